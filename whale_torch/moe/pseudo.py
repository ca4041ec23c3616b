"""Pseudo-to-Real (M6-10T, arXiv 2110.03888): layers train on one set of weights first, and then each on its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from whale_torch.comm.registry import place_of
from whale_torch.errors import CheckpointError, PlanError
from whale_torch.moe.optimizer_state import State, check_state, give_states
from whale_torch.strategies.root import root_of
from whale_torch.strategies.runtime import is_parallelized, runtime_of

__all__ = ["delink", "load_shared", "share", "unshared"]

_KEY = "_whale_shared"  # how many layers share this one's weights; a number, so that a copy of one layer stays small

_Slot = tuple[nn.Module, str, nn.Parameter]


def share(layers: Iterable[nn.Module]) -> None:
    """Lets layers of one form train on one set of weights: the first one's Parameter objects, in all of them.

    Buffers (running statistics of BatchNorm, the bias of a gate without auxiliary loss) stay each layer's own. Called
    before the optimizer is built and before wh.parallelize; a gradient is the sum over the layers.
    Raises PlanError for layers that differ in more than values, or that are parallelized.
    """
    listed = _layers(layers, "share")
    slots = _alike(listed)
    if any(map(is_parallelized, listed)):
        raise PlanError(
            "these layers are parallelized already, and their weights are averaged each by itself.",
            fix="call wh.moe.share(layers) before wh.parallelize(model)",
        )
    _check_none_left(listed, slots)
    for others in slots[1:]:
        for (_, _, shared), (module, key, _) in zip(slots[0], others, strict=True):
            setattr(module, key, shared)
    for layer in listed:
        layer.__dict__[_KEY] = len(listed)


def delink(
    layers: Iterable[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    state: State = "copy_scaled",
) -> None:
    """Gives layers that share weights their own ones, equal at first: the next forward is what it would have been.

    The first layer keeps the Parameter objects. optimizer: all optimizers that train these layers; the new parameters
    follow the old ones in their groups, in the order of a model that never shared. None: none is built yet.
    state: what an optimizer knows of the shared weights goes to every layer, "copy_scaled": as if its gradients had
    been those of one layer of n, first moments and momentum / n, second moments / n^2, steps kept (gradients were sums
    over the layers; by "copy" steps would be n times too short until second moments have forgotten that);
    "copy": as it is; "reset": nothing.
    A copy of the model (an average of weights) is delinked by a call of its own.
    Raises PlanError where the layers do not share all their weights or share them with further layers, where gradients
    are waiting, where no optimizer given trains them, and, naming the key, for state that it cannot scale.
    """
    listed = _layers(layers, "delink")
    slots = _alike(listed)
    _check_shared(listed, slots)
    optimizers = _optimizers(optimizer)
    shared = {id(p): p for _, _, p in slots[0]}
    check_state(list(shared.values()), optimizers, state)
    root = _parallelized(listed, shared.values())
    runtime = None if root is None else runtime_of(root, "wh.moe.delink")
    if root is not None and runtime is not None:
        runtime.check_untie(root)
    copies: dict[int, list[nn.Parameter]] = {number: [_copy(p) for _ in listed[1:]] for number, p in shared.items()}
    for index, others in enumerate(slots[1:]):
        for module, key, p in others:
            setattr(module, key, copies[id(p)][index])
    for layer in listed:
        layer.__dict__.pop(_KEY, None)
    if root is not None and runtime is not None:
        runtime.untie(root, {copied: shared[number] for number, found in copies.items() for copied in found})
    for each in optimizers:
        give_states(each, copies, state)


def _optimizers(given: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    listed: list[Any] = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    odd = next((one for one in listed if not isinstance(one, Optimizer)), None)
    if odd is not None:
        raise PlanError(
            f"optimizer is, or holds, a {type(odd).__name__}.", fix="a torch.optim.Optimizer, a list of them, or None"
        )
    return listed


def _parallelized(layers: Sequence[nn.Module], shared: Iterable[nn.Parameter]) -> nn.Module | None:
    """The parallelized model of the layers, None where they are in none or in a copy of one."""
    place = next((found for p in shared if (found := place_of(p)) is not None), None)
    root = None if place is None else root_of(layers)
    if place is not None and root is None:
        raise PlanError(
            f"'{place.name}' belongs to a parallelized model, of which these {len(layers)} layers are not all members.",
            fix="give layers of one model, and keep the model that wh.parallelize returned",
        )
    return root


def unshared(state: Mapping[str, Any], model: nn.Module, layers: Iterable[nn.Module]) -> dict[str, Any]:
    """The state dict for a model whose layers have weights of their own, of one saved while they shared them.

    state: of the whole model, with the weights under the names of all of these layers or of some (a file that names
    tensors once), or of one layer alone. layers: members of the model. What is missing is left out, so that
    load_state_dict and wh.parallelize(weights=) tell it.
    Raises CheckpointError where layers without a value could take several that differ.
    """
    listed = _layers(layers, "unshared")
    names = {module: name for name, module in model.named_modules()}
    absent = next((n for n, layer in enumerate(listed) if layer not in names), None)
    if absent is not None:
        raise PlanError(
            f"layer {absent} ({type(listed[absent]).__name__}) is no member of this {type(model).__name__}.",
            fix="give the layers of the model that is to be loaded",
        )
    prefixes = [f"{names[layer]}." if names[layer] else "" for layer in listed]
    found = dict(state)
    for key in listed[0].state_dict():
        known = [state[prefix + key] for prefix in prefixes if prefix + key in state]
        if not known and key in state:  # one layer's own
            known = [found.pop(key)]
        if not known:
            continue
        if len(known) < len(prefixes) and any(_differ(known[0], value) for value in known[1:]):
            raise CheckpointError(
                f"'{prefixes[0]}{key}' and the same of other layers differ in this state, and "
                f"{len(prefixes) - len(known)} of {len(prefixes)} layers have no value.",
                fix="give those layers only that shared their weights",
            )
        for prefix in prefixes:
            found.setdefault(prefix + key, known[0])
    return found


def load_shared(model: nn.Module, state: Mapping[str, Any], layers: Iterable[nn.Module], strict: bool = True) -> Any:
    """model.load_state_dict of what `unshared` makes of a state saved while layers shared their weights."""
    return model.load_state_dict(unshared(state, model, layers), strict=strict)


def _layers(layers: Iterable[nn.Module], call: str) -> list[nn.Module]:
    if not isinstance(layers, Iterable):
        raise PlanError(
            f"wh.moe.{call} takes a sequence of modules, and got a {type(layers).__name__}.",
            fix="a list of layers, or an nn.ModuleList",
        )
    listed = list(layers)
    odd = next((layer for layer in listed if not isinstance(layer, nn.Module)), None)
    if odd is not None or not listed:
        raise PlanError(
            f"wh.moe.{call} takes a sequence of modules, and got "
            + (f"a {type(odd).__name__} in it." if listed else "an empty one."),
            fix="a list of layers, or an nn.ModuleList",
        )
    owners: dict[int, int] = {}
    for number, layer in enumerate(listed):
        for module in layer.modules():
            other = owners.setdefault(id(module), number)
            if other != number and any(p is not None for p in module._parameters.values()):
                raise PlanError(
                    f"a {type(module).__name__} is part of layer {other} and of layer {number}: one module, which "
                    "cannot have weights of its own in each.",
                    fix="build every layer by itself",
                )
    return listed


def _slots(layer: nn.Module) -> dict[str, _Slot]:
    """Where a layer's parameters are, by name; a tied one under each of its names."""
    return {
        f"{name}.{key}" if name else key: (module, key, p)
        for name, module in layer.named_modules()
        for key, p in module._parameters.items()
        if p is not None
    }


