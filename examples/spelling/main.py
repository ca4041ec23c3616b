"""Trains the spelling corrector and times its step beside plain DistributedDataParallel.

torchrun --nproc-per-node 4 -m examples.spelling.main [--classes N|all] [--steps N] [--batch N] [--compare N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import whale_torch as wh
from examples.spelling.data import SEEN_IN_THE_WILD, Misspellings, encode, vocabulary
from examples.spelling.model import Features, SpellingCorrector

LEARNING_RATE = 2e-3
TIMED_STEPS = 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", default="5000", help="words to tell apart, or `all` (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=800, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="misspellings a rank and step (default: %(default)s)")
    parser.add_argument(
        "--compare", type=int, default=50_000, help="words at which a step is also timed (default: %(default)s)"
    )
    return parser.parse_args()


def loader(model: nn.Module, data: Misspellings, batch: int, *, shuffle: bool) -> DataLoader[tuple[Tensor, Tensor]]:
    batches = wh.batch_sampler(model, data, batch, shuffle=shuffle, seed=0)
    return DataLoader(data, batch_sampler=batches, collate_fn=batches.collate_fn)


def train(model: nn.Module, batches: DataLoader[tuple[Tensor, Tensor]], console: Console) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    steps, samples = len(batches), len(batches.dataset)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2.02 - 2 * step / steps))
    columns = ("{task.description}", "step {task.completed}/{task.total}", "loss {task.fields[loss]:.3f}")
    columns += ("accuracy {task.fields[accuracy]:.0%}", "{task.fields[speed]:,.0f} words/s")
    bar = Progress(BarColumn(), *map(TextColumn, columns), TimeRemainingColumn(), console=console)
    with bar:
        task = bar.add_task("training", total=steps, loss=float("nan"), accuracy=0.0, speed=0.0)
        shown, start = 0, time.perf_counter()
        for step, (letters, target) in enumerate(batches, 1):
            logits = model(letters)
            loss = F.cross_entropy(logits, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 20 == 0 or step == steps:
                accuracy = (logits.detach().argmax(1) == target).float().mean()
                fields = {
                    "loss": float(wh.reduce(loss.detach(), "mean")),
                    "accuracy": float(wh.reduce(accuracy, "mean")),
                    "speed": (step - shown) * samples / steps / (time.perf_counter() - start),
                }
                shown, start = step, time.perf_counter()
                bar.update(task, completed=step, **fields)


@torch.no_grad()
def accuracy_on(model: nn.Module, batches: DataLoader[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    right, seen = torch.zeros(()), torch.zeros(())
    for letters, target in batches:
        right += (model(letters).argmax(1) == target).sum()
        seen += len(target)
    model.train()
    return float(wh.reduce(right, "sum") / wh.reduce(seen, "sum"))


@torch.no_grad()
def correct(model: nn.Module, words: list[str], wrong: list[str]) -> list[str]:
    """What the model takes each misspelling for. All ranks ask, since each holds a part of the answer."""
    model.eval()
    best = model(torch.stack([encode(word) for word in wrong])).argmax(1)
    model.train()
    return [words[index] for index in best.tolist()]


def step_of(model: nn.Module, letters: Tensor, target: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(letters), target).backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def compare_with_ddp(num_classes: int, letters: Tensor) -> tuple[float, float]:
    """Median seconds of a step, split and with the whole classifier on every rank; the two take turns."""
    split = wh.parallelize(SpellingCorrector(num_classes))
    plain = DistributedDataParallel(nn.Sequential(Features(), nn.Linear(split.head.in_features, num_classes)))
    target = torch.randint(num_classes, (len(letters),))
    steps = step_of(split, letters, target), step_of(plain, letters, target)
    for step in steps:
        step()  # allocates the optimizer's state
    times = [[seconds(step) for step in steps] for _ in range(TIMED_STEPS)]
    ours, ddp = (statistics.median(column) for column in zip(*times, strict=True))
    return ours, ddp


def main() -> None:
    args = arguments()
    words = vocabulary(None if args.classes == "all" else int(args.classes))
    torch.manual_seed(0)
    model = wh.parallelize(SpellingCorrector(len(words)), seed=0)
    rank, world = wh.data_rank(model)
    console = Console(quiet=rank != 0)
    console.print(f"{len(words):,} words to tell apart, {world} ranks, {world * args.batch} misspellings a step\n")
    console.print(str(wh.plan(model)), markup=False, highlight=False, soft_wrap=True)

    data = Misspellings(words, args.steps * args.batch * world, seed=1)
    train(model, loader(model, data, args.batch, shuffle=True), console)

    held_out = Misspellings(words, 2000, seed=2, held_out=True)
    found = accuracy_on(model, loader(model, held_out, 250, shuffle=False))
    console.print(
        f"\nRight on {found:.1%} of {len(held_out):,} misspellings it never saw.\nTen that people really write:"
    )
    table = Table("written", "corrected", "meant")
    answers = correct(model, words, list(SEEN_IN_THE_WILD))
    for (wrong, meant), answer in zip(SEEN_IN_THE_WILD.items(), answers, strict=True):
        table.add_row(wrong, answer if answer == meant else f"[red]{answer}[/red]", meant)
    console.print(table)

    if world > 1:
        letters = torch.stack([data[index][0] for index in range(args.batch)])
        table = Table("words", "split", "DistributedDataParallel", "split is", title="Time of a training step")
        for size in sorted({len(words), max(len(words), args.compare)}):
            ours, ddp = compare_with_ddp(size, letters)
            table.add_row(f"{size:,}", f"{1e3 * ours:.0f} ms", f"{1e3 * ddp:.0f} ms", f"{ddp / ours:.1f} x as fast")
        console.print(table)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
