"""What the papers say about the idle share of their schedules."""

from __future__ import annotations

__all__ = ["bubble_formula"]


def bubble_formula(name: str, num_stages: int, num_micro_batches: int, num_ranks: int | None = None) -> float | None:
    """The idle share where stages cost the same and messages nothing; None where the papers give none.

    With R ranks, M micro-batches and v stages a rank:

    - gpipe, 1f1b: (R - 1) / (M + R - 1), one stage a rank;
    - interleaved: (R - 1) / (v M + R - 1), M >= R (the paper's own needs that R divides M);
    - zero_bubble: (R - 1) / (3 M + R - 1), one stage a rank, M >= R, and F, I and W that cost the same.

    Reference: GPipe (arXiv 1811.06965), section 2.3; PipeDream-flush (arXiv 2006.09503); arXiv 2104.04473, section
    2.2 (which gives the share of the computing time, ours is of the whole); arXiv 2401.10241, section 2 (ZB-H1).
    """
    ranks, batches = num_ranks or num_stages, num_micro_batches
    chunks, rest = divmod(num_stages, ranks)
    if rest:
        return None
    if name in ("gpipe", "1f1b") and chunks == 1:
        return (ranks - 1) / (batches + ranks - 1)
    if name == "interleaved" and (batches >= ranks or chunks == 1):
        return (ranks - 1) / (chunks * batches + ranks - 1)
    if name == "zero_bubble" and chunks == 1 and batches >= ranks:
        return (ranks - 1) / (3 * batches + ranks - 1)
    return None
