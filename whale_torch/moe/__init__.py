"""Mixture of experts: layers, gates, experts; imported into any model, run on one device or over ranks (wh.split)."""

from whale_torch.moe.experts import Experts, FeedForward, Stacked
from whale_torch.moe.gates import ExpertChoice, Gate, Hash, Prototypes, TopK
from whale_torch.moe.layer import Load, MoELayer, aux_loss
from whale_torch.moe.pseudo import delink, load_shared, share, unshared
from whale_torch.moe.routing import Routing

__all__ = [
    "ExpertChoice",
    "Experts",
    "FeedForward",
    "Gate",
    "Hash",
    "Load",
    "MoELayer",
    "Prototypes",
    "Routing",
    "Stacked",
    "TopK",
    "aux_loss",
    "delink",
    "load_shared",
    "share",
    "unshared",
]
