"""The data of a fake world's collectives: what a rank gives stands for what the others would give.

torch's fake backend copies, too, but refuses what gloo and NCCL take, such as an all_to_all in
which a rank gives nothing, or reads past a list (tried on torch 2.13.0). So these kernels take the
place of its own, and refuse nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from commlens.tap import tap


def install() -> Callable[[], None]:
    """Install the kernels, and return the function that removes them."""
    library = torch.library.Library("c10d", "IMPL")
    specs = list(tap.ops())
    begin_work = _works(next(op for op, spec in specs if spec.name == "barrier"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they override others
        for _, spec in specs:
            if spec.writes:
                library.impl(spec.name, _kernel(spec, begin_work), "CPU", with_keyset=True)
    return lambda: library._destroy()


def _works(barrier: Any) -> Callable[[Any, Any], Any]:
    """Return a function that makes a Work of the fake backend, by a barrier."""
    redispatch, tensor = barrier._handle.redispatch_boxed, torch.empty(0)
    needed = {
        argument.name: -1
        for argument in barrier._schema.arguments
        if not argument.has_default_value()
    }

    def begin_work(keys: Any, process_group: Any) -> Any:
        given = {"tensor": tensor, "process_group": process_group, "device_ids": []}
        return redispatch(keys, *(needed | given).values())

    return begin_work


def _kernel(spec: tap.OpSpec, begin_work: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    written = spec.writes[0]
    read = next(place for place in spec.tensors if place not in spec.writes)

    def commlens_fake(keys: Any, *arguments: Any) -> Any:
        outputs, boxed = arguments[written], arguments[spec.process_group]
        rank = tap.unbox_group(boxed).rank()
        with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
            for output, source in _pairs(outputs, arguments[read], rank):
                _fill(output, source, rank)
        work = begin_work(keys, boxed)
        return work if spec.results == 1 else (outputs, work)

    return commlens_fake


def _pairs(outputs: Any, inputs: Any, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each output with the input that it takes."""
    if isinstance(outputs, torch.Tensor):
        if isinstance(inputs, torch.Tensor):
            yield outputs, inputs
        elif rank < len(inputs):  # the list has one for each rank
            yield from _pairs(outputs, inputs[rank], rank)
        return
    each = [inputs] * len(outputs) if isinstance(inputs, torch.Tensor) else inputs
    for output, source in zip(outputs, each, strict=False):
        yield from _pairs(output, source, rank)


def _fill(output: torch.Tensor, source: torch.Tensor, rank: int) -> None:
    """Write the rank's part of an input into an output, or repeat the input until it is full."""
    count, given = output.numel(), source.reshape(-1)
    if output.shape == source.shape:
        output.copy_(source)
    elif given.numel() >= (rank + 1) * count:
        output.copy_(given[rank * count : (rank + 1) * count].view(output.shape))
    elif given.numel() == 0:
        output.zero_()
    elif output.is_contiguous() and count % given.numel() == 0:
        for part in output.view(-1, given.numel()):  # of which one may be the input itself
            part.copy_(given)
    else:
        repeated = given.repeat(-(-count // given.numel()))[:count]
        output.copy_(repeated.view(output.shape))
