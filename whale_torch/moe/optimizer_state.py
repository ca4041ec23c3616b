"""An optimizer's state of weights that layers shared, for each layer's own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whale_torch.errors import PlanError

__all__ = ["State", "check_state", "give_states"]

State = Literal["copy_scaled", "copy", "reset"]

# by the how-manieth power of the gradient's size a value grows, of torch's optimizers and those named like them
_POWERS = {
    **dict.fromkeys(("exp_avg", "momentum_buffer", "grad_avg", "exp_inf", "prev"), 1),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "variance", "row_var", "col_var"), 2),
    **dict.fromkeys(("step", "mu_product", "step_size", "acc_delta", "eta", "mu", "ax"), 0),
}


def check_state(shared: Sequence[nn.Parameter], optimizers: Sequence[Optimizer], state: State) -> None:
    """Raises PlanError where give_states could not do what is asked; changes nothing."""
    if state not in ("copy_scaled", "copy", "reset"):
        raise PlanError(f"state is {state!r}.", fix='"copy_scaled", "copy" or "reset"')
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    strays = [p for p in shared if p.requires_grad and id(p) not in held]
    if optimizers and strays:
        raise PlanError(
            f"{len(strays)} of the {len(shared)} parameters that the layers share, the first of shape "
            f"{list(strays[0].shape)}, are in no optimizer given: their copies would never be trained.",
            fix="give a list of all optimizers of these layers, or freeze what is not trained",
        )
    for each in optimizers:
        if any("param_names" in group for group in each.param_groups):
            raise PlanError(
                f"this {type(each).__name__} was built of named_parameters(), and how the new parameters are called is "
                "the model's to say.",
                fix="build it of model.parameters()",
            )
        for p in shared if state == "copy_scaled" else ():
            for key in each.state.get(p, {}):
                if key not in _POWERS:
                    raise PlanError(
                        f"{type(each).__name__} has state '{key}', of which it is not known how it grows with the "
                        "gradient.",
                        fix='state="copy" takes it as it is, state="reset" begins anew',
                    )


def give_states(optimizer: Optimizer, copies: Mapping[int, Sequence[nn.Parameter]], state: State) -> None:
    """Adds parameters to an optimizer: behind those that they are copies of, in the groups of these.

    copies: of a parameter, by its id, those of the further layers.
    """
    for group in optimizer.param_groups:
        params: list[nn.Parameter] = group["params"]
        places = [index for index, p in enumerate(params) if id(p) in copies]
        if not places:
            continue
        shared = [params[index] for index in places]
        further = len(copies[id(shared[0])])
        params[places[-1] + 1 : places[-1] + 1] = [copies[id(p)][layer] for layer in range(further) for p in shared]
        for p in shared:
            _hand_on(optimizer, group, p, copies[id(p)], state)


def _hand_on(
    optimizer: Optimizer, group: Mapping[str, Any], p: nn.Parameter, copies: Sequence[nn.Parameter], state: State
) -> None:
    known = optimizer.state.get(p)
    if not known:
        return
    if state == "reset":
        del optimizer.state[p]
        if isinstance(optimizer, torch.optim.Adagrad):  # makes its state when it is built
            fresh = torch.optim.Adagrad([p, *copies], **optimizer.defaults)
            optimizer.state.update(fresh.state)
        return
    if state == "copy_scaled":
        known = {key: _scaled(key, value, known, 1 + len(copies)) for key, value in known.items()}
    optimizer.state[p] = known
    for q in copies:
        optimizer.state[q] = {key: _own(value) for key, value in known.items()}


def _scaled(key: str, value: Any, known: Mapping[str, Any], layers: int) -> Any:
    power = _POWERS[key]
    if key == "momentum_buffer" and "square_avg" in known:  # RMSprop's sums gradients over their size
        power = 0
    return value / layers**power if power and isinstance(value, Tensor) else value


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
