"""Seeing how evenly experts are loaded: numbers of every layer over all ranks, for any logger."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from whale_torch.comm.collectives import gather_equal
from whale_torch.errors import CommError, PlanError
from whale_torch.mesh import Group
from whale_torch.moe.layer import MoELayer
from whale_torch.moe.parallel import SplitMoELayer
from whale_torch.moe.tally import Tally
from whale_torch.planning.plan import Plan
from whale_torch.strategies.root import root_of
from whale_torch.strategies.runtime import runtime_of

__all__ = ["Loads", "load", "on_load", "scalars"]

Loads: TypeAlias = dict[str, dict[str, Any]]
"""By a layer's name: what `load` says of it."""

_hooks: dict[Callable[[], nn.Module | None], RemovableHandle] = {}


def load(model: nn.Module) -> Loads:
    """How the MoE layers of a model were loaded since the last call of this, over all ranks: a collective.

    Counted are the calls in the mode, training or evaluation, that the model is in now, from the first call of `load`
    or `on_load` on, which itself tells of each layer's last call. A forward that a checkpoint runs again counts once.
    Of each layer: tokens; routes, to each expert; load, the share of them; dropped, how many found each expert full;
    drop_rate; balance, the largest load over the mean one; load_entropy and gate_entropy (the mean over tokens, of the
    scores of the gate), 1 where even and 0 where all is one expert's; loss, the auxiliary losses, a mean over calls
    (those in which they were finite).
    All are numbers or lists of numbers; `scalars` names each alone.
    Raises PlanError for a model without a MoELayer; CommError where a rank does not call it.
    """
    return _load(model, "load")


def _load(model: nn.Module, asker: object) -> Loads:
    layers = _layers(model)
    for layer in layers.values():
        _watch(layer, model.training)
    group, plan = _ranks(layers.values())
    names = {id(module): name for name, module in _modules_of(layers.values()).items()}
    parts = []
    for layer in layers.values():
        assert layer.tally is not None
        mine = layer.tally.take(asker, training=model.training)
        parts.append(mine / _times(layer, plan, names.get(id(layer), "")))
    total = _summed(torch.cat(parts), group)
    sizes = [2 * layer.num_experts + 4 for layer in layers.values()]
    return {name: _told(sums) for name, sums in zip(layers, total.split(sizes), strict=True)}


def on_load(model: nn.Module, fn: Callable[[Loads], object], *, every: int = 1) -> RemovableHandle:
    """Calls fn with the loads since its last call after every so many steps of the optimizer that trains the experts.

    However many micro-batches a step has accumulated, it is told once. fn is called on every rank, with the same
    numbers: log(found) on one of them. The handle's remove() ends it; so does the end of the model.
    Raises PlanError for a model without a MoELayer, and for every < 1.
    """
    if every < 1:
        raise PlanError(f"every is {every}.", fix="a number of steps, 1 or more")
    asker = object()
    for layer in _layers(model).values():
        _watch(layer, model.training)
        if layer.tally is not None:
            for training in (False, True):
                layer.tally.take(asker, training=training)
    reference, steps = weakref.ref(model), 0

    def held() -> nn.Module | None:
        return reference()

    def stepped(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal steps
        alive = held()
        if alive is not None and _trains(optimizer, alive):
            steps += 1
            if steps % every == 0:
                fn(_load(alive, asker))

    for gone in [model_of for model_of in _hooks if model_of() is None]:  # not while torch goes through its hooks
        _hooks.pop(gone).remove()
    _hooks[held] = register_optimizer_step_post_hook(stepped)
    return _hooks[held]


def scalars(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The same numbers one by one, as TensorBoard and the like take them: {"layers.0.ffn/load/3": 0.12, ...}."""
    flat: dict[str, float] = {}
    for name, values in found.items():
        for key, value in values.items():
            path = f"{name}/{key}" if name else key
            if isinstance(value, list):
                flat |= {f"{path}/{number}": float(one) for number, one in enumerate(value)}
            else:
                flat[path] = float(value)
    return flat


def _layers(model: nn.Module) -> dict[str, MoELayer]:
    if not isinstance(model, nn.Module):
        raise PlanError(f"this is a {type(model).__name__}, not a model.", fix="give an nn.Module with a MoELayer")
    found = {name.replace("_orig_mod.", ""): m for name, m in model.named_modules() if isinstance(m, MoELayer)}
    if not found:
        raise PlanError(f"this {type(model).__name__} has no MoELayer.", fix="give a model that has one")
    return found


def _watch(layer: MoELayer, training: bool) -> None:
    if layer.tally is None:
        layer.tally = Tally(layer.num_experts)
        if layer.load is not None:
            layer.tally.add(layer.load, training=training)


def _modules_of(layers: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """The modules of the parallelized model that has these layers, by the plan's names."""
    root = root_of(layers)
    return {} if root is None else runtime_of(root, "wh.moe.load").named


def _ranks(layers: Iterable[MoELayer]) -> tuple[Group | None, Plan | None]:
    """All ranks of the layers' model, and its plan; of a copy of one those that run the layers."""
    listed = list(layers)
    root = root_of(listed)
    if root is None:
        return listed[0]._ranks, None
    runtime = runtime_of(root, "wh.moe.load")
    return runtime.mesh.everyone(), runtime.plan


def _times(layer: MoELayer, plan: Plan | None, name: str) -> int:
    """How many ranks count each token of a layer: those that are fed the same and do not share the work."""
    if plan is None:
        return 1
    if isinstance(layer, SplitMoELayer):
        device = plan.device(plan.taskgraph_of(layer._cut.module).device)
        return device.feed_size // device.num_twins
    return plan.feed_size if plan.taskgraph_of(name).inner_replica is None else 1


def _summed(mine: Tensor, group: Group | None) -> Tensor:
    if group is None:
        return mine
    try:
        return gather_equal(mine, group, name="loads of experts (wh.moe.load is called on every rank)").sum(0)
    except CommError as error:
        raise error.inside("wh.moe.load(model)", "call wh.moe.load(model) on every rank") from error.__cause__


def _told(sums: Tensor) -> dict[str, Any]:
    num_experts = (len(sums) - 4) // 2
    routes, kept = sums[:num_experts], sums[num_experts : 2 * num_experts]
    tokens, entropy, losses, loss = sums[2 * num_experts :].tolist()
    number = float(routes.sum())
    share = routes / max(number, 1.0)
    even = math.log(max(2, num_experts))
    return {
        "tokens": tokens,
        "routes": routes.tolist(),
        "load": share.tolist(),
        "dropped": (routes - kept).tolist(),
        "drop_rate": float((routes - kept).sum()) / max(number, 1.0),
        "balance": float(share.max()) * num_experts,
        "load_entropy": float(torch.special.entr(share).sum()) / even,
        "gate_entropy": entropy / max(tokens, 1.0),
        "loss": loss / max(losses, 1.0),
    }


def _trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer has the first trained parameter of the model's experts, or of the model without one."""
    experts = (p for layer in model.modules() if isinstance(layer, MoELayer) for p in layer.parameters())
    first = next((p for p in experts if p.requires_grad), next(model.parameters(), None))
    return any(p is first for group in optimizer.param_groups for p in group["params"])
