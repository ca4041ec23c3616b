"""Process worlds: n fresh ranks run one function, as under torchrun, in about a tenth of a second.

`world` is for tests that expect every rank to succeed (or one to raise); `outcomes` is for tests about failure: it lets
every rank come to its own end and says how each ended.

The ranks meet at a store that this process hosts on a port the kernel chose, so any number of suites run side by side.
They are forked from a server that has imported torch and whale_torch once; nothing of the calling process but the
function, its arguments and the warning filters reaches them.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Outcome", "RankFailed", "WorldTimeout", "outcomes", "world"]

_FORKSERVER = multiprocessing.get_context("forkserver")
# Imported once, in the server, not by each rank: in the second and third line what torch imports late, at the first
# optimizer or loss say (1-2 s), then what tests are about (0.1 s), what models of others need (2 s, where it is
# installed), and what makes all of it no garbage.
_PRELOADED = ["torch", "torch.distributed", "numpy", "pytest"]
_PRELOADED += ["torch.distributed.device_mesh", "torch.distributed.tensor"]
_PRELOADED += ["torch._dynamo", "torch.nn.modules.linear_cross_entropy"]
_PRELOADED += ["whale_torch", "transformers.modeling_utils"]
_PRELOADED += ["tests.preloaded"]
_FORKSERVER.set_forkserver_preload(_PRELOADED)

_DUMP_SECONDS = 2.0  # how long a hanging rank has to write its stack
_LOG_CHARACTERS = 4000  # how much of a failed rank's output an error repeats


class RankFailed(Exception):
    """One rank raised or died; the message holds its number, traceback and last output."""


class WorldTimeout(TimeoutError):
    """Ranks were still running at the time-out; the message holds the stack of each."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended.

    value: what the function returned. error: what it raised; RankFailed if it cannot be pickled or the process died.
    traceback: of the error. exit_code: of the process, negative for a signal; None if it hung.
    seconds: from the world's start. returned: whether the function came to its end, by a result or an error.
    stack: of a rank that hung. output: what the rank printed.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    returned: bool = False
    stack: str = ""
    output: str = ""

    @property
    def ok(self) -> bool:
        return self.returned and self.error is None and self.exit_code == 0


