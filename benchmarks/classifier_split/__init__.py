"""A classifier over 100 000 classes: features replicated, the last layer split."""
