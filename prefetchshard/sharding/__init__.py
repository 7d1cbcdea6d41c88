"""What `sharding=` means, and where each leaf of a batch goes."""
