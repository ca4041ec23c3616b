"""Communication. Importing any module of it gives Columns all of its rules."""

from whale_torch.comm import channels, columnwise, loss, ranking, reentrant

__all__ = ["channels", "columnwise", "loss", "ranking", "reentrant"]
