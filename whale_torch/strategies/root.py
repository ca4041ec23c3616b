"""The model's own class after parallelize: same name, same signature, a forward that counts rows and weighs outputs."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from whale_torch.comm.region import refuse_compile
from whale_torch.strategies.copies import Replacement
from whale_torch.strategies.runtime import KEY, Runtime, runtime_of
from whale_torch.strategies.state_hooks import refuse_assign

__all__ = ["make_root", "root_of"]


_roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_LEFT_OUT = "whale_torch counts rows around a model's forward; compile its parts: m.part.compile()"


@functools.cache
def _root_class(base: type[nn.Module], compiles: Literal["whole", "parts", "no split"]) -> type[nn.Module]:
    original = base.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runtime = self.__dict__[KEY]
        if compiles == "no split" and torch.compiler.is_dynamo_compiling():
            refuse_compile(next(region.label for region in runtime.regions if not region.compiles))
        return runtime.run(original, self, args, kwargs)

    if compiles == "parts":
        forward = torch.compiler.disable(forward, reason=_LEFT_OUT)

    def no_sync(self: nn.Module) -> contextlib.AbstractContextManager[None]:
        """As whale_torch.no_sync(model)."""
        return runtime_of(self, "no_sync").no_sync()

    @functools.wraps(base.load_state_dict)
    def load_state_dict(
        self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, **options: Any
    ) -> Any:
        if assign and isinstance(self.__dict__.get(KEY), Runtime):
            refuse_assign(next((name for name, _ in self.named_parameters()), "nothing"))
        return base.load_state_dict(self, state_dict, strict=strict, assign=assign, **options)

    def get_name(self: nn.Module) -> str:
        return base._get_name(self) if base._get_name is not nn.Module._get_name else base.__name__

    body = {
        "forward": forward, "no_sync": no_sync, "_get_name": get_name,
        "load_state_dict": load_state_dict, "_added": (KEY,),
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
    }  # fmt: skip
    bases = (base,) if issubclass(base, Replacement) else (Replacement, base)
    root: type[nn.Module] = type(base.__name__, bases, body)
    return root


def make_root(model: nn.Module, runtime: Runtime) -> None:
    """Lets the model's forward run under its runtime.

    torch.compile of the whole model raises PlanError where it holds splits, and runs a model of replicas and experts as
    it is; parts of these compile.
    """
    torch.compiler.assume_constant_result(refuse_compile)
    model.__dict__[KEY] = runtime
    traced = all(region.compiles for region in runtime.regions)
    compiles = "no split" if not traced else "whole" if runtime.mesh.world == 1 else "parts"
    model.__class__ = _root_class(type(model), compiles)  # type: ignore[arg-type]
    _roots.add(model)


def root_of(members: Iterable[nn.Module]) -> nn.Module | None:
    """The parallelized model that these modules are all members of, None where there is none."""
    wanted = set(map(id, members))
    return next((root for root in _roots if wanted <= set(map(id, root.modules()))), None)
