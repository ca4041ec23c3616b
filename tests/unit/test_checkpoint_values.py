"""Values of states as JSON: what comes back is what was given, and nothing that is read runs code."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from whale_torch.checkpoint.payload import bytes_of
from whale_torch.checkpoint.values import decode, encode
from whale_torch.errors import CheckpointError

Pair = namedtuple("Pair", "a b")

VALUES: dict[str, Any] = {
    "none": None,
    "numbers": [0, -1, 1 << 80, 0.1, -0.0, 1e-320, True, False],
    "infinite": [math.inf, -math.inf],
    "strings": ["", "a/b", "ä", "\ud800 is no text", "\x00"],
    "bytes": [b"", b"\x00\xff"],
    "tuples": ((), (1,), (1, (2, [3]))),
    "sets": [set(), {1, 2}, {"a", (1, 2)}],
    "dicts": {"a": {"b": {}}, "": 1, "__kind__x": 2},
    "odd keys": {1: "one", 2.5: "x", (1, "a"): [1], None: 0, False: 3, "1": "text"},
    "the kind's own name": {"__kind__": "tensor", "key": "../secret"},
    "a kind inside": [{"__kind__": "float", "value": "inf"}, {"__kind__": {"__kind__": 1}}],
    "dtypes": [torch.float32, torch.bfloat16, torch.bool],
}


def _there_and_back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "x", tensors))
    return decode(json.loads(text), tensors)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) and repr(a) == repr(b)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(name: str) -> None:
    assert _same(_there_and_back(VALUES[name]), VALUES[name])


def test_nan_comes_back() -> None:
    assert math.isnan(_there_and_back(math.nan))


def test_further_dicts_and_numbers_come_back_as_plain_ones() -> None:
    given = [
        OrderedDict(a=1),
        defaultdict(list, {"a": [1]}),
        Counter("aab"),
        np.float32(0.5),
        np.int64(3),
        np.bool_(True),
    ]
    assert _there_and_back(given) == [{"a": 1}, {"a": [1]}, {"a": 2, "b": 1}, 0.5, 3, True]


def test_tensors_keep_dtype_and_shape() -> None:
    given = {"a": [torch.tensor(3), torch.zeros(0, 2)], "b": {"c": torch.ones(2, dtype=torch.bfloat16)}}
    tensors: dict[str, Tensor] = {}
    encode(given, "x", tensors)
    assert list(tensors) == ["x/a/0", "x/a/1", "x/b/c"]
    found = _there_and_back(given)
    assert torch.equal(found["a"][0], given["a"][0]) and found["a"][1].shape == (0, 2)
    assert found["b"]["c"].dtype is torch.bfloat16


def test_views_come_back_as_what_they_say() -> None:
    z = torch.tensor([1 + 2j, 3j])
    given = [z.conj(), z.conj().imag, torch.arange(4.0)[::2][:1], torch.arange(4.0)[::2][:0]]
    for one, other in zip(given, _there_and_back(given), strict=True):
        assert torch.equal(one, other) and len(bytes_of(other)) == one.numel() * one.element_size()


def test_tensors_whose_paths_would_be_one_stay_two() -> None:
    given = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 1: torch.tensor(3), "1": torch.tensor(4)}
    found = _there_and_back(given)
    assert [int(found["a/b"]), int(found["a"]["b"]), int(found[1]), int(found["1"])] == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, np.bool_, np.uint32, np.complex64])
def test_arrays_come_back(dtype: Any) -> None:
    given = np.arange(6).reshape(2, 3).astype(dtype)
    found = _there_and_back(given)
    assert found.dtype == given.dtype and (found == given).all()
    found[0, 0] = 1  # its own memory


def test_a_generators_state_comes_back() -> None:
    import random

    draw = random.Random(3)
    draw.gauss(0, 1)
    again = random.Random()
    again.setstate(_there_and_back(draw.getstate()))
    assert again.random() == draw.random()
    legacy = np.random.RandomState(5)
    other = np.random.RandomState()
    other.set_state(_there_and_back(legacy.get_state()))
    assert other.rand() == legacy.rand()
    modern = np.random.default_rng(5)
    twin = np.random.default_rng(0)
    twin.bit_generator.state = _there_and_back(modern.bit_generator.state)
    assert twin.random() == modern.random()


class _Own:
    pass


REFUSED: dict[str, Any] = {
    "an object": _Own(),
    "a class": _Own,
    "a function": len,
    "a lambda": lambda: 0,
    "a deque": deque([1]),
    "a named tuple": Pair(1, 2),
    "a complex number": 1j,
    "an array of objects": np.array([object()]),
    "an array of strings": np.array(["a"]),
    "an array of another byte order": np.arange(3, dtype=">f4"),
    "a record": np.zeros(1, dtype=[("a", float)]).view(np.recarray),
    "a number of more digits": np.longdouble(1),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a meta tensor": torch.empty(2, device="meta"),
    "a module": torch.nn.Linear(1, 1),
    "a generator": torch.Generator(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_data_is_refused_by_its_path(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"'x/deep/1'") as caught:
        encode({"deep": [0, REFUSED[name]]}, "x", {})
    assert caught.value.fix


def test_a_value_that_holds_itself_is_refused() -> None:
    given: list[Any] = []
    given.append(given)
    with pytest.raises(CheckpointError, match="holds itself"):
        encode(given, "x", {})


HOSTILE: dict[str, Any] = {
    "a kind that is not known": {"__kind__": "pickle", "value": "gASV"},
    "a kind that is no text": {"__kind__": ["tensor"], "key": "x"},
    "a kind that is None": {"__kind__": None, "value": 1},
    "no value": {"__kind__": "tuple"},
    "a value that is no list": {"__kind__": "tuple", "value": 5},
    "a set of lists": {"__kind__": "set", "value": [[1]]},
    "a set of dicts": {"__kind__": "set", "value": [{}]},
    "no float": {"__kind__": "float", "value": "one"},
    "a float of a list": {"__kind__": "float", "value": [1]},
    "a tensor that is not there": {"__kind__": "tensor", "key": "y"},
    "a tensor without a key": {"__kind__": "tensor"},
    "a tensor's key that is a list": {"__kind__": "tensor", "key": []},
    "a dtype that is a function": {"__kind__": "dtype", "value": "load"},
    "a dtype that is a module": {"__kind__": "dtype", "value": "hub"},
    "a dtype that is a number": {"__kind__": "dtype", "value": 3},
    "bytes that are none": {"__kind__": "bytes", "value": "\u20ac"},
    "bytes with a wrong end": {"__kind__": "bytes", "value": "abc"},
    "an array that is no tensor": {"__kind__": "numpy", "value": 3},
    "a dict of no pairs": {"__kind__": "dict", "value": [[1, 2, 3]]},
    "a dict of a number": {"__kind__": "dict", "value": 3},
    "a dict with a dict as key": {"__kind__": "dict", "value": [[{"a": 1}, 2]]},
    "an array of what numpy has not": {"__kind__": "numpy", "value": {"__kind__": "tensor", "key": "half"}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_told_apart(name: str) -> None:
    with pytest.raises(CheckpointError):
        decode([HOSTILE[name]], {"half": torch.ones(2, dtype=torch.bfloat16)})


def test_a_deep_nest_is_an_error_and_no_crash() -> None:
    nest: Any = 1
    for _ in range(100_000):
        nest = [nest]
    with pytest.raises(CheckpointError, match="deep"):
        decode(nest, {})
    with pytest.raises(CheckpointError, match="deep"):
        encode(nest, "x", {})
