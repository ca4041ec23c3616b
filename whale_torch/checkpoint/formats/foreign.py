"""Files of other frameworks: torch.save of tensors among objects of classes that nobody imports here."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from whale_torch.checkpoint.formats.torch_files import load_torch
from whale_torch.checkpoint.formats.unpickling import Record, restricted
from whale_torch.errors import CheckpointError

__all__ = ["as_dict", "attributes", "load_foreign"]

# Objects of these packages are kept as records: their classes are not imported, and none of their code runs.
_INERT = (
    "megatron",
    "deepspeed",
    "argparse",
    "numpy",
    "apex",
    "transformer_engine",
    "enum",
    "types",
    "pathlib",
    "_codecs",
)


def load_foreign(path: Path) -> Any:
    """What a file holds; objects of known frameworks are records.

    Raises CheckpointError for objects of anything else, and for a file that is not in torch's present format.
    """
    if path.is_file() and not _is_torch_zip(path):
        raise CheckpointError(
            f"{path} is not in the format that torch.save writes since version 1.6.",
            fix="load it where you trust it and save it again",
        )
    further = {
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    }
    module = ModuleType("restricted pickle")
    module.__dict__.update(Unpickler=restricted(*_INERT, further=further), load=_refuse, loads=_refuse)
    return load_torch(
        path,
        load=lambda path, **options: torch.load(path, **{**options, "weights_only": False, "pickle_module": module}),
    )


def _is_torch_zip(path: Path) -> bool:
    """Whether it is one, and no TorchScript, which is loaded by other ways."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        names = {name.split("/", 1)[-1] for name in archive.namelist()}
    return "data.pkl" in names and "constants.pkl" not in names


def _refuse(*_: Any, **__: Any) -> Any:
    raise pickle.UnpicklingError("only files in torch's present format are read")


def _tensor(
    storage: Any, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any
) -> Tensor:  # as torch.load builds it
    made = torch.empty(0, dtype=storage.dtype, device="cpu")
    return made.set_(storage._untyped_storage, offset, tuple(size), tuple(stride))


def attributes(value: Any) -> dict[str, Any]:
    """The fields of a record, such as an argparse.Namespace, or the items of a dict."""
    if isinstance(value, Record):
        return {key: one for key, one in value.__dict__.items() if key != "arguments"}
    return dict(value) if isinstance(value, dict) else {}


def as_dict(value: Any, path: Path) -> dict[str, Any]:
    """What a file holds, which is a dict. Raises CheckpointError where it is none."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a dict.", fix="give another checkpoint")
    return value
