"""From a source to host batches."""
