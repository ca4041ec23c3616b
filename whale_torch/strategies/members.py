"""The parameters a model was parallelized with: one that was replaced or added later is found before a forward."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from torch import nn

from whale_torch.errors import PlanError
from whale_torch.names import joined
from whale_torch.strategies.wrappers import refuse_wrappers

__all__ = ["Members"]

_Place = tuple[str, nn.Module, str, nn.Parameter]


class Members:
    """A model's parameters, each once.

    Modules may be wrapped (m.part = torch.compile(m.part)), moved or taken away later; every parameter of the model has
    to be one of these, and in its module under its old name where the module is still there.
    """

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())
        self._ids = {id(p) for p in self.parameters}
        self._places = list(_places(model))
        self._named = dict(model.named_modules(remove_duplicate=False))
        self._look(model)

    def _check_modules(self, model: nn.Module) -> None:
        now = dict(model.named_modules(remove_duplicate=False))
        name = next((n for n in {**self._named, **now} if now.get(n) is not self._named.get(n)), None)
        if name is not None:
            how = "replaced" if name in now and name in self._named else "added" if name in now else "removed"
            raise PlanError(
                f"module '{name}' was {how} after wh.parallelize; a pipeline runs the forward that it recorded.",
                fix="change the model before wh.parallelize; module.compile() compiles in place",
            )

    def _look(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._seen = self._children(), self._held()

    def _children(self) -> list[nn.Module | None]:
        return [child for module in self._modules for child in module._modules.values()]

    def _held(self) -> list[nn.Parameter | None]:
        return [parameter for module in self._modules for parameter in module._parameters.values()]

    def check(self, model: nn.Module, *, recorded: bool = False) -> None:
        """Raises PlanError naming a parameter that was replaced or added, or a wrapper of torch's around a member.

        recorded: of a model whose code was recorded no module may be exchanged either.
        Microseconds where nothing changed.
        """
        children, held = self._seen
        if _same(self._held(), held) and _same(self._children(), children):
            return
        refuse_wrappers(model)
        self._check_places(model)
        if recorded:
            self._check_modules(model)
        self._look(model)

    def _check_places(self, model: nn.Module) -> None:
        present = {id(module) for module in model.modules()}
        for name, owner, key, parameter in self._places:
            if id(owner) in present and owner._parameters.get(key) is not parameter:
                raise _replaced(name)
        names = {name for name, *_ in self._places}
        for name, _, _, parameter in _places(model):
            if id(parameter) not in self._ids:
                raise _replaced(name) if name in names else _added(name)


def _same(found: Sequence[object], expected: Sequence[object]) -> bool:
    return len(found) == len(expected) and all(map(operator.is_, found, expected))


def _places(model: nn.Module) -> Iterator[_Place]:
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield joined(name, key), module, key, parameter


def _replaced(name: str) -> PlanError:
    return PlanError(
        f"parameter '{name}' was replaced after wh.parallelize; its gradient would not be averaged.",
        fix="change values in place (parameter.data.copy_(...), load_state_dict), or replace it before wh.parallelize",
    )


def _added(name: str) -> PlanError:
    return PlanError(
        f"parameter '{name}' was added after wh.parallelize; its gradient would not be averaged.",
        fix="add it before wh.parallelize",
    )
