"""`benchmark`: how fast a source is by itself, through a loader, beside a step, and through a thread and a queue written by hand."""
