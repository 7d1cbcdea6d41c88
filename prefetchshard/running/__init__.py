"""The threads of a run, and how they are started and stopped."""
