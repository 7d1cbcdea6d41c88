"""The position of a run as a saveable value, and resuming from it."""
