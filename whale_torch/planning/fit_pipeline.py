"""Does the pipeline of a saved plan, as it may have been edited, fit a model and the ranks that run?"""

from __future__ import annotations

from torch import nn

from whale_torch.errors import PlanError
from whale_torch.names import containers
from whale_torch.planning.pipelines import PipelinePlan
from whale_torch.planning.schedules import NAMES, from_table

__all__ = ["check_pipeline"]


def check_pipeline(pipeline: PipelinePlan, model: nn.Module, world: int) -> None:
    """Raises PlanError for a pipeline, of a plan that was edited, that cannot be carried out on this model."""
    ranks, number = pipeline.num_ranks, pipeline.num_micro_batches
    if not pipeline.table and pipeline.schedule not in NAMES:
        raise PlanError(
            f"the plan's schedule is {pipeline.schedule!r}.",
            fix=f"it is one of {', '.join(NAMES)}, or the name of the rows in its `table`",
        )
    if type(number) is not int or number < 1:
        raise PlanError(f"the plan's pipeline has {number!r} micro-batches.", fix="1 or more")
    if type(ranks) is not int or not 1 <= ranks <= pipeline.num_stages or world % ranks:
        raise PlanError(
            f"the plan's pipelines have {ranks!r} ranks, {pipeline.num_stages} stages and {world} ranks to run on.",
            fix="num_ranks divides the ranks and is at most the number of stages",
        )
    if pipeline.table:
        _check_table(pipeline)
    if pipeline.micro_batch_loss not in (None, "mean"):
        raise PlanError(f"the plan's micro_batch_loss is {pipeline.micro_batch_loss!r}.", fix='it is null or "mean"')
    if pipeline.mixing not in (None, "accept"):
        raise PlanError(f"the plan's mixing is {pipeline.mixing!r}.", fix='it is null or "accept"')
    _check_stages(pipeline, model)
    parameters = {name for name, _ in model.named_parameters()}
    for name, stages in pipeline.elsewhere:
        if name not in parameters or not stages or not set(stages) <= set(range(pipeline.num_stages)):
            raise PlanError(
                f"the plan says that stages {list(stages)} of {pipeline.num_stages} use the parameter '{name}'.",
                fix="leave out what was recorded: an empty list of `elsewhere`",
            )


def _check_table(pipeline: PipelinePlan) -> None:
    """The rows are a schedule of as many stages, ranks and micro-batches as the plan says."""
    if pipeline.schedule in NAMES:
        raise PlanError(
            f"the plan's schedule is {pipeline.schedule!r}, and it has a table, which is run instead.",
            fix=f'empty `table` for {pipeline.schedule!r}, or call the schedule "table"',
        )
    found = from_table(pipeline.table, name=pipeline.schedule)
    for what, number, asked in (
        ("stages", found.num_stages, pipeline.num_stages),
        ("ranks", found.num_ranks, pipeline.num_ranks),
        ("micro-batches", found.num_micro_batches, pipeline.num_micro_batches),
    ):
        if number != asked:
            raise PlanError(
                f"the plan's table has actions of {number} {what}, and its pipeline has {asked}.",
                fix="edit both alike: one row a rank, and actions of every stage and micro-batch",
            )


def _check_stages(pipeline: PipelinePlan, model: nn.Module) -> None:
    """Every stage has modules, each of the model, and none that is or contains another's."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, int] = {}
    for stage, names in enumerate(pipeline.stages):
        if not names:
            raise PlanError(
                f"stage {stage} of the plan's {pipeline.num_stages} has no modules.",
                fix="leave it out, or give it some",
            )
        for name in names:
            if name not in modules:
                raise PlanError(
                    f"the plan's stage {stage} has '{name}', which is not in the model.", fix="take it out of the stage"
                )
            if name in found:
                raise _in_two_stages(name, stage, name, found[name])
            found[name] = stage
    for name, stage in found.items():
        outer = next((other for other in containers(name) if other in found), None)
        if outer is not None:
            raise _in_two_stages(name, stage, outer, found[outer])


def _in_two_stages(name: str, stage: int, other: str, other_stage: int) -> PlanError:
    return PlanError(
        f"the plan's stage {stage} has '{name}', and its stage {other_stage} has '{other}'.",
        fix="name every module in one stage, and none that contains another one",
    )
