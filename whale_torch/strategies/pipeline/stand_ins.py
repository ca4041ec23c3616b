"""Stand-ins: what a stage's modules hold in place of their parameters while a schedule runs.

Gradients of micro-batches gather in the stand-ins, so a parameter's own `.grad`, the user's hooks on it and optimizers
see nothing until the user's backward, and an error leaves no trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from whale_torch.comm.registry import place_of, set_place
from whale_torch.errors import LossError

__all__ = ["StandIns"]


Seen = tuple[int, int] | None
"""A gradient's identity and version."""


class StandIns:
    """The stand-ins of one rank's parameters.

    modules: those whose parameters are exchanged. parameters: the rank's own, each once.
    """

    def __init__(self, modules: list[nn.Module], parameters: list[nn.Parameter]):
        self.parameters = parameters
        self._of = {id(p): _stand_in(p) for p in parameters}
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
        grads = [self.of(p).grad for p in parameters]
        self.forget()
        return grads

    def forget(self) -> None:
        """The stand-ins have no gradients."""
        for alias in self._of.values():
            alias.grad = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The modules hold stand-ins, without gradients at first.

        Raises LossError where one got a gradient since, from a loss made of what a module kept, and, at the end, where
        a parameter itself got one.
        """
        for parameter in self.parameters:
            self._refresh(parameter)
        for member, name, parameter in self._places:
            _put(member, name, self.of(parameter))
        seen = [_seen(p.grad) for p in self.parameters]
        try:
            yield
            self._check_untouched(seen)
        except BaseException:
            self.forget()
            raise
        finally:
            for member, name, parameter in self._places:
                _put(member, name, parameter)

    def _check_untouched(self, seen: list[Seen]) -> None:
        for parameter, before in zip(self.parameters, seen, strict=True):
            if _seen(parameter.grad) != before:
                place = place_of(parameter)
                raise LossError(
                    f"'{place.name if place else 'a parameter'}' was used past its module's attribute, from a list or "
                    "a closure that keeps it, so its gradient was not averaged.",
                    fix="read it where it is registered: self.weight, or an nn.ParameterList of its own",
                )

    def _refresh(self, parameter: nn.Parameter) -> None:
        alias = self.of(parameter)
        if alias.grad is not None:
            alias.grad = None
            place = place_of(parameter)
            raise LossError(
                f"a backward past the model's output came to '{place.name if place else 'a parameter'}': a loss was "
                "made of tensors that a module of a stage kept, and its gradient is lost.",
                fix="let the model return them, or add them to the loss in its forward",
            )
        if alias.requires_grad != parameter.requires_grad:
            alias.requires_grad_(parameter.requires_grad)
        if alias.data_ptr() != parameter.data_ptr() or alias.dtype is not parameter.dtype:
            alias.data = parameter.data


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """One of the same memory; errors call it by the parameter's name."""
    alias, place = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad), place_of(parameter)
    if place is not None:
        set_place(alias, place)
    return alias


def _seen(grad: Tensor | None) -> Seen:
    return None if grad is None else (id(grad), grad._version)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:  # an LSTM keeps a list of its weights
        setattr(module, name, parameter)
