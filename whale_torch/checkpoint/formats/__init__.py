"""Forms in which tensors lie in files: each is opened as a source of tensors, of which boxes are read."""
