"""A transformer that reads a picture and writes its caption: attention on every rank, experts divided over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from examples.m6.data import CAPTION, NO_LABEL, SIDE, WORDS

__all__ = ["PATCHES", "Block", "Captioner"]

_PATCH = 4
PATCHES = (SIDE // _PATCH) ** 2


class Block(nn.Module):
    """Attention, in which a word sees the picture and the words before it, and experts.

    Shapes: x [B, L, width], real [B, L] (False: padding) -> [B, L, width].
    """

    def __init__(self, width: int, num_heads: int, num_experts: int):
        super().__init__()
        self.num_heads = num_heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.packed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        with wh.split():
            # M6-T's expert prototyping: each token goes to one expert of each half
            self.experts = wh.moe.MoELayer(width, num_experts, 2, hidden=2 * width, gate="prototypes")

    def forward(self, x: Tensor, real: Tensor, sees: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.packed(self.before(x)).chunk(3, dim=-1)
        )
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        y: Tensor = x + self.experts(self.after(x), mask=real)
        return y


class Captioner(nn.Module):
    def __init__(self, num_layers: int = 4, width: int = 64, num_heads: int = 4, num_experts: int = 8):
        super().__init__()
        self.patches = nn.Linear(_PATCH * _PATCH, width)
        self.words = nn.Embedding(len(WORDS), width)
        self.places = nn.Parameter(0.02 * torch.randn(PATCHES + CAPTION, width))
        self.layers = nn.ModuleList(Block(width, num_heads, num_experts) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(WORDS))
        whole = torch.ones(PATCHES + CAPTION, PATCHES + CAPTION, dtype=torch.bool).tril()
        whole[:PATCHES, :PATCHES] = True
        self.register_buffer("sees", whole, persistent=False)

    def forward(self, pictures: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of the words to write, and the logits of each word's successor.

        Shapes: pictures [B, SIDE, SIDE], captions [B, CAPTION] -> [], [B, CAPTION, words].
        """
        patches = pictures.unfold(1, _PATCH, _PATCH).unfold(2, _PATCH, _PATCH).flatten(3).flatten(1, 2)
        x = torch.cat([self.patches(patches), self.words(captions)], dim=1) + self.places
        real = F.pad(captions != 0, (PATCHES, 0), value=True)
        for layer in self.layers:
            x = layer(x, real, self.sees)
        logits = self.head(self.norm(x[:, PATCHES:]))
        labels = F.pad(captions[:, 1:], (0, 1)).masked_fill(F.pad(captions[:, 1:], (0, 1)) == 0, NO_LABEL)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)
        return loss, logits
