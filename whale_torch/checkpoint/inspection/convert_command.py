"""python -m whale_torch convert: the command that writes weights and checkpoints in another form."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any, get_args

from whale_torch.checkpoint.convert import Form, convert
from whale_torch.checkpoint.inspection.describe import bytes_text
from whale_torch.errors import CheckpointError

__all__ = ["add_convert", "run_convert"]


def add_convert(commands: Any) -> None:
    """Adds the command to the subparsers of an argparse.ArgumentParser."""
    one = commands.add_parser(
        "convert", help="write weights, or a whole checkpoint, in another form",
        description="Writes weights, or a whole checkpoint, in another form: whale, a run_dir of wh.save; safetensors, "
        "a file or folder of weights; hf, a folder for from_pretrained; torch, a file of weights (name.pt) or a folder "
        "of all; dcp, a folder of torch.distributed.checkpoint. What the form has no place for is printed.",
        epilog="Exit status: 0, and 2 where nothing was written.",
    )  # fmt: skip
    one.add_argument("source", help="a run_dir or step, or files of safetensors, Hugging Face, torch.save, DCP, ...")
    one.add_argument("target", help="a new file or folder; of --to whale a run_dir")
    one.add_argument("--to", required=True, choices=get_args(Form))
    one.add_argument("--shard-gb", type=float, default=5.0, help="most of a safetensors file, in 10^9 bytes")
    one.add_argument("--config", help="of --to hf: a config.json, or a folder with one and a tokenizer")
    one.add_argument("--step", type=int, help="of the checkpoint, where the source does not say it")
    one.add_argument("--vocabulary", type=int, help="rows to keep of a vocabulary that the source pads (Megatron-LM)")
    one.add_argument("--rename", nargs=2, action="append", default=[], metavar=("PATTERN", "NAME"),
                     help="a regular expression for whole names, and what they become; may be repeated")  # fmt: skip


def run_convert(asked: argparse.Namespace) -> int:
    """Its exit status: 0, or 2 with an error printed."""
    try:
        if not math.isfinite(asked.shard_gb):
            raise CheckpointError(f"--shard-gb is {asked.shard_gb}.", fix="such as 5")
        done = convert(
            asked.source,
            asked.target,
            asked.to,
            shard_bytes=int(asked.shard_gb * 10**9),
            config=asked.config,
            step=asked.step,
            vocabulary=asked.vocabulary,
            rename=dict(asked.rename),
        )
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{done.path}: {done.num_tensors} tensors, {bytes_text(done.num_bytes)}")
    if done.left_out:
        print(f"left out: {', '.join(done.left_out)}")
    return 0
