"""Trains BERT to guess words of Python's own library, as a pipeline with data parallelism.

torchrun --nproc-per-node 4 -m examples.bert_mlm.main [--stages N] [--micro-batches N] [--schedule NAME] [--steps N]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import whale_torch as wh
from examples.bert_mlm.data import LENGTH, NO_LABEL, Guesses, documents, sequences, train_tokenizer
from examples.bert_mlm.model import pipelined_bert
from whale_torch.planning.schedules import draw_text, make, simulate

T = TypeVar("T")

LEARNING_RATE = 1e-3
BLANKS = [
    "def __init__(self, name, [MASK]=None):",
    "for i in [MASK](len(self)):",
    "if not [MASK](other, type(self)): return NotImplemented",
    'raise [MASK]("invalid argument")',
    "This method [MASK] called by the server.",
    "Return a list of all the [MASK] in the directory.",
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stages", type=int, default=2, help="stages of the pipeline (default: %(default)s)")
    add("--micro-batches", type=int, default=4, help="parts of a pipeline's batch (default: %(default)s)")
    add("--schedule", choices=["gpipe", "1f1b", "interleaved"], help="order of forwards and backwards")
    add("--layers", type=int, default=2, help="(default: %(default)s)")
    add("--width", type=int, default=128, help="numbers a token becomes, a multiple of 32 (default: %(default)s)")
    add("--tokens", type=int, default=2000, help="tokens to tell apart (default: %(default)s)")
    add("--batch", type=int, default=16, help="sequences a pipeline and step (default: %(default)s)")
    add("--steps", type=int, default=1200, help="training steps (default: %(default)s)")
    add("--files", type=int, default=None, help="files of Python's library to read (default: all)")
    args = parser.parse_args()
    if not 1 <= args.stages <= args.layers:
        parser.error(f"{args.layers} layers make 1 to {args.layers} stages, not {args.stages}")
    return args


def from_first_rank(made: Callable[[], T]) -> T:
    """What the first rank makes, on every rank."""
    if not dist.is_initialized():  # one process
        return made()
    told = [made() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    value: T = told[0]  # type: ignore[assignment]
    return value


def loader(model: nn.Module, data: Guesses, batch: int, *, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
    """All ranks of a pipeline read the same batches, those of other pipelines others."""
    batches = wh.batch_sampler(model, data, batch, shuffle=shuffle, seed=0)
    return DataLoader(data, batch_sampler=batches, collate_fn=batches.collate_fn)


def train(model: nn.Module, batches: DataLoader[dict[str, Tensor]], console: Console) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    steps, tokens = len(batches), len(batches.dataset) * LENGTH  # type: ignore[arg-type]
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min((k + 1) / warm, (steps - k) / (steps - warm)))
    columns = ("{task.description}", "step {task.completed}/{task.total}", "loss {task.fields[loss]:.3f}")
    columns += ("{task.fields[speed]:,.0f} tokens/s",)
    bar = Progress(BarColumn(), *map(TextColumn, columns), TimeRemainingColumn(), console=console)
    with bar:
        task = bar.add_task("training", total=steps, loss=float("nan"), speed=0.0)
        shown, start = 0, time.perf_counter()
        for step, batch in enumerate(batches, 1):
            loss = model(**batch).loss  # the whole schedule runs here; the mean over all pipelines, on every rank
            optimizer.zero_grad()
            loss.backward()
            wh.clip_grad_norm_(model, 1.0)
            optimizer.step()
            schedule.step()
            if step % 10 == 0 or step == steps:
                speed = (step - shown) * tokens / steps / (time.perf_counter() - start)
                shown, start = step, time.perf_counter()
                bar.update(task, completed=step, loss=loss.item(), speed=speed)


@torch.no_grad()
def measure(model: nn.Module, batches: DataLoader[dict[str, Tensor]]) -> tuple[float, float]:
    """Mean loss of the tokens to guess, and how many of them are guessed."""
    model.eval()
    loss, right, seen = 0.0, 0.0, 0.0
    for batch in batches:
        out, asked = model(**batch), batch["labels"] != NO_LABEL  # on every rank of the pipeline
        loss += out.loss.item() * asked.sum().item()
        right += (out.logits.argmax(-1) == batch["labels"])[asked].sum().item()
        seen += asked.sum().item()
    model.train()
    loss, right, seen = (wh.reduce(value, "sum") for value in (loss, right, seen))
    return loss / seen, right / seen


@torch.no_grad()
def fill(model: nn.Module, tokenizer: Tokenizer, lines: list[str], best: int = 3) -> list[list[str]]:
    """The best guesses for the blank of each line. All ranks ask, since each runs a part of the answer."""
    ids = [encoding.ids for encoding in tokenizer.encode_batch(lines)]
    width = max(map(len, ids))
    rows = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    model.eval()
    logits = model(input_ids=rows, attention_mask=(rows != 0).long()).logits
    model.train()
    at = (rows == tokenizer.token_to_id("[MASK]")).int().argmax(1)
    found = logits[torch.arange(len(rows)), at].topk(best).indices
    return [[str(tokenizer.id_to_token(int(token))) for token in row] for row in found]


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    model = pipelined_bert(
        args.tokens,
        num_layers=args.layers,
        width=args.width,
        num_stages=args.stages,
        num_micro_batches=args.micro_batches,
        schedule=args.schedule,
    )
    example = torch.ones(args.batch, LENGTH, dtype=torch.long)
    wh.parallelize(model, sample_inputs={"input_ids": example, "labels": example})
    _, count = wh.data_rank(model)
    console = Console(quiet=dist.is_initialized() and dist.get_rank() != 0)
    plan = wh.plan(model)
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)
    pipeline = plan.pipeline
    assert pipeline is not None
    actions = make(pipeline.schedule, pipeline.num_stages, pipeline.num_micro_batches, pipeline.num_ranks)
    console.print("\nA step of one pipeline, where a backward takes as long as two forwards:")
    console.print(draw_text(simulate(actions), width=100), markup=False, highlight=False, soft_wrap=True)

    texts = list(itertools.islice(documents(), args.files))
    tokenizer = Tokenizer.from_str(from_first_rank(lambda: train_tokenizer(texts, args.tokens)))
    rows, held_out = sequences(tokenizer, texts)
    console.print(
        f"\n{len(texts)} files of Python's library, {len(rows) * LENGTH:,} tokens; "
        f"{count * args.batch} sequences of {LENGTH} a step, {args.batch} a pipeline\n"
    )
    data = Guesses(rows, args.steps * args.batch * count, args.tokens, seed=1)
    train(model, loader(model, data, args.batch, shuffle=True), console)

    unseen = Guesses(held_out, min(len(held_out), 512), args.tokens, seed=2)
    loss, right = measure(model, loader(model, unseen, args.batch, shuffle=False))
    console.print(f"\nOn text it never saw: loss {loss:.3f}, {right:.1%} of the hidden tokens guessed.\n")
    table = Table("a blank", "best guesses")
    for line, guesses in zip(BLANKS, fill(model, tokenizer, BLANKS), strict=True):
        table.add_row(line.replace("[MASK]", "____"), "  ".join(guesses))
    console.print(table)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
