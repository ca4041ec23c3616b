"""The task's real sizes, and how sizes and times are scaled so that 64 ranks fit on a few cores.

Every parameter tensor is `size` times smaller and every second `time` times longer than the real one; a link is slower
by both. One row stands for `images_per_row` images: rows x width, the bytes that travel for features, shrink by `size`
exactly, width x classes, the classifier, too. What is not shrunk enough: the three numbers a row that the softmax
exchanges (by images_per_row instead of size), labels, and the time that messages themselves take on these cores. All of
it counts against the split variants.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from benchmarks import cluster
from benchmarks.cluster import ModelledLayer
from benchmarks.harness import ring_seconds

__all__ = [
    "CLASSES",
    "GPUS_PER_NODE",
    "IMAGE_S",
    "LINK_BITS",
    "PUBLISHED",
    "WIDTH",
    "Scale",
    "limit_ms",
    "resnet50_blocks",
]

GPUS_PER_NODE = 8
LINK_BITS = 35e9  # bit/s of a node's link
IMAGE_S = 2.6e-3  # a V100 in fp32, forward and backward, of which backward is two thirds
WIDTH, CLASSES = 2048, 100_000
PUBLISHED = {8: 1.13, 16: 1.66, 32: 2.43, 64: 14.8}  # ranks -> speed-up over data parallelism; two sources, see README


def resnet50_blocks() -> list[tuple[int, int]]:
    """(parameters, multiply-adds) of ResNet-50's stem and 16 blocks at 224 x 224, without its classifier."""
    blocks = [(64 * 3 * 49 + 2 * 64, 64 * 3 * 49 * 112 * 112)]
    inputs, side = 64, 56
    for stage, count in enumerate((3, 4, 6, 3)):
        mid, outputs = 64 << stage, 256 << stage
        for index in range(count):
            after = side // 2 if index == 0 and stage else side
            first, second, third = inputs * mid, 9 * mid * mid, mid * outputs
            shortcut = inputs * outputs if index == 0 else 0
            norms = 2 * (2 * mid + outputs + (outputs if index == 0 else 0))
            operations = first * side * side + (second + third + shortcut) * after * after
            blocks.append((first + second + third + shortcut + norms, operations))
            inputs, side = outputs, after
    return blocks


@dataclass(frozen=True, slots=True)
class Scale(cluster.Scale):
    """images_per_row: images for one row."""

    images_per_row: int

    @property
    def width(self) -> int:
        return WIDTH * self.images_per_row // self.size

    @property
    def classes(self) -> int:
        return CLASSES // self.images_per_row

    def features(self) -> nn.Sequential:
        """ResNet-50's blocks as modelled layers: each with its share of the parameters and of the time."""
        blocks = resnet50_blocks()
        total, layers = sum(operations for _, operations in blocks), []
        for parameters, operations in blocks:
            seconds = IMAGE_S * self.images_per_row * self.time * operations / total
            layers.append(ModelledLayer(max(parameters // self.size, 1), seconds / 3, seconds * 2 / 3))
        return nn.Sequential(*layers)

    def head(self) -> nn.Linear:
        return nn.Linear(self.width, self.classes)


def limit_ms(
    ranks: int, batch: int, *, split: bool, wire_bytes: int, two_level: bool = True, overlap: bool = True
) -> float:
    """What a step cannot beat on the real cluster, in ms: compute and the bytes of a node's link.

    split: only the features' gradients are reduced, and features and their gradients cross once each, as fp32; else
    all gradients are reduced. wire_bytes: of a gradient element. two_level: the reduction crosses links once a node,
    else it is one ring over all ranks. overlap: it is hidden behind backward as far as it can be.
    """
    nodes, compute = ranks // GPUS_PER_NODE, IMAGE_S * batch
    if nodes == 1:
        return compute * 1e3
    features = sum(parameters for parameters, _ in resnet50_blocks())
    reduced = features if split else features + (WIDTH + 1) * CLASSES
    groups = nodes if two_level else ranks
    wire = ring_seconds(reduced * wire_bytes, groups, LINK_BITS)
    bridges = 2 * (ranks - GPUS_PER_NODE) * batch * WIDTH * 4 * 8 / LINK_BITS if split else 0.0
    backward = compute * 2 / 3
    return 1e3 * (compute / 3 + bridges + (max(backward, wire) if overlap else backward + wire))
