"""A layer of experts on two ranks, against a dense one, a chain of torch operations and fairscale."""
