"""Weights at build: a state dict of one process, or files of one, checked against the model before anything changes.

Of files a rank reads what it holds: tensors stay there until they are copied into the model's memory.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.checkpoint.boxes import Box, blocks, boxes_of, in_local
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import find
from whale_torch.checkpoint.formats.opened import is_run_dir, open_source
from whale_torch.checkpoint.formats.safetensors import is_safetensors
from whale_torch.checkpoint.formats.source import Source, inside
from whale_torch.checkpoint.formats.torch_files import load_torch, state_dict_of
from whale_torch.checkpoint.formats.unread import Unread, UnreadPart
from whale_torch.checkpoint.index import CHUNK_BYTES
from whale_torch.checkpoint.values import decode, tensors_in
from whale_torch.comm.cut_tensor import CutTensor
from whale_torch.comm.registry import ParameterPlace
from whale_torch.errors import CheckpointError

__all__ = ["Weights", "latest_of", "load_weights", "read_weights"]

Weights = Mapping[str, Any] | str | os.PathLike[str]

_MOST = 5  # names an error lists


def latest_of(weights: Weights) -> Path | None:
    """The latest checkpoint of a run_dir; None for weights that are none. Raises CheckpointError for a damaged one."""
    if isinstance(weights, Mapping) or not is_run_dir(Path(weights)):
        return None
    return find(Path(weights), Files())


def read_weights(
    weights: Weights,
    model: nn.Module,
    cuts: Mapping[str, ParameterPlace] | None = None,
    is_here: Callable[[str], bool] = lambda name: True,
) -> Mapping[str, Any]:
    """The state dict itself, or one whose tensors lie in files and are read when they are used.

    weights: of files, a checkpoint of wh.save, safetensors, a Hugging Face folder, a file of torch.save, a folder of
    DCP. A name that is missing has the values of one that shares its tensor: files write ties once. cuts, is_here: by
    first names, how parameters will be cut and whether this rank keeps a tensor: what a checkpoint has of that is
    checked against its checksums.
    Raises CheckpointError where names or shapes differ from the model's, and for damaged files.
    """
    if not isinstance(weights, Mapping):
        weights = _opened(weights)
    expected = model.state_dict()
    weights = _with_ties(weights, model)
    faults = [_listed("missing", [k for k in expected if k not in weights])]
    faults.append(_listed("unexpected", [k for k in weights if k not in expected]))
    for key, value in expected.items():
        given = weights.get(key)
        if isinstance(given, CutTensor):
            faults.append(f"{key} is one rank's part")
        elif isinstance(value, Tensor) and key in weights and not _is_extra(key):
            faults.append(_misfit(key, value, given))
    faults = [fault for fault in faults if fault]
    if faults:
        raise CheckpointError(
            f"the weights given do not fit {type(model).__name__}: {'; '.join(faults[:_MOST])}"
            + (f"; and {len(faults) - _MOST} more." if len(faults) > _MOST else "."),
            fix=_fix(weights, expected),
        )
    _check(weights, model, cuts or {}, is_here)
    return weights


def _check(
    weights: Mapping[str, Any],
    model: nn.Module,
    cuts: Mapping[str, ParameterPlace],
    is_here: Callable[[str], bool],
) -> None:
    """Checks what this rank will read: against checksums, and that names of one tensor have one value."""
    first = {id(p): name for name, p in model.named_parameters()}
    boxes: dict[str, list[Box]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    inside = weights.weights if isinstance(weights, _WithTies) else weights
    of_tensor: dict[str, list[str]] = {}
    for name, value in model.state_dict().items():
        known = first.get(id(parameters.get(name)), name)
        if isinstance(inside, _InSource) and name in inside and (in_value := inside.tensors_of(name)):
            boxes |= {key: [Box.whole(inside.source.tensors[key].shape)] for key in in_value}
            continue
        if not isinstance(value, Tensor) or _is_extra(name) or not is_here(known):
            continue
        found, place = [Box.whole(value.shape)], cuts.get(known)
        if place is not None and place.shard is not None and place.parts is not None:
            found = boxes_of(place.shard, place.parts.index)
        given = weights.known_as(name) if isinstance(weights, _WithTies | _InSource) else name
        key = inside.key(given) if isinstance(inside, _InSource) else given
        boxes.setdefault(key, []).extend(found)
        if name in parameters and given not in of_tensor.setdefault(known, []):
            of_tensor[known].append(given)
    if isinstance(inside, _InSource):
        inside.source.check(boxes)
    for names in of_tensor.values():
        for other in names[1:]:
            key = inside.key(names[0]) if isinstance(inside, _InSource) else names[0]
            if not _alike(weights[names[0]], weights[other], boxes[key]):
                raise CheckpointError(
                    f"{names[0]} and {other} are one tensor in {type(model).__name__}, and their values differ.",
                    fix="give one of them, or build the model without the tie",
                )


def _alike(one: Tensor, other: Tensor, boxes: Sequence[Box]) -> bool:
    """Whether two tensors are bit-equal in some boxes."""
    if one.dtype != other.dtype:
        return False
    if isinstance(one, Unread) and isinstance(other, Unread):
        if one.entry is other.entry:
            return True
    elif one.data_ptr() == other.data_ptr():
        return True
    most = max(1, CHUNK_BYTES // one.dtype.itemsize)
    for box in boxes:
        for chunk in blocks(box, most):
            values = [_part_of(each, chunk).contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
            if not torch.equal(*values):
                return False
    return True


def _part_of(value: Tensor, box: Box) -> Tensor:
    if isinstance(value, Unread):
        return value.entry.read(box)
    return inside(value.detach().as_subclass(Tensor), box).cpu()


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


def _misfit(key: str, value: Tensor, given: Any) -> str:
    """What keeps a value from being copied into a tensor of the model, "" where nothing does."""
    if not isinstance(given, Tensor):
        return f"{key} is a {type(given).__name__}, not a tensor"
    if given.shape != value.shape:
        return f"{key} has shape {tuple(given.shape)}, the model {tuple(value.shape)}"
    if given.is_meta or given.layout is not value.layout:
        return f"{key} " + ("is on the meta device, without values" if given.is_meta else f"is {given.layout}")
    return ""


def _opened(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    path = Path(path)
    if path.is_dir() or is_safetensors(path):
        return _InSource(open_source(path))
    return state_dict_of(load_torch(path), path)


class _InSource(Mapping[str, Any]):
    """A model's state dict that lies in files."""

    def __init__(self, source: Source):
        self.source = source
        found = (*source.tensors, *source.ties, *source.values)
        inside = {key for value in source.values.values() for key in tensors_in(value)} - source.values.keys()
        self._keys = {k.removeprefix("model/"): k for k in found if k.startswith("model/") and k not in inside}

    def key(self, name: str) -> str:
        """The key of the tensor that has the values of a name."""
        return self.source.ties.get(self._keys[name], self._keys[name])

    def known_as(self, name: str) -> str:
        return name

    def tensors_of(self, name: str) -> list[str]:
        """The keys of the tensors in what is no tensor of the model's."""
        values = self.source.values
        return list(tensors_in(values[self._keys[name]])) if self._keys[name] in values else []

    def __getitem__(self, name: str) -> Any:
        key = self.key(name)
        if key in self.source.tensors:
            return Unread.of(self.source.tensors[key])
        tensors = {k: self.source.tensors[k].read() for k in self.tensors_of(name) if k in self.source.tensors}
        return decode(self.source.values[key], tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class _WithTies(Mapping[str, Any]):
    """A state dict with further names for some of its tensors."""

    def __init__(self, weights: Mapping[str, Any], names: Mapping[str, str]):
        self.weights, self._names = weights, names

    def known_as(self, name: str) -> str:
        """The name under which the state dict has the values of a name."""
        return self._names.get(name, name)

    def __getitem__(self, name: str) -> Any:
        return self.weights[self.known_as(name)]

    def __iter__(self) -> Iterator[str]:
        yield from self.weights
        yield from self._names

    def __len__(self) -> int:
        return len(self.weights) + len(self._names)


def _with_ties(weights: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    names: dict[str, str] = {}
    for tied in groups.values():
        given = next((name for name in tied if name in weights), None)
        if given is not None:
            names |= {name: given for name in tied if name not in weights}
    return _WithTies(weights, names) if names else weights


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Loads what `read_weights` gave: of a cut parameter its part, and nothing of what another rank holds."""
    own = model.state_dict()
    state: OrderedDict[str, Any] = OrderedDict()
    parameters, first = dict(model.named_parameters(remove_duplicate=False)), dict[int, str]()
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, value in own.items():
        if isinstance(value, CutTensor):
            given = _part(weights, name, value)
        else:
            given = weights[name]
        if name in parameters and first.setdefault(id(parameters[name]), name) != name:
            state[name] = value if isinstance(given, Unread | UnreadPart) else given  # read once, by its first name
        elif isinstance(given, Unread) and name not in parameters and name not in buffers:
            state[name] = given.read()  # a module keeps an extra state as it is
        else:
            state[name] = given
    if hasattr(weights, "_metadata"):  # versions of modules, by which load_state_dict reads older files
        state._metadata = weights._metadata  # type: ignore[attr-defined]
    model.load_state_dict(state)


def _part(weights: Mapping[str, Any], name: str, value: CutTensor) -> Any:
    place = value.place
    if not place.held:
        return value
    given = weights[name]
    if not isinstance(given, Unread) or place.shard is None or place.parts is None:
        return given
    index = place.parts.index
    boxes = list(zip(boxes_of(place.shard, index), in_local(place.shard, index), strict=True))
    return UnreadPart.at(given.entry, boxes, place.shard.local_shape(index), place)


def _fix(given: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """What to do where names or shapes differ: what a prefix would mend is told, and what is to be taken from one."""
    missing, unexpected = [k for k in expected if k not in given], [k for k in given if k not in expected]
    for longer, shorter, less in ((missing, unexpected, False), (unexpected, missing, True)):
        prefix = next((k.removesuffix(shorter[0]) for k in longer if shorter and k.endswith(f".{shorter[0]}")), "")
        if prefix and sum(prefix + name in set(longer) for name in shorter) * 2 > len(shorter):
            pattern, to = (re.escape(prefix) + "(.*)", r"\1") if less else ("(.*)", rf"{prefix}\1")
            what = "have more" if less else "lack"
            return (
                f"the names given {what} '{prefix}' in front: of files, python -m whale_torch convert SOURCE TARGET "
                f"--to safetensors --rename '{pattern}' '{to}'; of a state dict, other keys"
            )
    plain = "give a state dict as one process has it: the plain model's own, or wh.full_state_dict(model)"
    if isinstance(given, _InSource) and given.source.padded:
        plain += "; a vocabulary that is padded is cut by python -m whale_torch convert ... --vocabulary ROWS"
    if missing and not unexpected:
        plain += "; where several are to have the values of one, wh.load(run_dir, model=model, assign={pattern: name})"
    return plain


def _listed(how: str, keys: list[str]) -> str:
    if not keys:
        return ""
    more = f", and {len(keys) - _MOST} more" if len(keys) > _MOST else ""
    return f"{how} {', '.join(map(str, keys[:_MOST]))}{more}"
