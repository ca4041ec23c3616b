"""Annotations: frozen data, the merge rule, legal nestings, what a module inherits."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch import nn

from whale_torch.annotation import (
    KINDS,
    Annotation,
    annotate_module,
    annotations_of,
    check_nesting,
    effective_annotations,
    inherited_annotations,
)
from whale_torch.errors import AnnotationError


def a(kind, entry=0, **options):
    return Annotation(kind, tuple(sorted(options.items())), f"train.py:{entry}", entry)


def chain(*kinds):
    return tuple(a(kind, entry) for entry, kind in enumerate(kinds))


def kinds(annotations):
    return [annotation.kind for annotation in annotations]


def test_annotation_is_frozen_data():
    one = a("split", 3, size=8, rows="own")
    assert one.call == "wh.split(rows='own', size=8)" and str(one) == "wh.split(rows='own', size=8) at train.py:3"
    assert one.get("size") == 8 and one.get("gather") is None and one.get("gather", "x") == "x"
    assert one == a("split", 3, rows="own", size=8) and one != a("split", 4, rows="own", size=8)
    assert hash(one) == hash(copy.deepcopy(one)) and pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.kind = "replica"
    assert a("replica", reduce_dtype=torch.bfloat16).call == "wh.replica(reduce_dtype=torch.bfloat16)"
    assert a("pipeline", batch_dim=(("mask", None),)).call == "wh.pipeline(batch_dim={'mask': None})"


def test_annotations_survive_copies_and_stay_out_of_state_dict():
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(4))
    before = list(model.state_dict())
    annotate_module(model[0], (a("replica", 1, reduce_dtype=torch.float16),), (a("split", 2, size=2),))
    annotate_module(model[1], (), (a("recompute", 3),))
    model(torch.ones(1, 2))  # the lazy module changes its class and keeps its annotations
    assert type(model[1]) is nn.Linear and kinds(annotations_of(model[1])) == ["recompute"]
    assert list(model.state_dict()) == before and list(nn.Linear(2, 3).state_dict()) == list(model[0].state_dict())
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)):
        assert effective_annotations(other) == effective_annotations(model)


def test_merge_rule_open_scopes_then_new_then_existing():
    module = nn.Linear(2, 2)
    outer, split, memory, pipe, stage = chain("replica", "split", "recompute", "pipeline", "stage")
    annotate_module(module, (outer, split))
    annotate_module(module, (outer, split))
    assert annotations_of(module) == (outer, split)
    annotate_module(module, (outer,), (memory,))
    assert annotations_of(module) == (outer, memory, split)
    annotate_module(module, (outer, pipe, stage))
    assert annotations_of(module) == (outer, pipe, stage, memory, split)


def test_nothing_is_written_where_the_result_does_not_nest():
    module = nn.Linear(2, 2)
    annotate_module(module, (), (a("replica", 1),))
    with pytest.raises(AnnotationError, match=r"module 'Linear': wh.replica\(\) at train.py:1 cannot be inside"):
        annotate_module(module, (), (a("split", 2),))
    with pytest.raises(AnnotationError, match=r"module 'head': wh.replica"):
        annotate_module(module, (), (a("split", 2),), name="head")
    assert annotations_of(module) == (a("replica", 1),)


LEGAL = [
    "replica", "split", "stage", "pipeline", "auto_parallel", "recompute", "cpu_offload",
    "replica pipeline stage split", "replica pipeline stage replica", "replica pipeline stage replica split",
    "pipeline stage", "replica split", "replica stage", "stage split", "auto_parallel stage",
    "auto_parallel replica pipeline stage split", "auto_parallel split", "cpu_offload auto_parallel",
    "cpu_offload replica recompute pipeline cpu_offload stage recompute split recompute", "recompute recompute",
]  # fmt: skip
ILLEGAL = [
    ("split", "split", "keep one"), ("split", "replica", "exchange them"), ("replica", "replica", "keep one"),
    ("stage", "stage", "side by side"), ("split", "stage", "exchange them"), ("split", "pipeline", "exchange them"),
    ("pipeline", "pipeline", "a model has one"), ("stage", "pipeline", "outside its stages"),
    ("pipeline", "split", "with wh.stage"), ("pipeline", "replica", "with wh.stage"),
    ("replica", "auto_parallel", "outermost"), ("auto_parallel", "auto_parallel", "outermost"),
    ("pipeline", "auto_parallel", "outermost"), ("stage", "auto_parallel", "outermost"),
    ("split", "auto_parallel", "outermost"),
]  # fmt: skip


@pytest.mark.parametrize("order", LEGAL)
def test_legal_nestings(order):
    check_nesting(chain(*order.split()), "x")


@pytest.mark.parametrize(("outer", "inner", "fix"), ILLEGAL)
@pytest.mark.parametrize("between", [(), ("recompute", "cpu_offload")])
def test_illegal_nestings_name_both_sites_and_the_fix(outer, inner, fix, between):
    annotations = (a(outer, 11), *(a(kind, 12) for kind in between), a(inner, 22))
    with pytest.raises(AnnotationError) as caught:
        check_nesting(annotations, "block.fc")
    what = f"module 'block.fc': wh.{inner}() at train.py:22 cannot be inside wh.{outer}() at train.py:11."
    assert caught.value.what == what and fix in caught.value.fix
    assert caught.value.where == "train.py:22, inside train.py:11"


def test_every_pair_of_kinds_is_legal_or_has_its_own_message():
    legal = set()
    for outer in KINDS:
        for inner in KINDS:
            try:
                check_nesting(chain(outer, inner), None)
                legal.add((outer, inner))
            except AnnotationError as error:
                assert error.what.startswith(f"wh.{inner}()") and error.fix
    memory = {"recompute", "cpu_offload"}
    parallel = {pair for pair in legal if not memory & set(pair)}
    assert len(legal) - len(parallel) == 7 * 7 - 5 * 5
    assert parallel == {
        ("auto_parallel", "replica"), ("auto_parallel", "pipeline"), ("auto_parallel", "stage"),
        ("auto_parallel", "split"), ("replica", "pipeline"), ("replica", "stage"), ("replica", "split"),
        ("pipeline", "stage"), ("stage", "split"), ("stage", "replica"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("order", "pair"),
    [
        ("pipeline stage replica pipeline", ("pipeline", "pipeline")),
        ("pipeline stage replica stage", ("stage", "stage")),
        ("stage replica pipeline", ("pipeline", "stage")),
    ],
)
def test_a_second_pipeline_or_stage_is_illegal_at_any_distance(order, pair):
    with pytest.raises(AnnotationError, match=rf"wh.{pair[0]}\(\) at .* cannot be inside wh.{pair[1]}\(\)"):
        check_nesting(chain(*order.split()), "x")


def test_max_splits():
    check_nesting(chain("split", "split"), "x", max_splits=2)
    with pytest.raises(
        AnnotationError, match=r"wh.split\(\) at train.py:2 cannot be inside wh.split\(\) at train.py:1"
    ):
        check_nesting(chain("split", "split", "split"), "x", max_splits=2)


def test_effective_annotations_add_the_parents_in_named_modules_order():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    replica, split = a("replica", 1), a("split", 2)
    annotate_module(model[1], (replica,))
    annotate_module(model[1][0], (replica, split))
    effective = effective_annotations(model)
    assert list(effective) == [name for name, _ in model.named_modules()]
    assert effective == {"": (), "0": (), "1": (replica,), "1.0": (replica, split), "1.1": (replica,)}


def test_a_pipeline_put_on_the_container_completes_its_stages():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    replica = a("replica", 0)
    annotate_module(model[0], (replica, a("stage", 1)))
    annotate_module(model[1], (replica, a("stage", 2)))
    effective_annotations(model)
    text = r"module '0': wh.stage\(\) at train.py:1 is not inside wh.pipeline\(\), but directly inside wh.replica\(\)"
    with pytest.raises(AnnotationError, match=text) as caught:
        effective_annotations(model, complete=True)
    assert "with wh.pipeline(num_micro_batches=...):" in caught.value.fix and caught.value.where == "train.py:1"
    annotate_module(model, (replica,), (a("pipeline", 3),))
    assert kinds(effective_annotations(model, complete=True)["1"]) == ["replica", "pipeline", "stage"]


def test_effective_annotations_find_what_containment_makes_illegal():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    annotate_module(model[0], (), (a("split", 5),))
    annotate_module(model[0][0], (), (a("replica", 6),))
    with pytest.raises(AnnotationError, match=r"module '0.0': wh.replica\(\) at train.py:6 cannot be inside wh.split"):
        effective_annotations(model)
    assert kinds(inherited_annotations(model)["0.0"]) == ["split", "replica"]
    assert kinds(inherited_annotations(model, {model[0]: ()})["0.0"]) == ["replica"]


def test_a_shared_module_has_one_entry_under_its_first_name():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"first": nn.Sequential(shared), "second": nn.Sequential(shared)})
    annotate_module(model["first"], (), (a("replica", 1),))
    annotate_module(model["second"], (), (a("split", 2),))
    effective = effective_annotations(model)
    assert kinds(effective["first.0"]) == ["replica"] and "second.0" not in effective
