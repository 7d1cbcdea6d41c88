"""Plots of what was measured, as SVG that works without scripts and without other files."""
