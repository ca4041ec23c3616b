"""Pipelines: a recorded forward cut into stages, run micro-batch by micro-batch (docs/design.md 5.4 to 5.6)."""
