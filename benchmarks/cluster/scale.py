"""Real sizes on a few cores: tensors are made smaller and seconds longer, and links slower by both."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Scale"]

_BUCKET_BYTES = 25 << 20  # torch DDP's default, for every variant that has buckets


@dataclass(frozen=True, slots=True)
class Scale:
    """size: how many times smaller tensors are; time: how many times slower everything is."""

    size: int
    time: float

    def rate(self, bits_per_second: float) -> str:
        """A link's rate, as tc spells it."""
        return f"{bits_per_second / self.size / self.time:.0f}bit"

    @property
    def bucket_bytes(self) -> int:
        return _BUCKET_BYTES // self.size
