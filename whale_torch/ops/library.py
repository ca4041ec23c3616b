"""Registers the default kernels, loads the compiled ones, and says which of them answers."""

from __future__ import annotations

import ctypes
import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_torch.ops import activation_reference, checksum_reference, linear, moe_reference, reference
from whale_torch.ops.schemas import COMPILED_OPS, LIBRARY, OPS

__all__ = [
    "CompiledLibrary",
    "backend",
    "compiled",
    "differentiated_again",
    "isa",
    "load",
    "op",
    "run",
    "use_isa",
    "written",
]

_LOG = logging.getLogger("whale_torch")


@dataclass(frozen=True, slots=True)
class CompiledLibrary:
    """A file of kernels for one device type, and what became of loading it (`reason` is empty when loaded)."""

    device: str
    path: Path
    reason: str

    @property
    def loaded(self) -> bool:
        return not self.reason


def load(device: str, path: Path, present: bool = True) -> CompiledLibrary:
    """Loads one library; a file that exists and does not load is warned about with the loader's own text."""
    if not present:
        return CompiledLibrary(device, path, f"this torch is built without {device}")
    if not path.exists():
        return CompiledLibrary(device, path, f"{path.name} was not built")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        text = str(error.__cause__ or error)  # torch wraps the loader's own words
        warnings.warn(f"{path} does not load, so Python kernels run: {text}", RuntimeWarning, stacklevel=2)
        return CompiledLibrary(device, path, text)
    return CompiledLibrary(device, path, "")


@functools.cache
def compiled() -> dict[str, CompiledLibrary]:
    """The compiled libraries by device type, loaded on the first call: this package's import."""
    folder = Path(__file__).parents[1]
    return {
        "cpu": load("cpu", folder / "_C_cpu.so"),
        "cuda": load("cuda", folder / "_C_cuda.so", torch.backends.cuda.is_built()),
    }


@functools.cache
def _say_once(device: str) -> None:
    library = compiled().get(device)
    if library is not None and not library.loaded:
        _LOG.warning("whale_torch: %s, so the ops on %s run on slower Python kernels", library.reason, device)


def _device_type(arguments: tuple[Any, ...]) -> str:
    first = arguments[0]
    tensor: Tensor = first if isinstance(first, Tensor) else [*first, *arguments[2:3]][0]
    return tensor.device.type


def _register_default(name: str, kernel: Callable[..., Any]) -> None:
    @functools.wraps(kernel)
    def announced(*arguments: Any) -> Any:
        _say_once(_device_type(arguments))
        return kernel(*arguments)

    LIBRARY.impl(name, announced, "CompositeExplicitAutograd")


def op(name: str) -> torch._ops.OpOverload:
    """The op as the dispatcher knows it, with its kernels in place."""
    overload: torch._ops.OpOverload = getattr(torch.ops.whale, name).default
    return overload


def run(kernel: Callable[..., Any], check: Callable[[], None], *arguments: Any) -> Any:
    """What a kernel gives; where it refuses, `check` says why first: it costs too much to be asked every time."""
    with torch.no_grad():
        if torch.compiler.is_compiling():
            return kernel(*arguments)
        try:
            return kernel(*arguments)
        except (RuntimeError, ValueError, IndexError):
            check()
            raise


def differentiated_again() -> bool:
    """In a backward: whether its own graph is wanted (create_graph=True), which torch.compile never asks for."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def written(tensors: Tensor | list[Tensor]) -> None:
    """Lets autograd refuse what it saved of them before."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


def _native() -> ctypes.CDLL:
    native = ctypes.CDLL(str(compiled()["cpu"].path))
    native.whale_cpu_isa.restype = ctypes.c_char_p
    return native


def isa() -> str | None:
    """The instruction set that the C++ kernels run on: "baseline", "v3" or "v4"; None where they are not loaded."""
    if not compiled()["cpu"].loaded:
        return None
    name: bytes = _native().whale_cpu_isa()
    return name.decode()


def use_isa(name: str) -> bool:
    """Makes the C++ kernels run on another instruction set, for tests; False if this machine or build lacks it."""
    return compiled()["cpu"].loaded and bool(_native().whale_cpu_use_isa(name.encode()))


def _answer(name: str, device: str) -> str:
    if name not in COMPILED_OPS:
        inner = {_answer("softmax_stats", device), _answer("softmax_grad_", device)} - {"Python"}
        return " + ".join(["Python", *sorted(inner)])
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"whale::{name}", device.upper()):
        return "Python"
    return f"C++ ({isa()})" if device == "cpu" else device.upper()


def backend() -> dict[str, dict[str, str]]:
    """Op -> device type -> which kernel answers: "C++ (v3)", "CUDA" or "Python", for the devices that torch sees.

    The linear ops are a Python loop over matmuls and the softmax ops: "Python + C++ (v3)".
    """
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {name: {device: _answer(name, device) for device in devices} for name in OPS}


def _default_kernel(name: str) -> Callable[..., Any]:
    homes = (activation_reference, checksum_reference, moe_reference, reference, linear)
    kernel: Callable[..., Any] = next(getattr(home, name) for home in homes if hasattr(home, name))
    return kernel


for _name in OPS:
    _register_default(_name, _default_kernel(_name))
compiled()
