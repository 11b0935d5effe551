"""Checks at a place of the user's choice: ``commlens.check_numbers``, ``must_agree`` and
``must_differ``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from commlens import launchers
from commlens.blackbox import job_dirs
from commlens.errors import CommandError
from commlens.model.numbers import CheckId, Relation
from commlens.model.verdict import Verdict
from commlens.numbers.exchange import Exchange
from commlens.numbers.inspection import Inspection, tensors_to_check
from commlens.numbers.job_folder import job_folder
from commlens.numbers.measuring import Named, reason_to_skip
from commlens.numbers.meeting import JobStore, Meeting, SharedMemory, write_file
from commlens.numbers.replicas import Model, Replicas, find_roots, group_ranks, local_part

log = logging.getLogger("commlens")

_TAKEN_WITHIN_S: Final = 2.0
_NAP_S: Final = 0.02

_exchanges: dict[int, Exchange] = {}  # by the rank that compares
_calls: Counter[tuple[str, tuple[int, ...]]] = Counter()


def check_numbers(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    tolerance: float = 0.0,
    timeout_s: float = 60.0,
) -> Verdict:
    """Compare parameters, buffers, gradients and optimizer states with those of the other ranks.

    All ranks of the job, or of ``group``, must call it at the same place: they wait there for each
    other, and communicate through no process group. commlens compares what ranks must hold alike:
    all of a model in DDP, the replicas of HSDP, what a DTensor replicates. It compares tensors by
    their hashes, bit for bit.

    Args:
        model: the model, wrapped or not.
        optimizer: its states and hyperparameters are compared, too.
        group: the ranks that hold replicas of the tensors that neither DDP nor a placement
            describes, such as those of a plain module.
        tolerance: compare norms and means instead, which may differ by this much, relatively.
        timeout_s: how long to wait for the other ranks. Those that do not come are named in the
            log and are not compared.

    Returns:
        On all ranks, the verdict: ``healthy``, or ``diverged`` with the ranks, tensors and causes.
        The lowest rank also reports a ``diverged`` one to the watcher, or logs it.

    Raises:
        CommandError: there is no default group, this rank is not in ``group``, or no tensor is
            known to be replicated.
    """
    ranks = _ranks_of("commlens.check_numbers()", group)
    whole = Model([model], ranks if group is not None else None)
    if not whole.has_replicas and group is None:
        whole = Model(find_roots(model.parameters()))
    if not whole.has_replicas and len(ranks) > 1 and not whole.is_sharded:
        raise CommandError(
            "commlens.check_numbers() does not know which ranks hold replicas of this model: no"
            " parameter is in DistributedDataParallel or replicated by a DTensor. If all ranks hold"
            " the same, pass group=torch.distributed.group.WORLD."
        )
    check = _next_check("commlens.check_numbers()", tolerance, timeout_s, ranks)
    exchange = exchange_of(ranks)
    if exchange is None:
        return Verdict(summary="there is no other rank to compare with")
    exchange.send(check, Inspection(tensors_to_check(whole, optimizer)))
    return exchange.verdict_on(check)


def must_agree(
    tensor: Any, *, group: torch.distributed.ProcessGroup | None = None, name: str = "value"
) -> None:
    """Say that a tensor or number must have the same bytes on all ranks of a group. Returns at
    once; the lowest of the ranks logs a verdict if they differ.

    Args:
        tensor: a tensor, or a number.
        group: the ranks that call this; by default all.
        name: names the value in the verdict; calls with the same name are numbered.

    Raises:
        CommandError: it is no tensor or number, there is no default group, or this rank is not in
            the group.
    """
    _compare("commlens.must_agree()", tensor, group, name, "equal")


def must_differ(
    tensor: Any, *, group: torch.distributed.ProcessGroup | None = None, name: str = "value"
) -> None:
    """Say that no two ranks of a group may have the same bytes in a tensor or number, such as the
    ids of a batch. Takes what :func:`must_agree` takes, and raises the same.
    """
    _compare("commlens.must_differ()", tensor, group, name, "different")


def exchange_of(ranks: Sequence[int]) -> Exchange | None:
    """Return the exchange that the lowest of these ranks compares, and start it if there is none;
    None if this rank is alone.
    """
    reader = min(ranks)
    exchange = _exchanges.get(reader)
    if exchange is not None and exchange.is_for(dist.group.WORLD):
        return exchange
    if exchange is not None:
        finish()  # of a former default group
    if len(ranks) < 2:
        return None
    rank, world_size, folder = dist.get_rank(), dist.get_world_size(), job_folder()
    on_one_node = launchers.number(os.environ, [launchers.LOCAL_WORLD_SIZE]) == world_size
    meeting: Meeting = (
        SharedMemory(folder, rank, reader)
        if folder is not None and on_one_node
        else JobStore(dist.distributed_c10d._get_default_store(), reader)
    )
    # A check that names no ranks is one of all ranks, whichever group's check comes first.
    exchange = Exchange(meeting, rank, range(reader, world_size), report, dist.group.WORLD)
    _exchanges[reader] = exchange
    return exchange


def finish() -> None:
    """Send what is left, and compare it where this rank does so. Takes a few seconds at most."""
    for exchange in _exchanges.values():
        exchange.close()
    _exchanges.clear()


def report(verdict: Verdict) -> None:
    """Hand a verdict to the watcher, which prints it and saves it; log it if there is none."""
    folder = job_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            path = folder / f"{job_dirs.NUMBERS_VERDICT}{os.getpid()}"
            write_file(path, verdict.to_json())
            until = time.monotonic() + _TAKEN_WITHIN_S
            while path.exists() and time.monotonic() < until:
                time.sleep(_NAP_S)
            try:
                path.unlink()
            except FileNotFoundError:
                return
    sentences = (verdict.summary, verdict.explanation, f"Next: {verdict.next_step}")
    text = " ".join(f"{each.rstrip('.')}." for each in sentences if each)
    log.warning("commlens: %s", text, extra={"verdict": verdict})


def _compare(
    caller: str,
    tensor: Any,
    group: torch.distributed.ProcessGroup | None,
    name: str,
    relation: Relation,
) -> None:
    if isinstance(tensor, (int, float)):
        tensor = torch.tensor(tensor)
    tensor = local_part(tensor)
    if (reason := reason_to_skip(tensor)) is not None:
        is_tensor = isinstance(tensor, torch.Tensor)
        what = f"a tensor that is {reason}" if is_tensor else type(tensor).__name__
        raise CommandError(
            f"{caller} cannot compare {name!r}, which is {what}: it takes a tensor with values or a"
            " number."
        )
    ranks = _ranks_of(caller, group)
    check = _next_check(f"{caller} of {name}", 0.0, 0.0, ranks)
    exchange = exchange_of(ranks)
    if exchange is None:
        return
    named = Named("value", name, tensor, (Replicas(ranks, relation),))
    exchange.send(check, Inspection([named]))


def _ranks_of(caller: str, group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group that this rank is in; None stands for all."""
    if not dist.is_available() or not dist.is_initialized():
        raise CommandError(f"{caller} compares ranks: call it after init_process_group.")
    members = None if group is dist.GroupMember.NON_GROUP_MEMBER else group or dist.group.WORLD
    ranks = group_ranks(members) if members is not None else ()
    if dist.get_rank() not in ranks:
        raise CommandError(
            f"{caller} was given a group that rank {dist.get_rank()} is not in: only its members"
            " may call it."
        )
    return ranks


def _next_check(source: str, tolerance: float, wait_s: float, ranks: tuple[int, ...]) -> CheckId:
    _calls[source, ranks] += 1
    return CheckId(source, _calls[source, ranks], tolerance, wait_s, ranks)
