"""The mistakes themselves: docs/errors.md shows each function as it stands here, so it reads like a user's code."""

from __future__ import annotations

import argparse
import copy
import fcntl
import io
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import safetensors.torch as safetensors
import torch
import torch.nn.functional as F
from torch import nn

import whale_torch as wh
from tests.errors.catalogue import mistake
from whale_torch import moe

S = "Scopes and annotations"
P = "Sizes, nesting and what cannot be planned"
A = "Saved plans and wh.parallelize"
W = "Ranks that disagree"
T = "Training"
C = "The output of a split"
M = "State, copies and checkpoints"
K = "wh.save and wh.load"
E = "Layers of experts"


def classifier(classes: int = 8) -> nn.Module:
    torch.manual_seed(0)
    with wh.split():
        head = nn.Linear(4, classes)
    return nn.Sequential(nn.Linear(4, 4), head)


# ---- scopes ----


@mistake(
    S,
    "A replica inside a split",
    wh.AnnotationError,
    r"wh\.replica\(\) at .* cannot be inside wh\.split\(\) at ",
    site=True,
)
def replica_inside_split(rank: int, n: int) -> None:
    """Scopes nest outer to inner: replica > pipeline > stage > split."""
    with wh.split(), wh.replica():
        nn.Linear(4, 4)


@mistake(
    S,
    "A split inside a split",
    wh.AnnotationError,
    r"wh\.split\(size=2\) at .* cannot be inside wh\.split\(\)",
    site=True,
)
def split_inside_split(rank: int, n: int) -> None:
    """Two splits of one module have no meaning."""
    with wh.split(), wh.split(size=2):
        nn.Linear(4, 4)


@mistake(
    S,
    "A size of 0",
    wh.AnnotationError,
    r"wh\.split\(size=0\): size must be a positive whole number or None",
    site=True,
)
def size_zero(rank: int, n: int) -> None:
    """A size is a number of ranks."""
    wh.split(size=0)


@mistake(
    S, "True for a size", wh.AnnotationError, r"wh\.split\(size=True\): size must be a positive whole number", site=True
)
def size_true(rank: int, n: int) -> None:
    """In Python True is 1; a scope does not take it for a size."""
    wh.split(size=True)


@mistake(
    S,
    "An option with an unknown value",
    wh.AnnotationError,
    r"rows='mine'\): rows must be None, 'own' or 'shared'",
    site=True,
)
def unknown_value(rank: int, n: int) -> None:
    """Options with names have a few legal values; the message lists them."""
    wh.split(rows="mine")  # type: ignore[call-overload]


@mistake(S, "An option that cannot be compared", wh.AnnotationError, r"batch_dim=\[0\]\): batch_dim must be", site=True)
def unhashable_option(rank: int, n: int) -> None:
    """Options are kept as frozen data; lists are none."""
    wh.replica(batch_dim=[0])  # type: ignore[call-overload]


@mistake(
    S,
    "An option without its name",
    wh.AnnotationError,
    r"wh\.split\(\) takes a module, a class or a function, but got int 4",
    site=True,
)
def positional_option(rank: int, n: int) -> None:
    """The only positional argument of a scope is what it annotates."""
    wh.split(4)  # type: ignore[call-overload]


@mistake(
    S,
    "A scope that captures nothing",
    wh.AnnotationError,
    r"wh\.split\(\) at .* closed without capturing an nn\.Module",
    site=True,
)
def empty_scope(rank: int, n: int) -> None:
    """Scopes annotate modules while these are built: around a forward they see none."""
    head = nn.Linear(4, 8)
    with wh.split():
        head(torch.ones(2, 4))


@mistake(
    S,
    "A parameter of an older module",
    wh.AnnotationError,
    r"parameter 'scale' was assigned to Linear, which is older than wh\.split\(\)",
    site=True,
)
def older_module(rank: int, n: int) -> None:
    """A scope holds whole modules, and this one was built before the scope was opened."""
    head = nn.Linear(4, 8)
    with wh.split():
        head.scale = nn.Parameter(torch.ones(8))


@mistake(
    S,
    "A decorated class of torch",
    wh.AnnotationError,
    r"torch's own class Linear would annotate every Linear there is",
    site=True,
)
def decorated_torch_class(rank: int, n: int) -> None:
    """A class of one's own can be decorated, and any instance can be annotated."""
    wh.split(nn.Linear)


@mistake(
    S,
    "A name with a slip of the pen",
    wh.AnnotationError,
    r"pattern 'faetures' matches no module\. Close names: 'features'",
    site=True,
)
def misspelt_name(rank: int, n: int) -> None:
    """Every pattern of wh.annotate has to match a module."""
    model = nn.ModuleDict({"features": nn.Linear(4, 4), "head": nn.Linear(4, 8)})
    wh.annotate(model, {"faetures": wh.replica()})


@mistake(
    S,
    "A pattern that is not a regular expression",
    wh.AnnotationError,
    r"pattern 'layers\.\*\[' is not a regular expression",
    site=True,
)
def broken_pattern(rank: int, n: int) -> None:
    """Patterns are Python's regular expressions, not those of a shell."""
    wh.annotate(nn.Sequential(nn.Linear(4, 4)), {"layers.*[": wh.replica()})


@mistake(
    S,
    "A scope without its parentheses",
    wh.AnnotationError,
    r"pattern '0' has the function split, which is not a scope",
    site=True,
)
def scope_without_parentheses(rank: int, n: int) -> None:
    """wh.split is a function that makes a scope; wh.split() is the scope."""
    wh.annotate(nn.Sequential(nn.Linear(4, 4)), {"0": wh.split})  # type: ignore[dict-item]


# ---- planning ----


@mistake(
    P,
    "A size that does not divide the ranks",
    wh.PlanError,
    r"4 ranks cannot be cut into groups of 3(.|\n)*1, 2, 4",
    site=True,
)
def three_of_four(rank: int, n: int) -> None:
    """All groups of a split are equally large."""
    with wh.split(size=3):
        model = nn.Linear(4, 8)
    wh.plan(model, cluster=wh.Cluster.of(nodes=1, ranks_per_node=4))


@mistake(P, "More ranks than there are", wh.PlanError, r"2 ranks cannot be cut into groups of 8", ranks=2, site=True)
def more_than_there_are(rank: int, n: int) -> None:
    """Every rank says so before anything is changed; wh.plan(model, cluster=...) says it on a laptop."""
    with wh.split(size=8):
        model = nn.Linear(4, 8)
    wh.parallelize(model)


@mistake(
    P,
    "A nested split on uneven nodes",
    wh.PlanError,
    r"nodes have \[4, 2\] ranks, so a split inside a replica has no natural size",
    site=True,
)
def uneven_nodes(rank: int, n: int) -> None:
    """Directly inside a replica a split takes the ranks of a node, if all nodes are equal."""
    with wh.replica(), wh.split():
        model = nn.Linear(4, 8)
    wh.plan(model, cluster=wh.Cluster(ranks_of_nodes=(4, 2)))


@mistake(
    P,
    "Two sizes of which none divides the other",
    wh.PlanError,
    r"has size 2, .* shares rows over 3: neither divides the other",
    site=True,
)
def sizes_two_and_three(rank: int, n: int) -> None:
    """Ranks are fed alike in blocks; the blocks of all splits lie inside one another."""
    with wh.replica(), wh.split(size=3):
        first = nn.Linear(4, 4)
    with wh.split(size=2):
        second = nn.Linear(4, 4)
    wh.plan(nn.Sequential(first, second), cluster=wh.Cluster.of(nodes=1, ranks_per_node=6))


