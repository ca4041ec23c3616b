"""Stand-ins: what a stage's modules hold in place of their parameters while a schedule runs.

Gradients of micro-batches gather in the stand-ins, so a parameter's own `.grad`, the user's hooks on it and optimizers
see nothing until the user's backward, and an error leaves no trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

__all__ = ["StandIns"]


class StandIns:
    """The stand-ins of one rank's parameters.

    modules: those whose parameters are exchanged. parameters: the rank's own, each once.
    """

    def __init__(self, modules: list[nn.Module], parameters: list[nn.Parameter]):
        self.parameters = parameters
        self._of = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in parameters}
        members = dict.fromkeys(member for module in modules for member in module.modules())
        self._places = [
            (member, name, parameter)
            for member in members
            for name, parameter in member._parameters.items()
            if parameter is not None and id(parameter) in self._of
        ]

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The stand-in of a parameter."""
        return self._of[id(parameter)]

    def take(self, parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
        """The gradients that gathered in the stand-ins of these; nothing but the list holds them afterwards."""
        aliases = [self.of(p) for p in parameters]
        grads = [alias.grad for alias in aliases]
        for alias in aliases:
            alias.grad = None
        return grads

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The modules hold stand-ins, without gradients at first."""
        for parameter in self.parameters:
            self._refresh(parameter)
        for member, name, parameter in self._places:
            _put(member, name, self.of(parameter))
        try:
            yield
        finally:
            for member, name, parameter in self._places:
                _put(member, name, parameter)

    def _refresh(self, parameter: nn.Parameter) -> None:
        alias = self.of(parameter)
        alias.grad = None
        if alias.requires_grad != parameter.requires_grad:
            alias.requires_grad_(parameter.requires_grad)
        if alias.data_ptr() != parameter.data_ptr() or alias.dtype is not parameter.dtype:
            alias.data = parameter.data


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:  # an LSTM keeps a list of its weights
        setattr(module, name, parameter)
