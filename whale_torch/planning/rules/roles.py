"""Roles: which layers of a neighbourhood are cut by output, which by input features, so that nothing moves between."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from whale_torch.planning.rules.registry import Role

__all__ = ["features_of", "neighbour_roles"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

# What passes columns on as they are, although it has parameters: one of each a feature.
_FEATURE_WISE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def features_of(module: nn.Module) -> tuple[int, int] | None:
    """(input, output) features of a layer that mixes all of them, None for any other module."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module) in _CONVOLUTIONS:
        assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        return (module.in_channels, module.out_channels) if module.groups == 1 else None
    if f"{type(module).__module__}.{type(module).__qualname__}" == "transformers.pytorch_utils.Conv1D":
        weight = module._parameters.get("weight")
        return None if weight is None else (weight.shape[0], weight.shape[1])
    return None


def neighbour_roles(children: Iterable[nn.Module], forced: str | None = None) -> dict[nn.Module, Role]:
    """Roles of the layers among neighbours, in order of registration.

    A layer that takes exactly what earlier column layers of its neighbourhood give (a pair, or a gated pair) is cut by
    rows, so that nothing is gathered between; a linear after a convolution takes its channels with all their pixels.
    Alone, the side that moves fewer bytes: rows where the output is narrower than the input. `forced` overrides.
    A wrong guess costs a gather, never a wrong result.
    """
    before: list[nn.Module] = []  # column layers whose columns the next layer may take
    roles: dict[nn.Module, Role] = {}
    for child in children:
        sizes = features_of(child)
        if sizes is None:
            if not isinstance(child, _FEATURE_WISE) and any(True for _ in child.parameters()):
                before = []
            continue
        unit = _unit(before[0], child) if before else 0
        if unit:
            roles[child] = Role("rows", unit, paired=True)
            roles.update({module: Role("columns", paired=True) for module in before})
            before = []
        else:
            beside = bool(before) and type(before[0]) is type(child) and features_of(before[0]) == sizes
            before = [*before, child] if beside else [child]
            roles[child] = Role("columns")
    for module, role in roles.items():
        sizes = features_of(module)
        assert sizes is not None
        if not role.paired and sizes[1] < sizes[0]:
            roles[module] = Role("rows")
    return dict.fromkeys(roles, Role(forced)) if forced else roles


def _unit(first: nn.Module, second: nn.Module) -> int:
    """Input features of `second` for one output feature of `first`; 0 where it cannot take them."""
    given, taken = features_of(first), features_of(second)
    assert given is not None and taken is not None
    if type(first) in _CONVOLUTIONS and type(second) is nn.Linear:
        return taken[0] // given[1] if taken[0] % given[1] == 0 else 0
    return int(type(first) is type(second) and given[1] == taken[0])
