"""From host batches to batches on the devices."""
