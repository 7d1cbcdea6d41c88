"""Copies of large values that do not go through the processor's cache."""