def world(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    local_world_size: int | None = None,
    init: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs fn(rank, n, *args) in n fresh processes and returns what each returned, in rank order.

    fn is a module-level function. timeout in seconds, for the whole world. local_world_size: ranks a node, default n.
    init: start the gloo default group before fn. env: further environment variables of the ranks.
    Raises: the first rank's own error, from a RankFailed that names the rank and shows its traceback, as soon as it
    happens (the other ranks are ended); WorldTimeout, with the stack of each rank that hangs.
    """
    ended = _run(n, fn, args, timeout, local_world_size, init, env, stop_at_first_error=True)
    failed = min((o for o in ended if o.error is not None), key=lambda o: o.seconds, default=None)
    if failed is not None and failed.error is not None:
        reason = f"rank {failed.rank} of {n} failed after {failed.seconds:.1f} s{_tail(failed)}\n{failed.traceback}"
        raise failed.error from RankFailed(reason)
    hanging = [o for o in ended if o.exit_code is None or not o.returned]  # some end while stacks are written
    if hanging:
        raise WorldTimeout(_hang_report(n, timeout, ended, hanging))
    return [o.value for o in ended]


def outcomes(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    local_world_size: int | None = None,
    init: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """As `world`, but lets each rank come to its own end and says how it ended; never raises what a rank raised."""
    return _run(n, fn, args, timeout, local_world_size, init, env, stop_at_first_error=False)


@dataclass(frozen=True, slots=True)
class _Orders:
    """What a rank is told, besides the function."""

    rank: int
    environment: dict[str, str]
    filters: list[tuple[str, str, type[Warning], str, int]]
    folder: str
    init: bool
    limit: float


@dataclass(slots=True)
class _Rank:
    """This process's end of one rank."""

    number: int
    process: Any
    reports: Connection
    report: dict[str, Any] | None = None
    stack: str = ""
    closed: bool = False


def _run(
    n: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    local_world_size: int | None,
    init: bool,
    env: Mapping[str, str] | None,
    *,
    stop_at_first_error: bool,
) -> list[Outcome]:
    local = local_world_size or n
    if n < 1 or n % local:
        raise ValueError(f"a world of {n} ranks cannot have {local} ranks a node")
    payload = _to_bytes((fn, args))
    _start_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        ranks: list[_Rank] = []
        try:
            for number in range(n):
                environment = _torchrun_environment(number, n, local, store.port) | dict(env or {})
                orders = _Orders(number, environment, _warning_filters(), folder, init, timeout + 15)
                ranks.append(_launch(orders, n, payload))
            if not _collect(ranks, start + timeout, stop_at_first_error):
                _dump_stacks([rank for rank in ranks if rank.process.is_alive()], folder)
            return [_outcome(rank, start, folder) for rank in ranks]
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
                rank.process.close()
                rank.reports.close()


@functools.cache
def _start_server() -> None:
    """Waits until the server has imported what ranks share: on a busy machine that is longer than a world may take."""
    process = _FORKSERVER.Process(target=_nothing, daemon=True)
    process.start()
    process.join()


def _nothing() -> None:
    pass


def _torchrun_environment(rank: int, n: int, local: int, port: int) -> dict[str, str]:
    values = {
        "RANK": rank,
        "WORLD_SIZE": n,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": rank // local,
        "GROUP_WORLD_SIZE": n // local,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        # As under torchrun, ranks connect to the launcher's store and rank 0 opens none: no race for a port.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in values.items()}


def _warning_filters() -> list[tuple[str, str, type[Warning], str, int]]:
    """The filters in force here (pytest's), in a form that pickles: a warning that fails a test fails in a rank too."""
    filters: list[Any] = list(warnings.filters)
    return [
        (action, _pattern(message), kind, _pattern(module), line) for action, message, kind, module, line in filters
    ]


def _pattern(expression: re.Pattern[str] | str | None) -> str:
    return expression.pattern if isinstance(expression, re.Pattern) else expression or ""


def _launch(orders: _Orders, n: int, payload: bytes) -> _Rank:
    ours, theirs = _FORKSERVER.Pipe(duplex=False)
    name = f"rank {orders.rank} of {n}"
    process = _FORKSERVER.Process(target=_rank_main, args=(orders, n, payload, theirs), name=name, daemon=True)
    process.start()
    theirs.close()  # so that the rank holds the only writing end, and its death is an end of file here
    return _Rank(orders.rank, process, ours)


def _collect(ranks: list[_Rank], deadline: float, stop_at_first_error: bool) -> bool:
    """Receives each rank's report and its end, to the last or, if asked to, the first error; False at the deadline."""
    while waiting := {rank.reports: rank for rank in ranks if not rank.closed}:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        for connection in ready:
            rank = waiting[connection]  # type: ignore[index]
            try:
                rank.report = pickle.loads(rank.reports.recv_bytes())
            except EOFError:
                rank.closed = True
        failed = any(rank.closed if rank.report is None else rank.report["summary"] for rank in ranks)
        if failed and stop_at_first_error:
            break
    for rank in ranks:
        if rank.closed:  # the pipe closes a moment before the process ends
            rank.process.join(max(1.0, deadline - time.monotonic()))
    return True


def _dump_stacks(ranks: list[_Rank], folder: str) -> None:
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGUSR1)
    end = time.monotonic() + _DUMP_SECONDS
    for rank in ranks:
        file = Path(folder, f"stack{rank.number}")
        while not rank.stack.endswith("\n") and time.monotonic() < end and rank.process.is_alive():
            time.sleep(0.05)
            rank.stack = file.read_text() if file.exists() else ""
        if not rank.stack:
            rank.stack = f"  (no stack within {_DUMP_SECONDS:.0f} s: the process is stopped or has not begun)\n"


def _outcome(rank: _Rank, start: float, folder: str) -> Outcome:
    log, report = Path(folder, f"log{rank.number}"), rank.report
    exit_code = None if rank.process.is_alive() else rank.process.exitcode
    seconds = (report["at"] if report else time.monotonic()) - start
    output = log.read_text(errors="replace") if log.exists() else ""
    common: dict[str, Any] = {"exit_code": exit_code, "seconds": seconds, "stack": rank.stack, "output": output}
    if report is None and not rank.closed:  # it runs still: it hangs, or another rank failed first
        return Outcome(rank.number, **common)
    if report is None:
        died = RankFailed(f"the process ended with exit code {exit_code} and no result")
        return Outcome(rank.number, error=died, **common)
    if report["summary"]:
        error = _load_error(report)
        return Outcome(rank.number, error=error, traceback=report["traceback"], returned=True, **common)
    value = torch.load(io.BytesIO(report["value"]), weights_only=False)
    return Outcome(rank.number, value=value, returned=True, **common)


def _load_error(report: dict[str, Any]) -> BaseException:
    try:
        error = pickle.loads(report["error"])
    except Exception as problem:  # any error at all can come out of a foreign __reduce__
        return RankFailed(f"{report['summary']} (the error itself cannot be rebuilt here: {problem})")
    return error if isinstance(error, BaseException) else RankFailed(report["summary"])


def _tail(outcome: Outcome) -> str:
    return f"; its last output:\n{outcome.output[-_LOG_CHARACTERS:].rstrip()}" if outcome.output.strip() else ""


def _hang_report(n: int, timeout: float, ended: list[Outcome], hanging: list[Outcome]) -> str:
    numbers = ", ".join(str(o.rank) for o in hanging)
    done = ", ".join(str(o.rank) for o in ended if o.exit_code is not None) or "none"
    lines = [f"world of {n} ranks: still running after {timeout:g} s: rank {numbers}; ended: {done}"]
    for o in hanging:
        state = "has returned but does not exit" if o.returned else "hangs"
        lines.append(f"--- rank {o.rank} of {n} {state} here{_tail(o)}\n{o.stack}")
    return "\n".join(lines)


# ---- in the rank ----


def _rank_main(orders: _Orders, n: int, payload: bytes, reports: Connection) -> None:
    log = Path(orders.folder, f"log{orders.rank}").open("wb", buffering=0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    stack = Path(orders.folder, f"stack{orders.rank}").open("w")
    faulthandler.enable()  # a crash writes its stack into the log
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    # The last bound: a rank whose parent was killed ends by itself.
    faulthandler.dump_traceback_later(orders.limit, exit=True)
    os.environ.update(orders.environment)
    torch.set_num_threads(1)
    _set_warning_filters(orders.filters)
    report: dict[str, Any] = {"summary": ""}
    try:
        if orders.init:
            dist.init_process_group("gloo")
        fn, args = torch.load(io.BytesIO(payload), weights_only=False)
        report["value"] = _to_bytes(fn(orders.rank, n, *args))
    except BaseException as error:  # also pytest's outcomes and SystemExit: whatever ends a rank is the test's to see
        report["error"] = _pickled(error)
        report["summary"] = "".join(traceback.format_exception_only(error)).strip()
        report["traceback"] = "".join(traceback.format_exception(error))
    report["at"] = time.monotonic()
    reports.send_bytes(pickle.dumps(report))
    if not report["summary"] and dist.is_initialized():
        dist.destroy_process_group()


def _set_warning_filters(filters: list[tuple[str, str, type[Warning], str, int]]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in filters:
        warnings.filterwarnings(action, message, category, module, line, append=True)  # type: ignore[arg-type]


def _pickled(error: BaseException) -> bytes:
    """The error in bytes, or None's where it cannot be pickled or, an exit, must not be raised in another process."""
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return pickle.dumps(None)
    try:
        return pickle.dumps(error)
    except Exception:  # any error at all can come out of a foreign __reduce__
        return pickle.dumps(None)


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
