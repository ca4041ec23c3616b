"""What the other ranks say when one does something else: nothing hangs, and the message names operation and ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.split_case import Case, build
from tests.world import Outcome, outcomes
from whale_torch.comm.rows import enter_batch
from whale_torch.errors import CommError, LayoutError
from whale_torch.strategies.runtime import runtime_of

ROOT = Path(__file__).parents[2]
TIMEOUT = 5.0
PROMPT = 4.0  # a rank that ended is noticed long before the time-out
LONG = 12.0  # more than the time-out and the time for last words


def _step(case: Case) -> None:
    F.cross_entropy(case.model(case.x[case.here]), case.y[case.here]).backward()


def _metric_on_rank_0(case: Case, rank: int) -> None:
    z = case.model(case.x[case.here])
    if rank == 0:
        z.max()
    F.cross_entropy(z, case.y[case.here]).backward()


def _metric_before_backward(case: Case, rank: int) -> None:
    z = case.model(case.x[case.here])
    loss = F.cross_entropy(z, case.y[case.here])
    if rank == 0:
        z.max()
    loss.backward()


def _metric_after_the_step(case: Case, rank: int) -> None:
    z = case.model(case.x[case.here])
    F.cross_entropy(z, case.y[case.here]).backward()
    if rank == 0:
        z.argmax(-1)
    _step(case)


def _raises(case: Case, rank: int) -> None:
    _step(case)
    if rank == 1:
        raise ValueError("no such file: shard-1.bin\nsecond line")
    _step(case)


def _raises_in_backward(case: Case, rank: int) -> None:
    h = case.model.features(case.x[case.here])  # type: ignore[operator]
    z = case.model.fc(h.tanh())  # type: ignore[operator]
    if rank == 1:
        h.register_hook(_refuse)
    F.cross_entropy(z, case.y[case.here]).backward()
    _step(case)


def _refuse(grad: Tensor) -> None:
    raise ValueError("a gradient that is not wanted")


def _evaluates_alone(case: Case, rank: int) -> None:
    if rank == 0:
        with torch.no_grad():
            case.model.eval()(case.x[case.here])
    _step(case)


def _evaluates_alone_at_the_end(case: Case, rank: int) -> None:
    if rank == 0:
        case.model.eval()(case.x[case.here])


def _keeps_the_state_alone(case: Case, rank: int) -> None:
    if rank == 0:
        wh.full_state_dict(case.model)
    _step(case)


def _is_killed(case: Case, rank: int) -> None:
    _step(case)
    if rank == 1:
        os._exit(9)
    _step(case)


def _sleeps(case: Case, rank: int) -> None:
    _step(case)
    if rank == 1:
        time.sleep(LONG)
    _step(case)


def _skips_backward(case: Case, rank: int) -> None:
    loss = F.cross_entropy(case.model(case.x[case.here]), case.y[case.here])
    if rank != 1:
        loss.backward()
    _step(case)


def _run(rank: int, n: int, name: str, layout: str, options: dict[str, Any]) -> None:
    """A script's main part: an error that ends it is seen by sys.excepthook, as at the top of a program."""
    case = build(rank, n, layout, 10, [3, 2], timeout=TIMEOUT, **options)
    dist.barrier()
    try:
        SCRIPTS[name](case, rank)
    except Exception:  # whatever ends the script
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        raise


SCRIPTS: dict[str, Callable[[Case, int], None]] = {
    function.__name__.lstrip("_"): function
    for function in (
        *(_metric_on_rank_0, _metric_before_backward, _metric_after_the_step, _raises, _raises_in_backward),
        *(_is_killed, _sleeps, _skips_backward),
        *(_evaluates_alone, _evaluates_alone_at_the_end, _keeps_the_state_alone),
    )
}


def _outcomes(n: int, name: str, layout: str, **options: Any) -> list[Outcome]:
    ended = outcomes(n, _run, name, layout, options, timeout=45, init=True)
    assert all(o.returned or o.exit_code for o in ended), "a rank hangs"
    return ended


def _others(ended: list[Outcome], *, but: int = 1) -> list[str]:
    """The messages of the ranks that waited; each is a CommError."""
    errors = [o.error for o in ended if o.rank != but]
    assert all(isinstance(error, CommError) for error in errors), errors
    return [str(error) for error in errors]


