"""Replica alone: its gradient reducer against DDP's."""
