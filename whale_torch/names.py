"""Dotted names of modules and what they hold; "" is the model itself."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["containers", "joined", "outward"]


def joined(module: str, key: str) -> str:
    """The name of what a module holds under a key."""
    return f"{module}.{key}" if module else key


def containers(name: str) -> Iterator[str]:
    """Names of what contains a module, from the inside out."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def outward(name: str) -> Iterator[str]:
    """A module's own name, then those of what contains it."""
    yield name
    yield from containers(name)
