"""Attention modules that nobody wrote a rule for: they run their own forward on this rank's heads of all samples.

The samples of every tensor argument are gathered where the module begins; the projections inside are plain layers with
local weights; the output projection brings complete own rows out. What the arguments mean is told by their names, which
are those of transformers' attention modules; nothing of that package is imported.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.comm.bridge import ColumnsToRows, Enter
from whale_torch.comm.columns import Columns
from whale_torch.comm.local_random import LocalRandom
from whale_torch.comm.region import Region
from whale_torch.comm.rows import enter_samples, gather_plain, leave_rows, partial_parameter
from whale_torch.errors import LayoutError
from whale_torch.planning.rules.huggingface import ATTENTION, PACKED_ATTENTION
from whale_torch.strategies.outputs import PARTS
from whale_torch.strategies.split_rules import SplitModule, joined_class, register_class
from whale_torch.trace.settings import LOCAL

__all__ = ["SplitAttention"]

_SAMPLES = ("attention_mask", "position_embeddings", "position_ids", "encoder_hidden_states", "encoder_attention_mask")
"""Arguments, besides hidden_states, that have the samples in front."""

_FREE = ("cache_position",)
"""Tensor arguments that no sample owns."""


class _Call:
    """One run of an attention module: shared by it and its output projection."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.counts: tuple[int, ...] = ()
        self.random: LocalRandom | None = None
        self.left: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Call:
        import copy

        copied = _Call(copy.deepcopy(self.region, memo))
        memo[id(self)] = copied
        return copied


class _OutputProjection(SplitModule):
    """The last layer of an attention module: takes this rank's heads of all samples, gives complete own rows."""

    _added = ("_call",)
    _call: _Call

    def _product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        call = self._call
        if call.random is not None:
            call.random.end()
        own = leave_rows(self._product(input), call.counts, (call.counts[call.region.rows.index],), call.region)
        call.left = own
        bias = self._parameters.get("bias")
        return own if bias is None else own + bias.to(own.dtype)


class _LinearOutput(_OutputProjection, nn.Linear):
    def _product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _TransposedOutput(_OutputProjection):
    weight: Tensor

    def _product(self, x: Tensor) -> Tensor:
        return x @ self.weight


