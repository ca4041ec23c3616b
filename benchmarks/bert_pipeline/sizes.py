"""BERT-large's real sizes, and how sizes and times are scaled so that 64 ranks fit on a few cores.

Every tensor, parameters and activations alike, is `size` times smaller and every second `time` times longer than the
real one; a link is slower by both. Not shrunk: the time that messages themselves take on these cores, which counts
against the pipelines.
"""

from __future__ import annotations

from torch import nn

from benchmarks import cluster
from benchmarks.cluster import ModelledLayer
from benchmarks.harness import ring_seconds

__all__ = ["GPUS_PER_NODE", "GRADIENT_BYTES", "LINK_BITS", "NODES", "PUBLISHED", "SEQUENCE_S", "Scale", "limit_ms"]

GPUS_PER_NODE = NODES = 8
LINK_BITS = 35e9  # bit/s of a node's link
SEQUENCE_S = 19.7e-3  # a V100 in fp32, forward and backward of 128 tokens, of which backward is two thirds
LAYERS, WIDTH, TOKENS, VOCABULARY = 24, 1024, 128, 30522
PUBLISHED = {"whale data parallelism": 1.74, "pipeline": 2.32}  # over Horovod, 64 GPUs (the slides)

EMBEDDING = (VOCABULARY + 512 + 2 + 2) * WIDTH
LAYER = 12 * WIDTH * WIDTH + 13 * WIDTH
HEAD = 2 * WIDTH * WIDTH + 4 * WIDTH + VOCABULARY
GRADIENT_BYTES = 4 * (EMBEDDING + LAYERS * LAYER + HEAD)


class Scale(cluster.Scale):
    """BERT-large at a scale."""

    __slots__ = ()

    @property
    def width(self) -> int:
        """Elements of what one sequence hands from layer to layer."""
        return TOKENS * WIDTH // self.size

    def layers(self) -> list[nn.Module]:
        """Embedding, 24 encoder layers, head: each with its parameters; the encoder takes all of the time."""
        seconds = SEQUENCE_S * self.time / LAYERS
        encoder = [ModelledLayer(LAYER // self.size, seconds / 3, seconds * 2 / 3) for _ in range(LAYERS)]
        return [ModelledLayer(EMBEDDING // self.size, 0.0, 0.0), *encoder, ModelledLayer(HEAD // self.size, 0.0, 0.0)]


def limit_ms(
    sequences: int, *, places: int, num_micro_batches: int, wire_bytes: int, flat: bool, inner: bool = False
) -> float:
    """What a step cannot beat on the real cluster, in ms: compute with its bubble, and the bytes of a node's link.

    places: ranks of one pipeline; inner: they are neighbours, else its stages lie on different nodes. flat: one ring
    over all ranks after backward; else it crosses links once a node and is hidden behind backward as far as it can be.
    """
    compute = SEQUENCE_S * sequences
    reduced = GRADIENT_BYTES / 4 * wire_bytes
    if flat:
        return 1e3 * (compute + ring_seconds(reduced, NODES * GPUS_PER_NODE, LINK_BITS))
    nodes = NODES if inner else max(NODES // places, 1)
    wire = ring_seconds(reduced if inner else reduced / places, nodes, LINK_BITS)
    bubble = (places - 1) / num_micro_batches * compute
    crossing = 2 * 4 * TOKENS * WIDTH * sequences * GPUS_PER_NODE * 8 / LINK_BITS if places > 1 and not inner else 0.0
    hidden = compute * 2 / 3 if places == 1 else compute * 2 / 3 / num_micro_batches
    return 1e3 * (max(compute + bubble, crossing) + max(wire - hidden, 0.0))
