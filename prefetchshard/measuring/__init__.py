"""What a run has done, and where its time went."""