@pytest.mark.parametrize(("n", "layout"), [(2, "own"), (4, "shared"), (4, "mixed"), (4, "groups")])
def test_an_operation_on_one_rank_only(n: int, layout: str) -> None:
    ended = _outcomes(n, "metric_on_rank_0", layout)
    group = 2 if layout in ("shared", "groups") else n
    for o in ended[:group]:
        assert isinstance(o.error, CommError), o
        assert "are in different operations: rank 0: 'max' (number" in str(o.error)
        assert "rank 1: 'cross_entropy' (number" in str(o.error) and "z.rows() on every rank" in str(o.error)
        assert o.error.ranks == tuple(range(group))
    for o in ended[group:]:  # they wait for the gradients of the first group
        assert isinstance(o.error, CommError) and "are in different operations" in str(o.error), o.error


@pytest.mark.parametrize("layout", ["own", "shared"])
@pytest.mark.matrix(keep=0)
def test_an_operation_on_one_rank_while_others_run_backward(layout: str) -> None:
    mine, *others = _outcomes(2, "metric_before_backward", layout)
    assert isinstance(mine.error, CommError) and "'max' over" in str(mine.error)
    assert "rank 1 waited in '" in str(mine.error) and "failed on rank 0" in str(mine.error)
    for o in others:
        assert isinstance(o.error, CommError) and "rank 0 waited in 'max' of" in str(o.error), o.error


@pytest.mark.parametrize("layout", ["own", "shared"])
@pytest.mark.matrix(keep=1)
def test_an_operation_on_one_rank_after_the_step(layout: str) -> None:
    for o in _outcomes(2, "metric_after_the_step", layout):
        assert isinstance(o.error, CommError) and "argmax" in str(o.error), o.error


@pytest.mark.parametrize("layout", ["own", "shared"])
def test_an_evaluation_on_one_rank_only(layout: str) -> None:
    mine, other = _outcomes(2, "evaluates_alone", layout)
    assert isinstance(mine.error, CommError) and isinstance(other.error, CommError), (mine, other)
    assert str(mine.error).startswith("model(...) in evaluation of "), mine.error
    assert "call the model on all ranks together, to evaluate too" in str(mine.error)
    if layout == "own":
        assert "rank 0: 'model(...) in evaluation' (number" in str(other.error), other.error


def test_an_evaluation_after_the_others_ended() -> None:
    mine, _ = _outcomes(2, "evaluates_alone_at_the_end", "own")
    assert isinstance(mine.error, CommError) and "model(...) in evaluation of " in str(mine.error), mine


@pytest.mark.matrix(keep=0)
def test_a_whole_state_dict_on_one_rank_only() -> None:
    mine, other = _outcomes(2, "keeps_the_state_alone", "own")
    assert isinstance(mine.error, CommError) and str(mine.error).startswith("wh.full_state_dict(model): "), mine
    assert "call wh.full_state_dict(model) on every rank" in str(mine.error)
    assert isinstance(other.error, CommError) and "wh.full_state_dict is called on every rank" in str(other.error)


@pytest.mark.parametrize(("n", "layout"), [(3, "own"), (4, "shared"), (3, "replica")])
def test_a_rank_that_raises_is_named(n: int, layout: str) -> None:
    ended = _outcomes(n, "raises", layout)
    assert isinstance(ended[1].error, ValueError)
    for text in _others(ended):
        assert "rank 1 ended: ValueError: no such file: shard-1.bin" in text and "second line" not in text
    assert max(o.seconds for o in ended) - ended[1].seconds < PROMPT


@pytest.mark.parametrize("layout", ["own", "shared"])
def test_a_rank_that_raises_in_backward_is_named(layout: str) -> None:
    ended = _outcomes(2, "raises_in_backward", layout)
    assert isinstance(ended[1].error, ValueError)
    for text in _others(ended):
        assert "rank 1 ended: ValueError: a gradient that is not wanted" in text


def test_a_rank_that_is_killed_did_not_arrive() -> None:
    ended = _outcomes(3, "is_killed", "own")
    for text in _others(ended):
        assert "ranks [1] did not arrive" in text and "closed by peer" in text.lower().replace("reset", "closed")


@pytest.mark.parametrize(
    ("layout", "options", "operation"),
    [
        ("own", {}, "rows of a split's input"),
        ("shared", {}, "row counts of the batch"),
        ("replica", {}, "row counts of the batch"),
    ],
)
@pytest.mark.matrix(keep=0)
def test_a_rank_that_sleeps_is_named_within_the_time_out(layout: str, options: dict[str, Any], operation: str) -> None:
    ended = _outcomes(2, "sleeps", layout, **options)
    (text,) = _others(ended)
    assert f"'{operation}' over" in text and "failed on rank 0" in text and "ranks [1] did not arrive" in text
    assert isinstance(ended[0].error, CommError) and ended[0].error.ranks == (1,)
    assert ended[0].seconds < TIMEOUT + 20
    assert isinstance(ended[1].error, CommError) and "ranks [0] waited here in vain" in str(ended[1].error)


