"""What a parallelized model carries at run time, and one forward of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.comm.call import Anchor, Call, Trained, accept, deliver, givers_of
from whale_torch.comm.columns import Columns, plain
from whale_torch.comm.cut_tensor import dtypes_of_trained
from whale_torch.comm.gradients import GradientReducer, Gradients
from whale_torch.comm.local_random import stream_code
from whale_torch.comm.loss_part import WHOLE, LossPart
from whale_torch.comm.region import Region
from whale_torch.comm.registry import place_of, set_place
from whale_torch.comm.scale import Witness
from whale_torch.comm.true_mean import TrueMeanLoss
from whale_torch.errors import CommError, LossError, PlanError
from whale_torch.mesh import Mesh
from whale_torch.planning.cost import may_call_losses
from whale_torch.planning.plan import GatherRecord, Plan
from whale_torch.planning.untied import named_once, untied
from whale_torch.strategies import delayed
from whale_torch.strategies.batch import BatchReader
from whale_torch.strategies.members import Members
from whale_torch.strategies.outputs import map_tensors, tensors_in
from whale_torch.strategies.split_linear import ColumnLinear
from whale_torch.strategies.state_hooks import attach_state_hooks, cut_places
from whale_torch.strategies.wrappers import refuse_wrapper_around

__all__ = ["KEY", "CopiedRuntime", "Runtime", "is_parallelized", "runtime_of"]

KEY = "_whale_runtime"
_EVALUATION = "model(...) in evaluation"


class CopiedRuntime:
    """What a deepcopy of a parallelized model has instead: it evaluates, and refuses to train."""

    def __init__(self, plan: Plan, regions: list[Region]):
        self.plan, self.regions = plan, regions

    def run(self, forward: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if model.training and torch.is_grad_enabled():
            raise _copy_trains()
        trained = any(p.requires_grad for p in model.parameters())

        def leave(x: Tensor) -> Tensor:
            x = x.rows(_EVALUATION) if isinstance(x, Columns) else x
            if trained and x.requires_grad:
                x.register_hook(_refuse_gradient)
            return x

        with _evaluated(model):
            return map_tensors(forward(model, *args, **kwargs), leave)


@contextlib.contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Says of a failed exchange that it belongs to an evaluation: most often one that a rank makes alone."""
    try:
        yield
    except CommError as error:
        fix = "call the model on all ranks together, to evaluate too: each holds a part of the answer"
        raise error.inside(f"{_EVALUATION} of {model._get_name()}", fix) from error.__cause__


def _refuse_gradient(grad: Tensor) -> Tensor:
    raise _copy_trains()


def _copy_trains() -> LossError:
    return LossError(
        "this model is a copy of a parallelized one; its gradients would not be averaged over ranks.",
        fix="evaluate it (model.eval(), torch.no_grad()), or copy the model before wh.parallelize and parallelize both",
    )


