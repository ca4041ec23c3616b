"""Trains a captioner of pictures as M6-10T was trained: layers on one set of weights first, then each on its own.

torchrun --nproc-per-node 4 -m examples.m6.main [--pseudo N] [--real N] [--layers N] [--experts N] [--pictures FOLDER]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

import whale_torch as wh
from examples.m6.data import CAPTION, WORDS, Scenes, read, told
from examples.m6.model import Captioner

LEARNING_RATE = 2e-3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pseudo", type=int, default=400, help="steps on one set of weights for all layers (default: %(default)s)")
    add("--real", type=int, default=800, help="steps on each layer's own (default: %(default)s)")
    add("--layers", type=int, default=4, help="(default: %(default)s)")
    add("--width", type=int, default=64, help="numbers a token becomes, a multiple of 4 (default: %(default)s)")
    add("--experts", type=int, default=8, help="of each layer, an even number (default: %(default)s)")
    add("--batch", type=int, default=32, help="pictures a rank and step (default: %(default)s)")
    add("--unseen", type=int, default=400, help="pictures to measure on (default: %(default)s)")
    add("--pictures", type=Path, default=Path("m6"), help="folder for the heat maps (default: %(default)s)")
    return parser.parse_args()


def loader(model: nn.Module, data: Scenes, batch: int) -> DataLoader[tuple[Tensor, Tensor]]:
    batches = wh.batch_sampler(model, data, batch, shuffle=False)
    return DataLoader(data, batch_sampler=batches, collate_fn=batches.collate_fn)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batches: DataLoader[tuple[Tensor, Tensor]],
    name: str,
    console: Console,
) -> list[wh.moe.Loads]:
    """The loads of experts of each step."""
    history: list[wh.moe.Loads] = []
    watch = wh.moe.on_load(model, history.append)
    columns = ("{task.description}", "step {task.completed}/{task.total}", "loss {task.fields[loss]:.3f}")
    columns += ("balance {task.fields[balance]:.2f}", "{task.fields[speed]:,.0f} pictures/s")
    bar = Progress(BarColumn(), *map(TextColumn, columns), TimeRemainingColumn(), console=console)
    with bar:
        task = bar.add_task(name, total=len(batches), loss=float("nan"), balance=float("nan"), speed=0.0)
        shown, start = 0, time.perf_counter()
        for step, (pictures, captions) in enumerate(batches, 1):
            loss, _ = model(pictures, captions)
            optimizer.zero_grad()
            loss.backward()
            wh.clip_grad_norm_(model, 1.0)
            optimizer.step()
            schedule.step()
            if step % 10 == 0 or step == len(batches):
                seen = (step - shown) * len(batches.dataset) / len(batches)  # type: ignore[arg-type]
                fields = {
                    "loss": float(wh.reduce(loss.detach(), "mean")),
                    "balance": max(layer["balance"] for layer in history[-1].values()),
                    "speed": seen / (time.perf_counter() - start),
                }
                shown, start = step, time.perf_counter()
                bar.update(task, completed=step, **fields)
    optimizer.zero_grad()
    watch.remove()
    return history


@torch.no_grad()
def write(model: nn.Module, pictures: Tensor) -> list[list[int]]:
    """The caption that the model writes for each picture. All ranks ask, since each has a part of the experts."""
    model.eval()
    captions = torch.zeros(len(pictures), CAPTION, dtype=torch.int64)
    captions[:, 0] = WORDS.index("<start>")
    for place in range(1, CAPTION):
        _, logits = model(pictures, captions)
        captions[:, place] = logits[:, place - 1, 1:].argmax(1) + 1  # <pad> is no word
    model.train()
    found: list[list[int]] = captions.tolist()
    return found


def right(model: nn.Module, batches: DataLoader[tuple[Tensor, Tensor]]) -> float:
    """How many captions are right, word for word."""
    hits, number = 0.0, 0.0
    for pictures, captions in batches:
        answers = write(model, pictures)
        hits += sum(told(ours) == told(meant) for ours, meant in zip(answers, captions.tolist(), strict=True))
        number += len(answers)
    return float(wh.reduce(hits, "sum") / wh.reduce(number, "sum"))


def numbers(model: nn.Module) -> str:
    """Parameters of the model, whole ones, each once."""
    count = sum(value.numel() for value in {id(v): v for v in wh.full_state_dict(model).values()}.values())
    return f"{count:,} parameters"


def picture(image: Tensor) -> str:
    """A picture as text, two rows a line."""
    shades = " .:-=+*#@"
    rows = (image.view(8, 2, -1).amax(1) * (len(shades) - 1)).round().int().tolist()
    return "\n".join("".join(shades[value] for value in row) for row in rows)


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    model = Captioner(args.layers, args.width, num_experts=args.experts)
    wh.moe.share(model.layers)  # the pseudo stage
    wh.parallelize(model)
    rank, world = wh.data_rank(model)
    console = Console(quiet=rank != 0)
    console.print(str(wh.plan(model)), markup=False, highlight=False, soft_wrap=True)
    known, unknown = read()
    unseen = Scenes(unknown, args.unseen, seed=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    steps = args.pseudo + args.real
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, 2.02 - 2 * step / steps)
    )

    histories = {}
    for number, (stage, count) in enumerate((("pseudo", args.pseudo), ("real", args.real))):
        if stage == "real":
            wh.moe.delink(model.layers, optimizer)
        told_numbers = numbers(model)
        console.print(f"\n{stage}: {args.layers} layers of {args.experts} experts, {told_numbers}")
        scenes = Scenes(known, count * args.batch * world, seed=1 + number)
        histories[stage] = train(model, optimizer, schedule, loader(model, scenes, args.batch), stage, console)
        share = right(model, loader(model, unseen, 50))
        console.print(f"{stage}: {share:.1%} of {len(unseen)} captions of digits it never saw are right")

    table = Table("a picture", "its caption", "written", show_lines=True)
    for (image, meant), answer in zip(
        (unseen[index] for index in range(4)), write(model, torch.stack([unseen[i][0] for i in range(4)])), strict=True
    ):
        ours, caption = told(answer), told(meant.tolist())
        table.add_row(picture(image), caption, ours if ours == caption else f"[red]{ours}[/red]")
    console.print(table)
    if rank == 0:
        args.pictures.mkdir(parents=True, exist_ok=True)
        for stage, history in histories.items():
            path = args.pictures / f"load_{stage}.svg"
            wh.moe.draw_loads(history, path, title=f"{stage}: load of experts over {len(history)} steps")
            console.print(f"{path}: which experts were loaded when")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
