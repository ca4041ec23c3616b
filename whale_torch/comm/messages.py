"""Messages between the stages of a pipeline: every rank posts its own in one order, so that none waits for another.

The order is that in which a simulation of the schedule completes what each message carries (docs/design.md 5.6). A
receive is posted as soon as all messages before it are, some ahead of need, since a transfer begins only then; it is
waited for where its values are used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from whale_torch.comm.failure import explain
from whale_torch.mesh import Group

__all__ = ["Form", "Message", "Messages"]

_AHEAD = 2
"""Receives that may be under way before anything asks for them: each has a buffer."""


class Message(NamedTuple):
    """What one stage sends another for one micro-batch: activations forward, their gradients back."""

    kind: Literal["activation", "gradient"]
    source: int
    goal: int
    micro_batch: int

    def __str__(self) -> str:
        return f"the {self.kind}s of micro-batch {self.micro_batch} from stage {self.source} to stage {self.goal}"


class Form(NamedTuple):
    """Shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Forms = Callable[[Message], Sequence[Form]]


class Messages:
    """The messages of one step of a pipeline on one rank.

    group: the ranks of the pipeline. place_of: a stage's rank in it. order: all messages of the step that cross ranks.
    forms: what a message holds. Raises CommError, naming the message, where the other rank is gone or does not come.
    """

    def __init__(
        self, group: Group, place_of: Mapping[int, int], order: Sequence[Message], forms: Forms, device: torch.device
    ):
        self._group, self._place_of, self._forms, self._device = group, place_of, forms, device
        mine = group.index
        self._order = [m for m in order if mine in (place_of[m.source], place_of[m.goal])]
        self._next = 0
        self._ready: dict[Message, list[Tensor]] = {}
        self._receives: dict[Message, tuple[list[dist.Work], list[Tensor]]] = {}
        self._sends: deque[tuple[Message, dist.Work, Tensor]] = deque()
        self._ahead = 0
        self._post()

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Hands tensors to the stage that reads them, which may be on this rank; returns at once."""
        if self._place_of[message.goal] == self._group.index:
            self._receives[message] = ([], list(tensors))
            return
        self._ready[message] = [x.contiguous() for x in tensors]
        self._post()
        self._forget_sent()

    def receive(self, message: Message) -> list[Tensor]:
        """The tensors of a message, once they are here."""
        if message not in self._receives:
            self._post(message)
        works, tensors = self._receives.pop(message)
        for work in works:
            self._wait(message, work)
        if self._place_of[message.source] != self._group.index:
            self._ahead -= 1
            self._post()
        return tensors

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        self._post()
        assert self._next == len(self._order), f"rank {self._group.rank} has not sent {self._order[self._next]}"
        while self._sends:
            message, work, _ = self._sends.popleft()
            self._wait(message, work)

    def _post(self, needed: Message | None = None) -> None:
        """Posts messages in order: sends as far as what they carry is there, receives some ahead of need."""
        while self._next < len(self._order):
            message = self._order[self._next]
            if self._place_of[message.source] == self._group.index:
                if message not in self._ready:
                    assert needed is None or needed in self._receives, f"{needed} waits for {message} to be sent"
                    return
                goal = self._rank_of(message.goal)
                for x in self._ready.pop(message):
                    self._group.count(x.numel() * x.element_size(), "stages")
                    self._sends.append((message, self._start(message, dist.isend, x, goal), x))
            else:
                if self._ahead >= _AHEAD and (needed is None or needed in self._receives):
                    return
                source = self._rank_of(message.source)
                tensors = [torch.empty(f.shape, dtype=f.dtype, device=self._device) for f in self._forms(message)]
                works = [self._start(message, dist.irecv, x, source) for x in tensors]
                self._receives[message] = (works, tensors)
                self._ahead += 1
            self._next += 1

    def _start(self, message: Message, call: Callable[..., dist.Work | None], x: Tensor, rank: int) -> dist.Work:
        try:
            work = call(x, rank, group=self._group.process_group)
        except RuntimeError as error:
            raise explain(self._group, str(message), error) from error
        assert work is not None
        return work

    def _wait(self, message: Message, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise explain(self._group, str(message), error) from error

    def _forget_sent(self) -> None:
        while self._sends and self._sends[0][1].is_completed():
            self._sends.popleft()

    def _rank_of(self, stage: int) -> int:
        return self._group.ranks[self._place_of[stage]]
