"""Trains through the death of a rank: torchrun starts all ranks again, and they go on from the last checkpoint.

torchrun --standalone --max-restarts 3 --nproc-per-node 2 -m examples.resume.main RUN_DIR [--die-at N ...] [--wait]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

import whale_torch as wh
from examples.resume.model import Reader, digits

EVERY = 5  # steps from one checkpoint to the next


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="where checkpoints and losses.jsonl are kept")
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="pictures a step, of all ranks (default: %(default)s)")
    parser.add_argument(
        "--die-at", type=int, nargs="*", default=[], help="steps at which the last rank kills itself, one a life"
    )
    parser.add_argument("--wait", action="store_true", help="wait for each checkpoint, instead of training meanwhile")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(0)
    model = wh.parallelize(Reader())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    _, feeds = wh.data_rank(model)
    data = digits()
    batches = wh.batch_sampler(model, data, args.batch // feeds, shuffle=True, seed=0)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=batches.collate_fn)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "batches": batches}

    step = wh.load(args.run_dir, empty_ok=True, **state).step
    first = dist.get_rank() == 0
    if first:
        print(f"life {life}: {'begins' if step == 0 else f'goes on after step {step}'}", flush=True)
    args.run_dir.mkdir(parents=True, exist_ok=True)
    dying = args.die_at[life] if life < len(args.die_at) else None

    with (args.run_dir / "losses.jsonl").open("a") as losses:
        while step < args.steps:
            for pictures, labels in loader:
                loss = F.cross_entropy(model(pictures), labels)
                optimizer.zero_grad()
                loss.backward()
                if step + 1 == dying and dist.get_rank() == dist.get_world_size() - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                schedule.step()
                step += 1
                mean = float(wh.reduce(loss.detach(), "mean"))
                if first:
                    print(json.dumps({"life": life, "step": step, "loss": mean}), file=losses, flush=True)
                if step % EVERY == 0:
                    wh.save(args.run_dir, step=step, keep_last=2, wait=args.wait, **state)
                if step == args.steps:
                    break
    if first:
        print(f"life {life}: step {step}, loss {mean:.4f}", flush=True)


if __name__ == "__main__":
    main()
