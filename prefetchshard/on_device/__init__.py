"""Arrays that stay on the devices, and the gather of each batch's rows from them."""
