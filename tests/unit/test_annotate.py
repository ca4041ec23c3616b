"""wh.annotate: scopes by name on a model nobody edits."""

import pytest
from torch import nn

from whale_torch import scopes as wh
from whale_torch.annotation import annotations_of, effective_annotations
from whale_torch.errors import AnnotationError


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.ffn = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


class Bert(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.embeddings = nn.Embedding(10, 4)
        self.layer = nn.ModuleList(Layer() for _ in range(layers))
        self.cls = nn.Linear(4, 10)


def kinds(module):
    return [annotation.kind for annotation in annotations_of(module)]


def own(model):
    return {name: annotations_of(module) for name, module in model.named_modules() if annotations_of(module)}


def test_stages_in_dict_order_inside_one_pipeline():
    model = Bert()
    returned = wh.annotate(
        model,
        {r"embeddings|layer\.[01]": wh.stage(), r"layer\.[23]|cls": wh.stage()},
        inside=(wh.replica(), wh.pipeline(num_micro_batches=8)),
    )
    assert returned is model and set(own(model)) == {"embeddings", "layer.0", "layer.1", "layer.2", "layer.3", "cls"}
    effective = effective_annotations(model, complete=True)
    assert {tuple(x.kind for x in v) for k, v in effective.items() if v} == {("replica", "pipeline", "stage")}
    assert len({v[:2] for v in effective.values() if v}) == 1  # one entry of what is inside=
    stages = [effective[name][2] for name in ("embeddings", "layer.1.ffn.0", "layer.2", "layer.3.attention", "cls")]
    assert stages[0] == stages[1] != stages[2] == stages[3] == stages[4] and stages[0].entry < stages[2].entry
    assert effective["cls"][1].call == "wh.pipeline(num_micro_batches=8)" and effective["layer"] == ()
    assert stages[0].site.endswith("test_annotate.py:" + stages[0].site.rpartition(":")[2])


def test_one_scope_object_under_two_patterns_is_two_entries():
    model, stage = Bert(2), wh.stage()
    wh.annotate(model, {r"layer\.0": stage, r"layer\.1": stage}, inside=wh.pipeline())
    first, second = annotations_of(model.layer[0]), annotations_of(model.layer[1])
    assert first[0] == second[0] and first[1] != second[1] and first[1].site == second[1].site


def test_the_pattern_matches_whole_names_and_the_root():
    model = Bert(11)
    wh.annotate(model, {r"layer\.1": wh.split()})
    assert list(own(model)) == ["layer.1"]
    wh.annotate(model, {"": wh.recompute()})
    assert kinds(model) == ["recompute"]


def test_tuple_of_scopes_is_outer_to_inner():
    model = wh.annotate(Bert(), {r"layer\.\d+\.ffn": (wh.replica(), wh.split(size=2), wh.recompute())})
    assert kinds(model.layer[3].ffn) == ["replica", "split", "recompute"]


def test_a_module_matched_twice_nests_in_dict_order_or_else_the_other_way():
    model = wh.annotate(Bert(), {"cls": wh.recompute(), r"c.*": wh.split()})
    assert kinds(model.cls) == ["recompute", "split"]
    model = wh.annotate(Bert(), {"cls": wh.split(), r"c.*": wh.replica()})
    assert kinds(model.cls) == ["replica", "split"]
    model = wh.annotate(Bert(), {"cls": wh.split(), "c.*": wh.stage(), ".*s": wh.pipeline(), "cl[s]": wh.replica()})
    assert kinds(model.cls) == ["pipeline", "stage", "replica", "split"]


def test_container_and_member():
    model = wh.annotate(Bert(), {r"layer\.\d+\.ffn": wh.split(), r"layer\.\d+": wh.replica()})
    assert [x.kind for x in effective_annotations(model)["layer.0.ffn.1"]] == ["replica", "split"]
    model = wh.annotate(Bert(), {r"layer\.0.*": wh.split()})  # the same entry on the container and its members
    assert [x.kind for x in effective_annotations(model)["layer.0.ffn.1"]] == ["split"]


def test_what_is_there_stays_inside_and_open_scopes_stay_outside():
    model = Bert()
    wh.split(model.layer[0].ffn)
    with wh.replica():
        wh.annotate(model, {r"layer\.0.*": wh.recompute()})
    assert kinds(model.layer[0].ffn) == ["replica", "recompute", "split"]
    assert [x.kind for x in effective_annotations(model)["layer.0.ffn"]] == ["replica", "recompute", "split"]


def test_a_module_with_two_names_can_be_matched_by_either():
    model = Bert()
    model.decoder = model.embeddings
    wh.annotate(model, {"decoder": wh.split()})
    assert kinds(model.embeddings) == ["split"]


def raises(model, patterns, inside=None):
    before = own(model)
    with pytest.raises(AnnotationError) as caught:
        wh.annotate(model, patterns, inside=inside)
    assert own(model) == before  # nothing is changed where it raises
    assert "test_annotate.py:" in caught.value.where and caught.value.fix
    return caught.value


def test_a_pattern_that_matches_nothing_gives_close_names():
    error = raises(Bert(), {"cls": wh.split(), r"layer\.0\.atention": wh.split()})
    assert error.what.startswith(r"annotate(): pattern 'layer\\.0\\.atention' matches no module. Close names: ")
    assert "'layer.0.attention'" in error.what
    error = raises(Bert(1), {"zzz": wh.split()})
    assert error.what == "annotate(): pattern 'zzz' matches no module. The model has 8 names."
    assert "'embeddings'" in error.fix


def test_an_invalid_expression():
    error = raises(Bert(), {"layer.(0": wh.split()})
    assert "pattern 'layer.(0' is not a regular expression: missing ), unterminated subpattern" in error.what


@pytest.mark.parametrize("value", [wh.split, "split", None, (wh.replica(), wh.split), [wh.split()]])
def test_a_value_that_is_no_scope(value):
    assert "annotate(): pattern 'cls' has " in raises(Bert(), {"cls": value}).what


def test_bad_arguments():
    assert "inside has 3, which is not a scope" in raises(Bert(), {"cls": wh.split()}, inside=3).what
    assert "no pattern was given" in raises(Bert(), {}, inside=wh.pipeline()).what
    assert "pattern 3 is not a regular expression" in raises(Bert(), {3: wh.split()}).what
    with pytest.raises(AnnotationError, match=r"first argument is dict, not an nn\.Module"):
        wh.annotate({"cls": wh.split()}, None)


def test_two_patterns_that_do_not_nest_are_named():
    error = raises(Bert(), {"cls": wh.stage(), "c.*": wh.stage()}, inside=wh.pipeline())
    assert error.what.startswith("annotate(): module 'cls': wh.stage() at ")
    assert error.what.endswith("Patterns: 'cls' and 'c.*'.")
    error = raises(Bert(), {r"layer\.0": wh.stage(), r"layer\.0\.ffn": wh.stage()}, inside=wh.pipeline())
    assert error.what.startswith("annotate(): module 'layer.0.ffn': wh.stage() at ")
    assert error.what.endswith(r"Patterns: 'layer\\.0' and 'layer\\.0\\.ffn'.")


def test_a_container_that_is_split_cannot_hold_what_was_replicated_before():
    model = Bert()
    wh.replica(model.layer[1].ffn)
    error = raises(model, {"cls": wh.split(), "layer": wh.split()})
    assert "module 'layer.1.ffn': wh.replica() at " in error.what and error.what.endswith("Patterns: 'layer'.")
