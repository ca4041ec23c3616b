"""Claim: what csrc gains over torch's own ops on CPU."""
