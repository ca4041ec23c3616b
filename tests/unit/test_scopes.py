"""Scopes: forms, options, what an open scope captures, and that nothing of it is left behind."""

import asyncio
import contextlib
import copy
import inspect
import pickle
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from whale_torch import parallelize
from whale_torch import scopes as wh
from whale_torch.annotation import KINDS, annotations_of, effective_annotations
from whale_torch.capture import open_scopes
from whale_torch.errors import AnnotationError
from whale_torch.scopes import _OPTIONS

SCOPES = {kind: getattr(wh, kind) for kind in KINDS}


def kinds(module):
    return [annotation.kind for annotation in annotations_of(module)]


def num_hooks():
    return sum(
        len(getattr(torch_module, f"_global_{what}_registration_hooks")) for what in ("module", "parameter", "buffer")
    )


def line():
    return inspect.currentframe().f_back.f_lineno


def here(number):
    return f"{Path(__file__).relative_to(Path.cwd())}:{number}"


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert num_hooks() == 0 and open_scopes() == ()


class Plain(nn.Module):
    """A model whose older modules a scope may meet."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)


# ---- forms


@pytest.mark.parametrize("kind", KINDS)
def test_every_scope_has_every_form(kind):
    scope = SCOPES[kind]
    with scope():
        built = nn.Linear(2, 2)
    called, made = scope(nn.Linear(2, 2)), scope()(nn.Linear(2, 2))

    @scope
    class Bare(nn.Linear):
        pass

    @scope()
    class Parenthesised(nn.Linear):
        pass

    @scope
    def bare():
        return nn.Linear(2, 2)

    @scope()
    def parenthesised():
        return nn.Linear(2, 2)

    named = wh.annotate(nn.Sequential(nn.Linear(2, 2)), {"0": scope()})[0]
    modules = [built, called, made, Bare(2, 2), Parenthesised(2, 2), bare(), parenthesised(), named]
    assert [kinds(module) for module in modules] == [[kind]] * 8
    assert len({annotations_of(module)[0].entry for module in modules}) == 8
    assert repr(scope()) == f"wh.{kind}()"


def test_the_call_on_a_module_returns_it_and_keeps_its_state():
    module = nn.Linear(2, 2)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    assert wh.split(module, size=4, gather="error") is module
    assert annotations_of(module)[0].call == "wh.split(gather='error', size=4)"
    assert list(module.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_class_decorator_keeps_the_signature_and_works_for_subclasses():
    @wh.split(size=2)
    class Head(nn.Module):
        def __init__(self, dim, *, bias: bool = True):
            """Builds a head."""
            super().__init__()
            self.scale = nn.Parameter(torch.ones(dim))
            self.fc = nn.Linear(dim, dim, bias=bias)

    class Wide(Head):
        def __init__(self, dim):
            super().__init__(2 * dim, bias=False)
            self.extra = nn.Linear(dim, dim)
            self.shift = nn.Parameter(torch.zeros(dim))

    assert list(inspect.signature(Head).parameters) == ["dim", "bias"] and Head.__init__.__doc__ == "Builds a head."
    head, wide = Head(3, bias=False), Wide(3)
    assert kinds(head) == kinds(head.fc) == kinds(wide) == kinds(wide.fc) == ["split"] and head.fc.bias is None
    assert annotations_of(head)[0].entry != annotations_of(wide)[0].entry
    assert kinds(wide.extra) == [] and [a.kind for a in effective_annotations(wide)["extra"]] == ["split"]
    assert isinstance(wide, Head) and copy.deepcopy(wide).state_dict().keys() == wide.state_dict().keys()


def test_stacked_decorators_and_a_decorated_class_inside_an_open_scope():
    @wh.replica
    @wh.split
    class Head(nn.Linear):
        pass

    @wh.split
    class Ffn(nn.Linear):
        pass

    assert kinds(Head(2, 2)) == ["replica", "split"]
    with wh.replica(), wh.recompute():
        model = nn.Sequential(Ffn(2, 2), nn.Linear(2, 2))
    assert kinds(model[0]) == ["replica", "recompute", "split"] and kinds(model[1]) == ["replica", "recompute"]


def test_builder_functions_each_call_an_entry():
    @wh.stage
    def block(dim, depth=1):
        """Builds a block."""
        return nn.Sequential(*[nn.Linear(dim, dim) for _ in range(depth)])

    with wh.pipeline(num_micro_batches=2):
        model = nn.Sequential(block(2), block(2, depth=3))
    assert block.__doc__ == "Builds a block." and list(inspect.signature(block).parameters) == ["dim", "depth"]
    effective = effective_annotations(model, complete=True)
    assert [a.kind for a in effective["1.2"]] == ["pipeline", "stage"]
    assert effective["0"][1] == effective["0.0"][1] != effective["1"][1] == effective["1.2"][1]


def test_hugging_face_like_builder():
    class Pretrained(nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings = nn.Embedding(10, 4)
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
            self.head = nn.Linear(4, 10, bias=False)
            self.register_buffer("positions", torch.arange(4))

        @classmethod
        def from_pretrained(cls, state):
            with torch.device("meta"):
                model = cls()
            for name, value in state.items():  # loading replaces the parameters of modules born inside the scope
                parent, _, leaf = name.rpartition(".")
                owner = model.get_submodule(parent)
                if leaf in owner._parameters:
                    setattr(owner, leaf, nn.Parameter(value))
                else:
                    owner.register_buffer(leaf, value)
            model.head.weight = model.embeddings.weight
            return model

    state = Pretrained().state_dict()
    build = wh.split(lambda: Pretrained.from_pretrained(state))
    model = build()
    assert all(kinds(module) == ["split"] for module in model.modules())
    assert model.head.weight is model.embeddings.weight and model.state_dict().keys() == state.keys()
    with wh.replica():
        model = Pretrained.from_pretrained(state)
    assert {tuple(kinds(module)) for module in model.modules()} == {("replica",)}


@pytest.mark.parametrize("target", [8, "fc", [nn.Linear(2, 2)], torch.ones(1)])
def test_a_target_of_another_kind(target):
    with pytest.raises(AnnotationError) as caught:
        wh.split(target)
    text = f"wh.split() takes a module, a class or a function, but got {type(target).__name__} {target!r}."
    assert caught.value.what == text and "call the scope on each module by itself" in caught.value.fix


def test_classes_that_cannot_be_decorated():
    with pytest.raises(AnnotationError, match=r"wh.stage\(\) on class int, which is not an nn.Module"):
        wh.stage(int)
    text = r"wh.split\(\) on torch's own class Linear would annotate every Linear there is"
    with pytest.raises(AnnotationError, match=text) as caught:
        wh.split(nn.Linear)
    assert "wh.split(nn.Linear(...))" in caught.value.fix and kinds(nn.Linear(2, 2)) == []


# ---- sites and options


def test_site_is_the_users_file_and_line():
    made = wh.split(size=2)
    number = line() + 1
    with made:
        built = nn.Linear(2, 2)
    called = made(nn.Linear(2, 2))
    direct = wh.split(nn.Linear(2, 2))
    with contextlib.ExitStack() as stack:
        stack.enter_context(made)
        entered = nn.Linear(2, 2)
    named = wh.annotate(nn.Sequential(nn.Linear(2, 2)), {"0": made})[0]
    sites = [annotations_of(module)[0].site for module in (built, called, direct, entered, named)]
    assert sites == [here(number), here(number + 2), here(number + 3), here(number + 5), here(number - 2)]


def test_site_outside_the_current_directory_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    number = line() + 1
    assert annotations_of(wh.split(nn.Linear(2, 2)))[0].site == f"{Path(__file__)}:{number}"


def test_site_of_a_decorator_is_where_it_stands():
    number = line() + 2

    @wh.stage
    def block():
        return nn.Linear(2, 2)

    assert annotations_of(block())[0].site in (here(number), here(number + 1))


VALID = {
    "replica": [
        {"reduce_dtype": torch.float32}, {"reduce_dtype": torch.bfloat16}, {"reduce_dtype": torch.float16},
        {"bucket_bytes": 1}, {"max_in_flight": 2}, {"all_reduce": "flat"}, {"all_reduce": "hierarchical"},
        {"sync_batch_norm": True}, {"loss": "sum"}, {"batch_dim": 1},
    ],
    "split": [
        {"size": 1}, {"rows": "own"}, {"rows": "shared"}, {"output": "columns"}, {"gather": "error"},
        {"chunked_loss": True},
    ],
    "pipeline": [
        {"num_micro_batches": 8}, {"num_stages": 2}, {"schedule": "1f1b"}, {"num_ranks": 2},
        {"micro_batch_loss": "mean"}, {"batch_dim": {"mask": None, "x": 1}}, {"mixing": "accept"},
    ],
}  # fmt: skip
INVALID = [
    ("replica", "reduce_dtype", torch.float64, "None, torch.float32, torch.bfloat16 or torch.float16"),
    ("replica", "reduce_dtype", "bf16", "None, torch.float32"),
    ("replica", "bucket_bytes", 0, "a positive whole number"),
    ("replica", "bucket_bytes", 25e6, "a positive whole number"),
    ("replica", "max_in_flight", True, "a positive whole number"),
    ("replica", "all_reduce", "ring", "'auto', 'flat' or 'hierarchical'"),
    ("replica", "sync_batch_norm", 1, "False or True"),
    ("replica", "loss", None, "'mean' or 'sum'"),
    ("replica", "batch_dim", -1, "a whole number, 0 or more"),
    ("split", "size", 0, "a positive whole number"),
    ("split", "size", "8", "a positive whole number"),
    ("split", "rows", "Own", "None, 'own' or 'shared'"),
    ("split", "output", "rows", "None or 'columns'"),
    ("split", "gather", False, "None or 'error'"),
    ("split", "chunked_loss", None, "False or True"),
    ("pipeline", "num_micro_batches", 0, "a positive whole number"),
    ("pipeline", "num_stages", -1, "a positive whole number"),
    ("pipeline", "num_ranks", 1.0, "a positive whole number"),
    ("pipeline", "schedule", "GPipe", "None, 'gpipe', '1f1b', 'interleaved', 'zero_bubble', or a table: one row"),
    ("pipeline", "schedule", "F0.0 B0.0", "or a table: one row of actions a rank"),
    ("pipeline", "schedule", 7, "or a table: one row of actions a rank"),
    ("pipeline", "micro_batch_loss", "sum", "None or 'mean'"),
    ("pipeline", "batch_dim", 0, "a dict of input names"),
    ("pipeline", "batch_dim", {}, "a dict of input names"),
    ("pipeline", "batch_dim", {"x": "0"}, "a dict of input names"),
]


@pytest.mark.parametrize(("kind", "options"), [(kind, options) for kind, all in VALID.items() for options in all])
def test_valid_options_are_frozen_hashable_data(kind, options):
    [(name, value)] = options.items()
    annotation = annotations_of(SCOPES[kind](nn.Linear(2, 2), **options))[0]
    assert annotation.call == f"wh.{kind}({name}={value!r})" == repr(SCOPES[kind](**options))
    assert annotation.get(name) == (tuple(sorted(value.items())) if isinstance(value, dict) else value)
    assert hash(annotation) == hash(pickle.loads(pickle.dumps(annotation)))


@pytest.mark.parametrize(("kind", "name", "value", "expected"), INVALID)
def test_invalid_options_raise_at_once(kind, name, value, expected):
    number = line() + 2
    with pytest.raises(AnnotationError) as caught:
        SCOPES[kind](**{name: value})
    assert caught.value.what.startswith(f"wh.{kind}({name}={value!r}): {name} must be ")
    assert expected in caught.value.what and caught.value.where == here(number) and name in caught.value.fix


@pytest.mark.parametrize("kind", KINDS)
def test_signatures_agree_with_the_table_of_options(kind):
    parameters = dict(inspect.signature(SCOPES[kind]).parameters)
    assert parameters.pop("target").kind is inspect.Parameter.POSITIONAL_ONLY
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert defaults == {name: option.default for name, option in _OPTIONS.get(kind, {}).items()}
    assert SCOPES[kind](**defaults).options == ()
    assert inspect.getdoc(SCOPES[kind])
    with pytest.raises(TypeError, match="unexpected keyword argument 'sise'"):
        SCOPES[kind](sise=3)
    with pytest.raises(TypeError):
        SCOPES[kind](nn.Linear(2, 2), 3)


# ---- capture


def test_the_slides_classifier():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            with wh.replica():
                self.features = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()))
            with wh.split():
                self.fc = nn.Linear(2, 9)
            self.loss = nn.CrossEntropyLoss()

    model = Classifier()
    effective = {name: [a.kind for a in found] for name, found in effective_annotations(model).items()}
    assert effective == {
        "": [], "features": ["replica"], "features.0": ["replica"], "features.1": ["replica"],
        "features.1.0": ["replica"], "features.1.1": ["replica"], "fc": ["split"], "loss": [],
    }  # fmt: skip
    other = pickle.loads(pickle.dumps(copy.deepcopy(model.features)))
    assert effective_annotations(other) == effective_annotations(model.features)


def test_modules_born_inside_are_captured_without_being_assigned():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            with wh.split():
                self.fc = nn.Linear(2, 2)

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(2))

    with wh.replica():
        block, scale, table, many = Block(), Scale(), Table(), nn.ParameterList([nn.Parameter(torch.ones(1))])
    # Block registers nothing but inside the inner scope: it is older than that one, and born in the outer one.
    assert kinds(block) == ["replica"] and kinds(block.fc) == ["replica", "split"]
    assert kinds(scale) == kinds(table) == kinds(many) == ["replica"]


def test_children_assigned_inside_are_captured_also_by_older_containers():
    older, container = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    model = Plain()
    with wh.split():
        model.head = older
        container.append(nn.ReLU())
        model.fc.add_module("extra", nn.Tanh())
        model.nothing = None
    assert kinds(older) == kinds(container[1]) == kinds(model.fc.extra) == ["split"]
    assert kinds(model) == kinds(container) == kinds(container[0]) == kinds(model.fc) == []


def test_module_list_insert_bypasses_the_hooks_but_its_module_is_born_inside():
    with wh.split():
        layers = nn.ModuleList([nn.Linear(2, 2)])
        layers.insert(0, nn.Linear(2, 2))
    assert kinds(layers) == kinds(layers[0]) == kinds(layers[1]) == ["split"]


def test_deepcopied_clones_are_captured():
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    with wh.split():
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert kinds(encoder) == kinds(encoder.layers) == kinds(encoder.layers[1]) == ["split"] and kinds(layer) == []
    assert all(found for found in effective_annotations(encoder).values())
    with wh.split():
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False)
    assert {tuple(found) for found in effective_annotations(encoder).values()} == {annotations_of(encoder)}


def test_lazy_modules_and_parametrizations():
    with wh.split():
        lazy = nn.LazyLinear(3)
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    lazy(torch.ones(1, 2))
    assert type(lazy) is nn.Linear and kinds(lazy) == ["split"]
    for module in (normed, spectral):
        assert {tuple(found) for found in effective_annotations(module).values()} == {annotations_of(lazy)}
    assert normed(torch.ones(1, 2)).shape == (1, 2)


def test_stages_built_in_a_loop_are_told_apart_by_entry():
    model = nn.Sequential()
    with wh.pipeline(num_micro_batches=4):
        for index in range(3):
            with wh.stage():
                model.add_module(f"block{index}", nn.Linear(2, 2))
    stages = [annotations_of(block)[1] for block in model]
    assert len({stage.entry for stage in stages}) == 3 and len({stage.site for stage in stages}) == 1
    assert len({annotations_of(block)[0] for block in model}) == 1


def test_nested_scopes_across_constructors():
    class Block(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.norm = nn.LayerNorm(dim)
            with wh.split(size=2):
                self.ffn = nn.Sequential(nn.Linear(dim, dim), nn.Linear(dim, dim))
            self.scale = nn.Parameter(torch.ones(dim))

    with wh.replica(), wh.pipeline(num_micro_batches=2):
        with wh.stage():
            first, second = Block(2), Block(2)
        with wh.stage():
            third = Block(2)
    around = ["replica", "pipeline", "stage"]
    for block in (first, second, third):
        assert kinds(block) == kinds(block.norm) == around and kinds(block.ffn[1]) == [*around, "split"]
    assert annotations_of(first)[2] == annotations_of(second)[2] != annotations_of(third)[2]
    assert annotations_of(first.ffn)[3] != annotations_of(second.ffn)[3]
    effective_annotations(nn.Sequential(first, second, third), complete=True)


def test_a_module_object_assigned_in_two_scopes():
    model = Plain()
    with wh.replica():
        model.a = nn.Linear(2, 2)
    number = line() + 1
    with pytest.raises(AnnotationError) as caught, wh.split():
        model.b = model.a
    replica, split = here(number - 3), here(number)
    assert caught.value.what == f"module 'b': wh.replica() at {replica} cannot be inside wh.split() at {split}."
    assert kinds(model.a) == ["replica"] and not hasattr(model, "b")
    with wh.recompute():
        model.b = model.a
    assert kinds(model.a) == ["recompute", "replica"]
    with wh.pipeline():
        with wh.stage():
            model.tied = nn.Embedding(2, 2)
        with pytest.raises(AnnotationError, match=r"wh.stage\(\) at \S+ cannot be inside wh.stage\(\) at"), wh.stage():
            model.head = model.tied


def test_a_module_called_on_inside_open_scopes():
    module = wh.split(nn.Linear(2, 2))
    with wh.replica():
        wh.recompute(module)
    assert kinds(module) == ["replica", "recompute", "split"]


# ---- single parameters of older modules


def parameter_error(caught, owner, name, kind):
    text = rf"parameter '{name}' was assigned to {owner}, which is older than wh.{kind}\(\) at "
    assert re.match(text, caught.value.what) and f"put '{name}' into a module of its own" in caught.value.fix
    assert "test_scopes.py:" in caught.value.where


def test_a_bare_parameter_of_an_older_module_raises():
    model = Plain()
    with pytest.raises(AnnotationError) as caught, wh.split():
        model.weight = nn.Parameter(torch.ones(2))
    parameter_error(caught, "Plain", "weight", "split")
    assert not hasattr(model, "weight") and kinds(model) == []
    with pytest.raises(AnnotationError) as caught, wh.split():
        model.fc.register_parameter("gain", nn.Parameter(torch.ones(2)))
    parameter_error(caught, "Linear", "gain", "split")
    with wh.split():
        model.fc.register_parameter("gain", None)
        model.register_buffer("table", torch.ones(2))
        model.x = nn.Linear(2, 2)
    assert kinds(model) == kinds(model.fc) == []


@contextlib.contextmanager
def split_of_mine():
    with wh.split():
        yield


@pytest.mark.parametrize("open_scope", [wh.split, split_of_mine, contextlib.ExitStack])
@pytest.mark.parametrize("around", [contextlib.nullcontext, wh.replica])
def test_a_bare_parameter_of_the_module_whose_init_opened_the_scope_raises(open_scope, around):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            with open_scope() as opened:
                if open_scope is contextlib.ExitStack:
                    opened.enter_context(wh.split())
                self.weight = nn.Parameter(torch.ones(2))

    with pytest.raises(AnnotationError) as caught, around():
        Model()
    parameter_error(caught, "Model", "weight", "split")


def test_a_parameter_of_a_captured_module_may_be_assigned_late():
    with wh.split():
        model = Plain()
        model.weight = nn.Parameter(torch.ones(2))
        model.fc.weight = nn.Parameter(torch.ones(2, 2))
    assert kinds(model) == ["split"]


def test_init_may_call_its_parents_init_and_closures():
    class Base(nn.Module):
        def __init__(this, dim):
            super().__init__()
            register = lambda: this.register_parameter("weight", nn.Parameter(torch.ones(dim)))  # noqa: E731
            register()

    class Sub(Base):
        def __init__(self):
            super().__init__(2)

    with wh.split():
        model = Sub()
    assert kinds(model) == ["split"]


# ---- nesting, empty scopes, exceptions


def test_illegal_nesting_raises_where_the_inner_scope_is_opened():
    number = line() + 1
    with pytest.raises(AnnotationError) as caught, wh.split():
        with wh.replica():
            pytest.fail("not reached")
    assert caught.value.what == f"wh.replica() at {here(number + 1)} cannot be inside wh.split() at {here(number)}."
    assert "exchange them" in caught.value.fix


def test_a_scope_that_captured_nothing_raises_at_exit():
    model = Plain()
    number = line() + 1
    with pytest.raises(AnnotationError) as caught, wh.split(size=2):
        model.fc(torch.ones(1, 2))
    assert caught.value.what == (
        f"wh.split(size=2) at {here(number)} closed without capturing an nn.Module: "
        "scopes annotate modules while they are built."
    )
    assert caught.value.where == here(number) and "call wh.split(module) on a module that exists" in caught.value.fix

    with pytest.raises(AnnotationError, match=r"wh.stage\(\) at \S+ closed without capturing"):
        wh.stage(lambda: 3)()
    with pytest.raises(AnnotationError, match="closed without capturing"), wh.split():
        nn.ReLU()  # registers nothing and is assigned nowhere


def test_every_open_scope_counts_what_the_inner_one_captured():
    with wh.replica(), wh.cpu_offload():
        with wh.split():
            nn.Linear(2, 2)
    with wh.replica():
        wh.split(nn.Linear(2, 2))
    with wh.replica():
        wh.annotate(Plain(), {"fc": wh.split()})


def test_an_exception_in_the_body_comes_out_untouched():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            with wh.split():
                raise KeyError("mine")

    class Decorated(Failing):
        pass

    for build in (Failing, wh.replica(lambda: Failing()), wh.replica(Decorated)):
        with pytest.raises(KeyError, match="mine") as caught:
            build()
        assert caught.value.__context__ is None and num_hooks() == 0 and open_scopes() == ()
    with wh.split():
        module = nn.Linear(2, 2)
    assert kinds(module) == ["split"]


def test_hooks_are_installed_only_while_a_scope_is_open():
    assert num_hooks() == 0
    with wh.replica():
        assert num_hooks() == 3
        with wh.split():
            assert num_hooks() == 3
            nn.Linear(2, 2)
        assert num_hooks() == 3
    assert num_hooks() == 0


def test_scopes_are_reusable_and_reentrant():
    scope = wh.recompute()
    with scope:
        first = nn.Linear(2, 2)
        with scope:
            second = nn.Linear(2, 2)
        third = nn.Linear(2, 2)
    with scope:
        fourth = nn.Linear(2, 2)
    assert [len(annotations_of(module)) for module in (first, second, third, fourth)] == [1, 2, 1, 1]
    assert annotations_of(first) == annotations_of(third) == annotations_of(second)[:1] != annotations_of(fourth)


# ---- generators, threads, tasks


def test_a_generator_may_close_its_scope_out_of_order():
    def built():
        with wh.replica():
            yield nn.Linear(2, 2)

    generator = built()
    held = next(generator)
    with wh.recompute():
        inner = nn.Linear(2, 2)
        generator.close()
        later = nn.Linear(2, 2)
    after = nn.Linear(2, 2)
    assert [kinds(m) for m in (held, inner, later, after)] == [["replica"], ["replica", "recompute"], ["recompute"], []]


def test_a_generator_may_be_closed_by_another_thread():
    def built():
        with wh.replica():
            yield nn.Linear(2, 2)

    generator = built()
    next(generator)
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join(10)
    assert num_hooks() == 0 and open_scopes() == () and kinds(nn.Linear(2, 2)) == []


def test_threads_do_not_see_each_others_scopes():
    barrier, found = threading.Barrier(3, timeout=10), {}

    def work(name, scope):
        with scope:
            barrier.wait()
            modules = [nn.Sequential(nn.Linear(2, 2)) for _ in range(50)]
            barrier.wait()
        found[name] = {tuple(kinds(part)) for module in modules for part in module.modules()}

    shared = wh.split()
    jobs = [("a", wh.replica()), ("b", shared), ("c", shared)]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {"a": {("replica",)}, "b": {("split",)}, "c": {("split",)}}

    with wh.replica():
        nn.Linear(2, 2)
        plain = []
        thread = threading.Thread(target=lambda: plain.append(nn.Linear(2, 2)))
        thread.start()
        thread.join(10)
    assert kinds(plain[0]) == []


def test_a_task_that_outlives_the_scope_captures_nothing():
    async def late():
        await asyncio.sleep(0)
        outside = nn.Linear(2, 2)
        with wh.split():
            inside = nn.Linear(2, 2)
        return outside, inside

    async def main():
        with wh.replica():
            nn.Linear(2, 2)
            task = asyncio.ensure_future(late())
        return await task

    outside, inside = asyncio.run(main())
    assert kinds(outside) == [] and kinds(inside) == ["split"]


def test_a_parallelized_model_takes_no_annotation():
    model = parallelize(nn.ModuleDict({"features": nn.Linear(4, 4), "head": nn.Linear(4, 8)}))
    with pytest.raises(
        AnnotationError, match=r"^wh\.split\(\) at .*: Linear belongs to a model that is parallelized already"
    ) as caught:
        wh.split(model["head"])
    assert "test_scopes.py:" in caught.value.where and "before wh.parallelize" in caught.value.fix
    with pytest.raises(AnnotationError, match="ModuleDict belongs to a model that is parallelized already"):
        wh.replica(sync_batch_norm=True)(model)
    with pytest.raises(AnnotationError, match="module 'head' belongs to a model that is parallelized already"):
        wh.annotate(model, {"head": wh.split()})
    with pytest.raises(AnnotationError, match="module 'inner' belongs to a model that is parallelized already"):
        with wh.split():
            nn.ModuleDict({"inner": model["features"]})
    fresh = nn.Linear(4, 4)
    with pytest.raises(AnnotationError, match=r"module 'old\.head' belongs"):
        wh.annotate(nn.ModuleDict({"new": fresh, "old": model}), {"new|old.head": wh.split()})
    assert not annotations_of(fresh) and not annotations_of(model["head"])
    wh.split(copy.deepcopy(nn.Linear(4, 8)))
