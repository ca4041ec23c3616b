"""Mixture of experts: layers, gates, experts; imported into any model, run on one device or over ranks (wh.split)."""

from whale_torch.moe.auxiliary import aux_loss
from whale_torch.moe.convert import convert
from whale_torch.moe.expert_choice import ExpertChoice
from whale_torch.moe.experts import Experts, FeedForward, Stacked
from whale_torch.moe.fairscale import GumbelTop2, from_fairscale
from whale_torch.moe.gate import Gate
from whale_torch.moe.gates import Hash, Prototypes, TopK
from whale_torch.moe.heat_map import draw_loads
from whale_torch.moe.huggingface import from_huggingface
from whale_torch.moe.layer import MoELayer
from whale_torch.moe.loads import Loads, load, on_load, scalars
from whale_torch.moe.pseudo import delink, load_shared, share, unshared
from whale_torch.moe.routing import Routing
from whale_torch.moe.tally import Load
from whale_torch.moe.upcycling import upcycle

__all__ = [
    "ExpertChoice",
    "Experts",
    "FeedForward",
    "Gate",
    "GumbelTop2",
    "Hash",
    "Load",
    "Loads",
    "MoELayer",
    "Prototypes",
    "Routing",
    "Stacked",
    "TopK",
    "aux_loss",
    "convert",
    "delink",
    "draw_loads",
    "from_fairscale",
    "from_huggingface",
    "load",
    "load_shared",
    "on_load",
    "scalars",
    "share",
    "unshared",
    "upcycle",
]
