"""What a recording needs changed on the copy of a model whose modules hide tensors or read values.

Nothing is ever changed on the model itself.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

__all__ = ["register_tweak", "tweak"]

Tweak = Callable[[nn.Module], None]

_TWEAKS: list[Tweak] = []
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def register_tweak(change: Tweak) -> Tweak:
    """Has `change` called with every module of a copy before it is recorded."""
    _TWEAKS.append(change)
    return change


def tweak(model: nn.Module) -> None:
    for module in model.modules():
        for change in _TWEAKS:
            change(module)


@register_tweak
def _no_cache(module: nn.Module) -> None:
    """Hugging Face: a cache object is of no use in training, and hides tensors."""
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", False) is True:
        setattr(config, "use_cache", False)  # noqa: B010 - a config of any type


@register_tweak
def _no_cumulative_average(module: nn.Module) -> None:
    """BatchNorm with momentum=None reads how many batches it has seen, which changes no shape."""
    if isinstance(module, _BATCH_NORMS) and module.momentum is None:
        module.momentum = 0.1
