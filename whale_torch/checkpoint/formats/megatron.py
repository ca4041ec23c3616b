"""Folders of Megatron-LM (its format "torch"): what tensor, pipeline and expert ranks saved, put together by rules."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.formats.foreign import attributes, load_foreign
from whale_torch.checkpoint.formats.megatron_optimizer import add_groups, states_of
from whale_torch.checkpoint.formats.megatron_parts import put_together
from whale_torch.checkpoint.formats.megatron_rules import RULES, Rule
from whale_torch.checkpoint.formats.source import Entry, Source
from whale_torch.errors import CheckpointError

__all__ = ["RULES", "Rule", "is_megatron", "read_megatron"]

_LATEST = "latest_checkpointed_iteration.txt"
_FILE = "model_optim_rng.pt"
_DISTRIBUTED = "distrib_optim.pt"
_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_WAY = (
    "convert it first with Megatron's own tools/checkpoint/convert.py --saver core, or save it as Hugging Face has it"
)
_GROUPED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.weight(\d+)")  # experts in one grouped product
_NUMBERED = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_LOCAL = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")


def is_megatron(path: Path) -> bool:
    """Its own format, or what it calls "torch_dist": DCP's, with layers stacked and names of its own."""
    is_dist = (path / "common.pt").is_file() and (path / ".metadata").is_file()
    return is_dist or (path / _LATEST).is_file() or any(path.glob(f"mp_rank_*/{_FILE}"))


Tensors = dict[str, Tensor]


def read_megatron(path: Path, files: Files, rules: Sequence[Rule] = RULES) -> Source:
    """Weights, and the optimizer's state where each rank saved its own.

    Raises CheckpointError for tensors that no rule knows, for layouts that would be read wrongly, and for the format
    "torch_dist".
    """
    folder = _iteration(path)
    found = sorted(folder.glob(f"mp_rank_*/{_FILE}"))
    if not found:
        raise CheckpointError(
            f"{folder} has no mp_rank_*/{_FILE}.",
            fix="save with --ckpt-format torch, or let Megatron write it: --ckpt-convert-format torch",
        )
    reading = _Reading(folder, found, rules)
    return reading.source()


def _iteration(path: Path) -> Path:
    if not (path / _LATEST).is_file():
        return path
    told = (path / _LATEST).read_text().strip()
    return path / (told if told == "release" else f"iter_{int(told):07d}" if told.isdigit() else told)


