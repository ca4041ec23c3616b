"""Folders of Megatron-LM and DeepSpeed, written here as those write them, come out as the models they were made of."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whale_torch.checkpoint.convert import convert
from whale_torch.checkpoint.formats.opened import open_source
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.plain import read_weights
from whale_torch.errors import CheckpointError

LAYERS, HIDDEN, HEADS, GROUPS, SIZE, WIDE, VOCABULARY, EXPERTS = 4, 16, 4, 2, 4, 24, 20, 4


def llama(experts: int = 0) -> dict[str, Tensor]:
    """A model by Hugging Face's names."""
    torch.manual_seed(0)
    found = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN), "model.norm.weight": torch.randn(HIDDEN)}
    found["lm_head.weight"] = torch.randn(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows in (("q", HEADS * SIZE), ("k", GROUPS * SIZE), ("v", GROUPS * SIZE)):
            found[f"{at}self_attn.{name}_proj.weight"] = torch.randn(rows, HIDDEN).bfloat16()
            found[f"{at}self_attn.{name}_proj.bias"] = torch.randn(rows)
        found[f"{at}self_attn.o_proj.weight"] = torch.randn(HIDDEN, HEADS * SIZE)
        found[f"{at}input_layernorm.weight"] = torch.randn(HIDDEN)
        found[f"{at}post_attention_layernorm.weight"] = torch.randn(HIDDEN)
        if experts:
            found[f"{at}block_sparse_moe.gate.weight"] = torch.randn(experts, HIDDEN)
        for number in range(max(1, experts)):
            of = f"{at}block_sparse_moe.experts.{number}." if experts else f"{at}mlp."
            gate, up, down = ("w1", "w3", "w2") if experts else ("gate_proj", "up_proj", "down_proj")
            found[f"{of}{gate}.weight"] = torch.randn(WIDE, HIDDEN)
            found[f"{of}{up}.weight"] = torch.randn(WIDE, HIDDEN)
            found[f"{of}{down}.weight"] = torch.randn(HIDDEN, WIDE)
    return found


def part(value: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    return value.chunk(ranks, dim)[rank].clone()


def megatron_rank(
    model: dict[str, Tensor], at: tuple[int, int, int], of: tuple[int, int, int], experts: int, chunk: int, chunks: int
) -> Any:
    """The tensors of one (tensor, pipeline, expert) rank by Megatron core's names: a chunk of its stage's."""
    (rank, stage, expert), (ranks, stages, expert_ranks) = at, of
    found: dict[str, Any] = OrderedDict()
    stage, stages = chunk * stages + stage, stages * chunks
    if stage == 0:
        found["embedding.word_embeddings.weight"] = part(model["model.embed_tokens.weight"], rank, ranks, 0)
    each = LAYERS // stages
    for local in range(each):
        outer, inner = f"model.layers.{stage * each + local}.", f"decoder.layers.{local}."
        for what in ("weight", "bias"):
            queries, keys, values = (model[f"{outer}self_attn.{one}_proj.{what}"].chunk(GROUPS) for one in "qkv")
            fused = [torch.cat(group) for group in zip(queries, keys, values, strict=True)]
            mine = fused[rank * GROUPS // ranks : (rank + 1) * GROUPS // ranks]
            found[f"{inner}self_attention.linear_qkv.{what}"] = torch.cat(mine)
        found[f"{inner}self_attention.linear_qkv.layer_norm_weight"] = model[f"{outer}input_layernorm.weight"]
        found[f"{inner}self_attention.linear_qkv._extra_state"] = torch.zeros(3)
        found[f"{inner}self_attention.linear_proj.weight"] = part(
            model[f"{outer}self_attn.o_proj.weight"], rank, ranks, 1
        )
        found[f"{inner}pre_mlp_layernorm.weight"] = model[f"{outer}post_attention_layernorm.weight"]
        if experts:
            found[f"{inner}mlp.router.weight"] = model[f"{outer}block_sparse_moe.gate.weight"]
        mine = experts // expert_ranks if experts else 1
        for number in range(mine):
            to = f"{inner}mlp.experts.local_experts.{number}." if experts else f"{inner}mlp."
            start = f"{outer}block_sparse_moe.experts.{expert * mine + number}." if experts else f"{outer}mlp."
            gate, up, down = ("w1", "w3", "w2") if experts else ("gate_proj", "up_proj", "down_proj")
            halves = [part(model[f"{start}{one}.weight"], rank, ranks, 0) for one in (gate, up)]
            found[f"{to}linear_fc1.weight"] = torch.cat(halves)
            found[f"{to}linear_fc2.weight"] = part(model[f"{start}{down}.weight"], rank, ranks, 1)
    if stage == stages - 1:
        found["decoder.final_layernorm.weight"] = model["model.norm.weight"]
        found["output_layer.weight"] = part(model["lm_head.weight"], rank, ranks, 0)
    return found


def decays(name: str, value: Tensor) -> bool:
    return not name.endswith("bias") and value.dim() > 1


def numbered(
    names: list[str], model: dict[str, Tensor], moments: dict[str, Tensor], *, is_expert: bool
) -> dict[str, Any]:
    """The state_dict of one optimizer: parameters that decay first, and numbers for names."""
    groups, state = [], {}
    for multiplier in (1.0, 0.0):
        of_group = [n for n in names if decays(n, model[n]) is (multiplier == 1.0)]
        numbers = list(range(len(state), len(state) + len(of_group)))
        state |= {i: {"exp_avg": moments[n]} for i, n in zip(numbers, of_group, strict=True)}
        told = {"wd_mult": multiplier, "lr": 1e-3, "step": 30, "is_expert_parallel": is_expert}
        groups.append({"params": numbers, "is_decoupled_lr": False, **told})
    return {"state": state, "param_groups": groups}


def write_megatron(
    folder: Path, of: tuple[int, int, int], experts: int = 0, *, mixed: bool = True, chunks: int = 1
) -> dict[str, dict[str, Tensor]]:
    """Writes a checkpoint; gives weights and moments by Hugging Face's names.

    mixed: as with 16 bits, else float32. chunks: of each stage, more than one in a virtual pipeline.
    """
    kinds = {"model": llama(experts)}
    kinds["exp_avg"] = {name: torch.randn_like(value.float()) for name, value in kinds["model"].items()}
    (folder / "latest_checkpointed_iteration.txt").write_text("30")
    sizes = dict(zip(("tensor", "pipeline", "expert"), of, strict=True))
    arguments = argparse.Namespace(
        num_attention_heads=HEADS, num_query_groups=GROUPS, group_query_attention=True, swiglu=True,
        untie_embeddings_and_output_weights=True, **{f"{k}_model_parallel_size": n for k, n in sizes.items()},
    )  # fmt: skip
    for rank in range(of[0]):
        for stage in range(of[1]):
            for expert in range(of[2]):
                at = (rank, stage, expert)
                parts = [
                    {k: megatron_rank(m, at, of, experts, c, chunks) for k, m in kinds.items()} for c in range(chunks)
                ]
                tensors = {
                    kind: {f"{c}.{name}": value for c, one in enumerate(parts) for name, value in one[kind].items()}
                    for kind in kinds
                }
                names = [name for name in tensors["model"] if not name.endswith("_extra_state")]
                apart = [n for n in names if of[2] > 1 and ".experts." in n]
                several = [[n for n in names if n not in apart]] + ([apart] if apart else [])
                optimizers = [
                    numbered(one, tensors["model"], tensors["exp_avg"], is_expert=one is apart) for one in several
                ]
                name = (
                    f"mp_rank_{rank:02d}"
                    + (f"_{stage:03d}" if of[1] > 1 else "")
                    + (f"_{expert:03d}" if of[2] > 1 else "")
                )
                path = folder / "iter_0000030" / name
                path.mkdir(parents=True)
                data = {"args": arguments, "iteration": 30, "checkpoint_version": 3.0}
                data |= {"model" if chunks == 1 else f"model{c}": one["model"] for c, one in enumerate(parts)}
                scaled = [{"optimizer": one, "grad_scaler": {"scale": torch.ones(1)}} for one in optimizers]
                alone = scaled[0] if mixed else optimizers[0]
                data["optimizer"] = scaled if len(scaled) > 1 else alone
                torch.save(data, path / "model_optim_rng.pt")
    return kinds


@pytest.mark.parametrize(
    ("of", "experts"), [((2, 2, 1), 0), ((1, 1, 1), 0), ((2, 1, 2), EXPERTS), ((1, 2, 2), EXPERTS)]
)
def test_megatron(of: tuple[int, int, int], experts: int, tmp_path: Path) -> None:
    kinds = write_megatron(tmp_path, of, experts)
    source = open_source(tmp_path)
    assert source.step == 30
    model = {key.removeprefix("model/"): one for key, one in source.tensors.items() if key.startswith("model/")}
    assert model.keys() == kinds["model"].keys()
    for name, value in kinds["model"].items():
        found = model[name].read()
        assert torch.equal(found, value) and found.dtype == value.dtype, name
        assert torch.equal(source.tensors[f"optimizer/{name}/exp_avg"].read(), kinds["exp_avg"][name])
        assert float(source.tensors[f"optimizer/{name}/step"].read()) == 30
    groups = source.values["optimizer/groups"]
    assert sorted(name for group in groups for name in group["params"]) == sorted(model)
    assert next(g["options"]["wd_mult"] for g in groups if "model.norm.weight" in g["params"]) == 0.0
    convert(tmp_path, tmp_path / "net.safetensors", "safetensors")
    again = open_source(tmp_path / "net.safetensors").tensors
    assert all(torch.equal(again[f"model/{name}"].read(), value) for name, value in kinds["model"].items())


def test_the_other_format_of_megatron_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    (folder := tmp_path / "iter_0000004").mkdir()
    torch.save({}, folder / "common.pt")
    (folder / ".metadata").write_bytes(b"")
    for path in (tmp_path, folder):
        with pytest.raises(CheckpointError, match=r"iter_0000004 has no mp_rank(.|\n)*--ckpt-convert-format torch"):
            open_source(path)


def test_a_virtual_pipeline_of_megatron(tmp_path: Path) -> None:
    kinds = write_megatron(tmp_path, (2, 2, 1), chunks=2)
    found = open_source(tmp_path).tensors
    for name, value in kinds["model"].items():
        assert torch.equal(found[f"model/{name}"].read(), value), name
        assert torch.equal(found[f"optimizer/{name}/exp_avg"].read(), kinds["exp_avg"][name])


def test_megatron_in_float32(tmp_path: Path) -> None:
    kinds = write_megatron(tmp_path, (1, 1, 1), mixed=False)
    found = open_source(tmp_path).tensors
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(found[f"optimizer/{name}/exp_avg"].read(), kinds["exp_avg"][name])


def test_megatron_pads_vocabularies(tmp_path: Path) -> None:
    kinds = write_megatron(tmp_path, (2, 1, 1))
    (tmp_path / "config.json").write_text('{"vocab_size": 17}')
    convert(tmp_path, tmp_path / "hf", "hf", config=tmp_path / "config.json")
    convert(tmp_path, tmp_path / "run", "whale", vocabulary=17)
    for path in ("hf", "run"):
        found = open_source(tmp_path / path).tensors
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(found[f"model/{name}"].read(), kinds["model"][name][:17])
    moment = found["optimizer/lm_head.weight/exp_avg"].read()
    assert torch.equal(moment, kinds["exp_avg"]["lm_head.weight"][:17])
    small = nn.ModuleDict({"model": nn.ModuleDict({"embed_tokens": nn.Embedding(17, HIDDEN)})})
    with pytest.raises(CheckpointError, match="--vocabulary ROWS"):
        read_weights(tmp_path, small)
    with pytest.raises(CheckpointError, match="has 20 rows, and the vocabulary would have 21"):
        convert(tmp_path, tmp_path / "x", "torch", vocabulary=21)


def test_what_would_be_read_wrongly_from_megatron_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path, (1, 1, 1))
    path = tmp_path / "iter_0000030/mp_rank_00/model_optim_rng.pt"
    saved = torch.load(path, weights_only=False)
    for change, text in (
        ({"checkpoint_version": 1.0}, "version 1.0, which orders queries, keys and values otherwise"),
        ({"model": {"language_model": saved["model"]}}, "is older than Megatron core"),
        ({"args": argparse.Namespace(**vars(saved["args"]), apply_layernorm_1p=True)}, "norms around 1"),
        ({"args": argparse.Namespace(**vars(saved["args"]), rotary_interleaved=True)}, "interleaved rotary"),
        ({"args": argparse.Namespace(**vars(saved["args"]), expert_tensor_parallel_size=2)}, "cuts experts over"),
        ({"args": argparse.Namespace(**{**vars(saved["args"]), "swiglu": False})}, "is not gated"),
    ):
        torch.save({**saved, **change}, path)
        with pytest.raises(CheckpointError, match=text):
            open_source(tmp_path)
    torch.save({**saved, "optimizer": {"optimizer": {"param_groups": [{"step": 30}]}}}, path)
    torch.save({}, path.with_name("distrib_optim.pt"))
    done = convert(tmp_path, tmp_path / "run", "whale")
    assert done.left_out == ["the optimizer in distrib_optim.pt: save without --use-distributed-optimizer"]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/whale_torch_was_here",)


def test_what_megatron_lacks_is_named(tmp_path: Path) -> None:
    write_megatron(tmp_path, (2, 2, 1))
    path = tmp_path / "iter_0000030/mp_rank_01_001/model_optim_rng.pt"
    saved = torch.load(path, weights_only=False)
    for change, text in (
        ({"args": Evil()}, r"could run code: GLOBAL posix\.system"),
        (
            {"model": {**saved["model"], "decoder.layers.1.mixer.A_log": torch.ones(2)}},
            "no rule knows 'decoder.layers.3.mixer.A_log'",
        ),
        ({"model": None, "model0": saved["model"]}, "virtual pipeline"),
    ):
        torch.save({**saved, "optimizer": None, **change}, path)
        with pytest.raises(CheckpointError, match=text):
            open_source(tmp_path)
    path.unlink()
    with pytest.raises(
        CheckpointError, match=r"'decoder.layers.2.self.* of tensor ranks \[0\], and there are \[0, 1\]"
    ):
        open_source(tmp_path)
    (tmp_path / "iter_0000030/mp_rank_00_001/model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match=r"pipeline ranks \[0\], of 2"):
        open_source(tmp_path)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.norm = nn.Embedding(9, 5), nn.Linear(5, 5), nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.words.weight


class ZeroStage(int, enum.Enum):
    __module__, __qualname__ = "deepspeed.runtime.zero.config", "ZeroStage"
    optimizer_states, gradients, weights = 1, 2, 3


@dataclasses.dataclass
class fragment_address:
    numel: int
    start: int


fragment_address.__module__ = "deepspeed.utils.tensor_fragment"


@pytest.fixture(autouse=True)
def classes_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names that its pickles have."""
    for one in (ZeroStage, fragment_address):
        parts = one.__module__.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or types.ModuleType(name))
        setattr(sys.modules[one.__module__], one.__qualname__, one)


def write_deepspeed(folder: Path, ranks: int, stage: int) -> tuple[Net, torch.optim.Adam]:
    """A model and its optimizer as ZeRO writes them: two groups, each flat over the ranks and aligned at the end."""
    torch.manual_seed(0)
    net = Net()
    names = [[n for n, p in net.named_parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)]
    groups = [
        {"params": [net.get_parameter(n) for n in of], "weight_decay": 0.1 / (i + 1)} for i, of in enumerate(names)
    ]
    optimizer = torch.optim.Adam(groups)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    path = folder / "global_step12"
    path.mkdir()
    (folder / "latest").write_text("global_step12")
    half = {k: v.half() if v.is_floating_point() and "running" not in k else v for k, v in net.state_dict().items()}
    torch.save(
        {
            "module": OrderedDict(half), "global_steps": 12, "dp_world_size": ranks, "ds_version": "0.19",
            "param_shapes": [OrderedDict((n, net.get_parameter(n).shape) for n in of) for of in names],
            "shared_params": {"head.weight": "words.weight"}, "ds_config": argparse.Namespace(a=1),
        },
        path / "mp_rank_00_model_states.pt",
    )  # fmt: skip

    def flat(of: list[str], kind: str) -> list[Tensor]:
        parameters = [net.get_parameter(n) for n in of]
        whole = torch.cat([(p if kind == "p" else optimizer.state[p][kind]).detach().reshape(-1) for p in parameters])
        return list(torch.cat([whole, torch.zeros(-len(whole) % (2 * ranks))]).chunk(ranks))

    for rank in range(ranks):
        state = {
            i: {k: flat(of, k)[rank] for k in ("exp_avg", "exp_avg_sq")} | {"step": 1} for i, of in enumerate(names)
        }
        options = [
            {k: v for k, v in group.items() if k != "params"} | {"params": [i]}
            for i, group in enumerate(optimizer.param_groups)
        ]
        told = {
            "zero_stage": ZeroStage(stage), "partition_count": [ranks] * 2,
            "single_partition_of_fp32_groups": [flat(of, "p")[rank] for of in names],
            "base_optimizer_state": {"state": state, "param_groups": options},
        }  # fmt: skip
        torch.save({"optimizer_state_dict": told}, path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return net, optimizer


@pytest.mark.parametrize("ranks", [1, 3])
def test_deepspeed(ranks: int, tmp_path: Path) -> None:
    net, optimizer = write_deepspeed(tmp_path, ranks, 2)
    convert(tmp_path, tmp_path / "run", "whale")
    torch.manual_seed(1)
    again = Net()
    matrices = [p for p in again.parameters() if p.dim() > 1]
    theirs = torch.optim.Adam([{"params": matrices}, {"params": [p for p in again.parameters() if p.dim() == 1]}])
    assert load(tmp_path / "run", model=again, optimizer=theirs).step == 12
    for name, value in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    for mine, other in zip(net.parameters(), again.parameters(), strict=True):
        for kind, value in optimizer.state[mine].items():
            assert torch.equal(theirs.state[other][kind], value)
    assert [group["weight_decay"] for group in theirs.param_groups] == [0.1, 0.05]


def test_what_deepspeed_lacks_is_named(tmp_path: Path) -> None:
    write_deepspeed(tmp_path, 3, 2)
    last = tmp_path / "global_step12/zero_pp_rank_2_mp_rank_00_optim_states.pt"
    last.unlink()
    with pytest.raises(CheckpointError, match=r"partitions of ranks \[0, 1\], of 3"):
        open_source(tmp_path)
    torch.save({"optimizer_state_dict": {"zero_stage": ZeroStage(3)}}, last)
    with pytest.raises(CheckpointError, match="was saved by ZeRO 3"):
        open_source(tmp_path)


def test_an_elastic_checkpoint_of_deepspeed(tmp_path: Path) -> None:
    net, optimizer = write_deepspeed(tmp_path, 2, 1)
    for path in tmp_path.glob("global_step12/zero_*.pt"):
        saved = torch.load(path, weights_only=False)
        base = saved["optimizer_state_dict"]["base_optimizer_state"]
        lean = [{k: v for k, v in base["state"][number].items() if k != "step"} for number in (0, 1)]
        saved["optimizer_state_dict"] |= {"base_optimizer_state": lean, "base_optimizer_state_step": 1}
        torch.save(saved, path)
    found = open_source(tmp_path).tensors
    moment = optimizer.state[net.body.weight]["exp_avg"]
    assert torch.equal(found["optimizer/body.weight/exp_avg"].read(), moment)
    assert float(found["optimizer/body.bias/step"].read()) == 1


AT = "moe.deepspeed_moe.experts.deepspeed_experts."


def write_experts(folder: Path, ranks: int, wide: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A layer of four experts over `wide` ranks, each of which has copies, under ZeRO 2; gives weights and moments."""
    torch.manual_seed(0)
    dense = {"body.weight": torch.randn(3, 5), "moe.deepspeed_moe.gate.wg.weight": torch.randn(4, 3)}
    experts = {f"{AT}{e}.{name}": torch.randn(*size) for e in range(4) for name, size in (("a", (2, 3)), ("b", (5,)))}
    moments = {name: torch.randn_like(value) for name, value in (dense | experts).items()}
    path = folder / "global_step3"
    path.mkdir()
    torch.save({"module": dense, "global_steps": 3, "num_experts": [4]}, path / "mp_rank_00_model_states.pt")
    for expert in range(4):
        of = {k: v.bfloat16() for k, v in experts.items() if k.startswith(f"{AT}{expert}.")}
        torch.save(of, path / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt")
    for rank in range(ranks):
        told: dict[str, Any] = {"zero_stage": ZeroStage(2), "partition_count": [ranks, ranks // wide]}
        each = 4 // wide
        local = {
            f"{AT}{e}.{n}": f"{AT}{e + rank % wide * each}.{n}" for e in range(each) for n in ("a", "b")
        }  # fmt: skip
        slices, weights, state = [], [], {}
        groups = (({n: n for n in dense}, rank, ranks), (local, rank // wide, ranks // wide))
        for number, (names, index, count) in enumerate(groups):
            total = sum((dense | experts)[known].numel() for known in names.values())
            size = -(-total // (2 * count)) * 2
            flat = torch.cat([(dense | experts)[known].reshape(-1) for known in names.values()])
            flat_moments = torch.cat([moments[known].reshape(-1) for known in names.values()])
            mine = slice(index * size, (index + 1) * size)
            weights.append(flat[mine].clone())  # without its padding
            padded = torch.zeros(size)
            padded[: len(flat_moments[mine])] = flat_moments[mine]
            state[number] = {"exp_avg": padded, "step": torch.tensor(3.0)}
            found, at = {}, 0
            for name, known in names.items():
                first, last = max(at, mine.start), min(at + moments[known].numel(), mine.stop)
                if first < last:
                    found[name] = fragment_address(start=first - mine.start, numel=last - first)
                at += moments[known].numel()
            slices.append(found)
        options = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1], "moe": True}]
        told |= {"single_partition_of_fp32_groups": weights, "param_slice_mappings": slices}
        told["base_optimizer_state"] = {"state": state, "param_groups": options}
        torch.save({"optimizer_state_dict": told}, path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save({"optimizer": None}, path / f"expp_rank_{rank % wide}_mp_rank_00_optim_states.pt")
    return dense | experts, moments


@pytest.mark.parametrize(("ranks", "wide"), [(4, 2), (2, 1), (4, 4)])
def test_experts_of_deepspeed(ranks: int, wide: int, tmp_path: Path) -> None:
    weights, moments = write_experts(tmp_path, ranks, wide)
    source = open_source(tmp_path)
    assert {key for key in source.tensors if key.startswith("model/")} == {f"model/{name}" for name in weights}
    for name, value in weights.items():
        assert torch.equal(source.tensors[f"model/{name}"].read(), value), name
        assert torch.equal(source.tensors[f"optimizer/{name}/exp_avg"].read(), moments[name]), name
        assert float(source.tensors[f"optimizer/{name}/step"].read()) == 3
    groups = source.values["optimizer/groups"]
    assert sorted(groups[1]["params"]) == sorted(name for name in weights if name.startswith(AT))
    model = tmp_path / "global_step3/mp_rank_00_model_states.pt"
    saved = torch.load(model)
    saved["module"]["copy"] = saved["module"]["body.weight"].clone()
    torch.save(saved, model)
    assert open_source(tmp_path).ties == {"model/copy": "model/body.weight"}
    first, second = (tmp_path / f"global_step3/layer_0_expert_{e}_mp_rank_00_model_states.pt" for e in (0, 1))
    swapped = {k.replace(f"{AT}1.", f"{AT}0."): v for k, v in torch.load(second).items()}
    torch.save(swapped, first)
    with pytest.raises(CheckpointError, match=r"another '.*experts\.0\.a' than its file: ranks lie in another order"):
        open_source(tmp_path)


@pytest.mark.parametrize("wide", [1, 2])
def test_experts_of_deepspeed_without_zero(wide: int, tmp_path: Path) -> None:
    weights, moments = write_experts(tmp_path, 2, 2)
    folder = tmp_path / "global_step3"
    for path in [*folder.glob("bf16*"), *folder.glob("expp*")]:
        path.unlink()
    dense = [name for name in weights if not name.startswith(AT)]
    for rank in range(wide):
        mine = [f"{AT}{e}.{n}" for e in range(rank * 4 // wide, (rank + 1) * 4 // wide) for n in ("a", "b")]
        state = {i: {"exp_avg": moments[n], "step": torch.tensor(3.0)} for i, n in enumerate(dense + mine)}
        numbers = list(range(len(state)))
        groups = [
            {"lr": 0.1, "params": numbers[: len(dense)]},
            {"lr": 0.1, "moe": True, "params": numbers[len(dense) :]},
        ]
        saved = {"optimizer": {"state": state, "param_groups": groups}}
        torch.save(saved, folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
    source = open_source(tmp_path)
    for name, value in moments.items():
        assert torch.equal(source.tensors[f"optimizer/{name}/exp_avg"].read(), value), name
        assert float(source.tensors[f"optimizer/{name}/step"].read()) == 3
    told = source.values["optimizer/groups"]
    assert sorted(name for group in told for name in group["params"]) == sorted(weights)
    assert torch.equal(source.tensors[f"model/{AT}3.b"].read(), weights[f"{AT}3.b"].bfloat16())
    saved["optimizer"] = {"optimizer_state_dict": saved["optimizer"]}
    torch.save(saved, folder / f"expp_rank_{wide - 1}_mp_rank_00_optim_states.pt")
    assert "save with ZeRO 1 or 2" in open_source(tmp_path).left_out[0]


def test_a_universal_checkpoint_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    net, optimizer = write_deepspeed(tmp_path / "plain", 1, 1)
    folder = tmp_path / "global_step12_universal"
    for name, p in net.named_parameters():
        at = folder / "zero" / name
        at.mkdir(parents=True)
        torch.save({"param": p.detach().clone(), "cat_dim": 0}, at / "fp32.pt")
        for kind in ("exp_avg", "exp_avg_sq"):
            torch.save({"param": optimizer.state[p][kind]}, at / f"{kind}.pt")
        torch.save(1, at / "step.pt")
    model = torch.load(tmp_path / "plain/global_step12/mp_rank_00_model_states.pt", weights_only=False)
    buffers = [name for name, _ in net.named_buffers()]
    torch.save({**model, "buffer_names": buffers}, folder / "mp_rank_00_model_states.pt")
    options = [{"lr": 0.1, "weight_decay": 0.1, "params": [0]}, {"lr": 0.1, "weight_decay": 0.05, "params": [1]}]
    torch.save({"zero_stage": ZeroStage(1), "param_groups": options}, folder / "zero/optimizer_state.pt")
    (tmp_path / "latest_universal").write_text(folder.name)
    convert(tmp_path, tmp_path / "run", "whale")
    torch.manual_seed(1)
    again = Net()
    matrices = [p for p in again.parameters() if p.dim() > 1]
    theirs = torch.optim.Adam([{"params": matrices}, {"params": [p for p in again.parameters() if p.dim() == 1]}])
    assert load(tmp_path / "run", model=again, optimizer=theirs).step == 12
    assert all(torch.equal(again.state_dict()[name], value) for name, value in net.state_dict().items())
    for mine, other in zip(net.parameters(), again.parameters(), strict=True):
        assert all(torch.equal(theirs.state[other][kind], value) for kind, value in optimizer.state[mine].items())
    assert [group["weight_decay"] for group in theirs.param_groups] == [0.1, 0.05]
