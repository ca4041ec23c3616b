"""Benchmarks of whale_torch: one folder, one claim. From the repository's root: `python -m benchmarks.<name>`."""
