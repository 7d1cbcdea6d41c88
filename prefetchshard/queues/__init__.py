"""The hand-over between two threads, and between a thread and an event loop."""
