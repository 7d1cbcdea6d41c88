"""Host memory that the workers write and the devices read."""
