"""python -m tests.checkpoint.peers: the same bit flips in files of wh.save, DCP, torch.save and safetensors."""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.save import save

__all__ = ["OUTCOMES", "flipped"]

OUTCOMES = ("raised", "other values, no error", "the same values")
State = dict[str, Tensor]


class _Holder(nn.Module):
    def __init__(self, state: State):
        super().__init__()
        for name, value in state.items():
            self.register_buffer(name, value.clone())


def _ours(folder: Path) -> State:
    model = _Holder(_state(fill=False))
    load(folder, model=model)
    return dict(model.state_dict())


def _dcp(folder: Path) -> State:
    state = _state(fill=False)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


_READ: dict[str, tuple[str, Callable[[Path], State]]] = {
    "wh.save": ("step-00000001/rank-00000.safetensors", _ours),
    "DCP": ("__0_0.distcp", _dcp),
    "torch.save": ("state.pt", lambda folder: torch.load(folder / "state.pt", weights_only=True)),
    "safetensors": ("state.safetensors", lambda folder: load_file(folder / "state.safetensors")),
}


def _state(*, fill: bool = True) -> State:
    sizes = {"weight": (64, 96), "bias": (96,), "exp_avg": (64, 96), "exp_avg_sq": (64, 96)}
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=made) if fill else torch.zeros(size) for name, size in sizes.items()}


def flipped(folder: Path, flips: int, seed: int = 0) -> dict[str, Counter[str]]:
    """For each writer what reading back did after one flipped bit, at the same place of each one's file of values."""
    state = _state()
    for name in _READ:
        (folder / name).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP, that it is alone
        return _flipped(folder, flips, seed, state)


def _flipped(folder: Path, flips: int, seed: int, state: State) -> dict[str, Counter[str]]:
    save(folder / "wh.save", step=1, model=_Holder(state), rng=False)
    dcp.save(state, checkpoint_id=folder / "DCP", no_dist=True)
    torch.save(state, folder / "torch.save" / "state.pt")
    save_file(state, folder / "safetensors" / "state.safetensors")
    rng, found = random.Random(seed), {name: Counter[str]() for name in _READ}
    for _ in range(flips):
        place, bit = rng.random(), 1 << rng.randrange(8)
        for name, (file, read) in _READ.items():
            path = folder / name / file
            data = path.read_bytes()
            offset = int(place * len(data))
            path.write_bytes(data[:offset] + bytes([data[offset] ^ bit]) + data[offset + 1 :])
            found[name][_outcome(read, folder / name, state)] += 1
            path.write_bytes(data)
    return found


def _outcome(read: Callable[[Path], State], folder: Path, state: State) -> str:
    try:
        back = read(folder)
    except BaseException:  # whatever a reader says is an error; those of DCP are no Exceptions
        return OUTCOMES[0]
    bits = {name: value.view(torch.uint8) for name, value in state.items()}
    same = back.keys() == bits.keys() and all(torch.equal(back[name].view(torch.uint8), bits[name]) for name in bits)
    return OUTCOMES[2 if same else 1]


def _main() -> None:
    parser = argparse.ArgumentParser("python -m tests.checkpoint.peers", description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    flips = parser.parse_args().flips
    folder = Path(tempfile.mkdtemp())
    try:
        found = flipped(folder, flips)
    finally:
        shutil.rmtree(folder)
    print(f"{flips} flipped bits, one at a time".ljust(40) + "".join(f"{one:>26}" for one in OUTCOMES))
    for name, counts in found.items():
        print(name.ljust(40) + "".join(f"{counts[one]:>26}" for one in OUTCOMES))


if __name__ == "__main__":
    _main()
