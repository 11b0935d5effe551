"""Two small models, and how their parts are laid over a tensor-parallel mesh."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class MLPModule(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int = 10, hidden: int = 16) -> None:
        super().__init__()
        self.net1 = nn.Linear(width, hidden)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


class Attention(nn.Module):
    """Causal self-attention. Under tensor parallelism each rank has a share of the heads."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (part(x).view(batch, length, -1, self.head_width).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """The part of a block that treats each position by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.w2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.gelu(self.w1(x)))


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, head_width)
        self.ffn_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """A decoder; with ``checkpointed``, the forward of each block runs again during backward instead of keeping what it computed."""

    def __init__(
        self, vocabulary: int = 8, length: int = 16, width: int = 16, heads: int = 4, layers: int = 2, checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.pos_embeddings = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, width // heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.output(self.norm(x))


def parallel_mlp(mesh: DeviceMesh) -> MLPModule:
    """An MLP whose first layer is split by columns and whose second one by rows: one all_reduce in forward."""
    model = MLPModule()
    parallelize_module(model, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    return model


def parallel_transformer(mesh: DeviceMesh, **sizes: int) -> Transformer:
    """A transformer with everything but its norms split over the mesh. ``heads`` must be a multiple of the mesh's size."""
    model = Transformer(**sizes)
    embeddings = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    plan = {"tok_embeddings": embeddings, "pos_embeddings": embeddings, "output": ColwiseParallel(output_layouts=Replicate())}
    for number in range(len(model.layers)):
        at = f"layers.{number}"
        plan |= {f"{at}.attention.w{which}": ColwiseParallel() for which in "qkv"}
        plan |= {
            f"{at}.attention.wo": RowwiseParallel(),
            f"{at}.feed_forward.w1": ColwiseParallel(),
            f"{at}.feed_forward.w2": RowwiseParallel(),
        }
    parallelize_module(model, mesh, plan)
    return model