def _alike(layers: Sequence[nn.Module]) -> list[list[_Slot]]:
    """Parameters of each layer, in one order. Raises PlanError where layers differ in more than values."""
    forms, found = [], []
    for layer in layers:
        slots = _slots(layer)
        first: dict[int, str] = {}
        form: dict[str, str] = {f"module '{n}'" if n else "the layer": _kind(m) for n, m in layer.named_modules()}
        for name, (_, _, p) in slots.items():
            tie = first.setdefault(id(p), name)
            form[f"'{name}'"] = _form(p) + (f", tied to '{tie}'" if tie != name else "")
        forms.append(form)
        found.append(list(slots.values()))
    for number, form in enumerate(forms):
        what = next((w for w in {**forms[0], **form} if forms[0].get(w) != form.get(w)), None)
        if what is not None:
            raise PlanError(
                f"layers 0 and {number} cannot share weights: {what} is {forms[0].get(what, 'absent')} in layer 0 and "
                f"{form.get(what, 'absent')} in layer {number}.",
                fix="build the layers alike",
            )
    return found


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _form(p: nn.Parameter) -> str:
    if isinstance(p, UninitializedParameter):
        raise PlanError("a layer has a parameter without a shape yet.", fix="run the model once before")
    trained = "" if p.requires_grad else ", frozen"
    return f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)} on {p.device}{trained}"


def _check_shared(layers: Sequence[nn.Module], slots: Sequence[Sequence[_Slot]]) -> None:
    names = list(_slots(layers[0]))
    for number, others in enumerate(slots):
        for name, (_, _, shared), (_, _, p) in zip(names, slots[0], others, strict=True):
            if p is not shared:
                raise PlanError(
                    f"layers 0 and {number} do not share '{name}'.", fix="wh.moe.share(layers) at the beginning"
                )
    known = {layer.__dict__.get(_KEY, len(layers)) for layer in layers}
    if known != {len(layers)}:
        raise PlanError(
            f"{len(layers)} layers are to be delinked, and {max(known)} share these weights.",
            fix="give all layers that wh.moe.share was given",
        )
    for name, (_, _, p) in zip(names, slots[0], strict=True):
        if p.grad is not None:
            raise PlanError(
                f"'{name}' has a gradient, the sum over {len(layers)} layers: none of them can have it as its own.",
                fix="optimizer.step() and optimizer.zero_grad() before wh.moe.delink",
            )


def _check_none_left(layers: Sequence[nn.Module], slots: Sequence[Sequence[_Slot]]) -> None:
    """Raises PlanError where a layer shares weights already, with others than these."""
    firsts = [id(of[0][2]) if of else None for of in slots]
    for number, layer in enumerate(layers):
        known, here = layer.__dict__.get(_KEY, 1), firsts.count(firsts[number])
        if known > here:
            raise PlanError(
                f"layer {number} shares its weights with {known - 1} other layers, of which {here - 1} are given.",
                fix="call wh.moe.share once, with all layers that are to share",
            )


def _copy(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is not b and (a.shape != b.shape or not bool((a == b).all()))
    return a is not b and bool(a != b)
