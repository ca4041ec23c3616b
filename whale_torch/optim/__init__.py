"""optim: what a training loop does to gradients and parameters, right on cut ones too."""

from whale_torch.optim.clip import clip_grad_norm_
from whale_torch.optim.guard import element_wise
from whale_torch.optim.scaler import GradScaler

__all__ = ["GradScaler", "clip_grad_norm_", "element_wise"]
