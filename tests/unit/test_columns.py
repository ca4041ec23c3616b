"""What a split's output says of itself, keeps and refuses, without a single message between ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from whale_torch.comm.columns import Columns, ColumnsPlace, Deferred
from whale_torch.comm.region import Region
from whale_torch.errors import LayoutError
from whale_torch.mesh import Group

WIDTHS = (3, 2)
COUNTS = (4, 6)


def _region(strict: bool = True) -> Region:
    """Ranks 0 and 1, at rank 0; they share no process group, so whatever communicates fails."""
    both, alone = Group("both", (0, 1), 0, None), Group("alone", (0,), 0, None)
    return Region("the head at model.py:3", both, both, alone, alone, strict=strict)


def _columns(lead: tuple[int, ...] = (4,), *, region: Region | None = None, requires_grad: bool = True) -> Columns:
    local = torch.randn(sum(COUNTS), WIDTHS[0], requires_grad=requires_grad)
    return Columns.of(local, ColumnsPlace(region or _region(), COUNTS, WIDTHS, lead))


def test_it_looks_like_the_own_rows_with_all_columns() -> None:
    z = _columns((2, 2))
    assert z.shape == z.size() == torch.Size((2, 2, 5))
    assert (len(z), z.dim(), z.ndim, z.numel(), z.nelement(), torch.numel(z), z.size(-1)) == (2, 3, 3, 20, 20, 20, 5)
    assert (z.stride(), z.is_contiguous(), z.nbytes, z.element_size()) == ((10, 5, 1), True, 80, 4)
    assert (z.dtype, z.device.type, z.requires_grad, z.is_leaf) == (torch.float32, "cpu", True, False)
    assert z.is_floating_point() and torch.is_floating_point(z) and not z.is_complex()
    assert z.grad_fn is not None and isinstance(z, Tensor) and z.local.shape == (10, 3)
    assert z.place.first == 0


@pytest.mark.parametrize("show", [repr, str, "{}".format, lambda z: f"{z}", lambda z: dir(z) and repr([z])])
def test_showing_it_never_communicates(show: Callable[[Columns], str]) -> None:
    assert "Columns(shape=(4, 5), here 3 of 5 columns from 0, the head at model.py:3)" in show(_columns())


KEPT: list[Callable[[Any], Any]] = [
    F.relu,
    lambda z: F.gelu(z, approximate="tanh"),
    lambda z: z.relu().tanh().exp().sigmoid(),
    lambda z: 2 * z - 1 + z / 3 - (1 - z) ** 2,
    lambda z: F.silu(z) * z,
    lambda z: -z.abs().sqrt() * torch.tensor(2.0),
    lambda z: torch.clamp(z, 0.1, 0.2),
    lambda z: z.clone().detach().double(),
    lambda z: z.to(torch.bfloat16).float(),
    lambda z: F.dropout(z, 0.5, training=False),
    lambda z: torch.dropout(z, 0.0, True),
]


@pytest.mark.parametrize("function", KEPT)
def test_what_acts_on_elements_runs_on_the_shard(function: Callable[[Any], Any]) -> None:
    z = _columns()
    out = function(z)
    assert isinstance(out, Columns) and out.shape == (4, 5)
    assert torch.equal(out.local, function(z.local))


@pytest.mark.parametrize(
    ("reshape", "shape"),
    [
        (lambda z: z.view(-1, 5), (4, 5)),
        (lambda z: z.flatten(0, 1), (4, 5)),
        (lambda z: z.flatten(end_dim=1), (4, 5)),
        (lambda z: torch.flatten(z, 0, -2), (4, 5)),
        (lambda z: z.reshape((4, 1, 5)), (4, 1, 5)),
        (lambda z: torch.reshape(z, (1, 4, -1)), (1, 4, 5)),
        (lambda z: z.unsqueeze(1), (2, 1, 2, 5)),
        (lambda z: z.unsqueeze(0).squeeze(0), (2, 2, 5)),
        (lambda z: z.unflatten(0, (1, 2)), (1, 2, 2, 5)),
    ],
)
def test_views_of_the_rows_keep_it(reshape: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    z = _columns((2, 2))
    out = reshape(z)
    assert isinstance(out, Columns) and out.shape == shape and out.hold is z.hold
    assert out.local.data_ptr() == z.local.data_ptr()


GATHERED: list[Callable[[Any], Any]] = [
    lambda z: z.softmax(-1),
    lambda z: z.sum(),
    lambda z: z @ torch.ones(5, 2),
    lambda z: z[0],
    lambda z: list(z),
    lambda z: z > 0,
    lambda z: z.view(-1),
    lambda z: z.view(torch.int32),
    lambda z: z.view(5, 4),
    lambda z: z * torch.ones(4, 1),
    lambda z: z * torch.tensor(2.0, requires_grad=True),
    lambda z: torch.add(z, z, alpha=2),
    lambda z: z.topk(1, largest=False),
    lambda z: z.topk(1, dim=0),
    lambda z: z.argmax(),
    lambda z: z.max(),
    lambda z: torch.maximum(z, torch.zeros(5)),
    lambda z: z + _columns(),
    lambda z: z + z.unsqueeze(0),
    lambda z: torch.zeros(4, 5).add_(z),
    lambda z: torch.add(z, 1, out=torch.zeros(4, 5)),
    lambda z: z.detach().numpy(),
    lambda z: z.data,
    lambda z: z.backward(torch.ones(4, 5)),
    lambda z: torch.cat([z, z]),
    lambda z: F.cross_entropy(z, torch.ones(4, 5)),
]


@pytest.mark.parametrize("function", GATHERED)
def test_anything_else_gathers_and_strict_scopes_refuse(function: Callable[[Any], Any]) -> None:
    with pytest.raises(LayoutError) as caught:
        function(_columns())
    text = str(caught.value)
    assert "would gather (4, 5) of the head at model.py:3" in text and "z.rows()" in text
    line = re.search(r"where:  (.*):(\d+)$", text, re.MULTILINE)
    assert line is not None and Path(line[1]).name == Path(__file__).name
    assert function.__code__.co_firstlineno == int(line[2])


def test_einops_and_torch_are_not_the_users_line() -> None:
    einops = pytest.importorskip("einops")
    with pytest.raises(LayoutError) as caught:
        einops.rearrange(_columns(), "b c -> c b")
    assert caught.value.where is not None and Path(caught.value.where.partition(":")[0]).name == Path(__file__).name


def _assign(z: Any) -> None:
    z[0] = 1


def _add(z: Any) -> None:
    z += 1


def _data(z: Any) -> None:
    z.data = torch.zeros(4, 5)


def _needs_no_gradient(z: Any) -> None:
    z.requires_grad = False


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (_assign, "__setitem__"),
        (_add, "add_"),
        (_data, "data"),
        (_needs_no_gradient, "requires_grad"),
        (lambda z: z.mul_(2), "mul_"),
        (lambda z: torch.relu_(z), "relu_"),
        (lambda z: F.relu_(z), "relu_"),
        (lambda z: z.zero_(), "zero_"),
        (lambda z: z.copy_(torch.ones(4, 5)), "copy_"),
        (lambda z: torch.exp(torch.ones(4, 5), out=z), "exp"),
        (lambda z: torch._foreach_add_([z], 1), "_foreach_add_"),
        (lambda z: torch.nn.init.zeros_(z), "zero_"),
        (lambda z: z.masked_fill_(torch.ones(4, 5, dtype=torch.bool), 0), "masked_fill_"),
    ],
)
def test_writing_to_it_is_refused(write: Callable[[Any], Any], name: str) -> None:
    z = _columns(requires_grad=False)
    before = z.local.clone()
    with pytest.raises(LayoutError, match=rf"{name} would write into a split's output Columns\(shape=\(4, 5\)"):
        write(z)
    assert torch.equal(z.local, before)


@pytest.mark.parametrize(
    "hook",
    [
        lambda z: z.register_hook(print),
        lambda z: z.retain_grad(),
        lambda z: z.requires_grad_(),
        lambda z: z.register_post_accumulate_grad_hook(print),
    ],
)
def test_hooks_are_refused(hook: Callable[[Any], Any]) -> None:
    with pytest.raises(LayoutError, match="its gradient is a shard of all rows") as caught:
        hook(_columns())
    assert caught.value.fix is not None and "put the hook on rows" in caught.value.fix


def test_activations_in_place_write_into_the_shard() -> None:
    local = torch.randn(10, 3, requires_grad=True)
    z = Columns.of(local * 1, ColumnsPlace(_region(), COUNTS, WIDTHS, (4,)))
    out = F.relu(z, inplace=True)
    assert torch.equal(z.local, local.relu()) and torch.equal(out.local, local.relu())
    (out.local * z.local).sum().backward()
    expected = torch.autograd.grad(local.relu().square().sum(), local)[0]
    assert local.grad is not None and torch.equal(local.grad, expected)


def test_nothing_is_in_the_way_of_ordinary_python() -> None:
    z = _columns()
    assert z is not None and z in {z: 1} and hash(z) == id(z)
    assert z.to(torch.float32) is z and z.float() is z and z.contiguous() is z


def test_a_layer_put_off_runs_when_its_output_is_asked_for() -> None:
    x, weight, bias = torch.randn(10, 4), torch.randn(3, 4, requires_grad=True), torch.randn(3)
    deferred = Deferred(x, weight, bias)
    z = Columns.put_off(deferred, ColumnsPlace(_region(), COUNTS, WIDTHS, (2, 2)))
    flat = z.float().view(-1, 5).contiguous().to(torch.float32)
    assert (z.shape, flat.shape, z.dtype, flat.requires_grad) == ((2, 2, 5), (4, 5), torch.float32, True)
    assert not deferred.made
    with torch.no_grad():
        made = flat.relu().local
    assert deferred.made and not made.requires_grad
    assert torch.equal(made, F.linear(x, weight, bias).relu())
    assert z.local.requires_grad and z.grad_fn is not None
    assert not Columns.put_off(Deferred(x, weight.detach(), bias), z.place).requires_grad


def test_a_layer_put_off_under_autocast_is_of_its_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        deferred = Deferred(torch.randn(10, 4), torch.randn(3, 4), None)
        wide = Deferred(torch.randn(10, 4).double(), torch.randn(3, 4).double(), None)
    assert deferred.make().dtype is torch.bfloat16 and wide.make().dtype is torch.float64
