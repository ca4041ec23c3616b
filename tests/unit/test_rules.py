"""The pure half of the split rules: which parameters are cut, how, and what cannot be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import whale_torch as wh
from whale_torch.planning.layout import Shard
from whale_torch.planning.plan import Plan
from whale_torch.planning.rules import Cut, neighbour_roles, replicated
from whale_torch.planning.rules import registry as rules
from whale_torch.strategies.split_rules import SplitModule, register_split_rule, run_class


def cuts(model: nn.Module, size: int = 4, **options: Any) -> dict[str, Cut]:
    """Cuts of a model that is split as a whole."""
    plan = wh.plan(wh.split(**options)(model), cluster=wh.Cluster.of(ranks_per_node=size))
    assert Plan.from_json(plan.to_json()) == plan
    return {cut.module: cut for cut in plan.cuts}


def roles(*children: nn.Module) -> list[str]:
    found = neighbour_roles(children)
    return [found[child].name for child in children if child in found]


@pytest.mark.parametrize(
    ("children", "expected"),
    [
        ([nn.Linear(8, 12), nn.GELU(), nn.Dropout(), nn.Linear(12, 8)], ["columns", "rows"]),
        ([nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)], ["columns", "columns", "rows"]),
        ([nn.Linear(8, 12)], ["columns"]),
        ([nn.Linear(12, 8)], ["rows"]),
        ([nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8)], ["columns", "rows"]),  # each alone, narrowing
        ([nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)], ["columns", "columns"]),
        ([nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 13)], ["columns", "rows"]),
        ([nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 9, 3)], ["columns", "rows"]),
        ([nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(6 * 4, 99)], ["columns", "rows"]),
        ([nn.Conv2d(3, 6, 3), nn.Linear(25, 99)], ["columns", "columns"]),
        ([nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 9), nn.Linear(9, 8)], ["columns", "rows"] * 2),
        ([nn.Conv2d(4, 8, 3, groups=2)], []),
    ],
)  # fmt: skip
def test_roles_of_neighbours(children: list[nn.Module], expected: list[str]) -> None:
    assert roles(*children) == expected


def test_a_flattened_convolution_gives_a_linear_its_pixels_side_by_side() -> None:
    found = cuts(nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(24, 99)))
    assert found["0"].widths == (2, 2, 1, 1)
    assert found["2"].widths == (8, 8, 4, 4)


def test_a_linear_by_columns_and_by_rows() -> None:
    found = cuts(nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 8)))
    widths = (3, 3, 2, 2)
    assert dict(found["0"].shards) == {"weight": Shard(0, widths, (10, 8)), "bias": Shard(0, widths, (10,))}
    assert dict(found["2"].shards) == {"weight": Shard(1, widths, (8, 10))}
    assert (found["0"].elements_in, found["0"].elements_out) == (8, 0)
    assert (found["2"].elements_in, found["2"].elements_out) == (0, 8)


def test_cut_forces_the_role() -> None:
    assert {cut.role for cut in cuts(nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 8)), cut="rows").values()} == {
        "rows"
    }
    assert {cut.role for cut in cuts(nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 8)), cut="columns").values()} == {
        "columns"
    }


def test_cut_holds_for_the_model_itself() -> None:
    assert cuts(nn.Linear(8, 10), cut="rows")[""].role == "rows"
    assert cuts(nn.Linear(10, 8), cut="columns")[""].role == "columns"
    assert cuts(nn.Linear(10, 8))[""].role == "rows"


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (nn.Embedding(9, 6), {"cut": "rows"}, r"cut='rows'; what is cut: '0' \(Embedding by columns\)\."),
        (nn.MultiheadAttention(8, 4), {"cut": "rows"}, r"cut='rows'; .*'0' \(MultiheadAttention by heads\)\."),
        (nn.Conv2d(8, 8, 3, groups=4), {"cut": "columns"}, r"cut='columns'; .*'0' \(Conv2d by groups\)\."),
        (nn.BatchNorm2d(8), {"cut": "rows"}, r"cut='rows'; .*'0' \(BatchNorm2d by channels\)\."),
        (nn.Linear(10, 8), {"chunked_loss": True}, r"chunked_loss=True; .*'0' \(Linear by rows\)\."),
        (nn.Linear(8, 10), {"chunked_loss": True, "cut": "rows"}, r"chunked_loss=True; .*'0' \(Linear by rows\)\."),
        (nn.Conv2d(4, 8, 3), {"chunked_loss": True}, r"chunked_loss=True; .*'0' \(Conv2d by columns\)\."),
        (nn.LayerNorm(8), {"cut": "rows"}, r"cut='rows'; what is cut: nothing\."),
    ],
)
def test_an_option_that_nobody_follows(module: nn.Module, options: dict[str, Any], said: str) -> None:
    with pytest.raises(wh.PlanError, match=said) as caught:
        cuts(nn.Sequential(module), **options)
    assert caught.value.where and "test_rules.py:" in caught.value.where and caught.value.fix
    cuts(nn.Sequential(module, nn.Linear(8, 10)), **{**options, "cut": "columns"})


def test_an_embedding_by_features_and_by_words() -> None:
    assert cuts(nn.Sequential(nn.Embedding(9, 6)))["0"].shards == (("weight", Shard(1, (2, 2, 1, 1), (9, 6))),)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9, bias=False))
    model[1].weight = model[0].weight
    found = cuts(model)
    assert found["0"].role == "vocabulary"
    assert found["0"].shards == found["1"].shards == (("weight", Shard(0, (3, 2, 2, 2), (9, 6))),)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_options_of_an_embedding_that_need_whole_rows(option: dict[str, Any]) -> None:
    name = next(iter(option))
    with pytest.raises(wh.PlanError, match=f"Embedding '0' with {name}="):
        cuts(nn.Sequential(nn.Embedding(9, 6, **option)))


def test_attention_by_heads() -> None:
    cut = cuts(nn.Sequential(nn.MultiheadAttention(12, 6)))["0"]
    widths = (2, 2, 1, 1)
    assert dict(cut.shards) == {
        "in_proj_weight": Shard(0, widths, (36, 12), blocks=3, unit=2),
        "in_proj_bias": Shard(0, widths, (36,), blocks=3, unit=2),
        "out_proj.weight": Shard(1, widths, (12, 12), unit=2),
    }
    keys = dict(cuts(nn.MultiheadAttention(12, 6, kdim=5, vdim=7, bias=False))[""].shards)
    assert keys["k_proj_weight"] == Shard(0, widths, (12, 5), unit=2)
    assert "in_proj_bias" not in keys


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_attention_with_keys_of_no_sample(option: str) -> None:
    with pytest.raises(wh.PlanError, match=f"MultiheadAttention '0' with {option}=True"):
        cuts(nn.Sequential(nn.MultiheadAttention(12, 6, **{option: True})))


def test_convolutions() -> None:
    found = cuts(nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 1), nn.Conv2d(8, 16, 1, groups=8)))
    assert found["0"].shards[0] == ("weight", Shard(0, (2, 2, 1, 1), (6, 3, 3, 3)))
    assert found["1"].shards == (("weight", Shard(1, (2, 2, 1, 1), (5, 6, 1, 1))),)
    assert dict(found["2"].shards)["bias"] == Shard(0, (2, 2, 2, 2), (16,), unit=2)


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(1, 5, 8))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Own(8, 8), "Own 'layer', a subclass of Linear that may compute something else, with parameters {'weight'"),
        (nn.Bilinear(4, 4, 4), "no split rule for Bilinear 'layer', with parameters"),
        (nn.LSTM(4, 4), "no split rule for LSTM 'layer'"),
        (nn.ConvTranspose2d(4, 4, 2), "no split rule for ConvTranspose2d 'layer'"),
        (Table(), "no split rule for Table 'layer', with parameters {'table': \\(1, 5, 8\\)}"),
        (parametrizations.weight_norm(nn.Linear(8, 8)), "'layer' .ParametrizedLinear. has parametrized parameters"),
        (nn.utils.spectral_norm(nn.Linear(8, 8)), "Linear 'layer' has parameters \\['bias', 'weight_orig'\\]"),
        (prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5), "Linear 'layer' has parameters ..bias., .weight_orig"),
    ],
)  # fmt: skip
def test_modules_without_a_rule(module: nn.Module, text: str) -> None:
    model = nn.Module()
    model.layer = module
    with pytest.raises(wh.PlanError, match=text) as raised:
        cuts(model)
    fix = raised.value.fix or ""
    assert "register_split_rule" in fix or "remove" in fix
    assert "test_rules.py:" in (raised.value.where or "")


def test_modules_with_vectors_only_stay_whole() -> None:
    model = nn.Sequential(Scale(), nn.LayerNorm(8), nn.PReLU(8), nn.InstanceNorm1d(8, affine=True), nn.RMSNorm((4, 8)))
    assert cuts(model) == {}


def test_replicated_keeps_a_type_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_REPLICATED", set(rules._REPLICATED))
    replicated(Table)
    assert cuts(nn.Sequential(Table())) == {}


def test_a_rule_is_registered_and_taken_back() -> None:
    class Run(SplitModule, Table):
        pass

    def plan(module: nn.Module, name: str, context: Any) -> list[Cut]:
        return [
            Cut(name, "table", "words", (2,) * context.size, (("table", Shard(2, (2,) * context.size, (1, 5, 8))),))
        ]

    take_back = register_split_rule(Table, plan=plan, classes={"words": Run}, name="table")
    cut = cuts(nn.Sequential(Table()))["0"]
    assert cut.role == "words"
    assert run_class(cut, Table) is Run
    take_back()
    with pytest.raises(wh.PlanError, match="no split rule for Table"):
        cuts(nn.Sequential(Table()))


# --- models with a plan of their own, by duck typing


class Attention(nn.Module):
    def __init__(self, keys: int = 4, heads: int = 8, extra: nn.Module | None = None):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=keys)
        self.head_dim = 3
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, heads * 3), nn.Linear(8, keys * 3), nn.Linear(8, keys * 3)
        self.norm = nn.LayerNorm(3)
        self.o_proj = nn.Linear(heads * 3, 8)
        if extra is not None:
            self.extra = extra


class Block(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.attention = Attention(**options)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)


class Planned(nn.Module):
    _tp_plan: dict[str, str] | None = None

    def __init__(self, base: dict[str, str] | None = None, own: dict[str, str] | None = None, **options: Any):
        super().__init__()
        self.config = SimpleNamespace(base_model_tp_plan=base)
        self._tp_plan = own
        self.words = nn.Embedding(9, 8)
        self.layers = nn.ModuleList([Block(**options)])
        self.head = nn.Linear(8, 5)


PROJECTIONS = {
    "layers.*.attention.q_proj": "colwise",
    "layers.*.attention.k_proj": "colwise",
    "layers.*.attention.v_proj": "colwise",
}
PLAN = {**PROJECTIONS, "layers.*.attention.o_proj": "rowwise", "words": "embedding_rowwise"}


@pytest.mark.parametrize("where", ["base", "own"])
def test_a_plan_cuts_attention_as_a_whole(where: str) -> None:
    found = cuts(Planned(**{where: {**PLAN, "head": "colwise_gather_output", "layers.*.down": "rowwise"}}), size=2)
    assert {name: cut.role for name, cut in found.items()} == {
        "words": "gathered",
        "layers.0.attention": "heads",
        "layers.0.up": "columns",
        "layers.0.down": "rows",
        "head": "columns",
    }
    shards = dict(found["layers.0.attention"].shards)
    assert shards["q_proj.weight"] == Shard(0, (2, 2), (24, 8), unit=6)
    assert shards["k_proj.bias"] == Shard(0, (2, 2), (12,), unit=3)
    assert shards["o_proj.weight"] == Shard(1, (2, 2), (8, 24), unit=6)
    assert "o_proj.bias" not in shards


def test_key_value_heads_that_the_ranks_cannot_share() -> None:
    with pytest.raises(wh.PlanError, match=r"'layers\.0\.attention' has 4 key/value heads, which 3 ranks cannot share"):
        cuts(Planned(PLAN), size=3)


@pytest.mark.parametrize(
    ("plan", "options", "text"),
    [
        (PLAN, {"extra": nn.Linear(8, 8)}, r"holds 'extra' \(Linear\), which its model's plan does not name"),
        ({**PLAN, "layers.*.attention.q_proj": "mla_kv_a_proj"}, {}, r"planned as 'mla_kv_a_proj' by its model"),
        (PROJECTIONS, {}, "one projection by rows is wanted"),
    ],
)
def test_attention_that_a_plan_does_not_describe(plan: dict[str, str], options: dict[str, Any], text: str) -> None:
    with pytest.raises(wh.PlanError, match=text):
        cuts(Planned(plan, **options), size=2)


def test_a_part_of_attention_alone_is_a_layer_like_any_other() -> None:
    model = Planned(PLAN)
    wh.annotate(model, {r"layers\.0\.attention\.q_proj": wh.split()})
    plan = wh.plan(model, cluster=wh.Cluster.of(ranks_per_node=2))
    assert [(cut.module, cut.rule, cut.role) for cut in plan.cuts] == [
        ("layers.0.attention.q_proj", "Linear", "columns")
    ]
