"""The table as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.slides_table.sizes import PUBLISHED

__all__ = ["plot"]


def plot(path: Path, ratios: Mapping[tuple[int, int], float], name: str) -> None:
    """Draws the speed-up over flat data parallelism by ranks, one line a batch, beside the published points."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for batch in sorted({batch for _, batch in ratios}):
        points = sorted((ranks, ratio) for (ranks, own), ratio in ratios.items() if own == batch)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"batch {batch}")
    axes.plot(list(PUBLISHED), list(PUBLISHED.values()), "kx", markersize=9, label="published")
    axes.set(xscale="log", xlabel="ranks, 8 a node", ylabel="speed-up over flat data parallelism", title=name)
    axes.set_xticks(list(PUBLISHED), [str(ranks) for ranks in PUBLISHED])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
