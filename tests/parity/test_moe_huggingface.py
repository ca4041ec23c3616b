"""Mixtures of experts of transformers, run by this package's dispatch, are what they were: alone and on ranks."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.split_case import gradients_of
from tests.unit.test_moe_compile import counted
from tests.world import world
from whale_torch import moe

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

BAR = 2e-5
WORDS, LENGTH = 23, 6
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
DEEPSEEK = {
    "intermediate_size": 22,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "head_dim": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 12, "num_local_experts": 5},
    "Qwen2Moe": {
        "intermediate_size": 22,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 10,
        "num_experts": 6,
    },
    "Qwen3Moe": {"moe_intermediate_size": 12, "num_experts": 4, "norm_topk_prob": True, "head_dim": 4},
    "DeepseekV2": {**DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5},
    "DeepseekV3": DEEPSEEK,
    "Olmoe": {"intermediate_size": 12, "num_experts": 4},
    "GptOss": {"intermediate_size": 12, "num_local_experts": 4, "head_dim": 4},
}


def build(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **MODELS[kind], experts_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():  # as built, nearly everything is too small to see
        torch.nn.init.normal_(parameter, std=1.0 if name.endswith("gate.weight") else 0.3)
    return model


def batch(rows: int) -> torch.Tensor:
    return torch.randint(1, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_error({"": found.detach()}, {"": expected.detach()})


def _step(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, **options)
    out.loss.backward()
    return out


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients_are_those_of_transformers(kind: str) -> None:
    theirs, ours = build(kind), build(kind)
    parameters = dict(ours.named_parameters())
    assert moe.from_huggingface(moe.from_huggingface(ours)) is ours
    layers = [m for m in ours.modules() if isinstance(m, moe.MoELayer)]
    assert layers
    assert layers[0].experts.takes_blocks == (kind != "GptOss")  # whose gate is one of its own
    found, expected = (_step(model, batch(4), output_router_logits=kind == "Mixtral") for model in (ours, theirs))
    assert _error(found.logits, expected.logits) < BAR
    assert _error(found.loss, expected.loss) < BAR
    assert relative_error(gradients_of(ours), gradients_of(theirs)) < BAR
    assert {name: id(p) for name, p in ours.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    load = layers[0].load
    assert load is not None
    assert int(load.kept.sum()) == 4 * LENGTH * 2


SMALL = {"hidden_size": 16, "intermediate_size": 12}
EXPERTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gated": ("mixtral", "Mixtral", {**SMALL, "num_local_experts": 4}),
    "tanh": ("mixtral", "Mixtral", {**SMALL, "num_local_experts": 4, "hidden_act": "gelu_pytorch_tanh"}),
    "transposed": ("aria", "AriaText", {**SMALL, "moe_num_experts": 4, "num_attention_heads": 4}),
    "not gated": (
        "nemotron_h",
        "NemotronH",
        {"hidden_size": 16, "moe_intermediate_size": 12, "n_routed_experts": 4, "mlp_hidden_act": "gelu"},
    ),
}


def _experts(form: str) -> Any:
    module, name, options = EXPERTS[form]
    config = getattr(transformers, f"{name}Config")(**options)
    config._experts_implementation = "eager"
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    torch.manual_seed(0)
    experts = getattr(code, f"{name.removesuffix('Text')}Experts")(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("form", EXPERTS)
def test_experts_of_every_form_run_as_blocks(form: str, half: bool) -> None:
    theirs, ours = _experts(form), _experts(form)
    moe.from_huggingface(nn.ModuleList([ours]))
    assert ours.experts.takes_blocks
    x, chosen, weights = torch.randn(9, 16), torch.rand(9, 4).argsort(1)[:, :2], torch.rand(9, 2)
    for m in (ours, theirs):
        m.down_proj.requires_grad_(half)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        found, expected = (m(x, chosen, weights) for m in (ours, theirs))
    assert found.dtype == expected.dtype
    for out in (found, expected):
        out.square().sum().backward()
    bar = 0.03 if half else BAR
    assert _error(found, expected) < bar
    gradients = ({k: p.grad for k, p in m.named_parameters() if p.requires_grad} for m in (ours, theirs))
    assert relative_error(*gradients) < bar


def test_copies_and_pickles() -> None:
    model = moe.from_huggingface(build("Mixtral"))
    twin, plain = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert isinstance(twin.model.layers[0].mlp.experts, moe.MoELayer)
    assert type(plain.model.layers[0].mlp.experts).__name__ == "MixtralExperts"
    assert not isinstance(plain.model.layers[0].mlp.experts, moe.MoELayer)
    ids = batch(3)
    for other in (twin, plain, moe.from_huggingface(plain)):
        assert _error(other(ids).logits, model(ids).logits) < BAR


def test_save_pretrained_is_as_always(tmp_path: Any) -> None:
    model = moe.from_huggingface(build("Qwen3Moe"))
    model.save_pretrained(tmp_path)
    again = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path)
    ids = batch(3)
    assert _error(again(ids).logits, model(ids).logits) < BAR


DENSE: dict[str, tuple[str, str, type[nn.Module], dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", r".*\.mlp", moe.FeedForward, {"intermediate_size": 12, "mlp_bias": True}),
    "Gemma": ("GemmaForCausalLM", r".*\.mlp", moe.FeedForward, {"intermediate_size": 12, "head_dim": 4}),
    "GPT2": ("GPT2LMHeadModel", r".*\.mlp", moe.FeedForward, {"resid_pdrop": 0.0}),
    "GPT2 with dropout": ("GPT2LMHeadModel", r".*\.mlp", moe.Stacked, {}),
    "GPTNeoX": ("GPTNeoXForCausalLM", r".*\.mlp", moe.FeedForward, {"intermediate_size": 12}),
    "Bert": ("BertForMaskedLM", r".*\.layer\.\d", moe.FeedForward, {"intermediate_size": 12}),
    "DistilBert": ("DistilBertForMaskedLM", r".*\.ffn", moe.Stacked, {"dim": 16, "hidden_dim": 12, "n_heads": 4}),
}


def dense(kind: str) -> Any:
    name, _, _, options = DENSE[kind]
    config = getattr(transformers, f"{kind.partition(' ')[0]}Config")(**{**SIZES, **options})
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("kind", DENSE)
def test_upcycled_models_give_what_the_dense_ones_gave(kind: str) -> None:
    _, pattern, form, _ = DENSE[kind]
    model = dense(kind)
    ids = batch(3)
    before = model(ids).logits
    moe.convert(model, {pattern: {"num_experts": 4, "top_k": 2}})
    layers = [m for m in model.modules() if isinstance(m, moe.MoELayer)]
    assert len(layers) == len([m for m in layers if type(m.experts) is form]) > 1
    assert _error(model(ids).logits, before) < BAR


def test_what_has_no_experts_is_refused() -> None:
    config = transformers.LlamaConfig(**SIZES, intermediate_size=12)
    with pytest.raises(wh.PlanError, match="no module of LlamaForCausalLM has experts in transformers' common form"):
        moe.from_huggingface(transformers.LlamaForCausalLM(config))


def _layers(model: Any) -> str:
    """Names of layers of experts: all of a block where it was upcycled."""
    return r".*\.experts" if type(model).__name__ != "LlamaForCausalLM" else r".*\.mlp"


LAYOUTS: dict[str, Any] = {
    "own": lambda model: wh.annotate(model, {_layers(model): wh.split()}),
    "shared": lambda model: wh.annotate(model, {_layers(model): wh.split(size=2, rows="shared")}),
    "replica": lambda model: wh.replica()(model),
    "whole": lambda model: wh.split()(model),
    "stages": lambda model: wh.annotate(
        wh.annotate(model, {_layers(model): wh.split()}),
        {
            r"model\.embed_tokens|model\.layers\.0": wh.stage(),
            r"model\.layers\.1|model\.norm|lm_head": wh.stage(),
        },
        inside=wh.pipeline(num_micro_batches=2),
    ),
}


def _both(kind: str, aux_loss_coef: float) -> tuple[Any, Any]:
    """(one process' model, that for ranks)"""
    if kind != "upcycled":
        return build(kind), moe.from_huggingface(build(kind))
    options = {"num_experts": 5, "noise": 0.5, "aux_loss_coef": aux_loss_coef}
    model = moe.convert(dense("Llama").train(), {r".*\.mlp": options})
    return copy.deepcopy(model), model


def _trained(rank: int, n: int, kind: str, layout: str, counts: list[int]) -> tuple[float, float, float, list[int]]:
    """Errors of outputs, of gradients and of weights after two steps of SGD; experts of this rank's layers."""
    staged = layout == "stages"
    alone, model = _both(kind, 0.0 if staged else 0.1)  # a pipeline's balance is that of a micro-batch
    LAYOUTS[layout](model)
    wh.parallelize(model)
    index, feeds = wh.data_rank(model)
    counts = [4 * count if staged else count for count in counts[:feeds]]  # masks of one sample are recorded otherwise
    here = slice(sum(counts[:index]), sum(counts[: index + 1]))
    outputs, gradients = [], []
    for step in range(2):
        ids = batch(2 * sum(counts))[step::2]
        found, expected = _step(model, ids[here]), _step(alone, ids)
        outputs.append(0.0 if staged else _error(found.logits, expected.logits[here]))
        gradients.append(relative_error(gradients_of(model), gradients_of(alone)))
        for m in (model, alone):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
    experts = [len(p) for name, p in model.named_parameters() if re.search(r"\.experts\.(w1|down_proj)$", name)]
    return max(outputs), max(gradients), relative_error(wh.full_state_dict(model), alone.state_dict()), experts


REFUSED = ("Olmoe", "whole")  # its attention normalises queries over all heads


CASES = [
    *((kind, layout, 4, [3, 1, 2, 2]) for kind in [*MODELS, "upcycled"] for layout in ("own", "whole")),
    *(("Qwen2Moe", layout, 2, [2, 2]) for layout in LAYOUTS),
]


@pytest.mark.parametrize(("kind", "layout", "n", "counts"), [case for case in CASES if case[:2] != REFUSED])
@pytest.mark.matrix(keep=1)
def test_experts_of_transformers_on_ranks_are_one_process(kind: str, layout: str, n: int, counts: list[int]) -> None:
    for *errors, experts in world(n, _trained, kind, layout, counts, timeout=300):
        assert max(errors) < BAR, errors
        assert experts
        assert layout == "replica" or (layout, n) == ("stages", 2) or max(experts) < 5


def _compiled(rank: int, n: int, layout: str) -> tuple[float, list[int]]:
    """(error of gradients over steps of different lengths, graphs after two steps and at the end)"""
    alone, model = _both("Mixtral", 0.0)
    LAYOUTS[layout](model)
    wh.parallelize(model)
    backend, graphs = counted()
    for layer in model.model.layers:
        layer.compile(backend=backend)
    errors, seen = [], []
    for rows in ([2, 3], [4, 2], [3, 5], [2, 2]):
        ids = batch(sum(rows))
        _step(model, ids[: rows[0]] if rank == 0 else ids[rows[0] :])
        _step(alone, ids)
        errors.append(relative_error(gradients_of(model), gradients_of(alone)))
        seen.append(len(graphs))
    return max(errors), [seen[1], seen[-1]]


@pytest.mark.parametrize("layout", ["own", "replica"])
@pytest.mark.matrix(keep=0)
def test_compiled_layers_of_transformers(layout: str) -> None:
    for error, (seen, graphs) in world(2, _compiled, layout, timeout=300):
        assert error < BAR
        assert 0 < seen == graphs


def _built_on_meta(rank: int, n: int, kind: str) -> float:
    alone = build(kind)
    with torch.device("meta"):
        model = type(alone)(alone.config)
    wh.annotate(moe.from_huggingface(model), {r".*\.experts": wh.split()})
    wh.parallelize(model, weights=alone.state_dict(), init_fn=model._init_weights)
    ids = batch(2 * n)
    _step(model, ids[2 * rank : 2 * rank + 2])
    _step(alone, ids)
    return relative_error(gradients_of(model), gradients_of(alone))


@pytest.mark.parametrize("kind", ["Mixtral", "DeepseekV3"])
@pytest.mark.matrix(keep=0)
def test_what_is_built_on_meta_loads_its_experts(kind: str) -> None:
    assert max(world(2, _built_on_meta, kind, timeout=300)) < BAR
