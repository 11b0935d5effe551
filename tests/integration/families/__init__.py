"""Real programs of every family of distributed training, as plain data. Each module registers some;
``load()`` returns all.

A family is built and stepped under a process group that the caller has made; its collectives are
the point, its models are tiny.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

MODULES: Final = (
    "tensor_parallel",
    "fully_sharded",
    "data_parallel",
    "context_parallel",
    "pipelining",
    "experts",
    "checkpointing",
    "training",
    "compiled",
    "saving",
    "plain",
)
FAKE, GLOO = "fake", "gloo"
WIDTH = 16


@dataclass(frozen=True)
class World:
    """Where a family runs."""

    backend: str
    rank: int
    size: int


@dataclass
class Program:
    """A built family: what its step needs, and whose gradients are compared."""

    models: Sequence[torch.nn.Module]
    # runs the program; what it computed, as far as it is defined on this backend
    step: Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Family:
    """One kind of program."""

    name: str
    build: Callable[[World], Program]
    world_sizes: dict[str, tuple[int, ...]]  # backend to sizes
    needs: tuple[int, int] = (2, 6)  # the oldest torch that runs it

    @property
    def step(self) -> Callable[[Program], Sequence[torch.Tensor]]:
        """Runs a built program once."""
        return lambda program: program.step()


_registry: dict[str, Family] = {}
SMALL: Final = {FAKE: (8,), GLOO: (2, 4)}
ONLY_FAKE: Final = {FAKE: (8,)}
ONLY_GLOO: Final = {GLOO: (2, 4)}
LARGE: Final = {FAKE: (8, 64, 1024), GLOO: (2, 4)}
MIDDLE: Final = {FAKE: (8, 64), GLOO: (2, 4)}


def family(
    world_sizes: dict[str, tuple[int, ...]] = SMALL, needs: tuple[int, int] = (2, 6)
) -> Callable[[Callable[[World], Program]], Callable[[World], Program]]:
    """Register the decorated build function under its name."""

    def register(build: Callable[[World], Program]) -> Callable[[World], Program]:
        name = build.__name__
        assert name not in _registry, f"two families are called {name}"
        _registry[name] = Family(name, build, world_sizes, needs)
        return build

    return register


def load() -> list[Family]:
    """All families that the installed torch can run, in a fixed order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates what it uses itself
        for module in MODULES:
            importlib.import_module(f"{__name__}.{module}")
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return [family for family in _registry.values() if family.needs <= (major, minor)]


def cases(backend: str, size: int) -> list[Family]:
    """Those that run on a backend at a world size."""
    return [family for family in load() if size in family.world_sizes.get(backend, ())]


TRACED_ON_FOUR: Final = frozenset(
    {
        "plain_calls",
        "tp_mlp",
        "tp_transformer",
        "fsdp2",
        "hsdp",
        "fsdp2_tp",
        "ddp",
        "zero",
        "moe",
        "gpipe",
        "one_f_one_b",
        "ring_attention",
        "ring_by_hand",
        "point_to_point",
        "receive_from_anyone",
        "objects",
        "coalescing",
        "other_threads",
    }
)
"""Traced on four gloo ranks, too: two-dimensional meshes, rings, pipelines, messages, and one of
each other kind. A larger world changes nothing in the others, which are traced on two gloo ranks
and in fake worlds.
"""


USUAL: Final = frozenset(
    {
        "tp_mlp",
        "redistributions",
        "fsdp2",
        "hsdp",
        "ddp",
        "zero",
        "ring_by_hand",
        "gpipe",
        "moe",
        "checkpoint_non_reentrant",
        "save_and_load",
        "plain_calls",
        "monitored_barriers",
        "point_to_point",
        "receive_from_anyone",
        "objects",
        "coalescing",
        "functional_calls",
        "other_threads",
    }
)
"""One of each way in which a library comes to its collectives. The others combine these, and are
left to ``make test-all``.
"""


def traced_cases(backend: str, size: int) -> list[Family]:
    """Return the families whose traces are checked on a backend at a world size."""
    return [
        family
        for family in cases(backend, size)
        if (backend, size) != (GLOO, 4) or family.name in TRACED_ON_FOUR
    ]


def training_step(model: torch.nn.Module, *inputs: Any) -> Callable[[], list[torch.Tensor]]:
    """A forward and a backward pass."""

    def step() -> list[torch.Tensor]:
        loss = model(*inputs).square().mean()
        loss.backward()
        return [loss.detach()]

    return step
