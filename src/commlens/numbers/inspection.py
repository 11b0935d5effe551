"""The tensors of one check: those of a model and its optimizer that other ranks hold, too.

For a linear layer in DDP on ranks 0 and 1, :func:`tensors_to_check` yields its weight and bias,
their gradients and their optimizer states, each with ``Replicas((0, 1), "equal")``. An
:class:`Inspection` of them measures hashes, and returns one table for these two ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from commlens.model.numbers import Measure, NanEvent, OpLog, TensorTable
from commlens.numbers.measuring import Named, Unread, reason_to_skip
from commlens.numbers.replicas import (
    Model,
    Replicas,
    TensorPlace,
    draws_random_numbers,
    has_fsdp,
    local_part,
    mesh_ranks,
    replicas_of_dtensor,
    tensor_parallel_ranks,
)

_HYPERPARAMETERS = ("lr", "momentum", "weight_decay", "eps", "alpha", "dampening", "betas")
_WATCHED_FOR_NAN = ("parameter", "optimizer-state")


class Inspection:
    """The tensors of one check, which are being measured.

    Args:
        tensors: to measure. They may change as soon as this returns.
        nans: report parameters and optimizer states that are NaN.
        first_nan: where NaN came up.
        outputs: of collectives, which are being measured already.
    """

    def __init__(
        self,
        tensors: Iterable[Named] = (),
        *,
        nans: bool = True,
        first_nan: NanEvent | None = None,
        outputs: Iterable[Unread] = (),
    ) -> None:
        self.first_nan = first_nan
        self._nans = nans
        measured = [each for each in tensors if reason_to_skip(each.tensor) is None]
        self._unread = [Unread(measured), *outputs]
        self.ops: OpLog | None = None  # of a check of every op

    def read(self) -> tuple[list[TensorTable], list[Measure]]:
        """Return the tables, and the parameters and optimizer states that are NaN. Waits for the
        device.
        """
        tables: dict[Replicas, list[Measure]] = {}
        nans = []
        for unread in self._unread:
            for measure, kept_by in zip(unread.read(), unread.kept_by, strict=True):
                if self._nans and measure.nans and measure.kind in _WATCHED_FOR_NAN:
                    nans.append(measure)
                for replicas in kept_by:
                    tables.setdefault(replicas, []).append(measure)
        return [
            TensorTable(replicas.ranks, replicas.relation, tuple(measures))
            for replicas, measures in tables.items()
        ], nans


def tensors_to_check(
    model: Model,
    optimizer: Any = None,
    *,
    only: Collection[int] | None = None,
    buffers: bool = True,
) -> Iterator[Named]:
    """Yield the tensors of a check.

    Args:
        model: whose parameters, gradients and buffers are compared.
        optimizer: whose states and hyperparameters are, too.
        only: the ids of the parameters to compare; None: all.
        buffers: compare the buffers, and the parameters that are not trained, too.
    """
    kept_by_all: set[Replicas] = set()
    for place, parameter in model.parameters():
        is_frozen = buffers and not parameter.requires_grad
        if only is not None and id(parameter) not in only and not is_frozen:
            continue
        kept_by_all.update(place.kept_by)
        yield Named("parameter", place.name, local_part(parameter), place.kept_by)
        if parameter.grad is not None:
            kept_by = _kept_like(parameter, parameter.grad, place)
            yield Named("gradient", place.name, local_part(parameter.grad), kept_by)
        if optimizer is not None:
            yield from _states(optimizer, place, parameter)
    if buffers:
        for name, buffer, kept_by in model.buffers():
            yield Named("buffer", name, local_part(buffer), kept_by)
    if optimizer is not None:
        yield from _hyperparameters(optimizer, model)
    if any(hasattr(parameter, "placements") for _, parameter in model.parameters()):
        yield from _generators(model, kept_by_all)


def _kept_like(parameter: Any, other: Any, place: TensorPlace) -> tuple[Replicas, ...]:
    """Return the ranks that hold the same part of a gradient or a state of a parameter."""
    if not hasattr(other, "placements"):
        return place.kept_by
    by_placement = replicas_of_dtensor(parameter)
    return (
        *replicas_of_dtensor(other),
        *(each for each in place.kept_by if each not in by_placement),
    )


def _states(optimizer: Any, place: TensorPlace, parameter: Any) -> Iterator[Named]:
    state = optimizer.state.get(parameter) if hasattr(optimizer, "state") else None
    for name, value in sorted((state or {}).items(), key=lambda item: str(item[0])):
        if isinstance(value, torch.Tensor):
            yield Named(
                "optimizer-state",
                f"{name} of {place.name}",
                local_part(value),
                _kept_like(parameter, value, place),
                place.name,
            )


def _hyperparameters(optimizer: Any, model: Model) -> Iterator[Named]:
    for index, group in enumerate(optimizer.param_groups):
        # of the parameters, one that most ranks certainly train with the same settings
        kept_by = max(
            (_set_up_alike(model, each) for each in group["params"]),
            key=lambda alike: max(
                ((each.relation == "equal", len(each.ranks)) for each in alike), default=(False, 0)
            ),
            default=(),
        )
        for name in _HYPERPARAMETERS:
            values = group.get(name)
            for number, value in enumerate(values if isinstance(values, tuple) else (values,)):
                if isinstance(value, (int, float)) and not isinstance(value, bool) and kept_by:
                    title = f"{name}[{number}]" if isinstance(values, tuple) else name
                    tensor = torch.tensor(float(value), dtype=torch.float64)
                    yield Named("hyperparameter", f"{title} of group {index}", tensor, kept_by)


def _set_up_alike(model: Model, parameter: Any) -> tuple[Replicas, ...]:
    """Return the ranks that train a parameter or parts of it, with the same settings."""
    if (mesh := getattr(parameter, "device_mesh", None)) is not None:
        ranks = mesh_ranks(mesh)
        return (Replicas(ranks, "equal"),) if len(ranks) > 1 else ()
    place = model.places.get(id(parameter))
    return place.kept_by if place is not None else ()


def _generators(model: Model, kept_by_all: Collection[Replicas]) -> Iterator[Named]:
    """Yield the state of the random number generator, which may explain why other tensors differ:
    with tensor parallel, ranks that hold the same tensors compute the same. It is compared on its
    own where tensor parallel ranks draw numbers in their forward passes: once they have had the
    same state, as with one seed, they must keep it. torch's own tracker for DTensors leaves this
    state the same on all of them.
    """
    if not any(map(has_fsdp, model.alive())):
        state = torch.get_rng_state()
        kept_by = tuple(each for each in sorted(kept_by_all) if each.relation != "learned")
        yield Named("rng", "the CPU's generator", state, kept_by)
    for root in filter(draws_random_numbers, model.alive()):
        ranks = tensor_parallel_ranks(root)
        device = next(root.parameters()).device
        if len(ranks) > 1:
            # No device is waited for: the state is the seed and the number of draws, on the host.
            on_device = device.type != "cpu"
            state = (
                torch.get_device_module(device).get_rng_state(device)
                if on_device
                else torch.get_rng_state()
            )
            name = f"the generator of {device.type}" if on_device else "the CPU's generator"
            yield Named("rng", name, state, (Replicas(ranks, "learned"),))
            return
