"""Tensors inside what a model takes and returns."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whale_torch.errors import LayoutError
from whale_torch.strategies.batch import BatchReader, digest
from whale_torch.strategies.outputs import leaves_in, map_tensors, tensors_in

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Output:
    loss: Tensor
    extra: Any = None
    count: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str = "f"


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As transformers': a dataclass that is a dict of what is not None, and keeps the two alike."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


@dataclasses.dataclass
class Causal(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None


class Slotted:
    __slots__ = ("name", "x")

    def __init__(self, x: Tensor):
        self.x, self.name = x, "s"


def double(x: Tensor) -> Tensor:
    return x * 2


def one() -> Tensor:
    return torch.ones(2)


VALUES: dict[str, Any] = {
    "tensor": one,
    "tuple": lambda: (one(), 3, [one()]),
    "namedtuple": lambda: Pair(one(), None),
    "dict": lambda: {"a": one(), "b": {"c": (one(),)}},
    "ordered": lambda: OrderedDict(a=one()),
    "userdict": lambda: UserDict(a=one()),
    "dataclass": lambda: Output(one(), [one()]),
    "frozen": lambda: Frozen(one()),
    "namespace": lambda: SimpleNamespace(x=one(), y=2),
    "slots": lambda: Slotted(one()),
    "distribution": lambda: torch.distributions.Normal(torch.zeros(2), one()),
    "packed": lambda: nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3), [3, 1], batch_first=True).data,
}


@pytest.mark.parametrize("name", VALUES)
def test_every_tensor_is_changed_and_types_stay(name: str) -> None:
    value = VALUES[name]()
    changed = map_tensors(value, double)
    assert type(changed) is type(value)
    before, after = list(tensors_in(value)), list(tensors_in(changed))
    assert before and len(before) == len(after)
    assert all(torch.equal(b * 2, a) for b, a in zip(before, after, strict=True))
    assert [v for v in leaves_in(value) if not isinstance(v, Tensor)] == [
        v for v in leaves_in(changed) if not isinstance(v, Tensor)
    ]


def test_a_model_output_keeps_keys_and_attributes_alike() -> None:
    changed = map_tensors(Causal(loss=one(), logits=None), double)
    assert (
        type(changed) is Causal
        and changed.loss is changed["loss"]
        and list(changed) == ["loss"]
        and changed.logits is None
    )
    assert torch.equal(changed.loss, one() * 2)


def test_fields_that_are_not_of_init_are_kept() -> None:
    value = Output(one())
    value.count = 7
    assert map_tensors(value, double).count == 7


def test_what_does_not_change_is_the_same_object() -> None:
    for value in (
        (1, "a"),
        {"a": [1]},
        SimpleNamespace(x=3),
        nn.Linear(2, 2),
        torch.float32,
        Output(None),
        {1, 2},
        deque([1]),
    ):  # type: ignore[arg-type]
        assert map_tensors(value, double) is value
    kept = [one(), one()]
    assert map_tensors(kept, lambda x: x) is kept


def test_an_object_that_holds_itself() -> None:
    value = SimpleNamespace(x=one())
    value.me = value
    assert torch.equal(map_tensors(value, double).x, one() * 2) and len(list(tensors_in(value))) == 1


@pytest.mark.parametrize(
    "value",
    [iter([one()]), (x for x in [one()]), {one()}, deque([one()]), {"a": one()}.values()],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_reached_raises(value: Any) -> None:
    with pytest.raises(LayoutError, match=f"returned a {type(value).__name__}"):
        map_tensors((value,), double)


# ---- the hash of a batch ----


def test_the_hash_sees_every_difference() -> None:
    x = torch.randn(6, 5)
    flipped = x.clone()
    flipped.view(-1).view(torch.int32)[7] ^= 1
    different = [
        x, flipped, x.flip(0), x.view(5, 6), x[:5], x.double(), x.half(), x.to(torch.int64), x > 0,
        x.to(torch.uint8)[:1, :3],
        torch.ones(6, 5), torch.full((6, 5), 2.0), torch.zeros(6, 5), torch.zeros(0, 5), torch.zeros(0, 6),
        torch.randn(3).to(torch.complex64),
    ]  # fmt: skip
    assert len({digest(t) for t in different}) == len(different)
    assert digest((x, 1)) != digest((x, 2)) != digest((x, "2")) and digest([x, flipped]) != digest([flipped, x])


def test_the_hash_is_of_values_alone() -> None:
    x = torch.randn(70, 1001)
    assert digest(x) == digest(x.clone()) == digest(x.t().contiguous().t()) == digest({"a": x})
    odd = torch.arange(101, dtype=torch.uint8)
    assert digest(odd[3:90]) == digest(odd[3:90].clone()) and digest(odd[3:90]) != digest(odd[4:91])


def test_numpy_arrays_are_hashed_and_counted() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    read_only = x.copy()
    read_only.flags.writeable = False
    same = [x, x.copy(), read_only, np.asfortranarray(x)]
    assert len({digest((a, 1)) for a in same}) == 1
    different = [x, x[::-1], x.reshape(3, 4), x.astype(np.float64), x.view(np.int32), x[:2], np.float32(1), np.int64(1)]
    assert len({digest((a,)) for a in different}) == len(different)
    names = np.array(["a", None], dtype=object)
    assert digest(names) == digest(names.copy()) != digest(names[::-1])
    reader = BatchReader(nn.Linear(3, 3), 0)
    assert reader.read((x,), {}, hashed=False).rows == 4
    assert reader.read(({"mask": x}, torch.ones(2)), {}, hashed=False).rows == 4
    assert reader.read((torch.ones(4), x[:2]), {}, hashed=False).other == 2
    assert BatchReader(nn.Linear(3, 3), (("input", 1),)).read((x,), {}, hashed=False).rows == 3