class _Reading:
    def __init__(self, folder: Path, paths: Sequence[Path], rules: Sequence[Rule]):
        self._folder, self._rules = folder, [(re.compile(rule.pattern), rule) for rule in rules]
        self._data = {one: load_foreign(one) for one in paths}
        first = next(iter(self._data.values()))
        if not isinstance(first, dict):
            raise CheckpointError(f"{paths[0]} holds no dict.", fix="give a checkpoint of Megatron core's GPT")
        self._arguments = attributes(first.get("args"))
        self._first = first
        for one, data in self._data.items():
            if not all(isinstance(chunk, dict) for chunk in _chunks(data)):
                raise CheckpointError(f"{one} has no 'model'.", fix="give a checkpoint of Megatron core's GPT")
            if len(_chunks(data)) != len(_chunks(first)) or ("model0" in data) != ("model0" in first):
                raise CheckpointError(
                    f"{one} is of a virtual pipeline, and other files are of another.", fix="give files of one save"
                )
            self._check(one, data)

    def _check(self, path: Path, data: Mapping[str, Any]) -> None:
        """Raises CheckpointError for what would be read wrongly by the rules."""
        version, told = data.get("checkpoint_version", 3.0), self._arguments
        faults = {
            "is older than Megatron core, with nested names": any("language_model" in one for one in _chunks(data)),
            f"is of version {version}, which orders queries, keys and values otherwise": (
                not isinstance(version, int | float) or version < 2
            ),
            "has norms around 1 (apply_layernorm_1p)": told.get("apply_layernorm_1p") is True,
            "has interleaved rotary embeddings (rotary_interleaved)": told.get("rotary_interleaved") is True,
            "cuts experts over other tensor ranks (expert_tensor_parallel_size)": told.get(
                "expert_tensor_parallel_size"
            )
            not in (None, told.get("tensor_model_parallel_size")),
        }
        for what, is_so in faults.items():
            if is_so:
                raise CheckpointError(f"{path} {what}, which is not read here.", fix=_WAY)

    def source(self) -> Source:
        source = Source(self._folder, {})
        step = self._first.get("iteration")
        source.step = step if isinstance(step, int) else None
        copies: dict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
        for kind, name, rank, value in self._tensors():
            copies[kind, name][rank] = value
        ranks = {rank for _, _, rank, _ in self._places()}
        for (_, name), of_ranks in copies.items():
            self._rule(name, next(iter(of_ranks.values())))
        for (kind, name), of_ranks in copies.items():
            if set(of_ranks) != ranks:
                raise CheckpointError(
                    f"{self._folder} has '{name}'{'' if kind == 'model' else f' ({kind})'} of tensor ranks "
                    f"{sorted(of_ranks)}, and there are {sorted(ranks)}.",
                    fix="give all ranks' files",
                )
            for outside, entry in self._whole(name, [of_ranks[rank] for rank in sorted(of_ranks)]):
                key = f"model/{outside}" if kind == "model" else f"optimizer/{outside}/{kind}"
                source.tensors[key] = entry
                if self._rule(name, next(iter(of_ranks.values())))[1].padded:
                    source.padded.add(key)
        self._finish(source)
        return source

    def _places(self) -> list[tuple[Path, int, int, int]]:
        """Of each file its pipeline stage, tensor rank and expert rank."""
        numbers: dict[Path, list[int | None]] = {}
        for path in self._data:
            found = _FOLDER.fullmatch(path.parent.name)
            if found is None:
                raise CheckpointError(f"{path.parent} is not called as Megatron does.", fix="mp_rank_00_000")
            numbers[path] = [None if one is None else int(one) for one in found.groups()]
        stages = self._arguments.get("pipeline_model_parallel_size", None)
        places: list[tuple[Path, int, int, int]] = []
        for path, (first, second, third) in numbers.items():
            is_stage = third is not None or stages is None or stages > 1
            stage = second or 0 if is_stage else 0
            expert = (third if is_stage else second) or 0
            places.append((path, stage, first or 0, expert))
        for number, name in ((0, "pipeline"), (1, "tensor"), (2, "expert")):
            there = {(stage, tensor, expert)[number] for _, stage, tensor, expert in places}
            told = self._arguments.get(f"{name}_model_parallel_size")
            size = told if isinstance(told, int) else max(there) + 1
            if there != set(range(size)):
                raise CheckpointError(
                    f"{self._folder} has files of {name} ranks {sorted(there)}, of {size}.",
                    fix="give all ranks' files",
                )
        return places

    def _tensors(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """Kind, global name, tensor rank and value of all tensors."""
        places = self._places()
        layers: dict[tuple[int, int], int] = defaultdict(int)  # of a chunk of a virtual pipeline, and a stage
        local: dict[tuple[int, int, str], int] = defaultdict(int)
        plain: dict[Path, dict[str, Tensors]] = {}
        for path, stage, _, _ in places:
            plain[path] = self._kinds(path)
            for qualified in plain[path]["model"]:
                chunk, name = _chunk_of(qualified)
                if (numbered := _NUMBERED.fullmatch(name)) is not None:
                    layers[chunk, stage] = max(layers[chunk, stage], int(numbered[2]) + 1)
                if (numbered := _LOCAL.fullmatch(name)) is not None:
                    of = (chunk, stage, numbered[1])
                    local[of] = max(local[of], int(numbered[2]) + 1)
        before = {place: sum(n for other, n in layers.items() if other < place) for place in layers}
        for path, stage, rank, expert in places:
            for kind, tensors in plain[path].items():
                for qualified, value in tensors.items():
                    chunk, known = _chunk_of(qualified)
                    if (found := _LOCAL.fullmatch(known)) is not None:
                        known = f"{found[1]}{expert * local[chunk, stage, found[1]] + int(found[2])}{found[3]}"
                    elif expert:
                        continue  # every expert rank has a copy
                    if (found := _NUMBERED.fullmatch(known)) is not None:
                        known = f"{found[1]}{int(found[2]) + before[chunk, stage]}{found[3]}"
                    yield kind, known, rank, value

    def _kinds(self, path: Path) -> dict[str, Tensors]:
        """The tensors that one rank saved, by local names after their chunk: "model", and states of the optimizer."""
        model: Tensors = {}
        for chunk, tensors in enumerate(_chunks(self._data[path])):
            for name, value in tensors.items():
                if isinstance(value, Tensor) and not name.endswith("_extra_state"):
                    grouped = _GROUPED.fullmatch(name)
                    known = f"{grouped[1]}.local_experts.{grouped[3]}.{grouped[2]}.weight" if grouped else name
                    model[f"{chunk}|{known}"] = value
        return {"model": model} | states_of(path, self._data[path].get("optimizer"), model, self._arguments)

    def _whole(self, name: str, parts: Sequence[Tensor]) -> Iterator[tuple[str, Entry]]:
        match, rule = self._rule(name, parts[0])
        names = [match.expand(one) for one in rule.names]
        yield from zip(names, put_together(rule, name, parts, self._arguments), strict=True)

    def _rule(self, name: str, value: Tensor) -> tuple[re.Match[str], Rule]:
        for pattern, rule in self._rules:
            match = pattern.fullmatch(name)
            if match is not None:
                return match, rule
        raise CheckpointError(
            f"no rule knows '{name}', of shape {list(value.shape)} on each rank, of {self._folder}.",
            fix="whale_torch.checkpoint.formats.megatron.read_megatron(path, files, rules=(*RULES, Rule(...)))",
        )

    def _finish(self, source: Source) -> None:
        """Groups, steps and ties."""
        if (
            self._arguments.get("untie_embeddings_and_output_weights") is False
            or "model/lm_head.weight" not in source.tensors
        ):
            for key in [k for k in source.tensors if k.partition("/")[2].startswith("lm_head.weight")]:
                del source.tensors[key]
            source.ties["model/lm_head.weight"] = "model/model.embed_tokens.weight"
        if any((path.parent / _DISTRIBUTED).is_file() for path in self._data):
            source.left_out.append(f"the optimizer in {_DISTRIBUTED}: save without --use-distributed-optimizer")
        add_groups(source, self._first.get("optimizer"), self._arguments)


def _chunks(data: Any) -> list[Any]:
    """The parts of the model in a file: of a virtual pipeline several."""
    if not isinstance(data, dict) or "model0" not in data:
        return [data.get("model") if isinstance(data, dict) else None]
    return [
        data[f"model{number}"] for number in range(sum(re.fullmatch(r"model\d+", str(key)) is not None for key in data))
    ]


def _chunk_of(qualified: str) -> tuple[int, str]:
    chunk, _, name = qualified.partition("|")
    return int(chunk), name
