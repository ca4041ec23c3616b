"""Other wrappers that average gradients: one inside a model is refused, one put around it later refuses itself."""

from __future__ import annotations

from torch import nn

from whale_torch.errors import PlanError

__all__ = ["keep_off_wrappers", "refuse_wrappers"]

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


def refuse_wrappers(model: nn.Module) -> None:
    """Raises PlanError naming a wrapper of torch's in the model, which would average gradients a second time."""
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
            raise PlanError(
                f"{name or 'the model'} is wrapped in {kind.__name__}, which moves parameters and "
                "gradients between ranks by itself.",
                fix="take the wrapper off and annotate what it held: with wh.replica(): ...; wh.parallelize averages",
            )


def keep_off_wrappers(model: nn.Module) -> None:
    """Lets torch's DistributedDataParallel find no parameter here: it raises that it is not needed.

    It would copy the first rank's parts over those of the others.
    """
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
