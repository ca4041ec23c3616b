"""Communication. Importing any module of it gives Columns all of its rules."""

from whale_torch.comm import columnwise, loss, ranking

__all__ = ["columnwise", "loss", "ranking"]