@mistake(
    S,
    "A scope on a parallelized model",
    wh.AnnotationError,
    r"wh\.split\(\) at .*: Linear belongs to a model that is parallelized already",
    site=True,
)
def scope_after_parallelize(rank: int, n: int) -> None:
    """wh.parallelize reads the annotations once; later ones would change nothing."""
    model = wh.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8)))
    wh.split(model[1])  # type: ignore[index]


@mistake(
    P,
    "An option that no module follows",
    wh.PlanError,
    r"no module follows chunked_loss=True; what is cut: '' \(Linear by rows\)",
    site=True,
)
def chunked_loss_by_rows(rank: int, n: int) -> None:
    """A layer cut by rows gives whole rows: there are no columns of which a loss could be computed in chunks."""
    with wh.split(cut="rows", chunked_loss=True):
        model = nn.Linear(4, 8)
    wh.plan(model, cluster=wh.Cluster.of(ranks_per_node=2))


@mistake(
    P,
    "Weights tied across the border of a split",
    wh.PlanError,
    r"parameter '0\.weight' is tied to '1\.weight', but one is whole and the other cut along dimension 0 in 4",
    site=True,
)
def tied_across(rank: int, n: int) -> None:
    """One tensor cannot be whole in one place and cut in another."""
    words = nn.Embedding(8, 4)
    with wh.split():
        head = nn.Linear(4, 8, bias=False)
    head.weight = words.weight
    wh.plan(nn.Sequential(words, head), cluster=wh.Cluster.of(nodes=1, ranks_per_node=4))


@mistake(
    P,
    "Weights tied and cut in two ways",
    wh.PlanError,
    r"is tied to '1\.weight', but one is cut along dimension 0 in 2 and the other cut along dimension 0 in 4",
    site=True,
)
def tied_and_cut_twice(rank: int, n: int) -> None:
    """Both ends of a tie have to be cut alike."""
    with wh.split(size=2):
        first = nn.Linear(4, 8, bias=False)
    with wh.split(size=4):
        second = nn.Linear(4, 8, bias=False)
    second.weight = first.weight
    wh.plan(nn.Sequential(first, second), cluster=wh.Cluster.of(nodes=1, ranks_per_node=4))


class Positions(nn.Module):
    """Numbers of positions, as transformers' embeddings have them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(8), persistent=False)


class Pretrained(nn.Module):
    """A model as transformers builds it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Positions(), nn.Linear(8, 4, bias=False)

    def _init_weights(self, module: nn.Module) -> None: ...


class Bilinear(nn.Module):
    """A layer of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.form) * x


@mistake(
    P,
    "A module that wh.split does not know",
    wh.PlanError,
    r"no split rule for Bilinear '0'.* with parameters \{'form': \(4, 4\)\}",
    site=True,
)
def unknown_module(rank: int, n: int) -> None:
    """What a shard of a module's own parameters computes is only known to a rule for its type."""
    with wh.split():
        model = nn.Sequential(Bilinear(), nn.Linear(4, 8))
    wh.plan(model, cluster=wh.Cluster.of(nodes=1, ranks_per_node=4))


@mistake(
    P,
    "A parametrized weight",
    wh.PlanError,
    r"'0' \(ParametrizedLinear\) has parametrized parameters \['weight'\]",
    site=True,
)
def parametrized_weight(rank: int, n: int) -> None:
    """What weight_norm or spectral_norm compute from a shard is not a shard of what they compute from the whole."""
    with wh.split():
        head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
    wh.plan(nn.Sequential(head), cluster=wh.Cluster.of(nodes=1, ranks_per_node=4))


@mistake(P, "An embedding with max_norm", wh.PlanError, r"Embedding '0' with max_norm=1\.0 cannot be split", site=True)
def embedding_with_max_norm(rank: int, n: int) -> None:
    """max_norm looks at whole rows, of which a rank has a part."""
    with wh.split():
        words = nn.Embedding(8, 4, max_norm=1.0)
    wh.plan(nn.Sequential(words), cluster=wh.Cluster.of(nodes=1, ranks_per_node=4))


@mistake(
    P,
    "A hierarchical all-reduce on one node",
    wh.PlanError,
    r"hierarchical all-reduce, but 1 node x 4 ranks",
    site=True,
)
def hierarchical_on_one_node(rank: int, n: int) -> None:
    """Two levels need several nodes with several, equally many ranks each."""
    with wh.replica(all_reduce="hierarchical"):
        model = nn.Linear(4, 8)
    wh.plan(model, cluster=wh.Cluster.of(nodes=1, ranks_per_node=4))


@mistake(
    P,
    "Replicas that count samples differently",
    wh.PlanError,
    r"batch_dim is 0 at .* and 1 at .*; a model has one",
    site=True,
)
def two_batch_dims(rank: int, n: int) -> None:
    """batch_dim and loss are said of the whole model's inputs and loss."""
    with wh.replica():
        first = nn.Linear(4, 4)
    with wh.replica(batch_dim=1):
        second = nn.Linear(4, 4)
    wh.plan(nn.Sequential(first, second), cluster=wh.Cluster.of(nodes=1, ranks_per_node=4))


@mistake(
    P,
    "A scope that this version does not run",
    wh.PlanError,
    r"wh\.auto_parallel\(\) is annotated, but this version runs wh\.replica, wh\.split and wh\.pipeline only",
    site=True,
)
def scope_of_another_version(rank: int, n: int) -> None:
    """wh.auto_parallel, wh.recompute and wh.cpu_offload can be written and their nesting is checked, but no plan runs
    them yet: take them off. The fix names what serves the same end today."""
    with wh.auto_parallel():
        first = nn.Linear(4, 4)
    wh.plan(nn.Sequential(first), cluster=wh.Cluster.of(nodes=1, ranks_per_node=4))


@mistake(
    P,
    "A stage without a pipeline",
    wh.AnnotationError,
    r"module '0': wh\.stage\(\) at .* is not inside wh\.pipeline\(\)",
    site=True,
)
def stage_alone(rank: int, n: int) -> None:
    """A stage is a part of a pipeline, which says into how many micro-batches a batch is cut."""
    with wh.stage():
        first = nn.Linear(4, 4)
    wh.plan(nn.Sequential(first))


@mistake(P, "A pipeline without stages", wh.PlanError, r"wh\.pipeline\(\) holds no wh\.stage\(\)", ranks=2, site=True)
def no_stages(rank: int, n: int) -> None:
    """Stages are said by scopes, or their number is."""
    wh.parallelize(wh.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))


@mistake(
    P,
    "More stages than modules",
    wh.PlanError,
    r"wh\.pipeline\(num_stages=3\) asks for 3 stages, but the model has 2 modules to make them of",
    ranks=2,
    site=True,
)
def more_stages_than_modules(rank: int, n: int) -> None:
    """Stages by count are made of whole modules; what takes long is opened into its members, a layer is not."""
    wh.parallelize(wh.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), num_stages=3))


