"""What a save or a load needs beside the memory of the values: one chunk, whatever that memory looks like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import whale_torch as wh
from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import read_index
from whale_torch.checkpoint.index import CHUNK_BYTES
from whale_torch.checkpoint.inventory import Held
from whale_torch.checkpoint.reader import Reader, Wanted

LARGE = 200 << 20
ALLOWED = CHUNK_BYTES + (6 << 20)  # a chunk that is checked lies in memory that the kernel has of the file

_LOAD = """
import sys
from pathlib import Path
import torch
from torch import nn
import whale_torch as wh

def resident():
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM")).split()[1])

def module(value):
    made = nn.Module()
    made.weight = nn.Parameter(value)
    return made

path, small, what = sys.argv[1:]
wh.load(small, model=module(torch.zeros(2000, 1000)))  # what is imported late
rows, columns = 12800, 4096
made = {
    "as it was": lambda: torch.ones(rows, columns),
    "cast": lambda: torch.ones(rows, columns, dtype=torch.bfloat16),
    "wider": lambda: torch.ones(rows, columns, dtype=torch.float64),
    "turned": lambda: torch.ones(columns, rows).t(),
    "turned and cast": lambda: torch.ones(columns, rows, dtype=torch.float16).t(),
    "every second": lambda: torch.ones(rows, 2 * columns)[:, ::2],
}[what]()
model = module(made)
Path("/proc/self/clear_refs").write_text("5")
before = resident()
wh.load(path, model=model, dtype="cast")
print(1024 * (resident() - before))
expected = torch.arange(columns) + torch.arange(rows)[:, None]
assert torch.equal(model.weight.detach().float(), expected.to(model.weight.dtype).float())
"""


_SAVE = """
import sys
from pathlib import Path
import torch
from torch import nn
import whale_torch as wh

def resident(field):
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field)).split()[1])

def module(value):
    made = nn.Module()
    made.weight = nn.Parameter(value)
    return made

path, what = sys.argv[1:]
wh.save(path, step=0, model=module(torch.ones(2000, 1000).t()))  # what is imported late
rows, columns = 12800, 4096
made = {
    "as it is": lambda: torch.ones(rows, columns),
    "turned": lambda: torch.ones(columns, rows).t(),
    "every second": lambda: torch.ones(rows, 2 * columns, dtype=torch.float16)[:, ::2],
    "one row": lambda: torch.ones(1, rows * columns),
}[what]()
model = module(made)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
wh.save(path, step=1, model=model)
print(1024 * (resident("VmHWM") - before))
"""


def _module(value: torch.Tensor) -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(value)
    return made


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("large")
    values = torch.arange(4096.0) + torch.arange(12800.0)[:, None]
    assert values.nbytes == LARGE
    wh.save(folder / "large", step=0, model=_module(values))
    wh.save(folder / "small", step=0, model=_module(torch.ones(2000, 1000)))
    return folder / "large", folder / "small"


@pytest.mark.parametrize("what", ["as it was", "cast", "wider", "turned", "turned and cast", "every second"])
@pytest.mark.matrix(keep=1)
def test_a_load_needs_a_chunk(what: str, large: tuple[Path, Path]) -> None:
    command = [sys.executable, "-c", _LOAD, str(large[0]), str(large[1]), what]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert int(done.stdout) < ALLOWED, f"{int(done.stdout) / 1e6:.1f} MB beyond what is loaded"


@pytest.mark.parametrize("what", ["as it is", "turned", "every second", "one row"])
@pytest.mark.matrix(keep=1)
def test_a_save_needs_a_chunk(what: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SAVE, str(tmp_path), what]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert int(done.stdout) < ALLOWED, f"{int(done.stdout) / 1e6:.1f} MB beyond what is saved"


class _Counted(Files):
    """Bytes that are read."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def read_some(self, fd: int, into: memoryview, offset: int) -> int:
        found = super().read_some(fd, into, offset)
        self.num_bytes += found
        return found


@pytest.mark.parametrize(("dtype", "turned"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_a_slice_is_read_alone(dtype: torch.dtype, turned: bool, tmp_path: Path) -> None:
    """Rows of a tensor, and columns of it, of which a rank holds a part."""
    values = torch.arange(2048.0 * 4096).view(2048, 4096)  # 32 MiB
    folder = wh.save(tmp_path, step=0, model=_module(values))
    index = read_index(folder, Files())
    for box in (Box((1000, 0), (16, 4096)), Box((0, 100), (2048, 64))):
        here = torch.zeros(box.size[::-1], dtype=dtype).t() if turned else torch.zeros(box.size, dtype=dtype)
        held = Held("model/weight", dtype, (2048, 4096), here, ((box, Box((0, 0), box.size)),))
        files = _Counted()
        Reader(files, folder, index).read([Wanted("model/weight", index.tensors["model/weight"], held)])
        expected = values.narrow(0, box.start[0], box.size[0]).narrow(1, box.start[1], box.size[1])
        assert torch.equal(here, expected.to(dtype))
        if box.size[1] == 4096:
            assert files.num_bytes <= 16 * 4096 * 4 + CHUNK_BYTES
        else:
            assert files.num_bytes <= values.nbytes + CHUNK_BYTES
