"""python -m whale_torch: what is installed, which kernels answer, and what the ranks started here would be.

With a command it looks at checkpoints instead.
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

import torch

import whale_torch
from whale_torch.checkpoint.inspection.commands import add_commands, run
from whale_torch.cluster import Cluster
from whale_torch.mesh import surroundings
from whale_torch.ops.library import backend, compiled, isa

__all__ = ["main", "report"]


def report() -> str:
    """The whole text. Starts no process group and allocates nothing on a device."""
    parts = [("versions", _versions()), ("kernels", _kernels()), ("this machine", _machine()), ("ranks", _ranks())]
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts)


def _versions() -> list[str]:
    cuda = torch.version.cuda
    return [
        f"whale_torch {whale_torch.__version__} in {Path(whale_torch.__file__).parent}",
        f"torch {torch.__version__} ({f'CUDA {cuda}' if cuda else 'no CUDA'}, "
        f"{'C++11' if torch.compiled_with_cxx11_abi() else 'old C++'} ABI)",
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}",
    ]


def _kernels() -> list[str]:
    lines = []
    for device, library in compiled().items():
        told = (
            f"loaded, instruction set {isa()}"
            if library.loaded and device == "cpu"
            else "loaded"
            if library.loaded
            else f"not loaded: {library.reason}"
        )
        lines.append(f"{library.path.name}: {told}")
    answers = backend()
    width = max(map(len, answers))
    lines += [
        f"{name.ljust(width)}  " + ", ".join(f"{device}: {kernel}" for device, kernel in found.items())
        for name, found in answers.items()
    ]
    return lines


def _machine() -> list[str]:
    threads = torch.get_num_threads()
    lines = [
        f"{surroundings().cores} CPU cores for this process, {threads} "
        f"{'thread' if threads == 1 else 'threads'} in torch"
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append(
            f"cuda:{index}  {properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}"
        )
    if len(lines) == 1:
        lines.append("no CUDA device")
    return lines


def _ranks() -> list[str]:
    around = surroundings()
    if around.world is None:
        return ["no launcher: a script runs as one process; torchrun --nproc-per-node N script.py starts N ranks"]
    if around.rank is None:
        return [f"WORLD_SIZE is {around.world} but RANK is not set: wh.parallelize will refuse it"]
    where = f"rank {around.rank} of {around.world}"
    where += "; ranks of one host will be a node" if around.node is None else f", on node {around.node}"
    if around.local_world is None:
        return [where]
    if around.world % around.local_world:
        return [f"{where}, of {around.local_world} ranks: nodes have unequal numbers of them"]
    cluster = Cluster.of(
        around.world // around.local_world, around.local_world, device="cuda" if torch.cuda.is_available() else "cpu"
    )
    return [where, f"cluster: {cluster}"]


def main() -> None:
    """Prints the report, under torchrun rank 0 all of it and the others where they are; or runs a command."""
    parser = argparse.ArgumentParser("python -m whale_torch", description=__doc__)
    add_commands(parser)
    asked = parser.parse_args()
    if asked.command is not None:
        sys.exit(run(asked))
    print(report() if not surroundings().rank else _ranks()[0], flush=True)


if __name__ == "__main__":
    main()