@mistake(
    P,
    "Measured balance without inputs",
    wh.PlanError,
    r"a pipeline is to be balanced by measured times, and nothing says what its model is fed",
    ranks=2,
    site=True,
)
def measured_without_inputs(rank: int, n: int) -> None:
    """What is measured is a forward and a backward, which need inputs."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    wh.parallelize(wh.pipeline(model, num_stages=2, balance="measured"))


@mistake(
    P,
    "Pipelines that do not fit the ranks",
    wh.PlanError,
    r"8 ranks cannot be cut into pipelines of 3 with 4 stages",
    site=True,
)
def ranks_of_a_pipeline(rank: int, n: int) -> None:
    """Every rank runs in one pipeline, and every rank of a pipeline has a stage."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    wh.plan(wh.pipeline(model, num_stages=4, num_ranks=3), cluster=wh.Cluster.of(nodes=1, ranks_per_node=8))


@mistake(
    P,
    "A schedule that is not complete",
    wh.PlanError,
    r"schedule 'table': rank 1 never runs B1\.1 \(backward of micro-batch 1 on stage 1\)",
    site=True,
)
def incomplete_table(rank: int, n: int) -> None:
    """Every stage runs every micro-batch forward and backward, once."""
    wh.pipeline(schedule=["F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1"])


@mistake(
    P,
    "A schedule whose ranks wait for each other",
    wh.PlanError,
    r"schedule 'table': it cannot run to its end, 2 of 8 actions run\. rank 0, position 1: B0\.0 waits for B1\.0",
    site=True,
)
def table_that_stops(rank: int, n: int) -> None:
    """A backward needs the gradient of the next stage, a forward the output of the one before."""
    wh.pipeline(schedule=["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"])


@mistake(
    P,
    "A schedule for more ranks than there are",
    wh.PlanError,
    r"the table has 3 rows, one for each rank of a pipeline, and 2 ranks are no multiple of it",
    ranks=2,
    site=True,
)
def table_of_many_ranks(rank: int, n: int) -> None:
    """A row is one rank of a pipeline; more ranks are further pipelines."""
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    wh.parallelize(wh.pipeline(layers, schedule=["F0.0 B0.0", "F1.0 B1.0", "F2.0 B2.0"]))


@mistake(
    P,
    "Own rows inside a stage",
    wh.PlanError,
    r"wh\.split\(rows='own'\) of '1' is inside a stage, whose ranks all get the same micro-batch",
    ranks=2,
    site=True,
)
def own_rows_inside_a_stage(rank: int, n: int) -> None:
    """The ranks of a stage that share a split are one replica: a micro-batch reaches all of them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stages = {"0": wh.stage(), "1": (wh.stage(), wh.split(rows="own"))}
    wh.parallelize(wh.annotate(model, stages, inside=wh.pipeline()))


@mistake(
    P,
    "A replica inside a stage, of statistics over samples",
    wh.PlanError,
    r"'0' is a BatchNorm1d in a wh\.replica inside a stage, beside a split",
    ranks=2,
    site=True,
)
def statistics_of_slices(rank: int, n: int) -> None:
    """The ranks of a split share each micro-batch, and a replica beside it runs on a slice of it."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    stages = {"0": (wh.stage(), wh.replica()), "1": (wh.stage(), wh.split())}
    wh.parallelize(wh.annotate(model, stages, inside=wh.pipeline()))


@mistake(
    P,
    "A replica inside a stage, of all positions at once",
    wh.TraceError,
    r"module '0' is in a wh\.replica inside a stage, .* it is given a tensor of shape \(3, 4\) that has not one row",
    ranks=2,
)
def slices_of_positions(rank: int, n: int) -> None:
    """A module on slices is cut along a dim of samples: samples and positions in one dim are not told apart."""

    class Positions(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(x.flatten(0, 1))
            return out.view(x.shape)

    stages = {"0": (wh.stage(), wh.replica()), "1": (wh.stage(), wh.split())}
    model = wh.annotate(Positions(nn.Linear(4, 4), nn.Linear(4, 4)), stages, inside=wh.pipeline(num_ranks=1))
    wh.parallelize(model, sample_inputs=torch.ones(4, 3, 4))


@mistake(
    P,
    "A split beside a pipeline",
    wh.PlanError,
    r"wh\.split\(\) of '2' is outside the pipeline of its model",
    ranks=2,
    site=True,
)
def split_beside_a_pipeline(rank: int, n: int) -> None:
    """What lies outside the stages runs where its input is; a split needs the ranks of a stage."""
    layers = [nn.Linear(4, 4) for _ in range(3)]
    model = wh.annotate(nn.Sequential(*layers), {"0": wh.stage(), "1": wh.stage()}, inside=wh.pipeline())
    wh.parallelize(wh.annotate(model, {"2": wh.split()}))


@mistake(
    P,
    "BatchNorm over all replicas of a pipeline",
    wh.PlanError,
    r"wh\.replica\(sync_batch_norm=True\) holds for wh\.pipeline\(num_stages=2\) too",
    ranks=2,
    site=True,
)
def sync_batch_norm_of_a_pipeline(rank: int, n: int) -> None:
    """A micro-batch has left a stage before the next one comes, so its statistics are its own."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    wh.parallelize(wh.replica(wh.pipeline(layers, num_stages=2), sync_batch_norm=True))


@mistake(
    P, "Something that is no cluster", wh.PlanError, r"at least one rank on each node, got ranks_of_nodes=\(8, 0\)"
)
def node_without_ranks(rank: int, n: int) -> None:
    """A node without ranks is no node."""
    wh.Cluster(ranks_of_nodes=(8, 0))


# ---- parallelize ----


@mistake(A, "Not a module", wh.PlanError, r"wh\.parallelize takes an nn\.Module, got list")
def not_a_module(rank: int, n: int) -> None:
    """Several models are parallelized one by one, or as members of one module."""
    wh.parallelize([nn.Linear(4, 4)])  # type: ignore[arg-type]


@mistake(A, "Parallelized twice", wh.PlanError, r"this model is parallelized already")
def parallelized_twice(rank: int, n: int) -> None:
    """Its parameters are shards by now."""
    model = wh.parallelize(classifier())
    wh.parallelize(model)


@mistake(A, "A member first, then the model", wh.PlanError, r"its member '1' is parallelized already")
def member_first(rank: int, n: int) -> None:
    """A model is planned as a whole."""
    model = classifier()
    wh.parallelize(model[1])  # type: ignore[index]
    wh.parallelize(model)


@mistake(A, "A member of a parallelized model", wh.PlanError, r"this Linear belongs to a parallelized model", ranks=2)
def member_afterwards(rank: int, n: int) -> None:
    """A model is planned as a whole."""
    model = wh.parallelize(classifier())
    wh.parallelize(model[1])  # type: ignore[index]


@mistake(A, "A forward on the instance", wh.PlanError, r"Linear has a forward of its own on the instance")
def forward_on_the_instance(rank: int, n: int) -> None:
    """A wrapper put on the object would run in the place of whale_torch's."""
    model = nn.Linear(4, 4)
    model.forward = torch.relu  # type: ignore[method-assign, assignment]
    wh.parallelize(model)


@mistake(
    A,
    "A saved plan of another cluster",
    wh.PlanError,
    r"saved plan is for ranks \[4\] on its nodes, but \[2\] are running",
    ranks=2,
)
def plan_of_another_cluster(rank: int, n: int) -> None:
    """A plan names its ranks."""
    plan = wh.plan(classifier(), cluster=wh.Cluster.of(nodes=1, ranks_per_node=4))
    wh.parallelize(classifier(), plan=plan)


@mistake(
    A,
    "A saved plan of another model",
    wh.PlanError,
    r"another model: the first that differs is '1\.weight' \[8, 4\] in the plan and '1\.weight' \[6, 4\] here",
    ranks=2,
)
def plan_of_another_model(rank: int, n: int) -> None:
    """A plan names the shape of every parameter."""
    plan = wh.plan(classifier(8), cluster=wh.Cluster.of(nodes=1, ranks_per_node=2))
    wh.parallelize(classifier(6), plan=plan)


@mistake(
    A,
    "A saved plan of other scopes",
    wh.PlanError,
    r"module '1' is under wh\.split\(\) here and under wh\.replica\(\) in the saved plan",
    ranks=2,
    site=True,
)
def plan_of_other_scopes(rank: int, n: int) -> None:
    """A plan and the scopes on a model have to say the same; a model without scopes takes the plan's."""
    replicated = wh.annotate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8)), {"1": wh.replica()})
    plan = wh.plan(replicated, cluster=wh.Cluster.of(nodes=1, ranks_per_node=2))
    wh.parallelize(classifier(), plan=plan)


