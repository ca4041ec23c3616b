"""What is said when a compiled library is missing, damaged or for a device that is not there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import whale_torch
from whale_torch.ops import library

PACKAGE = Path(whale_torch.__file__).parent


def test_a_missing_library_is_no_error(tmp_path: Path) -> None:
    absent = library.load("cpu", tmp_path / "_C_cpu.so")
    assert not absent.loaded
    assert absent.reason == "_C_cpu.so was not built"


def test_a_damaged_library_is_warned_about_with_the_loaders_words(tmp_path: Path) -> None:
    damaged = tmp_path / "_C_cpu.so"
    damaged.write_bytes(b"not a library")
    with pytest.warns(RuntimeWarning, match=r"_C_cpu.so does not load.*(too short|invalid ELF)"):
        assert not library.load("cpu", damaged).loaded


def test_no_cuda_library_on_a_torch_without_cuda(tmp_path: Path) -> None:
    (tmp_path / "_C_cuda.so").write_bytes(b"never opened")
    assert library.load("cuda", tmp_path / "_C_cuda.so", present=False).reason == "this torch is built without cuda"


def test_python_kernels_answer_and_say_so_once(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "whale_torch", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    program = (
        "import torch\n"
        "from whale_torch import ops\n"
        "assert {answer for of in ops.backend().values() for answer in of.values()} == {'Python'}, ops.backend()\n"
        "print('imported', flush=True)\n"
        "for _ in range(3):\n"
        "    flat = torch.zeros(3)\n"
        "    ops.bucket_pack([torch.ones(3)], [0], flat, 2.0)\n"
        "    ops.cross_entropy(torch.randn(2, 3, requires_grad=True), torch.tensor([0, 2])).backward()\n"
        "assert flat.tolist() == [2.0, 2.0, 2.0]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("_C_cpu.so was not built, so the ops on cpu run on slower Python kernels") == 1


def test_an_unknown_instruction_set_is_refused() -> None:
    before = library.isa()
    assert not library.use_isa("v99")
    assert library.isa() == before


@pytest.mark.skipif(not (PACKAGE / "_C_cuda.so").exists(), reason="the CUDA library was not built: no nvcc")
def test_the_cuda_library_loads_and_registers_without_a_gpu() -> None:
    program = (
        "import torch, sys\n"
        "from whale_torch.ops import schemas\n"
        "torch.ops.load_library(sys.argv[1])\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "assert all(has(f'whale::{name}', 'CUDA') for name in schemas.COMPILED_OPS if name not in schemas.HOST_OPS)\n"
    )
    command = [sys.executable, "-c", program, str(PACKAGE / "_C_cuda.so")]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(PACKAGE.parent)}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_backend_lists_the_devices_that_torch_sees() -> None:
    devices = {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
    assert all(set(answers) == devices for answers in library.backend().values())
