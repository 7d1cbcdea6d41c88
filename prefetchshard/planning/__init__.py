"""From the first look at a batch: how it lies on the host, how it is placed, how it is put together again."""
