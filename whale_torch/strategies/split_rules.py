"""The other half of each split rule: the classes that run shards. Their instances keep names, isinstance and repr.

A module becomes one by assignment to __class__; its weights are local shards, `_region` and `_cut` say of what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from whale_torch.comm.columns import Columns, ColumnsPlace, Hold
from whale_torch.comm.region import Region
from whale_torch.errors import PlanError
from whale_torch.planning.rules import Cut, PlanFunction, register_rule, unregister_rule
from whale_torch.strategies.copies import Replacement

__all__ = ["SplitModule", "joined_class", "register_class", "register_split_rule", "run_class"]


class SplitModule(Replacement, nn.Module):
    """What the classes that run shards have in common.

    _region: the ranks that run it together. _cut: the plan's decision. _options: the scope's options. _compiles:
    torch.compile may trace it.
    """

    _added: ClassVar[tuple[str, ...]] = ("_region", "_cut", "_options", "_delay")
    _compiles: ClassVar[bool] = False
    _region: Region
    _cut: Cut
    _options: dict[str, Any]

    def _get_name(self) -> str:
        return self._base().__name__

    def _prepare(self) -> None:
        """Called once, after the parameters were cut."""

    @property
    def _index(self) -> int:
        return self._region.columns.index

    @property
    def _width(self) -> int:
        """Units of this rank."""
        return self._cut.widths[self._index]

    @property
    def _first(self) -> int:
        """Number of this rank's first unit."""
        return sum(self._cut.widths[: self._index])

    def _columns(
        self,
        local: Tensor,
        counts: tuple[int, ...],
        lead: tuple[int, ...],
        *,
        fresh: bool = False,
        widths: tuple[int, ...] | None = None,
        tail: tuple[int, ...] = (),
    ) -> Columns:
        """This rank's columns of all rows as a Columns. fresh: nothing else reads the memory of `local`."""
        place = ColumnsPlace(self._region, counts, self._cut.widths if widths is None else widths, lead, tail)
        return Columns.of(local, place, Hold(shared=not fresh))


_JOINED: dict[tuple[Any, Any], Any] = {}


def joined_class(split: Any, module_type: Any) -> Any:
    """The class that puts `split` before a module's own class, under the latter's name; one a pair."""
    key = (split, module_type)
    if key not in _JOINED:
        body = {"__module__": module_type.__module__, "__doc__": module_type.__doc__}
        _JOINED[key] = type(module_type.__name__, (split, module_type), body)
    return _JOINED[key]


ClassFactory = Callable[[type[nn.Module]], type[SplitModule]]

_CLASSES: dict[tuple[str, str], type[SplitModule] | ClassFactory] = {}


def register_class(rule: str, role: str, run: type[SplitModule] | ClassFactory) -> None:
    """Gives a rule's role the class that runs it, or a function from the module's type to that class."""
    _CLASSES[rule, role] = run


def run_class(cut: Cut, module_type: type[nn.Module]) -> type[SplitModule]:
    """The class that runs a cut module. Raises PlanError for a rule or role that nobody registered."""
    run = _CLASSES.get((cut.rule, cut.role))
    if run is None:
        known = sorted({role for rule, role in _CLASSES if rule == cut.rule})
        raise PlanError(
            f"the plan's cut of '{cut.module}' cannot be carried out: nothing runs rule {cut.rule!r} in the role "
            f"{cut.role!r} (known roles: {known}).",
            fix="register the rule before wh.parallelize, or make the plan anew: wh.plan(model, cluster=...)",
        )
    return run if isinstance(run, type) else run(module_type)


def register_split_rule(
    module_type: type[nn.Module], *, plan: PlanFunction, classes: dict[str, type[SplitModule]], name: str | None = None
) -> Callable[[], None]:
    """Teaches wh.split a module type of yours: exactly this type, not its subclasses.

    plan(module, name, context) returns the Cuts of the module: a role of your choice, the units that each rank takes
    (planning.layout.balanced shares them out), and for each parameter that is cut its Shard. Parameters without one
    stay whole. It runs on every rank before anything is changed and must not depend on the rank.
    classes: for each role the class that runs the shards: a subclass of (SplitModule, module_type) whose forward brings
    its input into the region with comm.rows (enter_rows, enter_columns) and gives `self._columns(...)` or
    leave_rows(...).
    A whole parameter that it applies to its part of the features is read through comm.rows.partial_parameter.
    Returns a function that takes the rule back.
    """
    name = name or f"{module_type.__module__}.{module_type.__qualname__}"
    before = register_rule(module_type, plan)
    for role, run in classes.items():
        register_class(name, role, run)

    def take_back() -> None:
        unregister_rule(module_type, before)
        for role in classes:
            del _CLASSES[name, role]

    return take_back
