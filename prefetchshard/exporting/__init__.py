"""Statistics for what others watch loops with. Nothing imports these modules but who uses them."""