@pytest.mark.parametrize("layout", ["own", "shared", "replica"])
@pytest.mark.matrix(keep=0)
def test_a_rank_that_skips_backward(layout: str) -> None:
    ended = _outcomes(2, "skips_backward", layout)
    for o in ended:
        assert isinstance(o.error, CommError), o.error
        assert "waited in" in str(o.error) or "in different operations" in str(o.error), o.error


def _half_precision(rank: int, n: int) -> None:
    """Gradients reduced by a thread of their own: what it meets is raised by backward."""
    with wh.replica(reduce_dtype=torch.float16):
        model = nn.Linear(4, 4)
    wh.parallelize(model, timeout=TIMEOUT)
    out = model(torch.ones(2, 4)).sum()
    dist.barrier()
    if rank == 1:
        time.sleep(LONG)
    out.backward()


@pytest.mark.matrix(keep=0)
def test_a_reduction_in_phases_says_so_too() -> None:
    mine, _ = outcomes(2, _half_precision, timeout=45)
    assert isinstance(mine.error, CommError), mine
    assert "largest gradient" in str(mine.error) and "ranks [1] did not arrive" in str(mine.error)


# ---- inputs that do not fit together: the same error on every rank, at once


def _lengths(rank: int, n: int) -> None:
    case = build(rank, n, "own", 10, [2], timeout=TIMEOUT)
    region = runtime_of(case.model, "the test").regions[0]
    enter_batch(torch.ones(2, 3 + rank, 6), region)


def _widths(rank: int, n: int) -> None:
    case = build(rank, n, "own", 10, [2], timeout=TIMEOUT)
    case.model.fc(torch.ones(2, 6 + rank))  # type: ignore[operator]


def _dtypes(rank: int, n: int) -> None:
    case = build(rank, n, "own", 10, [2], timeout=TIMEOUT)
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
        h = case.model.features(case.x[case.here])  # type: ignore[operator]
        case.model.fc(h)  # type: ignore[operator]


def _losses(rank: int, n: int) -> None:
    case = build(rank, n, "own", 10, [2], timeout=TIMEOUT)
    F.cross_entropy(case.model(case.x[case.here]), case.y[case.here], label_smoothing=0.1 * rank)


@pytest.mark.parametrize(
    ("run", "mine", "theirs"),
    [
        (_lengths, "of shape (3, 6)", "of shape (4, 6)"),
        (_widths, "of width 6", "of width 7"),
        (_dtypes, "torch.float32", "torch.bfloat16"),
        (_losses, "label_smoothing=0.0", "label_smoothing=0.1"),
    ],
)
def test_inputs_that_differ_are_refused_on_every_rank(run: Callable[..., None], mine: str, theirs: str) -> None:
    first, second = outcomes(2, run, timeout=30)
    for o in (first, second):
        assert isinstance(o.error, LayoutError), o
        assert "rank 0: " in str(o.error) and mine in str(o.error)
        assert "rank 1: " in str(o.error) and theirs in str(o.error)
    assert str(first.error) == str(second.error)


# ---- real programs: what ends one process ends the others, though messages are under way


SCRIPT = """
import atexit, os, sys, threading
import torch, torch.distributed as dist
import whale_torch as wh
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
wh.parallelize(model, timeout=70)
model(torch.ones(2, 4)).sum().backward()
if os.environ["RANK"] == "1":
    atexit.register(print, "the script's own last words", flush=True)
    under_way = dist.all_reduce(torch.ones(8), async_op=True)
    if sys.argv[1] == "raise":
        threading.Thread(target=under_way.wait, daemon=True).start()
        raise ValueError("boom")
    sys.exit(3)
model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_processes_end_at_once(how: str, tmp_path: Path) -> None:
    """A rank with a message under way that nobody answers ends all the same, and takes the others along."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    begin = time.monotonic()
    ranks = []
    for rank in range(2):
        world = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        world |= {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in world.items()}
        command = [sys.executable, str(script), how]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        outputs = [process.communicate(timeout=100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    texts = [error for _, error in outputs]
    assert [process.returncode for process in ranks] == [1, 1 if how == "raise" else 3], texts
    assert "the script's own last words" in outputs[1][0]
    assert time.monotonic() - begin < 55
    assert f"rank 1 ended: {'ValueError: boom' if how == 'raise' else 'its program was over'}" in texts[0]
    assert "terminate called" not in texts[0] + texts[1]