class SplitAttention(SplitModule):
    """An attention module that runs on this rank's heads; joined with the module's own class.

    Raises LayoutError for arguments whose samples it cannot tell, and for a cache that holds other rows than the own.
    """

    _added = ("_call", "_whole")
    _call: _Call
    _whole: list[tuple[nn.Module, str]]

    def _prepare(self) -> None:
        self.__dict__["_call"] = _Call(self._region)
        cut = {key for key, _ in self._cut.shards}
        whole = []
        for name, member in self.named_modules():
            for key, parameter in member._parameters.items():
                if parameter is not None and f"{name}.{key}".strip(".") not in cut:
                    whole.append((member, key))
        rows = _rows_member(self)
        self.__dict__["_whole"] = [(member, key) for member, key in whole if member is not rows]
        rows.__class__ = _LinearOutput if isinstance(rows, nn.Linear) else joined_class(_TransposedOutput, type(rows))
        rows.__dict__.update(_call=self._call, _region=self._region, _cut=self._cut, _options=self._options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call
        names = list(inspect.signature(_own_forward(type(self))).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        inputs = _enter(self, given)
        call.left = None
        call.random = LocalRandom(self._region.columns.rank, inputs["hidden_states"].device) if self.training else None
        originals = [(member, key, member._parameters[key]) for member, key in self._whole]
        try:
            for member, key, parameter in originals:
                assert parameter is not None
                member._parameters[key] = partial_parameter(parameter, self._region)  # type: ignore[assignment]
            if call.random is not None:
                call.random.begin()
            out = super().forward(**inputs)
        finally:
            if call.random is not None:
                call.random.end()
            for member, key, parameter in originals:
                member._parameters[key] = parameter
        return _leave(self, out)


def _own_forward(split_type: Any) -> Any:
    """The forward of the class that was split."""
    return split_type._base().forward


def _rows_member(module: SplitAttention) -> nn.Module:
    """The output projection: the member whose weight is cut by input features."""
    for key, shard in module._cut.shards:
        owner, _, name = key.rpartition(".")
        member = module.get_submodule(owner)
        if name == "weight" and shard.dim == (1 if isinstance(member, nn.Linear) else 0):
            return member
    raise AssertionError(f"{module._cut} has no output projection")


def _error(module: SplitAttention, what: str, fix: str) -> LayoutError:
    return LayoutError(f"split attention '{module._cut.module}' ({module._get_name()}): {what}", fix=fix)


def _enter(module: SplitAttention, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the samples of all feeds."""
    region, call = module._region, module._call
    hidden = given["hidden_states"]
    hidden = hidden.implicit_rows("the input of a split layer") if isinstance(hidden, Columns) else hidden
    if hidden.dim() != 3:
        raise _error(
            module,
            f"hidden_states has shape {tuple(hidden.shape)}; it takes (samples, length, features).",
            "pass batches of sequences",
        )
    out = {name: _cache(module, value) if hasattr(value, "get_seq_length") else value for name, value in given.items()}
    if region.rows.size == 1:
        call.counts = (hidden.shape[0],)
        out["hidden_states"] = enter_samples(hidden, call.counts, region)
        states = given.get("encoder_hidden_states")
        if states is not None:
            out["encoder_hidden_states"] = enter_samples(states, call.counts, region)
        _take_heads(module, out)
        return out
    _check_arguments(module, given)
    call.counts, any_mask, remembered = _agree(module, hidden, out)
    if any_mask and out.get("attention_mask") is None:
        out["attention_mask"] = _causal_mask(module, hidden)
    out["hidden_states"] = enter_samples(hidden, call.counts, region)
    for name in _SAMPLES:
        value = out.get(name)
        if isinstance(value, Tensor):
            out[name] = _gather(module, name, value, hidden.shape[0], remembered)
        elif isinstance(value, (tuple, list)):
            parts = (_gather(module, f"{name}[{i}]", x, hidden.shape[0], remembered) for i, x in enumerate(value))
            out[name] = type(value)(parts)
    _take_heads(module, out)
    return out


def _take_heads(module: SplitAttention, given: dict[str, Any]) -> None:
    """A mask with an entry for each head becomes that of this rank's heads."""
    mask, local = given.get("attention_mask"), _local_heads(module)
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] != 1:
        if mask.shape[1] != sum(local):
            raise _error(
                module,
                f"attention_mask has {mask.shape[1]} heads of {sum(local)}.",
                "give it one entry a head, or one for all",
            )
        index = module._region.columns.index
        given["attention_mask"] = mask[:, sum(local[:index]) : sum(local[: index + 1])]


def _check_arguments(module: SplitAttention, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, Tensor) and name not in ("hidden_states", *_SAMPLES, *_FREE) and value.dim() > 0:
            raise _error(
                module,
                f"argument '{name}' has shape {tuple(value.shape)}, and nothing says whether it holds samples.",
                'split it with shared rows (wh.split(rows="shared")), or move it out of the split scope',
            )
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        told = f"{mask.dim()} dimensions" if isinstance(mask, Tensor) else f"the type {type(mask).__name__}"
        raise _error(
            module, f"attention_mask has {told}.", 'build the model with attn_implementation="sdpa" or "eager"'
        )


def _agree(module: SplitAttention, hidden: Tensor, given: Mapping[str, Any]) -> tuple[tuple[int, ...], bool, bool]:
    """Samples of each feed, whether any feed has a mask, and whether all feeds remember what they gathered of the rest.

    A model may drop a mask that masks nothing, so feeds may differ in it. Raises LayoutError for any other difference.
    """
    region, mask = module._region, given.get("attention_mask")
    tensors = [(name, *part) for name in _SAMPLES for part in _parts(name, given.get(name))]
    shapes = tuple((label, *x.shape[1:]) for name, label, x in tensors if name != "attention_mask")
    known = all(region.recall(x, label) is not None for _, label, x in tensors)
    numbers = (*hidden.shape[:2], 0 if mask is None else mask.shape[-1], zlib.crc32(repr(shapes).encode()), int(known))
    rows = region.meet("samples of a split attention", numbers)
    if any(row[1] != rows[0][1] for row in rows):
        raise _error(
            module,
            f"the ranks have sequences of lengths {[row[1] for row in rows]}.",
            "pad the batch to one length on all ranks of the split",
        )
    keys = {row[2] for row in rows if row[2]}
    if len(keys) > 1 or any(row[3] != rows[0][3] for row in rows):
        raise _error(
            module,
            f"the ranks call it with different arguments: masks of {sorted(keys)} keys, other arguments {shapes} here.",
            "call the model with the same arguments on all ranks of the split",
        )
    masked = [row[2] > 0 for row in rows]
    return tuple(row[0] for row in rows), any(masked), all(row[4] for row in rows) and any(masked) == all(masked)


def _parts(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors of one argument, by the names under which they are remembered."""
    if isinstance(value, Tensor):
        return [(name, value)]
    return [(f"{name}[{i}]", x) for i, x in enumerate(value)] if isinstance(value, (tuple, list)) else []


def _causal_mask(module: SplitAttention, hidden: Tensor) -> Tensor:
    """The mask that a feed without one stands for: what scaled_dot_product_attention does by itself."""
    samples, length = hidden.shape[:2]
    mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device)
    if getattr(module, "is_causal", True):
        mask = mask.tril()
    return mask.expand(samples, 1, length, length)


def _gather(module: SplitAttention, name: str, x: Tensor, samples: int, remembered: bool) -> Tensor:
    """Own samples of an argument, or one that stands for all of them -> those of all feeds; once for all layers."""
    region, counts = module._region, module._call.counts
    if x.dim() < 2 or x.shape[0] not in (1, samples):
        raise _error(
            module,
            f"argument '{name}' has shape {tuple(x.shape)}, and {samples} samples are fed.",
            "give it one entry a sample in front, or one for all",
        )
    known: Tensor | None = region.recall(x, name) if remembered else None
    if known is None:
        whole = x.expand(samples, *x.shape[1:])
        known = Enter.apply(whole, counts, region) if x.requires_grad else gather_plain(whole, counts, region, name)  # type: ignore[no-untyped-call]
        assert known is not None
        region.remember(x, name, known)
    return known


def _cache(module: SplitAttention, cache: Any) -> Any:
    """A cache of keys and values: kept where the ranks are fed the same rows and nothing is trained, else left empty.

    Raises LayoutError where an earlier forward left it empty.
    """
    if module._region.rows.size == 1 and not torch.is_grad_enabled():
        cache.__dict__[PARTS] = True
        return cache
    unfilled = cache.__dict__.setdefault("_whale_unfilled", set())
    if id(module) in unfilled or int(cache.get_seq_length()) > 0:
        why = "its ranks have own rows" if module._region.rows.size > 1 else "gradients are wanted"
        raise _error(
            module,
            f"keys and values of earlier calls are not kept in a split where {why}.",
            'generate under torch.no_grad() with wh.split(rows="shared"), all ranks fed alike, or with use_cache=False',
        )
    unfilled.add(id(module))
    return None


def _leave(module: SplitAttention, out: Any) -> Any:
    """What the module returned, with own samples and all heads."""
    if module._call.left is None:
        raise _error(module, "its forward did not call the output projection.", "move it out of the split scope")
    module._call.left = None
    if not isinstance(out, tuple):
        return out
    return (out[0], *(_leave_weights(module, value) for value in out[1:]))


def _leave_weights(module: SplitAttention, value: Any) -> Any:
    region, counts = module._region, module._call.counts
    if not isinstance(value, Tensor):
        return value
    local = _local_heads(module)
    if value.dim() != 4 or value.shape[0] != sum(counts) or value.shape[1] != local[region.columns.index]:
        raise _error(
            module,
            f"it returned a tensor of shape {tuple(value.shape)}, which is neither its output nor attention weights.",
            "move it out of the split scope",
        )
    pixels = value.shape[2] * value.shape[3]
    widths = tuple(width * pixels for width in local)
    flat: Tensor = ColumnsToRows.apply(value.reshape(value.shape[0], -1), counts, widths, region)  # type: ignore[no-untyped-call]
    return flat.view(-1, sum(local), *value.shape[2:])


def _local_heads(module: SplitAttention) -> tuple[int, ...]:
    """Query heads of each rank."""
    groups = int(getattr(module, "num_key_value_groups", 1))
    return tuple(width * groups for width in module._cut.widths)


class SplitPackedAttention(SplitAttention):
    """GPT-2's attention: the sizes by which its forward takes q, k and v apart are this rank's."""

    def _prepare(self) -> None:
        super()._prepare()
        attention: Any = self
        local = self._width * int(attention.head_dim)
        _make_local(self, "split_size", local)
        for key in ("c_attn", "q_attn"):
            member = getattr(self, key, None)
            if member is not None:
                _make_local(member, "nf", member.weight.shape[1])


def _make_local(module: Any, name: str, value: int) -> None:
    """A setting that is this rank's, and not the model's."""
    module.__dict__[name] = value
    module.__dict__.setdefault(LOCAL, set()).add(name)


register_class(ATTENTION, "heads", functools.partial(joined_class, SplitAttention))
register_class(PACKED_ATTENTION, "heads", functools.partial(joined_class, SplitPackedAttention))
