"""Sparse gradients of embeddings: gathered from all ranks with a copy, added up row by row, and averaged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from whale_torch.comm.collectives import all_gather_rows, all_reduce, gather_equal
from whale_torch.comm.hooks import on_gradient
from whale_torch.mesh import Group

__all__ = ["SparseReducer"]

_NONE, _SPARSE, _DENSE, _VOID = 0, 1, 2, 3


class SparseReducer:
    """Averages gradients that are sparse on some rank; one that is dense on some rank (a tied weight) is made dense.

    It works at the end of backward, in the order of its parameters, in their own dtype: sums in rank order, so every
    rank holds the same bits. hooked: gradients are noticed as they arrive.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], copies: Group, *, hooked: bool = True):
        self.copies, self.groups, self.sync = copies, [copies], True
        self._parameters = parameters
        self._handles = [on_gradient(p, self._ready) for p in parameters] if hooked else []

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def listen(self, noticed: Callable[[], None]) -> None:
        """noticed: called at each gradient."""
        self._noticed = noticed

    def _ready(self, parameter: torch.nn.Parameter) -> None:
        self._noticed()

    def begin(self) -> None:
        """A backward begins."""

    def arrive(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Nothing leaves before `land`."""

    def launch(self, *, void: bool = False) -> None:
        """Nothing leaves before `land`."""

    @torch.no_grad()
    def land(self, *, void: bool = False) -> bool:
        """Exchanges and averages; whether a rank marked its gradients as void."""
        mine = torch.tensor([(_VOID, 0) if void else _state(p.grad) for p in self._parameters])
        states = gather_equal(mine, self.copies, name="rows of sparse gradients")
        if bool((states[..., 0] == _VOID).any()):
            return True
        for number, parameter in enumerate(self._parameters):
            kinds, counts = states[:, number, 0].tolist(), states[:, number, 1].tolist()
            if _DENSE in kinds:
                parameter.grad = self._dense_mean(parameter)
            elif _SPARSE in kinds:
                parameter.grad = self._sparse_mean(parameter, counts)
        return False

    def _dense_mean(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        grad = parameter.grad
        total = (
            torch.zeros_like(parameter) if grad is None else grad.to_dense() if grad.is_sparse else grad.contiguous()
        )
        return all_reduce(total, self.copies, name="gradient all-reduce").div_(self.copies.size)

    def _sparse_mean(self, parameter: torch.nn.Parameter, counts: list[int]) -> torch.Tensor:
        if parameter.grad is None:
            rows = torch.zeros(0, dtype=torch.int64, device=parameter.device)
            values = parameter.new_zeros(0, *parameter.shape[1:])
        else:
            rows, values = parameter.grad._indices()[0], parameter.grad._values()
        gather = functools.partial(all_gather_rows, counts=counts, group=self.copies, name="sparse gradient")
        total = torch.sparse_coo_tensor(
            gather(rows).unsqueeze(0), gather(values) / self.copies.size, parameter.shape, check_invariants=False
        )
        return total.coalesce()


def _state(grad: torch.Tensor | None) -> tuple[int, int]:
    """What a gradient is, and its number of rows if it is sparse."""
    if grad is None:
        return _NONE, 0
    return (_SPARSE, grad._values().shape[0]) if grad.is_sparse else (_DENSE, 0)
