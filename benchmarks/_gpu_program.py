"""A training program for two ranks on one GPU: a small transformer, with one fault. The checks of
_gpu_jobs.py run it.

    torchrun --nproc-per-node 2 benchmarks/_gpu_program.py CASE MODEL cuda|cpu BACKEND FOLDER

CASE names the fault, or is "healthy"; MODEL is "ddp" or "fsdp". The moment of a fault is written to
FOLDER/struck, as time.time(). With "attach", the ranks wait for FOLDER/go before it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from _gpu_pair import CULPRIT, FAULT_STEP, ready

STEPS = 10
WORDS = 256
LENGTH = 32
WIDTH = 64
LAYERS = 4
TIMEOUT_S = {"timeout": 10.0}


def layers_of(torch: Any) -> Any:
    """Return the model's class."""
    nn = torch.nn

    class Layer(nn.Module):  # type: ignore[misc, name-defined]
        """Attention and two linear maps."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
            self.inner = nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.GELU(),
                nn.Linear(2 * WIDTH, WIDTH),
            )

        def forward(self, tokens: Any) -> Any:
            tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
            return tokens + self.inner(tokens)

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        """A transformer that predicts the next word."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, words: Any, *, skipped: int | None = None) -> Any:
            tokens = self.words(words)
            for number, layer in enumerate(self.layers):
                if number == skipped:
                    continue
                tokens = layer(tokens)  # LINE forward
            return self.head(tokens)

    return Model()


def wrapped(model: Any, kind: str, device: str, torch: Any) -> Any:
    """Return the model, wrapped as the kind says."""
    model = model.to(device)
    if kind == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, static_graph=False)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Data:
    """Random words, loaded on a stream of their own."""

    def __init__(self, device: str, torch: Any) -> None:
        self.device, self.torch = device, torch
        self.stream = torch.cuda.Stream() if device == "cuda" else None

    def load_batch(self, asleep_s: float = 0.0) -> Any:
        """Return a batch."""
        if asleep_s:
            time.sleep(asleep_s)  # LINE asleep
        batch = self.torch.randint(0, WORDS, (4, LENGTH + 1))
        if self.stream is None:
            return batch
        with self.torch.cuda.stream(self.stream):
            batch = batch.pin_memory().to(self.device, non_blocking=True)
        self.torch.cuda.current_stream().wait_stream(self.stream)
        batch.record_stream(self.torch.cuda.current_stream())
        return batch


def strike(case: str, model: Any, batch: Any, device: str, torch: Any) -> None:
    """Do what goes wrong on the culprit."""
    if case == "oom":
        if device != "cuda":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. (a dry run)")
        torch.empty(1 << 50, dtype=torch.uint8, device=device)  # LINE oom
    if case == "assert":
        words = torch.full_like(batch, WORDS * 1000)
        torch.nn.functional.embedding(words, torch.ones(8, 8, device=device))  # LINE assert
        if device == "cuda":
            torch.cuda.synchronize()
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_bench(folder: Path, rank: int) -> None:
    """Tell our pid, and wait until the job may go on, so that it can be looked at while it is well."""
    (folder / f"ready-{rank}").write_text(str(os.getpid()), encoding="utf-8")
    until = time.monotonic() + 60
    while not (folder / "go").exists() and time.monotonic() < until:
        time.sleep(0.05)


def train(case: str, kind: str, device: str, folder: Path, torch: Any) -> None:
    """Train some steps."""
    import torch.distributed as dist

    rank = dist.get_rank()
    torch.manual_seed(1)
    model = wrapped(layers_of(torch), kind, device, torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Data(device, torch)
    for step in range(STEPS):
        is_struck = step == FAULT_STEP and rank == CULPRIT and case != "healthy"
        if is_struck:
            (folder / "struck").write_text(str(time.time()), encoding="utf-8")
        if case == "attach" and step == FAULT_STEP - 1:
            wait_for_bench(folder, rank)
        is_asleep = is_struck and case in ("asleep", "timeout", "attach")
        batch = data.load_batch(300.0 if is_asleep else 0.0)
        if is_struck:
            strike(case, model, batch, device, torch)
        skipped = 2 if is_struck and case == "skipped" else None
        scores = model(batch[:, :-1], skipped=skipped)
        loss = torch.nn.functional.cross_entropy(
            scores.reshape(-1, WORDS), batch[:, 1:].reshape(-1)
        )
        loss.backward()  # LINE backward
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    print(f"rank {rank} ended well", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Run one case."""
    case, kind, device, backend, folder = sys.argv[1:6]
    torch = ready(device, backend, TIMEOUT_S.get(case, 300.0))
    train(case, kind, device, Path(folder), torch)


if __name__ == "__main__":
    main()
