"""nn.MultiheadAttention by heads: each rank runs some heads of the samples of all feeds."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.comm.bridge import ColumnsToRows, Enter, Leave, RowsToColumns
from whale_torch.comm.columns import dropout
from whale_torch.comm.local_random import LocalRandom
from whale_torch.comm.region import Region
from whale_torch.comm.rows import enter_samples, enter_shared
from whale_torch.errors import LayoutError
from whale_torch.strategies.batch import digest
from whale_torch.strategies.split_rules import SplitModule, register_class

__all__ = ["HeadAttention"]


class HeadAttention(SplitModule, nn.MultiheadAttention):
    """Attention of which each rank holds some heads; gives complete own rows, as nn.MultiheadAttention does.

    Raises LayoutError for unbatched and nested inputs, and where the ranks' samples or masks do not fit together.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        _check_inputs(self, query, key, value, attn_mask, is_causal)
        causal = is_causal and not need_weights
        masks = _Masks(self, query, key, key_padding_mask, attn_mask, causal)
        dim = 0 if self.batch_first else 1
        q, k, v = (enter_samples(x, masks.counts, self._region, dim) for x in (query, key, value))
        q, k, v = self._project(q, k, v)
        probability = self.dropout if self.training else 0.0
        weights = None
        if need_weights or self._width == 0:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            mask = masks.merged(q.dtype)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = dropout(weights, probability, True, self._region)
            out = (weights @ v).transpose(1, 2)
        else:
            out = _attend(q, k, v, masks.merged(q.dtype), probability, masks.causal, self._region).transpose(1, 2)
        part = F.linear(out.reshape(*out.shape[:2], self._width * self.head_dim), self.out_proj.weight)
        own: Tensor = Leave.apply(part, masks.counts, self._region)  # type: ignore[no-untyped-call]
        if self.out_proj.bias is not None:
            own = own + self.out_proj.bias.to(own.dtype)
        own = own if self.batch_first else own.transpose(0, 1)
        if not need_weights or weights is None:
            return own, None
        return own, self._own_weights(weights, masks.counts, average_attn_weights)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, L, E] -> queries, keys, values of this rank's heads [N, h, L, d]."""
        packed = self._parameters.get("in_proj_weight")
        if packed is not None:
            matrices: tuple[Tensor, ...] = packed.chunk(3) if self._width else (packed,) * 3
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases: tuple[Tensor | None, ...] = (None,) * 3
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.chunk(3) if self._width else (self.in_proj_bias,) * 3
        found = []
        for x, weight, bias in zip((query, key, value), matrices, biases, strict=True):
            heads = F.linear(x, weight, bias).view(x.shape[0], x.shape[1], self._width, self.head_dim)
            found.append(heads.transpose(1, 2))
        return found[0], found[1], found[2]

    def _own_weights(self, weights: Tensor, counts: tuple[int, ...], average: bool) -> Tensor:
        """[N, h, L, S] -> own samples, all heads or their mean."""
        if average:
            mean: Tensor = Leave.apply(weights.sum(1) / self.num_heads, counts, self._region)  # type: ignore[no-untyped-call]
            return mean
        pixels = weights.shape[2] * weights.shape[3]
        widths = tuple(width * pixels for width in self._cut.widths)
        flat: Tensor = ColumnsToRows.apply(  # type: ignore[no-untyped-call]
            weights.reshape(weights.shape[0], self._width * pixels), counts, widths, self._region
        )
        return flat.view(-1, self.num_heads, *weights.shape[2:])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, probability: float, causal: bool, region: Region
) -> Tensor:
    if probability == 0.0:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    with LocalRandom(region.columns.rank, q.device):
        return F.scaled_dot_product_attention(q, k, v, mask, probability, causal)


