"""What one stage runs of a recorded forward: its instructions, what it receives and what it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from whale_torch.names import joined
from whale_torch.trace.graph import Made, Node, map_nodes

__all__ = ["Instruction", "StageProgram", "stages_of_tensors"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One Node to run, and those whose values nobody reads afterwards.

    flat: none of its arguments is a nest.
    """

    node: Node
    drops: tuple[Node, ...]
    flat: bool = False

    @staticmethod
    def of(node: Node, drops: tuple[Node, ...]) -> Instruction:
        nests = (tuple, list, dict, slice, Made)
        return Instruction(node, drops, not any(isinstance(a, nests) for a in (*node.args, *node.kwargs.values())))

    def arguments(self, values: Mapping[Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What goes in, by the values of Nodes."""
        args, kwargs = self.node.args, self.node.kwargs
        if not self.flat:
            found: tuple[tuple[Any, ...], dict[str, Any]] = map_nodes((args, kwargs), values.__getitem__)
            return found
        return (
            tuple([values[a] if type(a) is Node else a for a in args]),
            {key: values[a] if type(a) is Node else a for key, a in kwargs.items()},
        )


@dataclass(frozen=True)
class StageProgram:
    """One stage's part of one recorded forward.

    instructions: in order, with the glue that depends on inputs only and is recomputed here. receives: values from each
    earlier stage; sends: values to each later one, in the same order on both sides. results: the nest that the model
    returns, on the last stage. draws: whether it draws random numbers. modules: dotted names of those that it calls.
    changed: inputs and received values that an instruction writes into; rewritten: values that are sent or returned as
    they were before an instruction wrote into them.
    """

    index: int
    instructions: tuple[Instruction, ...]
    receives: Mapping[int, tuple[Node, ...]]
    sends: Mapping[int, tuple[Node, ...]]
    results: Any
    draws: bool
    modules: tuple[str, ...]
    changed: frozenset[Node] = frozenset()
    rewritten: frozenset[Node] = frozenset()

    def run(
        self,
        inputs: Sequence[Any],
        counts: Mapping[Any, Any],
        received: Mapping[Node, Any],
        find: Callable[[Node], Any],
    ) -> tuple[dict[Node, Any], Any]:
        """One forward of the stage: the values that it sends, by Node, and its results.

        inputs: the model's tensor inputs. counts: of the loss, by number. received: values by Node. find: the live
        module, parameter or buffer that a Node names.
        """
        values: dict[Node, Any] = dict(received)
        before = {node: values[node].clone() for node in self.rewritten if node in values}
        for instruction in self.instructions:
            node = instruction.node
            if node.kind == "call" or node.kind == "module":
                args, kwargs = instruction.arguments(values)
                values[node] = node.run(args, kwargs, node.target if node.kind == "call" else find(node))
            elif node.kind == "input":
                values[node] = inputs[node.target].clone() if node in self.changed else inputs[node.target]
            elif node.kind == "constant":
                values[node] = node.target
            elif node.kind == "count":
                values[node] = counts[node.target]
            else:
                values[node] = find(node)
            if self.rewritten and node in self.rewritten:
                before[node] = values[node].clone()
            for dropped in instruction.drops:
                del values[dropped]
        values.update(before)
        sent = {node: values[node] for nodes in self.sends.values() for node in nodes}
        return sent, map_nodes(self.results, values.__getitem__)


def stages_of_tensors(model: nn.Module, programs: Iterable[StageProgram]) -> dict[str, set[int]]:
    """The stages that use each parameter, by its first name, and each buffer, by the first name of its module."""
    modules = dict(model.named_modules(remove_duplicate=False))
    owners = {id(module): name for name, module in model.named_modules()}
    first = {id(p): name for name, p in model.named_parameters()}

    def named(module: nn.Module, key: str) -> str:
        parameter = module._parameters.get(key)
        return joined(owners[id(module)], key) if parameter is None else first[id(parameter)]

    def used(program: StageProgram) -> Iterator[str]:
        for name in program.modules:
            for module in modules[name].modules():
                yield from (named(module, key) for key in (*module._parameters, *module._buffers))
        for instruction in program.instructions:
            if instruction.node.kind in ("parameter", "buffer"):
                owner, _, key = instruction.node.target.rpartition(".")
                yield named(modules[owner], key)

    found: dict[str, set[int]] = {}
    for program in programs:
        for name in used(program):
            found.setdefault(name, set()).add(program.index)
    return found
