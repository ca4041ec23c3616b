"""The CUDA sources compile for every architecture we ship, and no kernel spills registers. Needs nvcc, no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


@pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
@pytest.mark.matrix(keep=0)
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("source", sorted((ROOT / "csrc/cuda").glob("*.cu")), ids=lambda path: path.name)
def test_no_kernel_spills(source: Path, arch: int, tmp_path: Path) -> None:
    assert NVCC is not None
    include = Path(torch.__file__).parent / "include"
    command = [
        NVCC, "-O3", "-std=c++20", "-cubin", f"-arch=sm_{arch}", "-Xptxas=-v",
        "-DTORCH_TARGET_VERSION=0x020b000000000000", "-isystem", str(include),
        str(source), "-o", str(tmp_path / "kernels.cubin"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert len(spills) >= done.stderr.count("Compiling entry function") >= 4
    assert set(spills) == {("0", "0", "0")}, done.stderr
