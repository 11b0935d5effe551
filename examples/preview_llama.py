"""One training step of Llama-3-8B's shapes: FSDP2 x tensor parallelism with sequence parallelism. torch is all it needs.

Nothing in it knows of commlens. What rank 0 of 512 GPUs would communicate, found out on a laptop:

    commlens preview --world-size 512 --fake-tensors --network h100-ib examples/preview_llama.py

On GPUs it trains (random tokens): torchrun --nproc-per-node 8 ... examples/preview_llama.py
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


@dataclass
class Shapes:
    """Llama-3-8B's, unless told otherwise."""

    layers: int = 32
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocabulary: int = 128256


class Attention(nn.Module):
    """Grouped-query attention. The local number of heads follows from what the projections give."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.head_dim = shapes.dim // shapes.heads
        self.wq = nn.Linear(shapes.dim, shapes.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(shapes.dim, shapes.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(shapes.dim, shapes.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(shapes.heads * self.head_dim, shapes.dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (projection(x).view(batch, sequence, -1, self.head_dim) for projection in (self.wq, self.wk, self.wv))
        q, k = rotate(q, rotation), rotate(k, rotation)
        groups = q.shape[2] // k.shape[2]
        k, v = (each.repeat_interleave(groups, dim=2) for each in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, sequence, -1))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding; ``rotation`` is (2, sequence, 1, head_dim / 2): cosines and sines."""
    even, odd = x.chunk(2, dim=-1)
    cos, sin = rotation.to(x.dtype)
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.w1 = nn.Linear(shapes.dim, shapes.hidden, bias=False)
        self.w2 = nn.Linear(shapes.hidden, shapes.dim, bias=False)
        self.w3 = nn.Linear(shapes.dim, shapes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shapes.dim)
        self.attention = Attention(shapes)
        self.feed_forward_norm = nn.RMSNorm(shapes.dim)
        self.feed_forward = FeedForward(shapes)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Embedding, blocks, output projection."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.shapes = shapes
        self.embeddings = nn.Embedding(shapes.vocabulary, shapes.dim)
        self.layers = nn.ModuleList(Block(shapes) for _ in range(shapes.layers))
        self.norm = nn.RMSNorm(shapes.dim)
        self.output = nn.Linear(shapes.dim, shapes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        half = self.shapes.dim // self.shapes.heads // 2
        frequencies = 500_000.0 ** -(torch.arange(half, device=tokens.device) / half)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), frequencies)
        rotation = torch.stack([angles.cos(), angles.sin()]).unsqueeze(2)
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.output(self.norm(x))


def parallelize(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism within ``tp``, FSDP2 over ``dp``."""
    tp = mesh["tp"]
    parallelize_module(
        model,
        tp,
        {
            "embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.layers:
        parallelize_module(
            block,
            tp,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=Shapes.layers)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1, help="sequences per data-parallel rank")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=1)
    arguments = parser.parse_args()

    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    mesh = init_device_mesh("cuda", (dist.get_world_size() // arguments.tp, arguments.tp), mesh_dim_names=("dp", "tp"))

    shapes = Shapes(layers=arguments.layers)
    with torch.device("meta"):
        model = Llama(shapes)
    parallelize(model, mesh)
    model.to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    for step in range(arguments.steps):
        tokens = torch.randint(shapes.vocabulary, (arguments.batch, arguments.sequence + 1), device=device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
