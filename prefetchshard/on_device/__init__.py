"""Arrays that stay on the devices, and the rows of a batch from them."""