@mistake(
    A,
    "A cluster that is not running",
    wh.PlanError,
    r"cluster described has ranks \[4, 4\] on its nodes, but \[2\] are running",
    ranks=2,
)
def another_cluster(rank: int, n: int) -> None:
    """cluster= of wh.parallelize is for speeds that differ from the measured ones."""
    wh.parallelize(classifier(), cluster=wh.Cluster.of(nodes=2, ranks_per_node=4))


@mistake(A, "A world without ranks", wh.PlanError, r"WORLD_SIZE is 2 but RANK is not set")
def world_without_rank(rank: int, n: int) -> None:
    """torchrun sets both."""
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "2"}):
        os.environ.pop("RANK", None)
        wh.parallelize(classifier())


@mistake(A, "A GPU where there is none", wh.PlanError, r"device='cuda' was asked for, but torch sees no CUDA device")
def no_cuda_device(rank: int, n: int) -> None:
    """Without device= every rank takes a GPU of its own where there are some, and the CPU elsewhere."""
    with mock.patch("torch.cuda.device_count", lambda: 0):  # on any machine
        wh.parallelize(classifier(), device="cuda")


@mistake(
    A,
    "A module on meta that cannot initialise itself",
    wh.PlanError,
    r"module '' \(Bilinear\) was built on the meta device .* no reset_parameters\(\)",
)
def meta_without_reset(rank: int, n: int) -> None:
    """Initial values of what was built on meta are made module by module."""
    with torch.device("meta"):
        model = Bilinear()
    wh.parallelize(model)


@mistake(
    A,
    "A model of transformers on meta",
    wh.PlanError,
    r"module 'embed' \(Positions\) was built on the meta device with ids(.|\n)*init_fn=model\._init_weights",
)
def huggingface_on_meta(rank: int, n: int) -> None:
    """It has buffers that no file of weights holds; its own initialiser, which it calls _init_weights, fills them."""
    with torch.device("meta"):
        model = Pretrained()
    wh.parallelize(model, weights={"head.weight": torch.zeros(4, 8)})


@mistake(A, "Weights that do not fit", wh.CheckpointError, r"weights given do not fit Sequential: .*1\.weight")
def weights_that_do_not_fit(rank: int, n: int) -> None:
    """weights= takes the whole state dict of this model."""
    wh.parallelize(classifier(8), weights=classifier(6).state_dict())


@mistake(
    A,
    "Weights that are no state dict",
    wh.CheckpointError,
    r"the file given as weights holds a list, not a state dict",
)
def weights_that_are_a_list(rank: int, n: int) -> None:
    """A file for weights= is what one process writes of its plain model."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(list(classifier().parameters()), f"{folder}/model.pt")
        wh.parallelize(classifier(), weights=f"{folder}/model.pt")


@mistake(A, "A damaged file of safetensors", wh.CheckpointError, r"model\.safetensors cannot be read as safetensors: ")
def damaged_safetensors(rank: int, n: int) -> None:
    """A file whose end is missing is seen when it is opened, before anything is changed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        safetensors.save_model(classifier(), file)
        file.write_bytes(file.read_bytes()[:-1])
        wh.parallelize(classifier(), weights=file)


class Masked(nn.Linear):
    """A buffer that only __init__ fills."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.register_buffer("mask", torch.ones(size, size).tril())


class Fresh(nn.Linear):
    """An initialiser that makes a new parameter."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.weight = nn.Parameter(torch.zeros(4, 4))


@mistake(
    A,
    "A buffer that only __init__ fills",
    wh.PlanError,
    r"reset_parameters\(\) leaves '0\.mask' of Masked unset",
    ranks=2,
)
def buffer_left_unset(rank: int, n: int) -> None:
    """On the meta device nothing was written into it, so the module's initialiser has to."""
    with torch.device("meta"):
        layers = nn.Sequential(Masked(4), nn.Linear(4, 4))
    wh.parallelize(wh.pipeline(layers, num_stages=2))


@mistake(
    A,
    "An initialiser that replaces a parameter",
    wh.PlanError,
    r"reset_parameters\(\) replaces parameter '0\.weight'",
    ranks=2,
)
def initialiser_that_replaces(rank: int, n: int) -> None:
    """Parameters stay the same objects, which optimizers and ties know."""
    with torch.device("meta"):
        layers = nn.Sequential(Fresh(4, 4), nn.Linear(4, 4))
    wh.parallelize(wh.pipeline(layers, num_stages=2))


@mistake(
    A,
    "An initialiser that draws what has values",
    wh.PlanError,
    r"init_fn of module '' \(Sequential\) changes '0\.weight' of a member, which had values before",
    ranks=2,
)
def initialiser_of_what_has_values(rank: int, n: int) -> None:
    """Values that a module was built with stay: they may be pretrained."""

    def init_fn(module: nn.Module) -> None:
        for parameter in module.parameters():
            nn.init.normal_(parameter)

    with torch.device("meta"):
        head = nn.Linear(4, 4)
    wh.parallelize(wh.pipeline(nn.Sequential(nn.Linear(4, 4), head), num_stages=2), init_fn=init_fn)


@mistake(
    A,
    "A weak reference to a parameter on meta",
    wh.PlanError,
    r"parameter '0\.weight' on the meta device cannot be given memory: .*weakref",
)
def weak_reference_on_meta(rank: int, n: int) -> None:
    """A parameter is given its memory in place, which torch refuses where something refers to it weakly."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    found = weakref.ref(model[0].weight)
    wh.parallelize(model)
    print(found)


# ---- ranks that disagree ----


@mistake(W, "Different models", wh.PlanError, r"ranks \[1\] plan another model than rank 0", ranks=3)
def different_models(rank: int, n: int) -> None:
    """Every rank builds the same model under the same scopes."""
    wh.parallelize(classifier(8 if rank != 1 else 9))


@mistake(
    W,
    "Built on meta on some ranks only",
    wh.PlanError,
    r"ranks \[1\] built another model than rank 0: 4 of its tensors are on the meta device on rank 1, 0 on rank 0",
    ranks=2,
)
def meta_on_one_rank(rank: int, n: int) -> None:
    """What is on the meta device gets its values on all ranks together."""
    with torch.device("meta" if rank == 1 else "cpu"):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wh.parallelize(wh.pipeline(layers, num_stages=2))


@mistake(
    W,
    "Sample inputs on some ranks only",
    wh.PlanError,
    r"ranks \[1\] .*: the sample_inputs of rank 1 are None, those of rank 0 are \(2, 4\) float32",
    ranks=2,
)
def sample_inputs_of_one_rank(rank: int, n: int) -> None:
    """A pipeline is recorded on them, and what a rank holds follows from it."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wh.parallelize(wh.pipeline(layers, num_stages=2), sample_inputs=torch.ones(2, 4) if rank == 0 else None)


