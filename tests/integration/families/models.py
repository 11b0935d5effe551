"""The models that the families share."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, VOCABULARY, HEADS, TOKENS = 16, 32, 8, 8


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.net1 = nn.Linear(width, hidden)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


class Stack(nn.Module):
    """Several MLPs, one after another."""

    def __init__(self, depth: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Attention(nn.Module):
    """Causal self-attention on whatever heads the rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.head_width = 2
        inner = HEADS * self.head_width
        self.wq = nn.Linear(WIDTH, inner, bias=False)
        self.wk = nn.Linear(WIDTH, inner, bias=False)
        self.wv = nn.Linear(WIDTH, inner, bias=False)
        self.wo = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            part(x).view(batch, tokens, -1, self.head_width).transpose(1, 2)
            for part in (self.wq, self.wk, self.wv)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.ffn_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))
