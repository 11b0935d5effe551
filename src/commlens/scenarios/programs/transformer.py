"""A small transformer, tensor parallel, or data parallel (fully_shard) times tensor parallel on a mesh."""

from __future__ import annotations

import time

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from commlens.scenarios import lab

VOCABULARY, WIDTH, HEAD, LAYERS, TOKENS = 64, 32, 4, 2, 16


class Attention(torch.nn.Module):
    """Causal self-attention. With tensor parallelism, each rank holds a share of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (part(x).view(batch, tokens, -1, HEAD).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class Block(torch.nn.Module):
    """Attention and a feed-forward network, each with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.norm1 = torch.nn.LayerNorm(WIDTH)
        self.norm2 = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(torch.nn.Module):
    """Predicts the next token; forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def load_batch(replica: int, step: int) -> torch.Tensor:
    """Read the next batch of this replica's share, the same on every rank of the replica."""
    time.sleep(0.05)
    if lab.strikes("data-loader", step):
        time.sleep(lab.STALL_S)  # the file server does not answer  # fault: data-loader
    generator = torch.Generator().manual_seed(1000 * replica + step)
    start = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
    return (start + 3 * torch.arange(TOKENS + 1)) % VOCABULARY


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(tokens)
    loss.backward()
    optimizer.step()
    return loss.detach()


def main() -> None:
    _, world_size = lab.begin()
    data, tensor = (1, world_size) if lab.running() == "healthy-tensor-parallel" else (world_size // 2, 2)
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    model = Transformer()
    for block in model.blocks:
        attention = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan = {**attention, "attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        if data > 1:
            fully_shard(block, mesh=mesh["dp"])
    if data > 1:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(lab.STEPS):
        tokens = load_batch(mesh.get_local_rank("dp"), step)
        loss = train_step(model, optimizer, tokens)
        lab.report(step, loss)
    lab.finish(model)
