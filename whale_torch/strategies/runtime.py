"""What a parallelized model carries at run time, and one forward of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.comm.call import Call, deliver
from whale_torch.comm.columns import Columns, ColumnsPlace, plain
from whale_torch.comm.loss import TrueMeanLoss
from whale_torch.comm.reducer import Reducer
from whale_torch.comm.region import Region
from whale_torch.errors import LossError, PlanError
from whale_torch.mesh import Mesh
from whale_torch.planning.plan import GatherRecord, Plan
from whale_torch.strategies.delayed import Delay
from whale_torch.strategies.outputs import map_tensors, tensors_in
from whale_torch.strategies.split_rules import ColumnLinear

__all__ = ["CopiedRuntime", "Runtime", "runtime_of"]

KEY = "_whale_runtime"


class CopiedRuntime:
    """What a deepcopy of a parallelized model has instead: it evaluates, and refuses to train."""

    def __init__(self, plan: Plan, regions: list[Region]):
        self.plan, self.regions = plan, regions

    def run(self, forward: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if model.training and torch.is_grad_enabled():
            raise LossError(
                "this model is a copy of a parallelized one; its gradients would not be averaged over ranks.",
                fix="evaluate it (model.eval(), torch.no_grad()), or copy the model before wh.parallelize and parallelize both",
            )
        return map_tensors(forward(model, *args, **kwargs), _whole)


def _whole(x: Tensor) -> Tensor:
    return x.rows() if isinstance(x, Columns) else x


class Runtime:
    """Plan in force, groups, regions and reducers of one model."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, regions: list[Region], make_reducers: Callable[[], list[Reducer]]):
        self.plan, self.mesh, self.regions, self._make_reducers = plan, mesh, regions, make_reducers
        self.reducers = make_reducers()
        self.sync = True
        self.call: Call | None = None
        self._counts_group = mesh.everyone(channel="row counts")
        self._delayed = [m for m in model.modules() if isinstance(m, ColumnLinear)]
        self._watched = [(name, owner, key, p) for name, owner, key, p in _owners(model)]
        self._trained = [p.requires_grad for _, _, _, p in self._watched]
        self._keeps_columns = any(g.option("split", "output") == "columns" for g in plan.taskgraphs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedRuntime:
        return CopiedRuntime(self.plan, self.regions)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a runtime names live process groups and cannot be pickled")

    def run(self, forward: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward of the whole model: rows counted, outputs weighed and reducers armed by them."""
        if self.call is not None:  # the model calls itself
            return forward(model, *args, **kwargs)
        training = model.training and torch.is_grad_enabled()
        if training:
            self._check_parameters()
        if not torch.is_grad_enabled() and self.plan.feed_size == 1:
            return self._leave(forward(model, *args, **kwargs), None, training)
        call = self._begin(args, kwargs)
        try:
            with self._loss_scope(call):
                out = forward(model, *args, **kwargs)
        finally:
            self._end()
        return self._leave(out, call, training)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        inputs = list(tensors_in((args, kwargs)))
        dim = self.plan.batch_dim
        rows = next((t.shape[dim] for t in inputs if t.dim() > dim), 1)
        digest = _digest(inputs) if self.plan.feed_size > 1 else 0
        self.call = Call(self._counts_group, self.plan.feed_size, rows, digest, self.arm)
        for region in self.regions:
            region.call = self.call
        for layer in self._delayed:
            if torch.is_grad_enabled() and layer.weight.requires_grad:
                layer._delay = Delay(layer.weight, layer.bias)
        return self.call

    def _end(self) -> None:
        self.call = None
        for region in self.regions:
            region.call = None
            region.forget()
        for layer in self._delayed:
            layer._delay = None

    def _loss_scope(self, call: Call) -> contextlib.AbstractContextManager[Any]:
        if not torch.is_grad_enabled() or self.plan.num_feeds == 1:
            return contextlib.nullcontext()
        return TrueMeanLoss(call, self._counts_group)

    def _leave(self, out: Any, call: Call | None, training: bool) -> Any:
        def one(x: Tensor) -> Tensor:
            if isinstance(x, Columns):
                if training or self._keeps_columns:
                    return x if call is None else _deliver_columns(x, call)
                x = x.rows()
            return x if call is None else deliver(x, call, weigh=self.plan.loss == "mean")

        return map_tensors(out, one)

    def arm(self) -> None:
        """A backward has reached the model's output."""
        if self.sync:
            for reducer in self.reducers:
                reducer.arm()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulate on each rank and are not averaged; the next backward outside averages the sum."""
        before = self.sync
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(before)

    def _set_sync(self, sync: bool) -> None:
        self.sync = sync
        for reducer in self.reducers:
            reducer.sync = sync

    def _check_parameters(self) -> None:
        for reducer in self.reducers:
            reducer.abandon()
        changed = False
        for i, (name, owner, key, parameter) in enumerate(self._watched):
            if owner._parameters.get(key) is not parameter:
                raise PlanError(
                    f"parameter '{name}' was replaced after wh.parallelize; its gradient would not be averaged.",
                    fix="change values in place (parameter.data.copy_(...), load_state_dict), or replace it before wh.parallelize",
                )
            if parameter.requires_grad is not self._trained[i]:
                self._trained[i] = parameter.requires_grad
                changed = True
        if changed:
            for reducer in self.reducers:
                reducer.close()
            self.reducers = self._make_reducers()
            self._set_sync(self.sync)

    def current_plan(self) -> Plan:
        """The plan in force, with what was gathered implicitly so far."""
        from dataclasses import replace

        found = [
            GatherRecord(operation, site, int(count), num_bytes)
            for region in self.regions
            for (operation, site), (count, num_bytes) in region.gathered.items()
        ]
        return replace(self.plan, gathers=tuple(found))


def _deliver_columns(x: Columns, call: Call) -> Columns:
    from dataclasses import replace

    place: ColumnsPlace = replace(x.place, call=call)
    if x.deferred is not None:
        out = Columns.put_off(x.deferred, place)
    else:
        out = Columns.of(deliver(plain(x), call, weigh=False), place, x.hold)
    return out


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield (f"{name}.{key}" if name else key), module, key, parameter


def _digest(inputs: list[Tensor]) -> int:
    """A hash of the input tensors' bits, the same for equal tensors."""
    total = 0
    for t in inputs:
        data = t.detach()
        bits = data.to(torch.uint8) if data.dtype == torch.bool else data
        total = (total * 1000003 + (int(torch.hash_tensor(bits).item()) if bits.numel() else 0) + hash(tuple(t.shape))) & 0x7FFFFFFFFFFFFFFF
    return total


def runtime_of(model: nn.Module, what: str) -> Runtime:
    """The runtime of a parallelized model. Raises PlanError for any other model."""
    runtime = model.__dict__.get(KEY)
    if not isinstance(runtime, Runtime):
        raise PlanError(
            f"{what} needs a parallelized model, got {type(model).__name__}" + (" (a copy of one)." if runtime is not None else "."),
            fix="model = wh.parallelize(model) first",
        )
    return runtime


