"""Ways in which the files of a checkpoint go wrong: each, by a seed, damages one file of a copy of a run_dir."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KINDS", "Damage", "damage", "flip"]

POINTER = "latest"
KINDS = ("payload bit", "payload bits", "index bit", "pointer bit", "block", "cut", "longer", "missing", "swapped",
         "of another step", "of another run", "index of another step", "index of another run")  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """file: what was damaged. offset: of the first byte that differs, None where the whole is another."""

    file: Path
    offset: int | None = None


def flip(path: Path, rng: random.Random, bits: int = 1) -> int:
    """Flips bits of a byte; its offset."""
    data = bytearray(path.read_bytes())
    offset = rng.randrange(len(data))
    for bit in rng.sample(range(8), bits):
        data[offset] ^= 1 << bit
    path.write_bytes(data)
    return offset


def damage(kind: str, run_dir: Path, other: Path, rng: random.Random) -> Damage:
    """Damages step 2 of a run_dir that has steps 1 and 2; `other` is of another run of the same job."""
    step, before = run_dir / "step-00000002", run_dir / "step-00000001"
    payload = step / f"rank-{rng.randrange(2):05d}.safetensors"
    index, pointer = step / "index.json", run_dir / POINTER
    if kind.startswith("payload"):
        return Damage(payload, flip(payload, rng, 1 if kind == "payload bit" else rng.randint(2, 8)))
    if kind.startswith(("index bit", "pointer bit")):
        path = index if kind == "index bit" else pointer
        return Damage(path, flip(path, rng))
    path = rng.choice([payload, index])
    data = path.read_bytes()
    if kind == "block":
        first, size = rng.randrange(len(data)), rng.randint(1, 512)
        new = data[:first] + rng.choice([bytes(size), rng.randbytes(size)])[: len(data) - first] + data[first + size :]
        if new == data:
            return damage(kind, run_dir, other, rng)
        path.write_bytes(new)
        return Damage(path, next(i for i, (a, b) in enumerate(zip(data, new, strict=True)) if a != b))
    if kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "longer":
        path.write_bytes(data + rng.choice([b"\0", b"}", rng.randbytes(9)]))
    elif kind == "missing":
        payload.unlink()
        path = payload
    elif kind == "swapped":
        first, second = (step / f"rank-{rank:05d}.safetensors" for rank in range(2))
        first.rename(step / "aside")
        second.rename(first)
        (step / "aside").rename(second)
        path = first
    else:
        path = index if kind.startswith("index") else payload
        source = before if kind.endswith("another step") else other / step.name
        shutil.copy(source / path.name, path)
        if kind == "index of another run":  # found by the pointer, or by what the files say
            path = rng.choice([index, payload])
    return Damage(path)
