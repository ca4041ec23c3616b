"""The process worlds themselves: what the rest of the suite stands on."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.world import RankFailed, WorldTimeout, outcomes, world
from whale_torch import PlanError

TIMEOUT = 5.0  # seconds of the worlds that are meant to hang: also on a loaded machine their other ranks end within it


def _sum_of_ranks(rank: int, n: int, start: float) -> torch.Tensor:
    dist.init_process_group("gloo")
    value = torch.full((3,), start + rank)
    dist.all_reduce(value)
    return value


def _environment(rank: int, n: int, *names: str) -> list[str | None]:
    assert not dist.is_initialized()
    return [os.environ.get(name) for name in names]


def _threads_and_group(rank: int, n: int) -> tuple[int, bool]:
    return torch.get_num_threads(), dist.is_initialized()


def _one_raises(rank: int, n: int, at: int) -> None:
    dist.init_process_group("gloo")
    if rank == at:
        raise PlanError(f"split(size=8) does not fit {n} ranks", where="train.py:11", fix="use 4", ranks=[rank])
    dist.all_reduce(torch.ones(1))  # never answered by the rank that raised


def _raises_what_cannot_be_pickled(rank: int, n: int) -> None:
    class Local(Exception):
        pass

    raise Local(f"only rank {rank} knows this type")


def _exits(rank: int, n: int, how: str) -> int:
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(3)
    return rank


def _hangs(rank: int, n: int, at: int, folder: str) -> int:
    Path(folder, str(rank)).write_text(str(os.getpid()))
    if rank == at:
        _deep_inside()
    return rank


def _deep_inside() -> None:
    time.sleep(60)


def _leaves_a_thread(rank: int, n: int) -> int:
    if rank == 1:
        threading.Thread(target=time.sleep, args=(60,), daemon=False).start()
    return rank


def _ends_after_the_time_out(rank: int, n: int) -> int:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # its stack is waited for
    time.sleep(2.0)
    return rank


def _warns(rank: int, n: int) -> int:
    warnings.warn("something changed", FutureWarning, stacklevel=1)
    return rank


def _prints_and_raises(rank: int, n: int) -> None:
    print(f"rank {rank} was here", flush=True)
    raise ValueError("no")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("n", range(1, 9))
def test_ranks_meet_and_results_come_in_rank_order(n: int) -> None:
    results = world(n, _sum_of_ranks, 10.0)
    assert len(results) == n
    for value in results:
        torch.testing.assert_close(value, torch.full((3,), 10.0 * n + n * (n - 1) / 2))


def test_environment_is_torchruns() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MINE")
    results = world(4, _environment, *names, local_world_size=2, env={"MINE": "yes"})
    assert results[3] == ["3", "4", "1", "2", "1", "127.0.0.1", "yes"]
    assert [r[4] for r in results] == ["0", "0", "1", "1"]
    assert "RANK" not in os.environ


def test_nodes_must_be_full() -> None:
    with pytest.raises(ValueError, match="4 ranks cannot have 3"):
        world(4, _environment, local_world_size=3)


def test_one_thread_and_a_group_only_if_asked_for() -> None:
    assert world(2, _threads_and_group) == [(1, False)] * 2
    assert world(2, _threads_and_group, init=True) == [(1, True)] * 2


@pytest.mark.parametrize("at", [0, 2])
def test_an_error_keeps_its_type_names_its_rank_and_ends_the_others(at: int) -> None:
    start = time.monotonic()
    with pytest.raises(PlanError, match="does not fit 3 ranks") as caught:
        world(3, _one_raises, at)
    assert time.monotonic() - start < 30  # and not the 60 of the time-out
    assert caught.value.where == "train.py:11" and caught.value.ranks == (at,)
    reason = str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, RankFailed)
    assert f"rank {at} of 3 failed" in reason and "_one_raises" in reason


def test_an_error_that_cannot_be_pickled_still_tells_its_story() -> None:
    with pytest.raises(RankFailed, match="Local: only rank 0 knows this type") as caught:
        world(1, _raises_what_cannot_be_pickled)
    assert "_raises_what_cannot_be_pickled" in str(caught.value.__cause__)


@pytest.mark.parametrize(("how", "match"), [("killed", "exit code -9"), ("exit", "SystemExit: 3")])
def test_a_rank_that_dies_is_an_error(how: str, match: str) -> None:
    with pytest.raises(RankFailed, match=match) as caught:
        world(2, _exits, how)
    assert "rank 1 of 2" in str(caught.value.__cause__)


def test_outcomes_let_the_others_end_by_themselves() -> None:
    ended = outcomes(3, _exits, "killed")
    assert [o.ok for o in ended] == [True, False, True]
    assert [o.value for o in ended] == [0, None, 2]
    assert ended[1].exit_code == -signal.SIGKILL


def test_a_time_out_shows_where_each_hanging_rank_is_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(WorldTimeout) as caught:
        world(3, _hangs, 1, str(tmp_path), timeout=TIMEOUT)
    text = str(caught.value)
    assert "rank 1; ended: 0, 2" in text
    assert "rank 1 of 3 hangs here" in text and "_deep_inside" in text
    assert "rank 0 of 3" not in text
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(3)]
    end = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(_alive, pids))


def test_a_rank_that_returns_but_does_not_exit_hangs() -> None:
    with pytest.raises(WorldTimeout, match="rank 1 of 2 has returned but does not exit"):
        world(2, _leaves_a_thread, timeout=TIMEOUT)


def test_a_rank_that_ends_after_the_time_out_has_no_result() -> None:
    with pytest.raises(WorldTimeout, match="still running after 1 s: rank 0, 1"):
        world(2, _ends_after_the_time_out, timeout=1.0)
    assert not any(outcome.ok for outcome in outcomes(2, _ends_after_the_time_out, timeout=1.0))


def test_warnings_fail_in_a_rank_as_they_do_here() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FutureWarning, match="something changed"):
            world(1, _warns)
        warnings.simplefilter("ignore")
        assert world(1, _warns) == [0]


def test_a_failed_ranks_output_is_in_the_error() -> None:
    with pytest.raises(ValueError, match="no") as caught:
        world(1, _prints_and_raises)
    assert "rank 0 was here" in str(caught.value.__cause__)