@mistake(
    W,
    "A mistake on one rank only",
    wh.PlanError,
    r"rank 2 was refused, and not every rank with it: .*3 ranks cannot be cut into groups of 2",
    ranks=3,
    site=True,
)
def mistake_on_one_rank(rank: int, n: int) -> None:
    """All ranks stop with the same message; none waits for one that is gone."""
    with wh.split(size=3 if rank < 2 else 2):
        model = nn.Linear(4, 8)
    wh.parallelize(model)


@mistake(
    W,
    "Different batches in one replica",
    wh.LayoutError,
    r"ranks \[0, 1\] are one replica but were fed different batches \(rows \[2, 3\]",
    ranks=2,
    alone=True,
)
def different_batches(rank: int, n: int) -> None:
    """The ranks of a replica { split } are one: they are fed the same batch."""
    with wh.replica(), wh.split():
        head = nn.Linear(4, 8)
    model = wh.parallelize(nn.Sequential(head))
    model(torch.ones(2 + rank, 4))


@mistake(
    W,
    "Random numbers drawn by one rank of a replica",
    wh.LayoutError,
    r"ranks \[0, 1\] are one replica and were fed the same batch, but their random states differ",
    ranks=2,
    alone=True,
)
def different_random_states(rank: int, n: int) -> None:
    """The ranks of a replica { split } hold the same activations, so they have to drop the same ones."""
    with wh.replica(), wh.split():
        head = nn.Linear(4, 8)
    model = wh.parallelize(nn.Sequential(nn.Dropout(), head))
    for _ in range(2):
        model(torch.ones(2, 4))
        if rank == 0:
            torch.randn(1)


