"""Benchmarks of whale_torch: one folder, one claim. Run them from the repository's root: `python -m benchmarks.<name>`."""
