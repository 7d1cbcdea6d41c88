"""The allowed kinds of leaves, and how their values are converted, copied and stacked."""
