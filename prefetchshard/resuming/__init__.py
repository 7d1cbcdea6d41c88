"""Where a run stands, as a value, and the way back to it."""
