"""Strategies: what each parallelism does to modules."""
