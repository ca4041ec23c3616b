"""python -m whale_torch verify, inspect, diff and convert: checkpoints without the model."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from whale_torch.checkpoint.inspection.convert_command import add_convert, run_convert
from whale_torch.checkpoint.inspection.describe import bytes_text, describe, slice_text
from whale_torch.checkpoint.inspection.difference import difference
from whale_torch.checkpoint.inspection.verify import verify
from whale_torch.errors import CheckpointError

__all__ = ["add_commands", "run"]


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Adds verify, inspect, diff and convert to a parser; what is chosen is `command`."""
    commands = parser.add_subparsers(dest="command", metavar="{verify,inspect,diff,convert}")
    place = "a run_dir of wh.save, or one step's folder"
    one = commands.add_parser(
        "verify", help="read every byte of a checkpoint, or of all in a run_dir, on all cores",
        description="Reads every byte of a checkpoint, or of all in a run_dir and its pointers, on all cores.",
        epilog="Exit status: 0 where all is as it was written, 1 where anything is damaged, 2 without a checkpoint.",
    )  # fmt: skip
    one.add_argument("dir", help=place)
    one = commands.add_parser(
        "inspect", help="list what a checkpoint holds",
        description="Lists the tensors of a checkpoint, where their parts lie, ties, and what is no tensor.",
        epilog="Exit status: 0, and 2 without a checkpoint that can be read.",
    )  # fmt: skip
    one.add_argument("dir", help=place)
    one.add_argument("--json", action="store_true", help="as JSON")
    one = commands.add_parser(
        "diff", help="tell which tensors of two checkpoints differ, and by how much",
        description="Tells which tensors and values of two checkpoints differ, whatever the plans they were saved in.",
        epilog="Exit status: 0 where nothing differs, 1 where anything does, 2 without two checkpoints to read.",
    )  # fmt: skip
    one.add_argument("a", help=place)
    one.add_argument("b", help=place)
    add_convert(commands)


def run(asked: argparse.Namespace) -> int:
    """Runs a command; its exit status: 0, 1 for damage or a difference, 2 where it cannot be told."""
    if asked.command == "convert":
        return run_convert(asked)
    try:
        if asked.command == "verify":
            return _verify(asked.dir)
        if asked.command == "inspect":
            return _inspect(asked.dir, as_json=asked.json)
        return _diff(asked.a, asked.b)
    except BrokenPipeError:  # nobody reads what is told, as behind `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _verify(path: str) -> int:
    start = time.perf_counter()
    found = verify(path)
    for damage in found.damages:
        print(damage)
    took = time.perf_counter() - start
    told = f"{len(found.damages)} damages" if len(found.damages) != 1 else "1 damage"
    places = f"{len(found.folders)} checkpoints" if len(found.folders) != 1 else str(found.folders[0])
    threads = f"{found.threads} threads" if found.threads != 1 else "1 thread"
    rate = f"{bytes_text(found.num_bytes)} in {took:.2f} s, {bytes_text(round(found.num_bytes / took))}/s by {threads}"
    print(f"{places}: {rate}; {told if found.damages else 'all is as it was written'}")
    if found.damages and found.whole:
        print(f"whole: {', '.join(folder.name for folder in found.whole)}")
    return 1 if found.damages else 0


def _inspect(path: str, *, as_json: bool) -> int:
    found = describe(path)
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    tensors = found["tensors"]
    print(
        f"{found['path']}: step {found['step']}, {len(tensors)} tensors, {bytes_text(found['bytes'])}, id {found['id']}"
    )
    if "steps" in found:
        print(f"{path} has {', '.join(_named(step, found['tags']) for step in found['steps'])}")
    rows = []
    for key, one in tensors.items():
        pieces = [_place(piece, one["shape"]) for piece in one["pieces"]]
        for number, piece in enumerate(pieces):
            facts = [key, one["dtype"], str(one["shape"]), bytes_text(one["bytes"])] if not number else [""] * 4
            rows.append([*facts, piece])
    _table(["tensor", "dtype", "shape", "bytes", "where"], rows)
    _table(["tied", "to"], [list(pair) for pair in found["ties"].items()])
    _table(["value", ""], [[key, _short(value)] for key, value in sorted(found["values"].items())])
    return 0


def _named(step: int, tags: dict[str, int]) -> str:
    names = [tag for tag, tagged in tags.items() if tagged == step]
    return f"step {step}" + (f" ({', '.join(names)})" if names else "")


def _place(piece: dict[str, Any], shape: list[int]) -> str:
    """Where a piece lies, and which part of its tensor it is where it is not all."""
    file = piece["file"].removesuffix(".safetensors")
    return file if piece["size"] == shape else f"{file} {slice_text(piece['start'], piece['size'])}"


def _diff(one: str, other: str) -> int:
    found = difference(one, other)
    rows = []
    for item in found:
        counted = [f"{item.elements:,} of {item.total:,}", f"{item.largest:.3g}", f"{item.relative:.3g}"]
        rows.append([item.key, *(counted if item.total else [""] * 3), "" if item.what == "values" else item.what])
    _table(["differs", "elements", "by at most", "of the largest", "how"], rows)
    told = "1 difference" if len(found) == 1 else f"{len(found)} differences"
    print(f"{told} between {one} and {other}" if found else "no difference")
    return 1 if found else 0


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """By rich in a terminal; columns as wide as they need to be elsewhere, or without rich."""
    if not rows:
        return
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table()
            for title in titles:
                table.add_column(title, overflow="fold")
            for row in rows:
                table.add_row(*(cell.replace("[", "\\[") for cell in row))
            Console().print(table)
            return
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
