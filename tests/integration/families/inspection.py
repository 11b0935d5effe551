"""What is compared between a run with and one without a trace, and what a trace could leave behind."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as nn_module

import commlens

from . import Program

Digest = list[tuple[str, tuple[int, ...], bytes]]


def bits(name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return name, tuple(local.shape), local.reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(program: Program, outputs: Sequence[torch.Tensor]) -> Digest:
    """Every bit of the outputs and of the gradients."""
    whole = [bits(f"output {i}", output) for i, output in enumerate(outputs)]
    for model in program.models:
        whole += [
            bits(f"gradient of {name}", p.grad)
            for name, p in model.named_parameters()
            if p.grad is not None
        ]
    return whole


def state_of(program: Program) -> Digest:
    """Every bit of parameters and buffers, and of the random generator."""
    generator = [bits("random generator", torch.get_rng_state())]
    return generator + [
        bits(f"state {name}", value)
        for model in program.models
        for name, value in model.state_dict().items()
    ]


def differences(one: Digest, other: Digest) -> list[str]:
    """Names of what is not the same."""
    if [name for name, _, _ in one] != [name for name, _, _ in other]:
        return ["not the same tensors"]
    return [
        name for (name, *first), (_, *second) in zip(one, other, strict=True) if first != second
    ]


def left_behind() -> set[str]:
    """What a trace could leave in the process: hooks, replaced functions, subscriptions, modes."""
    from commlens.tap import tap

    hooks = [
        name
        for name in vars(nn_module)
        if name.startswith("_global_") and isinstance(vars(nn_module)[name], dict)
    ]
    found = {f"global hook in {name}" for name in hooks if vars(nn_module)[name]}
    for cls, name in (
        (torch.nn.Module, "__call__"),
        (torch.nn.Module, "_call_impl"),
        (torch.optim.Optimizer, "step"),
        (torch.optim.Optimizer, "profile_hook_step"),
        (torch.Tensor, "backward"),
        (torch.autograd, "backward"),
        (torch.autograd, "grad"),
        (torch.nn.utils, "clip_grad_norm_"),
        (DTensor, "redistribute"),
    ):
        found.add(f"{cls.__name__}.{name} is {getattr(cls, name, None)}")
    found |= {f"tap: {subscriber!r}" for subscriber in tap._subscribers}
    found |= {
        f"waits: {listener!r}"
        for listener in (tap._wait_listener, tap._wait_ended)
        if listener is not None
    }
    found.add(
        f"{len(torch.utils._python_dispatch._get_current_dispatch_mode_stack())} dispatch modes"
    )
    found.add(f"{torch._C._autograd._saved_tensors_hooks_is_enabled()} saved tensor hooks")
    return found


class Traces:
    """A trace of a block, and its counts in the form that the oracle gives."""

    def __init__(self, depth: str) -> None:
        self.depth = depth
        self.trace: Any = None

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        with commlens.trace(depth=self.depth) as self.trace:
            yield

    def counts(self) -> dict[str, Any]:
        raw = Counter(event.dispatcher_op for event in self.trace.tracer.event_log.events)
        coverage, events = self.trace.coverage, self.trace.events
        return {
            "traced": raw,
            "by_wire_op": Counter(event.op for event in events),
            "dispatched": coverage.dispatched,
            "recorded": coverage.recorded,
            "unclassified": [
                f"#{e.sequence} {e.op}: phase {e.phase}, site {e.site}"
                for e in events
                if not e.classified
            ],
            "unclassified_count": coverage.unclassified,
            "in_order": [event.sequence for event in events] == list(range(1, len(events) + 1)),
            "phases": Counter(event.phase.value for event in events if event.phase is not None),
        }