def _check_inputs(
    module: HeadAttention, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> None:
    label = module._cut.module
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested or x.dim() != 3:
            raise LayoutError(
                f"split MultiheadAttention '{label}' got a {'nested' if x.is_nested else f'{x.dim()}-dimensional'} "
                f"{name}; it takes batches of 3 dimensions.",
                fix="add a batch dimension: x.unsqueeze(0 if batch_first else 1); pad nested tensors",
            )
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    samples = 0 if module.batch_first else 1
    if key.shape[:2] != value.shape[:2] or query.shape[samples] != key.shape[samples]:
        raise LayoutError(
            f"split MultiheadAttention '{label}': query {tuple(query.shape)}, key {tuple(key.shape)} and value "
            f"{tuple(value.shape)} do not hold the same samples.",
            fix="give key and value one shape, and query the same number of samples",
        )


class _Masks:
    """The masks of one call, brought to all feeds' samples and this rank's heads.

    counts: samples of each feed. causal: the causal mask is left to the kernel.
    """

    def __init__(
        self,
        module: HeadAttention,
        query: Tensor,
        key: Tensor,
        padding: Tensor | None,
        mask: Tensor | None,
        causal: bool,
    ):
        self._module, self._region = module, module._region
        samples, length = (0, 1) if module.batch_first else (1, 0)
        self._shape = (query.shape[samples], query.shape[length], key.shape[length])
        if mask is not None and mask.dim() not in (2, 3):
            raise LayoutError(
                f"attn_mask has {mask.dim()} dimensions; 2 and 3 are known.", fix="give (L, S) or (N * num_heads, L, S)"
            )
        self.counts, padded, remembered = self._agree(padding, mask, causal)
        self.causal = causal and not padded
        self._padding = self._gather_padding(padding, remembered) if padded else None
        self._mask = None if mask is None or self.causal else self._of_heads(mask)

    def _agree(self, padding: Tensor | None, mask: Tensor | None, causal: bool) -> tuple[tuple[int, ...], bool, bool]:
        """Samples of each feed, whether any has a padding mask, and whether all remember what they gathered of it."""
        batch, length, source = self._shape
        known = padding is not None and self._region.recall(padding, "padding") is not None
        if self._region.rows.size == 1:
            return (batch,), padding is not None, known
        digest = 0 if mask is None or mask.dim() == 3 else self._digest(mask)
        state = 0 if padding is None else 1 + known
        numbers = (batch, length, source, 0 if mask is None else mask.dim(), digest, int(causal), state)
        rows = self._region.meet("samples of a split attention", numbers)
        label = f"split MultiheadAttention '{self._module._cut.module}'"
        for row in rows:
            if row[1:3] != rows[0][1:3]:
                raise LayoutError(
                    f"{label}: the ranks have queries and keys of lengths {rows[0][1:3]} and {row[1:3]}.",
                    fix="pad the batch to one length on all ranks of the split",
                )
            if row[3:6] != rows[0][3:6]:
                raise LayoutError(
                    f"{label}: the ranks have different attention masks (dimensions {rows[0][3]} and {row[3]}, "
                    f"digests {rows[0][4] & 0xFFFF} and {row[4] & 0xFFFF}).",
                    fix="give every rank the same attn_mask of 2 dimensions; a mask of samples has 3 dimensions, or is "
                    "a key_padding_mask",
                )
        states = [row[6] for row in rows]
        return tuple(row[0] for row in rows), any(states), min(states) == 2

    def _digest(self, mask: Tensor) -> int:
        known: int | None = self._region.recall(mask, "digest of a mask")
        if known is None:
            known = digest(mask)
            self._region.remember(mask, "digest of a mask", known)
        return known

    def _gather_padding(self, padding: Tensor | None, remembered: bool) -> Tensor:
        """[N, S] of all feeds; a feed without one masks nothing."""
        if padding is not None and remembered:
            known: Tensor = self._region.recall(padding, "padding")
            return known
        device = self._module.out_proj.weight.device
        mine = (
            torch.zeros(self._shape[0], self._shape[2], device=device)
            if padding is None
            else _additive(padding, torch.float32)
        )
        gathered: Tensor = Enter.apply(mine, self.counts, self._region)  # type: ignore[no-untyped-call]
        if padding is not None:
            self._region.remember(padding, "padding", gathered)
        return gathered

    def _of_heads(self, mask: Tensor) -> Tensor:
        """[L, S] as it is, [B * H, L, S] -> [N, h, L, S]."""
        if mask.dim() == 2:
            return enter_shared(mask, self._region)
        batch, length, source = self._shape
        heads = self._module.num_heads
        if tuple(mask.shape) != (batch * heads, length, source):
            raise LayoutError(
                f"attn_mask has shape {tuple(mask.shape)}, but {batch} samples and {heads} heads want "
                f"{(batch * heads, length, source)}.",
                fix="give (N * num_heads, L, S) with all heads, or (L, S)",
            )
        known: Tensor | None = self._region.recall(mask, "mask of heads")
        if known is None:
            widths = tuple(width * length * source for width in self._module._cut.widths)
            own = RowsToColumns.apply(  # type: ignore[no-untyped-call]
                _additive(mask, torch.float32).reshape(batch, heads * length * source),
                self.counts,
                widths,
                self._region,
            )
            known = own.view(sum(self.counts), self._module._width, length, source)
            self._region.remember(mask, "mask of heads", known)
        return known

    def merged(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores, broadcast to [N, h, L, S]; None where nothing is masked by it."""
        mask = None if self._mask is None else _additive(self._mask, dtype)
        if self._padding is None:
            return mask
        padding = _additive(self._padding, dtype)[:, None, None, :]
        return padding if mask is None else mask + padding


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: a boolean one is -inf where it is True."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)


register_class("MultiheadAttention", "heads", HeadAttention)
