"""Saving and loading a model and its optimizer on two ranks, beside torch.distributed.checkpoint and the plain disk."""
