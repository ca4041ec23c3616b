"""What several ranks hold is written once, by all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import whale_torch as wh
from tests.world import world


def _replicas(rank: int, n: int, folder: str) -> None:
    model = wh.parallelize(nn.Linear(4096, 3000, bias=False))
    wh.save(folder, step=0, model=model, rng=False)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.matrix(keep=1)
def test_replicas_share_the_writing_and_write_nothing_twice(n: int, tmp_path: Path) -> None:
    world(n, _replicas, str(tmp_path))
    sizes = [path.stat().st_size for path in (tmp_path / "step-00000000").glob("*.safetensors")]
    whole = 4 * 4096 * 3000
    assert len(sizes) == n and whole <= sum(sizes) < whole + n * 8192
    assert max(sizes) - min(sizes) <= (16 << 20) + 8192  # as much as is cut off for one rank
