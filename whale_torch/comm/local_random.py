"""The random streams of a rank: whether two ranks are at the same place, and one of its own for a while."""

from __future__ import annotations

import zlib

import torch

__all__ = ["LocalRandom", "stream_code"]


def stream_code(device: torch.device) -> int:
    """A hash, never 0, of where torch's global generators of the CPU and of a device stand; 3 us."""
    code = zlib.crc32(torch.get_rng_state().numpy().data)
    if device.type not in ("cpu", "meta"):
        code = zlib.crc32(torch.get_device_module(device).get_rng_state(device).numpy().data, code)
    return code + 1


class LocalRandom:
    """Between `begin` and `end`, torch's global generator of a device is seeded with this rank's place.

    The seed is drawn from the global CPU stream, which ranks share only where they are fed the same rows:
    so equal streams give different masks, a recomputation replays them, and afterwards the streams are equal again
    however much each rank drew.
    """

    def __init__(self, rank: int, device: torch.device):
        self._rank, self._device = rank, device
        self._before: torch.Tensor | None = None

    def begin(self) -> None:
        """Leaves the shared stream."""
        seed = int(torch.randint(1 << 62, (), device="cpu")) + self._rank
        if self._device.type == "meta":  # nothing is drawn
            return
        if self._device.type == "cpu":
            self._before = torch.get_rng_state()
            torch.default_generator.manual_seed(seed)
        else:
            module = torch.get_device_module(self._device)
            self._before = module.get_rng_state(self._device)
            module.manual_seed(seed)

    def end(self) -> None:
        """Returns to the shared stream; a second call does nothing."""
        if self._before is None:
            return
        if self._device.type in ("cpu", "meta"):
            torch.set_rng_state(self._before)
        else:
            module = torch.get_device_module(self._device)
            module.set_rng_state(self._before, self._device)
        self._before = None

    def __enter__(self) -> LocalRandom:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
