"""Which rows make which batch of an epoch."""