class Runtime:
    """Plan in force, groups, regions and reducers of one model."""

    def __init__(
        self, model: nn.Module, plan: Plan, mesh: Mesh, regions: list[Region],
        reader: BatchReader, make_reducers: Callable[[Plan], list[GradientReducer]],
    ):  # fmt: skip
        self._reader = reader
        self.plan, self.mesh, self.regions, self._make_reducers = plan, mesh, regions, make_reducers
        self.call: Call | None = None
        self.loss_part = WHOLE
        self._delayed = [
            m for m in model.modules() if isinstance(m, ColumnLinear) and m.weight.numel() >= delayed.MIN_ELEMENTS
        ]
        self.named = dict(model.named_modules(remove_duplicate=False))
        self._members = Members(model)
        self._trained = self._trained_dtypes()
        self._trained_code = Trained(self._trained)
        self._witness = Witness.among(self._members.parameters)
        self.gradients = self._make_gradients()
        self._anchor = self._make_anchor()
        self._draws: set[bool] = set()  # in which modes, training or not, forwards were seen to draw random numbers
        self._seeks_losses = plan.num_feeds > 1 and may_call_losses(model)
        apart = self._seeks_losses and plan.feed_size > 1
        # longer messages on a channel of their own: a rank may leave out a forward of one model, and none of another
        longer = self._seeks_losses and not apart
        self._counts_group = mesh.everyone(channel="counts of losses" if longer else "row counts")
        self._labels_group = mesh.everyone(channel="counts of labels") if apart else self._counts_group

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedRuntime:
        return CopiedRuntime(self.plan, self.regions)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a runtime names live process groups and cannot be pickled")

    def run(self, forward: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward of the whole model: rows counted, outputs weighed and reducers armed by them."""
        if self.call is not None:  # the model calls itself
            return forward(model, *args, **kwargs)
        if self.loss_part is not WHOLE:  # which torch.compile could not follow
            with self.loss_part.entered():
                return self._run_or_evaluate(forward, model, args, kwargs)
        return self._run_or_evaluate(forward, model, args, kwargs)

    def _run_or_evaluate(
        self, forward: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.mesh.world == 1 or (model.training and torch.is_grad_enabled()):
            return self._run(forward, model, args, kwargs)
        with _evaluated(model):
            return self._run(forward, model, args, kwargs)

    def _run(self, forward: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad = torch.is_grad_enabled()
        training = model.training and grad
        if self.mesh.world == 1 or (not grad and self.plan.feed_size == 1):  # no weights and nothing to average
            out = forward(model, *args, **kwargs)
            if not self.regions:
                return out
            self._end()
            return self._leave(out, None, training)
        if grad:
            self._check_parameters(model)
        call = self._begin(args, kwargs, model.training)
        watched = self.plan.feed_size > 1 and model.training not in self._draws
        before = stream_code(self.mesh.device) if watched else 0
        try:
            if grad and self.plan.num_feeds > 1 and any(map(_was_given, tensors_in((args, kwargs)))):
                args, kwargs = map_tensors((args, kwargs), functools.partial(_take, call=call))
            if grad and self._seeks_losses:
                with TrueMeanLoss(call, self._labels_group):
                    out = forward(model, *args, **kwargs)
            else:
                out = forward(model, *args, **kwargs)
        finally:
            self._end()
        if watched and stream_code(self.mesh.device) != before:
            self._draws.add(model.training)
        call.advance()
        return self._leave(out, call, training)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Call:
        plan = self.plan
        batch = self._reader.read(args, kwargs, hashed=plan.feed_size > 1)
        if training in self._draws:
            batch.stream = stream_code(self.mesh.device)
        self.call = Call(
            self._counts_group, plan.feed_size, batch, self._trained_code, self._anchor,
            summed=plan.loss == "sum", witness=self._witness, later=self._seeks_losses and torch.is_grad_enabled(),
            labels=self._labels_group,
        )  # fmt: skip
        for region in self.regions:
            region.call = self.call
        for layer in self._delayed:
            if torch.is_grad_enabled() and layer.weight.requires_grad:
                layer.__dict__["_delay"] = delayed.Delay(layer.weight, layer.bias)
        return self.call

    def _end(self) -> None:
        self.call = None
        for region in self.regions:
            region.call = None
            region.forget()
        for layer in self._delayed:
            layer.__dict__["_delay"] = None

    def _leave(self, out: Any, call: Call | None, training: bool) -> Any:
        def one(x: Tensor) -> Tensor:
            if isinstance(x, Columns):
                if training or x.place.region.keeps_columns:
                    return x if call is None else _deliver_columns(x, call)
                x = x.rows(_EVALUATION)
            return x if call is None else deliver(x, call)

        return one(out) if isinstance(out, Tensor) else map_tensors(out, one)

    def _make_anchor(self) -> Anchor:
        return Anchor(self.mesh.device, lambda: self.gradients.arm(), self._members.parameters)

    def _make_gradients(self) -> Gradients:
        return Gradients(self._make_reducers(self.plan), then=None if self._witness is None else self._witness.keep)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulate on each rank and are not averaged; the next backward outside averages the sum."""
        before, self.gradients.sync = self.gradients.sync, False
        try:
            yield
        finally:
            self.gradients.sync = before

    @property
    def keeps_gradients(self) -> bool:
        """Whether backwards inside no_sync left gradients that the next one averages."""
        return self.gradients.keeps

    def _check_parameters(self, model: nn.Module) -> None:
        refuse_wrapper_around(model)
        self.gradients.abandon()
        self._members.check(model)
        trained = self._trained_dtypes()
        if trained != self._trained:
            self._train(trained)

    def _train(self, trained: list[torch.dtype | None]) -> None:
        """Other parameters are trained from here on."""
        self._trained, self._trained_code = trained, Trained(trained)
        sync = self.gradients.sync
        self.gradients.close()
        self.gradients = self._make_gradients()
        self.gradients.sync = sync

    def check_untie(self, model: nn.Module) -> None:
        """Raises PlanError where `untie` could not follow."""
        if self.plan.pipeline is not None:
            raise PlanError(
                "the ties of a pipelined model cannot be undone while it runs: where its parameters lie is decided.",
                where=self.plan.pipeline.site,
                fix="state = wh.full_state_dict(model); build the model without ties, load that and parallelize it",
            )
        self.gradients.abandon()
        self._members.check(model)

    def untie(self, model: nn.Module, copies: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Takes up parameters that took the place of tied ones in some modules. copies: which one of which."""
        names = {id(p): name for name, p in named_once(self.named).items()}
        for copied, p in copies.items():
            place = place_of(p)
            if place is not None:
                set_place(copied, replace(place, name=names[id(copied)]))
        attach_state_hooks(model)
        self.plan = untied(self.plan, self.named)
        self._members = Members(model)
        self._anchor = self._make_anchor()
        self._train(self._trained_dtypes())

    def _trained_dtypes(self) -> list[torch.dtype | None]:
        return dtypes_of_trained(self._members.parameters)

    def scale_losses(self, scale: Callable[[], float]) -> None:
        """Told by a GradScaler by what it multiplies losses, for gradients that it does not reach."""
        self.loss_part = LossPart(scale=scale)

    def source_of_buffer(self, key: str) -> int:
        """The rank whose values of a buffer count."""
        return 0

    def current_plan(self) -> Plan:
        """The plan in force, with what was gathered implicitly so far."""
        return replace(self.plan, gathers=self.gathers())

    def gathers(self) -> tuple[GatherRecord, ...]:
        """The implicit gathers of splits' outputs so far."""
        return tuple(
            GatherRecord(operation, site, int(count), num_bytes)
            for region in self.regions
            for (operation, site), (count, num_bytes) in region.gathered.items()
        )


def _was_given(x: Tensor) -> bool:
    """Whether a gradient of an input goes on to parallelized models that gave it."""
    return x.requires_grad and (x.place.call is not None if isinstance(x, Columns) else bool(givers_of(x)))


def _take(x: Tensor, call: Call) -> Tensor:
    """An input. A split's output that another model gave is gathered, where its rows are weighed, and not later."""
    if isinstance(x, Columns) and _was_given(x):
        x = x.implicit_rows("the input of another model")
    return accept(x, call)


def _deliver_columns(x: Columns, call: Call) -> Columns:
    place = x.place.given_by(call)
    if x.deferred is not None:
        out = Columns.put_off(x.deferred, place)
    else:
        out = Columns.of(deliver(plain(x), call, weigh=False), place, x.hold)
    return out


def runtime_of(model: nn.Module, what: str) -> Runtime:
    """The runtime of a parallelized model. Raises PlanError for any other model."""
    runtime = model.__dict__.get(KEY)
    if not isinstance(runtime, Runtime):
        raise PlanError(
            f"{what} needs a parallelized model, got {type(model).__name__}"
            + (" (a copy of one)." if runtime is not None else "."),
            fix="model = wh.parallelize(model) first",
        )
    return runtime


def is_parallelized(model: nn.Module) -> bool:
    """Whether a model, a member of it, or what it belongs to went through parallelize, or is a copy of such a one."""
    return any(KEY in m.__dict__ or cut_places(m) for m in model.modules()) or any(
        place_of(p) for p in model.parameters()
    )
