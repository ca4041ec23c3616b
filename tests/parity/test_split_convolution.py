"""Convolutions in a split: by output channels, by input channels and by groups, with norms and pooling between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.compare import Case, Model, check, check_all, even, uneven
from whale_torch.strategies import split_normalization
from whale_torch.strategies.split_normalization import SplitBatchNorm

CHANNELS, SIZE = 3, 8


class Images(Model):
    rows = 8
    dims = (0,)

    @staticmethod
    def batch(rows: int) -> tuple[Any, ...]:
        return (torch.randn(rows, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(8)) + 0.5,)


class Pair(Images):
    """Convolution, norm, activation, pooling, convolution; 10 channels."""

    def __init__(
        self,
        scope: Any,
        pool: str = "max",
        norm: bool = True,
        options: dict[str, Any] | None = None,
        channels: int = 10,
        momentum: float | None = 0.1,
    ):
        super().__init__()
        pools = {
            "max": nn.MaxPool2d(2),
            "avg": nn.AvgPool2d(2),
            "adaptive": nn.AdaptiveAvgPool2d(3),
            "adaptive max": nn.AdaptiveMaxPool2d(2),
        }
        with scope():
            self.body = nn.Sequential(
                nn.Conv2d(CHANNELS, channels, 3, **(options or {"padding": 1})),
                nn.BatchNorm2d(channels, momentum=momentum) if norm else nn.Identity(),
                nn.ReLU(inplace=True),
                nn.Dropout2d(0.0),
                pools[pool],
                nn.Conv2d(channels, 4, 2),
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Classifier(Images):
    """Convolution, flattened channels into a linear layer by rows, a norm over own rows."""

    def __init__(self, scope: Any, pooled: bool = False):
        super().__init__()
        with scope():
            self.conv = nn.Conv2d(CHANNELS, 6, 3, stride=2, bias=False)
            self.norm = nn.BatchNorm2d(6, affine=False)
            self.pool = nn.AdaptiveAvgPool2d(1) if pooled else nn.Identity()
            self.fc = nn.Linear(6 if pooled else 54, 5, bias=False)
            self.last = nn.BatchNorm1d(5, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.pool(torch.relu(self.norm(self.conv(x))))
        return self.last(self.fc(h.view(h.shape[0], -1)))


class Groups(Images):
    """Depthwise and grouped convolutions, then a gather."""

    def __init__(self, scope: Any, mode: str = "zeros"):
        super().__init__()
        with scope():
            self.wide = nn.Conv2d(CHANNELS, 6, 1)
            self.depthwise = nn.Conv2d(6, 12, 3, groups=6, padding=1, padding_mode=mode)
            self.grouped = nn.Conv2d(12, 6, 3, groups=3, padding="same" if mode == "zeros" else 1, padding_mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.grouped(torch.tanh(self.depthwise(self.wide(x)))).softmax(1)


class OneDimension(Images):
    """nn.Conv1d by output channels, read as rows, and BatchNorm1d over it without running statistics."""

    def __init__(self, scope: Any):
        super().__init__()
        with scope():
            self.conv = nn.Conv1d(CHANNELS, 5, 3)
            self.norm = nn.BatchNorm1d(5, track_running_stats=False)
            self.group = nn.GroupNorm(1, 5)
        self.out = nn.Conv1d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.group(torch.nn.functional.max_pool1d(self.norm(self.conv(x.flatten(2))), 2)))


CASES: list[Case] = [
    (Pair, {}),
    (Pair, {"pool": "avg", "norm": False}),
    (Pair, {"pool": "adaptive", "options": {"stride": 1, "dilation": 2}, "momentum": None}),
    (Pair, {"pool": "adaptive max", "options": {"padding": 1, "padding_mode": "circular"}}),
    (Pair, {"channels": 3}),  # on 4 ranks one has no channels
    (Classifier, {}),
    (Classifier, {"pooled": True}),
    (OneDimension, {}),
    (Groups, {}),
    (Groups, {"mode": "reflect"}),
]
NO_GATHER = 7


@pytest.mark.parametrize(("mode", "n"), [("own", 2), ("own", 3), ("own", 4), ("shared", 2)])
def test_convolutions_equal_one_process(mode: str, n: int) -> None:
    found = check_all(CASES, n, mode, even if mode == "shared" else uneven)
    for case, ranks in zip(CASES[:NO_GATHER], found, strict=False):
        for run in ranks:
            assert run.gathered == [], (case, run.gathered)


@pytest.mark.parametrize("mode", ["shared", "pairs"])
def test_two_groups_without_a_norm(mode: str) -> None:
    """Statistics are those of a region's rows, so with two regions only what has none can equal one process."""
    check_all([(Pair, {"norm": False}), (Groups, {})], 4, mode, uneven)


def forget_the_other_channels() -> None:
    """Running statistics of this rank's channels only."""
    SplitBatchNorm._track_all = lambda self, mine: None  # type: ignore[method-assign]


def forget_the_share() -> None:
    """A norm's whole weight gets the gradient of this rank's channels, as if every rank had seen all."""
    split_normalization.partial_parameter = lambda p, region: p  # type: ignore[assignment]


@pytest.mark.parametrize("mutate", [forget_the_other_channels, forget_the_share])
def test_the_comparison_sees_a_wrong_norm(mutate: Any) -> None:
    with pytest.raises(AssertionError, match="is off"):
        check(Pair, 2, mutate=mutate)
