"""The threads of a run, and how they end."""
