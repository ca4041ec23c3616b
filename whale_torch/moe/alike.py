"""What the tokens of all ranks have to have in common: a number that travels with the counts of rows, and its words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whale_torch.errors import LayoutError

__all__ = ["check_alike", "form_of"]

_DTYPES = (None, torch.float32, torch.float64, torch.bfloat16, torch.float16)
_PLACES = 1 << 4


def form_of(x: Tensor, wire_dtype: torch.dtype | None) -> int:
    """The dtypes of tokens, of autocast and on the way, and whether a gradient is wanted."""
    autocast = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    number = 0
    for dtype in (x.dtype, autocast, wire_dtype):
        number = number * _PLACES + (_DTYPES.index(dtype) if dtype in _DTYPES else _PLACES - 1)
    return number * 2 + (x.requires_grad and torch.is_grad_enabled())


def check_alike(forms: Sequence[int], ranks: Sequence[int], name: str) -> None:
    """Raises LayoutError, the same on all ranks, where they differ. forms: of each rank, by form_of."""
    odd = next((place for place, form in enumerate(forms) if form != forms[0]), None)
    if odd is not None:
        raise LayoutError(
            f"{name}: tokens of rank {ranks[0]} are {_words(forms[0])}, and of rank {ranks[odd]} {_words(forms[odd])}.",
            fix="on all ranks one dtype of tokens, one wire_dtype, one autocast, and a gradient wanted or not",
            ranks=(ranks[0], ranks[odd]),
        )


def _words(form: int) -> str:
    number, wants_grad = divmod(form, 2)
    number, wire = divmod(number, _PLACES)
    of, autocast = divmod(number, _PLACES)
    if not 0 < of < _PLACES:
        return "something else (in other chunks, or in another forward)"
    found = [_dtype(of)]
    if autocast:
        found.append(f"under autocast to {_dtype(autocast)}")
    if wire:
        found.append(f"sent as {_dtype(wire)}")
    return ", ".join([*found, "with a gradient" if wants_grad else "without a gradient"])


def _dtype(place: int) -> str:
    return str(_DTYPES[place]).removeprefix("torch.") if place < len(_DTYPES) else "another dtype"
