"""What a batch is, in words."""
