"""Resolves `sharding=` to one sharding for each leaf of a batch."""
