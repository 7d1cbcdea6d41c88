"""What a leaf may be, and how its values are converted, copied and stacked."""
