"""Checkpoints looked at without a model: whether they are whole, what they hold, how two differ; the commands."""
