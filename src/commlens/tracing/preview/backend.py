"""The data of a fake world's collectives: the outputs get copies of the rank's own inputs, in place
of the other ranks' data.

torch's fake backend copies, too, but refuses calls that gloo and NCCL accept, such as an all_to_all
in which a rank gives nothing, or reads past the end of a list (tried on torch 2.13.0). So our
kernels replace its kernels, and refuse nothing.
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
    make_work = _work_maker(next(op for op, spec in specs if spec.name == "barrier"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that they override its kernels
        for _, spec in specs:
            if spec.writes:
                library.impl(spec.name, _kernel(spec, make_work), "CPU", with_keyset=True)
    return lambda: library._destroy()


def _work_maker(barrier: Any) -> Callable[[Any, Any], Any]:
    """Return a function that makes a Work: it calls the fake backend's barrier."""
    redispatch, tensor = barrier._handle.redispatch_boxed, torch.empty(0)
    # versions of torch differ in the other arguments
    needed = {
        argument.name: -1
        for argument in barrier._schema.arguments
        if not argument.has_default_value()
    }

    def make_work(keys: Any, process_group: Any) -> Any:
        known = {"tensor": tensor, "process_group": process_group, "device_ids": []}
        return redispatch(keys, *(needed | known).values())

    return make_work


def _kernel(spec: tap.OpSpec, make_work: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return the function that runs a collective of one rank."""
    written = spec.writes[0]
    read = next(position for position in spec.tensors if position not in spec.writes)

    def commlens_fake(keys: Any, *arguments: Any) -> Any:
        outputs, boxed = arguments[written], arguments[spec.process_group]
        rank = tap.unbox_group(boxed).rank()
        with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
            for output, source in _pairs(outputs, arguments[read], rank):
                _fill(output, source, rank)
        work = make_work(keys, boxed)
        return work if spec.results == 1 else (outputs, work)

    return commlens_fake


def _pairs(outputs: Any, inputs: Any, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each output tensor with the input tensor to copy from. Both arguments are a tensor or a
    list, whose items may be lists again.
    """
    if isinstance(outputs, torch.Tensor):
        if isinstance(inputs, torch.Tensor):
            yield outputs, inputs
        elif rank < len(inputs):  # the list has an input for each rank
            yield from _pairs(outputs, inputs[rank], rank)
        return
    sources = [inputs] * len(outputs) if isinstance(inputs, torch.Tensor) else inputs
    for output, source in zip(outputs, sources, strict=False):
        yield from _pairs(output, source, rank)


def _fill(output: torch.Tensor, source: torch.Tensor, rank: int) -> None:
    """Fill an output: with the rank's part of the source if that is large enough, else with copies
    of the whole source.
    """
    count, flat = output.numel(), source.reshape(-1)
    if output.shape == source.shape:
        output.copy_(source)
    elif flat.numel() >= (rank + 1) * count:
        output.copy_(flat[rank * count : (rank + 1) * count].view(output.shape))
    elif flat.numel() == 0:
        output.zero_()
    elif output.is_contiguous() and count % flat.numel() == 0:
        for part in output.view(-1, flat.numel()):  # in place: the source may be one of the parts
            part.copy_(flat)
    else:
        copies = flat.repeat(-(-count // flat.numel()))[:count]
        output.copy_(copies.view(output.shape))