@mistake(
    W,
    "Losses of different lines",
    wh.LossError,
    r"the ranks called different losses inside the model: rank 0 in the lines \[\d+\], rank 1 in the lines \[\d+\]",
    ranks=2,
    alone=True,
)
def losses_of_different_lines(rank: int, n: int) -> None:
    """A rank may leave a loss out; two losses are never taken for one."""

    class Speller(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if (y == 0).any():
                return F.cross_entropy(super().forward(x), y, label_smoothing=0.1)
            return F.cross_entropy(super().forward(x), y)

    model = wh.parallelize(Speller(4, 8))
    model(torch.ones(2, 4), torch.tensor([rank, 1])).backward()


@mistake(
    W,
    "A file that one rank does not find",
    wh.CheckpointError,
    r"rank 1 was refused, and not every rank with it: node1/model\.pt is not there",
    ranks=2,
)
def file_of_one_rank(rank: int, n: int) -> None:
    """No rank goes on alone, whatever kind of error another one met."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    wh.parallelize(model, weights=model.state_dict() if rank == 0 else f"node{rank}/model.pt")


@mistake(
    W, "An operation on one rank only", wh.CommError, r"rank 0: 'amax' .*rank 1: 'cross_entropy'", ranks=2, alone=True
)
def rank_zero_only(rank: int, n: int) -> None:
    """What is done to a split's output is done by all its ranks together."""
    model = wh.parallelize(classifier(), timeout=10)
    z = model(torch.ones(2, 4))
    if rank == 0:
        print(z.amax())
    F.cross_entropy(z, torch.tensor([0, 1])).backward()


@mistake(
    W,
    "Evaluated on one rank only",
    wh.CommError,
    r"model\(\.\.\.\) in evaluation of Sequential: .*failed on rank 0|rank 0 waited in 'rows of a split's input'",
    ranks=2,
    alone=True,
    same=False,
)
def evaluated_on_rank_zero(rank: int, n: int) -> None:
    """Each rank holds a part of the classes: all of them call the model, and one of them prints."""
    model = wh.parallelize(classifier(), timeout=3).eval()
    if rank == 0:
        with torch.no_grad():
            print(model(torch.ones(2, 4)).argmax(1))
    wh.reduce(0.0)


@mistake(
    W,
    "The whole state dict on one rank only",
    wh.CommError,
    r"wh\.full_state_dict\(model\): .*failed on rank 0|rank 0 waited in 'the whole of '1\.weight' \(wh\.full_state",
    ranks=2,
    alone=True,
    same=False,
)
def state_of_rank_zero(rank: int, n: int) -> None:
    """The parts of all ranks are brought together: all of them call it, and one of them writes the file."""
    model = wh.parallelize(classifier(), timeout=3)
    if rank == 0:
        torch.save(wh.full_state_dict(model), io.BytesIO())
    wh.reduce(0.0)


@mistake(
    W,
    "Sequences of different lengths",
    wh.LayoutError,
    r"queries and keys of lengths \(3, 3\) and \(4, 4\)",
    ranks=2,
    alone=True,
)
def different_lengths(rank: int, n: int) -> None:
    """Attention that is split runs on the sequences of all ranks of its group together."""
    with wh.split():
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = wh.parallelize(nn.Sequential(layer))
    model(torch.ones(2, 3 + rank, 8))


# ---- training ----


@mistake(T, "A replaced parameter", wh.PlanError, r"parameter '0\.weight' was replaced after wh\.parallelize", ranks=2)
def replaced_parameter(rank: int, n: int) -> None:
    """A new Parameter object is known to no reducer; its values can be written in place."""
    model = wh.parallelize(classifier())
    model[0].weight = nn.Parameter(torch.zeros(4, 4))  # type: ignore[index]
    model(torch.ones(2, 4))


@mistake(T, "A replaced module", wh.PlanError, r"parameter '1\.weight' was replaced after wh\.parallelize", ranks=2)
def replaced_module(rank: int, n: int) -> None:
    """A new head is known to no plan: it would be trained by each rank alone."""
    model = wh.parallelize(classifier())
    model[1] = nn.Linear(4, 2)  # type: ignore[index]
    model(torch.ones(2, 4))


@mistake(T, "An adapter that comes late", wh.PlanError, r"parameter '0\.down\.weight' was added after", ranks=2)
def late_adapter(rank: int, n: int) -> None:
    """Whatever brings parameters has its place before wh.parallelize."""
    model = wh.parallelize(classifier())
    model[0].down = nn.Linear(4, 1)  # type: ignore[index]
    model(torch.ones(2, 4))


@mistake(
    T,
    "An optimizer that has stepped before",
    wh.WhaleError,
    r"has state '.*' .* for '1\.weight', which is cut over 2 ranks",
    ranks=2,
)
def stepped_before(rank: int, n: int) -> None:
    """Its moments have the shape of the whole parameter."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    wh.parallelize(model)
    F.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1])).backward()
    optimizer.step()


@mistake(
    T,
    "An optimizer that looks at whole tensors",
    wh.WhaleError,
    r"LBFGS .*but '1\.weight' is cut over 2 ranks",
    ranks=2,
)
def whole_tensor_optimizer(rank: int, n: int) -> None:
    """Its norms and products would be those of a shard."""
    model = wh.parallelize(classifier())
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: F.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1])))  # type: ignore[arg-type]


@mistake(
    T,
    "torch's clip_grad_norm_ on shards",
    wh.CommError,
    r"the gradient of '0\.bias' differs between copies before an optimizer's "
    r"step: norm [\d.]+ on rank 0, norm [\d.]+ on rank 1",
    ranks=2,
)
def clipped_by_torch(rank: int, n: int) -> None:
    """Each rank saw the norm of its own shards, and scaled by another number."""
    model = wh.parallelize(classifier())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    F.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1])).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


@mistake(
    T,
    "no_sync on a model that is not parallelized",
    wh.PlanError,
    r"wh\.no_sync needs a parallelized model, got Linear",
)
def no_sync_on_a_plain_model(rank: int, n: int) -> None:
    """A plain model has nothing to postpone."""
    with wh.no_sync(nn.Linear(4, 4)):
        pass


@mistake(
    T,
    "A model that was never parallelized",
    wh.PlanError,
    r"wh\.batch_sampler needs a parallelized model, got Sequential",
)
def never_parallelized(rank: int, n: int) -> None:
    """Scopes alone change nothing: a script that forgets wh.parallelize trains one model of its own on each rank. What
    takes the model says so: wh.batch_sampler, wh.sampler, wh.data_rank, wh.no_sync, wh.full_state_dict, wh.GradScaler;
    and wh.clip_grad_norm_ where several ranks run."""
    wh.batch_sampler(classifier(), range(64), 8)


@mistake(
    T,
    "Several metrics in one call",
    wh.PlanError,
    r"wh\.reduce takes a number or a tensor, got dict \{'loss': 1\.0\}",
    site=True,
)
def reduce_of_a_dict(rank: int, n: int) -> None:
    """Values are reduced one by one, or as one tensor."""
    wh.reduce({"loss": 1.0})  # type: ignore[type-var]


@mistake(T, "An unknown reduction of a metric", wh.PlanError, r"""wh\.reduce knows "mean" and "sum", got 'max'""")
def reduce_max(rank: int, n: int) -> None:
    """Other reductions are torch.distributed's."""
    wh.reduce(1.0, "max")


class Layers(nn.Linear):
    """A model that yields its outputs one by one."""

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:  # type: ignore[override]
        return iter([super().forward(x)])


@mistake(
    T,
    "An output that cannot be looked into",
    wh.LayoutError,
    r"the model took or returned a list_iterator, which may hold tensors that cannot be reached",
    ranks=2,
)
def hidden_output(rank: int, n: int) -> None:
    """Every differentiable output is weighed by the rows of its rank, so it has to be found."""
    model = wh.parallelize(Layers(4, 4))
    model(torch.ones(2, 4))


class Tied(nn.Sequential):
    """Reads the first layer's weight again at its end."""

    def forward(self, x: torch.Tensor, tied: bool = True) -> torch.Tensor:
        x = self[1](self[0](x))
        return F.linear(x, self[0].weight) if tied else x  # type: ignore[arg-type]


@mistake(
    T,
    "A weight that another stage reads, built on meta",
    wh.LayoutError,
    r"this call uses '0\.weight' on stages 0, 1, and it lies with stage 0, where its name puts it",
    ranks=2,
    site=True,
)
def read_elsewhere(rank: int, n: int) -> None:
    """A rank makes the values of its own stages only: those that names say, where nothing else does."""
    with torch.device("meta"):
        layers = Tied(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wh.parallelize(wh.pipeline(layers, num_stages=2))
    model(torch.ones(2, 4))


@mistake(
    T,
    "A weight that another stage reads later",
    wh.LayoutError,
    r"this call uses '0\.weight' on stages 0, 1, and it lies with stage 0, where the first call used it",
    ranks=2,
    site=True,
)
def read_elsewhere_later(rank: int, n: int) -> None:
    """The first call, or sample_inputs, says which ranks hold a weight; the others let it go."""
    model = wh.parallelize(wh.pipeline(Tied(nn.Linear(4, 4), nn.Linear(4, 4)), num_stages=2))
    model(torch.ones(2, 4), tied=False)
    model(torch.ones(2, 4))


class Twice(nn.ModuleDict):
    """Calls one BatchNorm before and after its other layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self["norm"](self["layer"](self["norm"](x)))
        return out


@mistake(
    T,
    "Running statistics in two stages",
    wh.LayoutError,
    r"the buffer 'norm\.num_batches_tracked' is changed by its module in the forward, and used on stages 0, 1",
    ranks=2,
    site=True,
)
def statistics_in_two_stages(rank: int, n: int) -> None:
    """A parameter that two stages use is tied; statistics that each of them changes would drift apart."""
    layers = Twice({"norm": nn.BatchNorm1d(4), "layer": nn.Linear(4, 4)})
    model = wh.parallelize(wh.annotate(layers, {"norm": wh.stage(), "layer": wh.stage()}, inside=wh.pipeline()))
    model(torch.ones(8, 4))


@mistake(
    T,
    "A loss that ranks multiply by different numbers",
    wh.CommError,
    r"the loss of a pipeline was multiplied by 1 on rank 0 and by 2 on rank 1, in all backwards since the last call",
    ranks=2,
)
def loss_of_different_factors(rank: int, n: int) -> None:
    """A pipeline's loss is the mean over all samples, whatever number of them each replica had."""

    class Squares(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(x)
            return out.square().mean()

    layers = Squares(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wh.parallelize(wh.pipeline(layers, num_stages=2, num_ranks=1))
    (model(torch.ones(2, 4)) * (1 + rank)).backward()
    model(torch.ones(2, 4))


@mistake(
    T,
    "A member of another rank's stage called by itself",
    wh.LayoutError,
    r"module '\d' of a pipelined model was called on a rank that does not hold its parameters",
    ranks=2,
    site=True,
    same=False,
)
def member_of_another_stage(rank: int, n: int) -> None:
    """Each rank holds its own stages; the model's call runs them where they are."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wh.parallelize(wh.pipeline(layers, num_stages=2), sample_inputs=torch.ones(2, 4))
    model[1 - rank](torch.ones(2, 4))  # type: ignore[index]


@mistake(
    T,
    "An optimizer that looks at all stages",
    wh.PlanError,
    r"LBFGS reads whole tensors, but '\d\.weight' is on another rank of the pipeline",
    ranks=2,
    site=True,
    same=False,
)
def optimizer_of_all_stages(rank: int, n: int) -> None:
    """Its norms and products would be those of this rank's stages."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wh.parallelize(wh.pipeline(layers, num_stages=2), sample_inputs=torch.ones(2, 4))
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: model(torch.ones(2, 4)).sum())  # type: ignore[arg-type]


@mistake(
    T,
    "torch's GradScaler on stages",
    wh.PlanError,
    r"GradScaler looks for overflow in this rank's gradients alone, but '\d\.weight' is one stage's of several ranks",
    ranks=2,
    site=True,
    same=False,
)
def scaled_by_torch(rank: int, n: int) -> None:
    """Where a rank sees an overflow and another none, one steps and the other does not."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wh.parallelize(wh.pipeline(layers, num_stages=2), sample_inputs=torch.ones(2, 4))
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)


# ---- the output of a split ----


@mistake(
    C,
    "A gather that was forbidden",
    wh.LayoutError,
    r"softmax would gather \(2, 8\) of .*and wh\.split\(gather=\"error\"\) forbids it",
    ranks=2,
    site=True,
)
def forbidden_gather(rank: int, n: int) -> None:
    """wh.split(gather="error") is a promise that no operation gathers all columns by accident."""
    with wh.split(gather="error"):
        head = nn.Linear(4, 8)
    model = wh.parallelize(nn.Sequential(head))
    model(torch.ones(2, 4)).softmax(-1)


@mistake(
    C,
    "Written in place",
    wh.LayoutError,
    r"add_ would write into a split's output Columns\(shape=\(2, 8\), here 4 of 8 columns from [04]",
    ranks=2,
    site=True,
    same=False,
)
def written_in_place(rank: int, n: int) -> None:
    """A split's output is a view of the ranks' shards; its rows are an ordinary tensor."""
    z = wh.parallelize(classifier())(torch.ones(2, 4))
    z.add_(torch.arange(8.0))


@mistake(
    C,
    "A hook on its gradient",
    wh.LayoutError,
    r"register_hook on a split's output Columns\(shape=\(2, 8\)",
    ranks=2,
    site=True,
    same=False,
)
def hook_on_columns(rank: int, n: int) -> None:
    """The gradient that arrives there is that of all rows of the group, for the columns of this rank."""
    z = wh.parallelize(classifier())(torch.ones(2, 4))
    z.register_hook(print)


@mistake(
    C,
    "A full backward hook on a split's module",
    wh.LayoutError,
    r"a module's full backward hook.* met a split's output Columns\(shape=\(2, 8\)",
    ranks=2,
    site=True,
    same=False,
)
def backward_hook_on_columns(rank: int, n: int) -> None:
    """The gradient that it would be shown is that of all rows of the group, for the columns of this rank."""
    model = wh.parallelize(classifier())
    model[-1].register_full_backward_hook(lambda module, grad_input, grad_output: None)
    model(torch.ones(2, 4))


@mistake(C, "A label that is no class", IndexError, r"Target 8 is out of bounds", ranks=2)
def label_out_of_range(rank: int, n: int) -> None:
    """All ranks of the group say so, also those whose own labels are right."""
    z = wh.parallelize(classifier())(torch.ones(2, 4))
    F.cross_entropy(z, torch.tensor([0, 8 if rank == 1 else 1]))


# ---- state ----


@mistake(
    M,
    "torch.save of a shard",
    wh.CheckpointError,
    r"'1\.weight' is cut over ranks \[0, 1\]: this rank holds \(4, 4\) of \(8, 4\)",
    ranks=2,
)
def saved_shard(rank: int, n: int) -> None:
    """A file written on rank 0 would hold a part of the model."""
    model = wh.parallelize(classifier())
    torch.save(model.state_dict(), io.BytesIO())


@mistake(
    M, "load_state_dict(assign=True)", wh.CheckpointError, r"load_state_dict\(assign=True\) would replace '", ranks=2
)
def assigned_state(rank: int, n: int) -> None:
    """Parameters stay the same objects for the whole run."""
    model = wh.parallelize(classifier())
    model.load_state_dict(classifier().state_dict(), assign=True)


@mistake(M, "A copy that trains", wh.LossError, r"this model is a copy of a parallelized one", ranks=2)
def trained_copy(rank: int, n: int) -> None:
    """A copy (an average of weights, say) evaluates; its gradients would stay on their rank."""
    model = wh.parallelize(classifier())
    again = copy.deepcopy(model)
    F.cross_entropy(again(torch.ones(2, 4)), torch.tensor([0, 1])).backward()


@mistake(
    M,
    "torch.save of one rank's stages",
    wh.CheckpointError,
    r"'\d\.weight' belongs to a stage of rank \d: this rank \(\d\) has no values of it, so writing it would lose them",
    ranks=2,
    site=True,
    same=False,
)
def saved_stages(rank: int, n: int) -> None:
    """The other stages' parameters have their names and shapes here, and no values."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wh.parallelize(wh.pipeline(layers, num_stages=2), sample_inputs=torch.ones(2, 4))
    torch.save(model.state_dict(), io.BytesIO())


@mistake(
    M,
    "A number of another stage's parameter",
    wh.LayoutError,
    r"a number was asked for of '\d\.weight', which belongs to a stage of rank \d: this rank \(\d\) has no values",
    ranks=2,
    site=True,
    same=False,
)
def norm_of_all_stages(rank: int, n: int) -> None:
    """A norm over what this rank holds would be another one on each rank."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wh.parallelize(wh.pipeline(layers, num_stages=2), sample_inputs=torch.ones(2, 4))
    print(sum(p.norm() for p in model.parameters()))


@mistake(
    M,
    "torch.save of an optimizer of one rank's stages",
    wh.CheckpointError,
    r"an optimizer's state on this rank is without that of '\d\.weight' and of all else that other stages train",
    ranks=2,
    site=True,
    same=False,
)
def saved_optimizer_of_stages(rank: int, n: int) -> None:
    """Each rank writes its own, or all states but one are lost."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wh.parallelize(wh.pipeline(layers, num_stages=2), sample_inputs=torch.ones(2, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), io.BytesIO())


@mistake(
    M,
    "A copy of a pipelined model that is called",
    wh.PlanError,
    r"this model is a copy of a pipelined one: it has the values of this rank's stages only",
    ranks=2,
)
def called_copy_of_stages(rank: int, n: int) -> None:
    """A copy (an average of weights, say) keeps values; the pipeline's messages belong to the model."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wh.parallelize(wh.pipeline(layers, num_stages=2), sample_inputs=torch.ones(2, 4))
    copy.deepcopy(model).eval()(torch.ones(2, 4))


@mistake(M, "Delinked while a gradient waits", wh.PlanError, r"'weight' has a gradient, the sum over 2 layers", ranks=2)
def delinked_too_early(rank: int, n: int) -> None:
    """A gradient of shared weights is the sum over the layers; none of them can have it as its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wh.moe.share(model)
    wh.parallelize(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    wh.moe.delink(model, optimizer)


# ---- wh.save and wh.load ----


@mistake(K, "A step that is there already", wh.CheckpointError, r"run/step-00000100 exists\.")
def saved_twice(rank: int, n: int) -> None:
    """As of a run that was started again and did not load, or loaded an earlier step."""
    with tempfile.TemporaryDirectory() as folder:
        wh.save(f"{folder}/run", step=100, model=classifier())
        wh.save(f"{folder}/run", step=100, model=classifier())


@mistake(K, "A step that two jobs save", wh.CheckpointError, r"another job is saving .*run/step-00000100\.")
def saved_by_two(rank: int, n: int) -> None:
    """Of two jobs with one run_dir one wins; what it has written stays whole."""
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "run", "step-00000100.tmp-0123456789abcdef")  # where another job writes
        other.mkdir(parents=True)
        with (other / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            wh.save(f"{folder}/run", step=100, model=classifier())


@mistake(K, "A state without state_dict", wh.CheckpointError, r"lr= is a float, without state_dict and load_state_dict")
def saved_number(rank: int, n: int) -> None:
    """Numbers, texts and tensors of your own are extra."""
    with tempfile.TemporaryDirectory() as folder:
        wh.save(f"{folder}/run", step=100, model=classifier(), lr=0.1)


@mistake(K, "An object among extra", wh.CheckpointError, r"'extra/config' is a Namespace")
def saved_object(rank: int, n: int) -> None:
    """No pickle is written, so that no file can run code when it is read."""
    with tempfile.TemporaryDirectory() as folder:
        config = argparse.Namespace(width=4)
        wh.save(f"{folder}/run", step=100, model=classifier(), extra={"config": config})


@mistake(K, "A tag with a slash", wh.CheckpointError, r"tag is 'runs/best'")
def tagged_path(rank: int, n: int) -> None:
    """A tag is a name in its run_dir."""
    with tempfile.TemporaryDirectory() as folder:
        wh.save(f"{folder}/run", step=100, model=classifier(), tag="runs/best")


@mistake(K, "A folder without a checkpoint", wh.CheckpointError, r"run has no checkpoint: it does not exist\. Nothing")
def loaded_nothing(rank: int, n: int) -> None:
    """The wrong folder, or the first start of a run."""
    with tempfile.TemporaryDirectory() as folder:
        wh.load(f"{folder}/run", model=classifier())


@mistake(K, "A step that is not there", wh.CheckpointError, r"run has no step 150; there are 100, 200\.")
def loaded_other_step(rank: int, n: int) -> None:
    """It was never saved, or keep_last= has removed it."""
    with tempfile.TemporaryDirectory() as folder:
        for step in (100, 200):
            wh.save(f"{folder}/run", step=step, model=classifier())
        wh.load(f"{folder}/run", model=classifier(), step=150)


@mistake(K, "A model of other sizes", wh.CheckpointError, r"1\.weight has shape \(8, 4\), the model \(10, 4\)")
def loaded_other_size(rank: int, n: int) -> None:
    """All that does not fit is told at once, before anything changes."""
    with tempfile.TemporaryDirectory() as folder:
        wh.save(f"{folder}/run", step=100, model=classifier(8))
        wh.load(f"{folder}/run", model=classifier(10))


@mistake(K, "A model of other names", wh.CheckpointError, r"missing .*'heads\.weight' \(close: 'head\.weight'\)")
def loaded_other_names(rank: int, n: int) -> None:
    """A layer was renamed since."""
    with tempfile.TemporaryDirectory() as folder:
        wh.save(f"{folder}/run", step=100, model=nn.ModuleDict({"head": nn.Linear(4, 4)}))
        wh.load(f"{folder}/run", model=nn.ModuleDict({"heads": nn.Linear(4, 4)}))


@mistake(K, "A model of another dtype", wh.CheckpointError, r"weight is float32, the model's bfloat16")
def loaded_other_dtype(rank: int, n: int) -> None:
    """A dtype changes on request alone."""
    with tempfile.TemporaryDirectory() as folder:
        wh.save(f"{folder}/run", step=100, model=nn.Linear(4, 4))
        wh.load(f"{folder}/run", model=nn.Linear(4, 4, dtype=torch.bfloat16))


@mistake(K, "Another optimizer", wh.CheckpointError, r"the checkpoint's optimizer has options \['dampening', ")
def loaded_other_optimizer(rank: int, n: int) -> None:
    """Its state means nothing to this one."""
    with tempfile.TemporaryDirectory() as folder:
        model = nn.Linear(4, 4)
        sgd, adam = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        sgd.step()
        wh.save(f"{folder}/run", step=100, model=model, optimizer=sgd)
        wh.load(f"{folder}/run", model=model, optimizer=adam)


@mistake(K, "An optimizer without its model", wh.CheckpointError, r"an optimizer without its model")
def loaded_optimizer_alone(rank: int, n: int) -> None:
    """Its state is kept by the names of the parameters."""
    with tempfile.TemporaryDirectory() as folder:
        model = nn.Linear(4, 4)
        wh.save(f"{folder}/run", step=100, optimizer=torch.optim.Adam(model.parameters()))


@mistake(K, "A damaged file", wh.CheckpointError, r"rank-00000\.safetensors is damaged: chunk 0 of 'model/bias'")
def loaded_damaged(rank: int, n: int) -> None:
    """One flipped bit is enough; nothing is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = wh.save(f"{folder}/run", step=100, model=nn.Linear(4, 4), rng=False) / "rank-00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
        wh.load(f"{folder}/run", model=nn.Linear(4, 4))


@mistake(K, "A missing file", wh.CheckpointError, r"rank-00000\.safetensors is missing\.")
def loaded_without_file(rank: int, n: int) -> None:
    """As of a copy that did not come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        path = wh.save(f"{folder}/run", step=100, model=nn.Linear(4, 4))
        (path / "rank-00000.safetensors").unlink()
        wh.load(path, model=nn.Linear(4, 4))


# ---- layers of experts ----


@mistake(
    E,
    "A conversion of a name that is not there",
    wh.PlanError,
    r"pattern 'blocks\.0' matches no module\. Close names: 'block\.0', 'block\.1'",
    site=True,
)
def converted_name(rank: int, n: int) -> None:
    """Patterns match whole names."""
    model = nn.ModuleDict({"block": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))})
    moe.convert(model, {"blocks.0": {"num_experts": 4}})


@mistake(
    E,
    "An upcycled layer that would give something else",
    wh.PlanError,
    r"would not give what the dense feed-forward gives: the weights of a token's 1 experts do not sum to 1",
)
def inexact_upcycling(rank: int, n: int) -> None:
    """The weight of one expert is its probability, so that the gate learns."""
    dense = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    moe.upcycle(dense, num_experts=4, top_k=1)


@mistake(E, "A feed-forward that takes more than tokens", wh.PlanError, r"called with \[2, 4\] it raises TypeError")
def upcycled_attention(rank: int, n: int) -> None:
    """What becomes an expert is called with the rows that are sent to it, and nothing else."""
    moe.upcycle(nn.TransformerDecoderLayer(4, 2, 8), num_experts=4)


@mistake(E, "One expert in place of a function that builds one", wh.PlanError, r"one module, and 8 are to be built")
def one_expert(rank: int, n: int) -> None:
    """Every expert has weights of its own."""
    moe.MoELayer(4, num_experts=8, top_k=2, expert=nn.Linear(4, 4))


@mistake(E, "A gate built for another layer", wh.PlanError, r"gives a token 1 experts, the layer has top_k 2")
def gate_of_another_layer(rank: int, n: int) -> None:
    """A gate that is given says how many experts there are and how many a token has."""
    moe.MoELayer(4, num_experts=8, top_k=2, gate=moe.TopK(4, 8, 1))


@mistake(E, "A shared expert of another width", wh.LayoutError, r"shared expert makes \(3, 1\) of tokens \(3, 4\)")
def narrow_shared_expert(rank: int, n: int) -> None:
    """What it makes is added to what the experts make."""
    moe.MoELayer(4, num_experts=8, shared=nn.Linear(4, 1))(torch.ones(3, 4))


@mistake(
    E,
    "torch's GradScaler over a loss of balance",
    wh.PlanError,
    r"multiplied the loss by 1024, and the gradient of the auxiliary loss of a MoELayer was multiplied by 1\.",
)
def unscaled_balance(rank: int, n: int) -> None:
    """The loss of balance adds its gradient by itself, and cannot know of a scaler that is not wh.GradScaler."""
    model = moe.MoELayer(4, num_experts=2)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)


@mistake(
    E,
    "A loss of balance added inside the model",
    wh.LossError,
    r"aux_loss\(added=True\) inside the forward of Inside, whose outputs are weighed by rows",
    ranks=2,
)
def balance_inside(rank: int, n: int) -> None:
    """There it would be weighed as the rank's rows are, and it is of the tokens of all ranks."""

    class Inside(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mean() + moe.aux_loss(self, added=True)

    wh.parallelize(Inside(moe.MoELayer(4, num_experts=2)))(torch.ones(2, 4))
