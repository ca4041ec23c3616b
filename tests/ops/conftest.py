"""The instruction sets that the C++ kernels exist for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from whale_torch.ops import library


@pytest.fixture(params=["v4", "v3", "baseline"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on each instruction set that this machine and build have."""
    before = library.isa()
    if before is None:
        if request.param != "baseline":
            pytest.skip("the C++ kernels are not built: the Python kernels have no instruction set")
        yield "Python"
        return
    if not library.use_isa(request.param):
        pytest.skip(f"this machine or build lacks {request.param}")
    yield request.param
    library.use_isa(before)
