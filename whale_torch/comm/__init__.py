"""Tensors and mesh axes: collectives, bridges between layouts, Columns, the gradient reducer. No module's meaning here."""
