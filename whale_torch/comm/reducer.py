"""The gradient reducer: packed buckets, reduced while backward still runs, the plain mean over the ranks with a copy.

Order is static (reverse order of registration, cut by bytes), so that every rank reduces the same buckets in the same
order; one "used" flag a parameter rides in its bucket, so that ranks may use different parameters and a parameter that
nobody used keeps grad None. docs/design.md 5.7.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from whale_torch import ops
from whale_torch.comm.hooks import on_gradient
from whale_torch.comm.reduction import Packed, Reduction
from whale_torch.comm.registry import place_of
from whale_torch.errors import LossError

__all__ = ["Reducer"]


@dataclass(slots=True)
class Piece:
    """A parameter, or `num_rows` of its rows where it is larger than a bucket, and its place in the flat buffer."""

    parameter: torch.nn.Parameter
    first_row: int
    num_rows: int
    whole: bool
    offset: int = 0

    def of(self, grad: torch.Tensor) -> torch.Tensor:
        """This piece of a gradient, as real numbers: a view."""
        if not self.whole:
            grad = grad.narrow(0, self.first_row, self.num_rows)
        return torch.view_as_real(grad) if grad.is_complex() else grad


@dataclass(slots=True)
class Bucket:
    """Pieces reduced in one message, and how many of them have not arrived."""

    pieces: list[Piece] = field(default_factory=list)
    num_elements: int = 0
    num_bytes: int = 0
    missing: int = 0

    def add(self, piece: Piece, num_elements: int) -> None:
        piece.offset = self.num_elements
        self.pieces.append(piece)
        self.num_elements += num_elements * (2 if piece.parameter.is_complex() else 1)
        self.num_bytes += num_elements * piece.parameter.element_size()


class Reducer:
    """Reduces the gradients of parameters that one set of ranks holds copies of.

    parameters: in order of registration, all of one dtype. reduction: how one flat buffer is averaged.
    bucket_bytes: size of a message; a larger parameter is cut by rows. max_in_flight: messages under way at once.
    Their product bounds the staging memory. hooked: gradients are noticed as they arrive; else `arrive` says so.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        reduction: Reduction,
        *,
        bucket_bytes: int,
        max_in_flight: int,
        hooked: bool = True,
    ):
        self.reduction, self.max_in_flight = reduction, max_in_flight
        self.groups = reduction.groups
        self.sync = True
        self.buckets = _fill(parameters, bucket_bytes)
        self.staging = reduction.staging(
            max(b.num_elements + len(b.pieces) for b in self.buckets), parameters[0].device
        )
        self._arrived: set[int] = set()
        self._next = 0  # the first bucket that is not under way
        self._complete = 0  # the first bucket of which a piece is missing
        self._void = False  # a message of this backward was marked as void
        self._in_flight: deque[tuple[Bucket, torch.Tensor, bool, Callable[[], float]]] = deque()
        # reading the flags back waits for the device, so on a GPU only a rank that has to know does
        self._reads_flags = parameters[0].device.type == "cpu"
        self._all_used = torch.ones(max(len(b.pieces) for b in self.buckets), device=parameters[0].device)
        homes: dict[torch.nn.Parameter, list[int]] = {}
        for index, bucket in enumerate(self.buckets):
            for piece in bucket.pieces:
                homes.setdefault(piece.parameter, []).append(index)
        self._homes = homes
        self._handles = [on_gradient(p, self._ready, tuple(home)) for p, home in homes.items()] if hooked else []

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self.reduction.close()

    def listen(self, noticed: Callable[[], None]) -> None:
        """noticed: called at each gradient that arrives while no backward has begun."""
        self._noticed = noticed

    def begin(self) -> None:
        """A backward begins: no parameter has arrived."""
        self._next = self._complete = 0
        self._void = False
        self._arrived.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.pieces)

    def launch(self, *, void: bool = False) -> None:
        """Sends what has not been sent: backward is through, or has failed, and then it is marked as void."""
        while self._next < len(self.buckets):
            self._launch(void=void)

    def land(self, *, void: bool = False) -> bool:
        """Waits for all that is under way and writes the means; whether a rank has marked its gradients as void."""
        self._void |= void
        while self._in_flight:
            self._land()
        return self._void

    def _ready(self, homes: tuple[int, ...], parameter: torch.nn.Parameter) -> None:
        if not self.sync:
            return
        self._noticed()
        if id(parameter) in self._arrived:
            if homes[0] < self._next:
                _refuse_late(parameter)
            return
        # A bucket leaves at the next event after its last parameter, when the user's own hooks on that one have run.
        while self._next < self._complete:
            self._launch()
        self._note(homes, parameter)

    def arrive(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Gradients of parameters without a hook are there, or will not come: full buckets leave, as far as they can
        without waiting for another rank."""
        for parameter in parameters:
            if parameter in self._homes:
                self._note(self._homes[parameter], parameter)
        while self._next < self._complete and len(self._in_flight) < self.max_in_flight:
            self._launch()

    def _note(self, homes: Sequence[int], parameter: torch.nn.Parameter) -> None:
        self._arrived.add(id(parameter))
        for index in homes:
            self.buckets[index].missing -= 1
        while self._complete < len(self.buckets) and self.buckets[self._complete].missing == 0:
            self._complete += 1

    def _launch(self, *, void: bool = False) -> None:
        bucket = self.buckets[self._next]
        if len(self._in_flight) >= self.max_in_flight:
            self._land()
        grads, offsets, absent = self._collect(bucket) if not void else ([], [], [])
        flags = self._all_used[: len(bucket.pieces)]
        if absent:
            flags = flags.clone()
            flags[absent] = 0.0
        elif void:
            self._void = True
            flags = flags * torch.nan
        buffer = self.staging.take()
        if absent:
            buffer.zero_()
        elif void:
            buffer.fill_(torch.nan)  # what other ranks get where they do not read the flags
        self._next += 1
        wait = self.reduction.start(buffer, Packed(grads, offsets, bucket.num_elements, flags))
        self._in_flight.append((bucket, buffer, bool(absent), wait))

    def _collect(self, bucket: Bucket) -> tuple[list[torch.Tensor], list[int], list[int]]:
        """Gradients of the bucket's pieces, their offsets, and the numbers of pieces without one."""
        grads, offsets, absent = [], [], []
        for number, piece in enumerate(bucket.pieces):
            grad = piece.parameter.grad
            if grad is None:
                absent.append(number)
                if self._handles and id(piece.parameter) in self._arrived and piece.parameter.requires_grad:
                    _refuse_taken(piece.parameter)
            else:
                if grad.requires_grad or grad.layout is not torch.strided:
                    _refuse_grad(piece.parameter, grad)
                if grad.is_conj():  # only noted by torch so far; the mean is written where the gradient is read
                    piece.parameter.grad = grad = grad.resolve_conj()
                grads.append(piece.of(grad))
                offsets.append(piece.offset)
        return grads, offsets, absent

    @torch.no_grad()
    def _land(self) -> None:
        bucket, buffer, some_absent, wait = self._in_flight.popleft()
        scale = wait()
        pieces = bucket.pieces
        if not self._void and (some_absent or self._reads_flags):
            used = buffer[bucket.num_elements : bucket.num_elements + len(pieces)].tolist()
            self._void = used[0] != used[0]
            if some_absent:
                pieces = [piece for piece, flag in zip(pieces, used, strict=True) if flag]
                for piece in pieces:
                    if piece.parameter.grad is None:
                        piece.parameter.grad = torch.zeros_like(piece.parameter)
        if pieces and not self._void:
            grads = [piece.of(piece.parameter.grad) for piece in pieces if piece.parameter.grad is not None]
            ops.bucket_unpack(buffer, [piece.offset for piece in pieces], grads, scale)
        self.staging.give_back(buffer)


def _refuse_taken(parameter: torch.nn.Parameter) -> None:
    raise LossError(
        f"the gradient of '{_name(parameter)}' was taken away by a hook before it was averaged over ranks.",
        fix="step the optimizer after backward(), not in a hook on the parameter",
    )


def _refuse_late(parameter: torch.nn.Parameter) -> None:
    raise LossError(
        f"a second gradient of '{_name(parameter)}' came after the first had left for the other ranks.",
        fix="a reentrant checkpoint around a module that is used twice does this: "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    )


def _refuse_grad(parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
    if grad.requires_grad:
        raise LossError(
            f"backward(create_graph=True): the gradient of '{_name(parameter)}' is part of a graph, and a mean over "
            "ranks is not differentiable.",
            fix="use torch.autograd.grad(..., create_graph=True), and backward() for the whole loss",
        )
    raise LossError(
        f"the gradient of '{_name(parameter)}' is {grad.layout}, but it belongs to no nn.Embedding(sparse=True) "
        "or nn.EmbeddingBag(sparse=True).",
        fix="look it up in one of these modules, or without sparse=True",
    )


def _name(parameter: torch.nn.Parameter) -> str:
    place = place_of(parameter)
    return "a parameter" if place is None else place.name


def _fill(parameters: list[torch.nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most bucket_bytes, but one row of a parameter at least."""
    buckets = [Bucket()]
    for parameter in reversed(parameters):
        num_rows = parameter.shape[0] if parameter.dim() else 1
        row = parameter.numel() // max(num_rows, 1)
        most = max(1, bucket_bytes // max(row * parameter.element_size(), 1))
        for first in range(0, max(num_rows, 1), most):
            rows = min(most, num_rows - first)
            if buckets[-1].pieces and buckets[-1].num_bytes + rows * row * parameter.element_size() > bucket_bytes:
                buckets.append(Bucket())
            buckets[-1].add(Piece(parameter, first, rows, rows == num_rows), rows * row)
    return buckets
