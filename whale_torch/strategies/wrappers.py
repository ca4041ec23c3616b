"""Other wrappers that average gradients: refused inside a model and around it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from whale_torch.errors import PlanError

__all__ = ["keep_off_wrappers", "refuse_wrapper_around", "refuse_wrappers"]

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "ReplicateModule", "DataParallel")


def refuse_wrappers(model: nn.Module) -> None:
    """Raises PlanError naming a wrapper of torch's in the model, which would average gradients a second time."""
    for name, module in model.named_modules():
        kinds = (kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch."))
        found = next((kind for kind in kinds if kind in _WRAPPERS), None)
        if found is not None:
            raise PlanError(
                f"{name or 'the model'} is wrapped in {found}, which moves parameters and "
                "gradients between ranks by itself.",
                fix="take the wrapper off and annotate what it held: with wh.replica(): ...; wh.parallelize averages",
            )


def keep_off_wrappers(model: nn.Module) -> None:
    """Lets torch's DistributedDataParallel find no parameter here: it raises that it is not needed.

    It would copy the first rank's parts over those of the others.
    """
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]


def refuse_wrapper_around(model: nn.Module) -> None:
    """Raises PlanError where the model's forward runs inside that of a DistributedDataParallel that holds it."""
    outer = DistributedDataParallel._active_ddp_module
    if outer is not None and any(module is model for module in outer.modules()):
        raise PlanError(
            f"this {model._get_name()} runs inside a DistributedDataParallel, which moves parameters and gradients "
            "between ranks by itself.",
            fix="take the wrapper off, and build the model anew; wh.parallelize takes the outermost module, and "
            "averages the gradients of all of it",
        )
