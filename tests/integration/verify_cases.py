"""Faulty programs, one for each row of docs/verify_table.md, with the refusal and the outcome that
strict verification must give.

A case is a function that every rank of a real gloo job runs. Its docstring is its row's title, and
every line marked ``# reported``, or below that comment, must be in the refusal's text.
``verify_forked.py`` runs them, ``test_verify_strict.py`` judges, and ``python verify_cases.py``
writes the table.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import commlens

PREVENTED: Final = "prevented on all ranks"
DETECTED: Final = "detected"
ENDED: Final = "job ended"
PASSES: Final = "not refused"
PLAIN: Final = "plain"
P2P: Final = "point-to-point"
STRENGTH: Final = (PASSES, ENDED, DETECTED, PREVENTED)
TABLE: Final = Path(__file__).parents[2] / "docs" / "verify_table.md"
MARK: Final = "# reported"
_WIDTH: Final = 8


class Context:
    """The context of a case on one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.odd = rank == 1  # the rank that deviates
        self.groups: list[Any] = []  # two groups of all ranks
        # for cases that issue something legal first
        self.before_the_fault: Callable[[], None] = lambda: None

    @property
    def refused(self) -> threading.Event:
        """An event that is set when the next refusal is posted, however busy the machine is."""
        from commlens.capture import session

        verifier, event = session.recording().recorder.verifier, threading.Event()
        before = verifier.posted_refusals if verifier is not None else 0

        def look() -> None:
            while verifier is not None and verifier.posted_refusals == before:
                time.sleep(0.02)
            event.set()

        threading.Thread(target=look, daemon=True).start()
        return event


@dataclass(frozen=True)
class Case:
    """One fault."""

    name: str
    family: str
    body: Callable[[Context], None]
    kind: str  # of the exception; "" where nothing is refused
    ends: str
    shows: tuple[str, ...]
    sizes: tuple[int, ...]
    timeout_s: float  # the setting verify_timeout
    usable: bool  # the group can be used after the refusal was caught
    leaves: bool  # rank 1 dies or ends by itself
    pair: bool  # only ranks 0 and 1 take part

    @property
    def title(self) -> str:
        return " ".join((self.body.__doc__ or "").split()).rstrip(".")

    @property
    def lines(self) -> list[str]:
        """``verify_cases.py:21`` of every marked line."""
        source, first = inspect.getsourcelines(self.body)
        return [
            f"{Path(__file__).name}:{first + i + (line.strip() == MARK)}"
            for i, line in enumerate(source)
            if line.rstrip().endswith(MARK)
        ]


CASES: dict[str, Case] = {}
BOTH: Final = (2, 4)


def case(
    family: str,
    kind: str,
    ends: str,
    *shows: str,
    sizes: tuple[int, ...] = (2,),
    timeout_s: float = 4.0,
    usable: bool | None = None,
    leaves: bool = False,
) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    """Register the decorated function."""

    def register(body: Callable[[Context], None]) -> Callable[[Context], None]:
        name = body.__name__
        assert name not in CASES, name
        again = ends == PREVENTED if usable is None else usable
        CASES[name] = Case(
            name, family, body, kind, ends, shows, sizes, timeout_s, again, leaves, family == P2P
        )
        return body

    return register


# --- plain calls, synchronous: all_reduce


@case(PLAIN, "mismatch/shape", PREVENTED, "[5]  float32", "[4]  float32", sizes=BOTH)
def all_reduce_shape(c: Context) -> None:
    """all_reduce: number of elements."""
    dist.all_reduce(torch.ones(5 if c.odd else 4))  # reported


@case(PLAIN, "mismatch/shape", PREVENTED, "[2, 3]", "[3, 2]", sizes=BOTH)
def all_reduce_same_numel(c: Context) -> None:
    """all_reduce: same number of elements, different shape."""
    dist.all_reduce(torch.ones((3, 2) if c.odd else (2, 3)))  # reported


@case(PLAIN, "mismatch/dtype", PREVENTED, "float64", "float32", sizes=BOTH)
def all_reduce_dtype(c: Context) -> None:
    """all_reduce: dtype."""
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if c.odd else torch.float32))  # reported


@case(PLAIN, "mismatch/reduce-op", PREVENTED, "SUM", "MAX", sizes=BOTH)
def all_reduce_op(c: Context) -> None:
    """all_reduce: reduce op."""
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if c.odd else dist.ReduceOp.SUM)  # reported


@case(PLAIN, "mismatch/layout", PREVENTED, "row-major", "dimensions in order [1, 0]")
def all_reduce_layout(c: Context) -> None:
    """all_reduce: same shape, different memory order."""
    dist.all_reduce(torch.ones(3, 3).t() if c.odd else torch.ones(3, 3))  # reported


# --- all_gather, reduce_scatter, all_to_all, barrier


@case(PLAIN, "mismatch/shape", PREVENTED, "[5]", "[4]")
def all_gather_shape(c: Context) -> None:
    """all_gather (lists): shape."""
    n = 5 if c.odd else 4
    dist.all_gather([torch.empty(n) for _ in range(c.size)], torch.ones(n))  # reported


@case(PLAIN, "mismatch/dtype", PREVENTED, "int32", "float32")
def all_gather_dtype(c: Context) -> None:
    """all_gather (lists): dtype."""
    dtype = torch.int32 if c.odd else torch.float32
    # reported
    dist.all_gather(
        [torch.empty(4, dtype=dtype) for _ in range(c.size)], torch.ones(4, dtype=dtype)
    )


@case(PLAIN, "mismatch/shape", PREVENTED, "[6]", "[4]", sizes=BOTH)
def all_gather_into_tensor_shape(c: Context) -> None:
    """all_gather_into_tensor: number of elements."""
    n = 6 if c.odd else 4
    dist.all_gather_into_tensor(torch.empty(n * c.size), torch.ones(n))  # reported


@case(PLAIN, "mismatch/dtype", PREVENTED, "float64", "float32")
def all_gather_into_tensor_dtype(c: Context) -> None:
    """all_gather_into_tensor: dtype."""
    dtype = torch.float64 if c.odd else torch.float32
    # reported
    dist.all_gather_into_tensor(torch.empty(4 * c.size, dtype=dtype), torch.ones(4, dtype=dtype))


@case(PLAIN, "mismatch/shape", PREVENTED, sizes=BOTH)
def reduce_scatter_tensor_shape(c: Context) -> None:
    """reduce_scatter_tensor: number of elements."""
    n = 6 if c.odd else 4
    dist.reduce_scatter_tensor(torch.empty(n), torch.ones(n * c.size))  # reported


@case(PLAIN, "mismatch/reduce-op", PREVENTED, "SUM", "MIN")
def reduce_scatter_tensor_op(c: Context) -> None:
    """reduce_scatter_tensor: reduce op."""
    op = dist.ReduceOp.MIN if c.odd else dist.ReduceOp.SUM
    dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4 * c.size), op=op)  # reported


@case(PLAIN, "mismatch/dtype", PREVENTED, "float64", "float32")
def reduce_scatter_dtype(c: Context) -> None:
    """reduce_scatter (lists): dtype."""
    dtype = torch.float64 if c.odd else torch.float32
    # reported
    dist.reduce_scatter(
        torch.empty(4, dtype=dtype), [torch.ones(4, dtype=dtype) for _ in range(c.size)]
    )


@case(PLAIN, "mismatch/splits", PREVENTED, "sends [3, 1", "sends even", sizes=BOTH)
def all_to_all_splits(c: Context) -> None:
    """all_to_all_single: splits."""
    send = [3, 1] + [2] * (c.size - 2) if c.odd else []
    receive = [2] * c.size if c.odd else []
    # reported
    dist.all_to_all_single(torch.empty(2 * c.size), torch.ones(2 * c.size), receive, send)


@case(PLAIN, "mismatch/dtype", PREVENTED, "float64", "float32")
def all_to_all_dtype(c: Context) -> None:
    """all_to_all_single: dtype."""
    dtype = torch.float64 if c.odd else torch.float32
    # reported
    dist.all_to_all_single(
        torch.empty(2 * c.size, dtype=dtype), torch.ones(2 * c.size, dtype=dtype)
    )


@case(PLAIN, "mismatch/op", PREVENTED, "`barrier`", "`all_reduce`", sizes=BOTH)
def barrier_or_all_reduce(c: Context) -> None:
    """barrier vs. all_reduce."""
    if c.odd:
        dist.barrier()  # reported
    else:
        dist.all_reduce(torch.ones(1))  # reported


@case(PLAIN, "mismatch/op", PREVENTED, "`all_gather`", "`reduce_scatter`", sizes=BOTH)
def gather_or_scatter(c: Context) -> None:
    """all_gather vs. reduce_scatter."""
    if c.odd:
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4 * c.size))  # reported
    else:
        dist.all_gather_into_tensor(torch.empty(4 * c.size), torch.ones(4))  # reported


@case(PLAIN, "mismatch/shape", PREVENTED, "[3]", "[7]")
def order_swap_shapes(c: Context) -> None:
    """Two all_reduces of different shapes, swapped."""
    for n in (7, 3) if c.odd else (3, 7):
        dist.all_reduce(torch.ones(n))  # reported


@case(PLAIN, "", PASSES)
def order_swap_same_shape(c: Context) -> None:
    """Two all_reduces of the same shape, swapped (no difference to refuse; the watcher warns about
    the source lines).
    """
    if c.odd:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.zeros(3))
    else:
        dist.all_reduce(torch.zeros(3))
        dist.all_reduce(torch.ones(3))


@case(PLAIN, "cycle", PREVENTED, "wait for each other", "Cycle:", sizes=BOTH)
def order_swap_groups(c: Context) -> None:
    """The same all_reduces on two groups, swapped."""
    first, second = c.groups[::-1] if c.odd else c.groups
    dist.all_reduce(torch.ones(4), group=first)  # reported
    dist.all_reduce(torch.ones(4), group=second)


# --- rooted: ranks that the op does not need are only waited for briefly


@case(PLAIN, "mismatch/shape", PREVENTED, "[1, 5]", "[1, 2, 5]", sizes=BOTH)
def broadcast_shape(c: Context) -> None:
    """broadcast: shape."""
    dist.broadcast(torch.ones(1, 2, 5) if c.odd else torch.ones(1, 5), 0)  # reported


@case(PLAIN, "mismatch/shape", PREVENTED, "[2, 5]", "[5, 2]")
def broadcast_same_numel(c: Context) -> None:
    """broadcast: same number of elements, different shape."""
    dist.broadcast(torch.ones(5, 2) if c.odd else torch.ones(2, 5), 0)  # reported


@case(PLAIN, "mismatch/dtype", PREVENTED, "int32", "float32")
def broadcast_dtype(c: Context) -> None:
    """broadcast: dtype."""
    dist.broadcast(torch.ones(4, dtype=torch.int32 if c.odd else torch.float32), 0)  # reported


@case(PLAIN, "mismatch/root", PREVENTED, "root 0", "root 1", sizes=BOTH)
def broadcast_root(c: Context) -> None:
    """broadcast: source."""
    dist.broadcast(torch.ones(4), int(c.odd))  # reported


@case(PLAIN, "mismatch/root", PREVENTED, "root 0", "root 1")
def reduce_root(c: Context) -> None:
    """reduce: destination."""
    dist.reduce(torch.ones(4), int(c.odd))  # reported


@case(PLAIN, "mismatch/shape", PREVENTED, "[4]", "[5]", sizes=BOTH)
def reduce_shape(c: Context) -> None:
    """reduce: number of elements."""
    dist.reduce(torch.ones(5 if c.odd else 4), 0)  # reported


@case(PLAIN, "mismatch/reduce-op", PREVENTED, "SUM", "PRODUCT")
def reduce_op(c: Context) -> None:
    """reduce: reduce op."""
    # reported
    dist.reduce(torch.ones(4), 0, op=dist.ReduceOp.PRODUCT if c.odd else dist.ReduceOp.SUM)


@case(PLAIN, "mismatch/root", PREVENTED, "root 0", "root 1")
def scatter_root(c: Context) -> None:
    """scatter: source."""
    # reported
    dist.scatter(torch.empty(4), [torch.ones(4)] * c.size if c.rank < 2 else None, int(c.odd))


@case(PLAIN, "mismatch/shape", PREVENTED)
def scatter_shape(c: Context) -> None:
    """scatter: number of elements."""
    # reported
    dist.scatter(
        torch.empty(5 if c.odd else 4), [torch.ones(4)] * c.size if c.rank == 0 else None, 0
    )


@case(PLAIN, "mismatch/root", PREVENTED, "root 0", "root 1")
def gather_root(c: Context) -> None:
    """gather: destination."""
    # reported
    dist.gather(
        torch.ones(4), [torch.empty(4) for _ in range(c.size)] if c.rank < 2 else None, int(c.odd)
    )


@case(PLAIN, "mismatch/shape", PREVENTED, "[5]", "[4]", sizes=BOTH)
def gather_shape(c: Context) -> None:
    """gather: number of elements."""
    # reported
    dist.gather(
        torch.ones(5 if c.odd else 4),
        [torch.empty(4) for _ in range(c.size)] if c.rank == 0 else None,
        0,
    )


@case(PLAIN, "mismatch/op", PREVENTED, "`broadcast` with root 0", "`all_reduce`", sizes=BOTH)
def broadcast_or_all_reduce(c: Context) -> None:
    """broadcast vs. all_reduce."""
    if c.odd:
        dist.broadcast(torch.ones(4), 0)  # reported
    else:
        dist.all_reduce(torch.ones(4))  # reported


# --- point-to-point


@case(P2P, "mismatch/p2p", DETECTED, "[4] float32", "[6] float32", sizes=BOTH)
def send_recv_shape(c: Context) -> None:
    """send vs. recv: number of elements."""
    if c.rank == 0:
        dist.send(torch.ones(4), 1)  # reported
    elif c.odd:
        dist.recv(torch.ones(6), 0)  # reported


@case(P2P, "mismatch/p2p", DETECTED, "int32", "float32")
def send_recv_dtype(c: Context) -> None:
    """send vs. recv: dtype."""
    if c.rank == 0:
        dist.send(torch.ones(4), 1)  # reported
    elif c.odd:
        dist.recv(torch.ones(4, dtype=torch.int32), 0)  # reported


@case(
    P2P, "mismatch/p2p", DETECTED, "recv from rank 0, tag 7", "send to rank 1, tag 5", timeout_s=1.5
)
def send_recv_tag(c: Context) -> None:
    """send vs. recv: tag."""
    if c.rank == 0:
        dist.send(torch.ones(4), 1, tag=5)  # reported
    else:
        dist.recv(torch.ones(4), 0, tag=7)  # reported


@case(P2P, "cycle", DETECTED, "Each receives before it sends", sizes=BOTH)
def both_receive(c: Context) -> None:
    """Both ranks receive first."""
    if c.rank < 2:
        dist.recv(torch.ones(4), 1 - c.rank)  # reported


@case(P2P, "cycle", DETECTED, "Each sends before it receives", sizes=BOTH)
def both_send(c: Context) -> None:
    """Both ranks send first."""
    if c.rank < 2:
        dist.send(torch.ones(4), 1 - c.rank)  # reported


@case(P2P, "mismatch/p2p", DETECTED, "rank 1 sends to rank 9, which is not in", sizes=BOTH)
def send_to_nobody(c: Context) -> None:
    """send to a rank that does not exist."""
    if c.odd:
        dist.send(torch.ones(4), 9)  # reported
    else:
        dist.all_reduce(torch.ones(4))


@case(P2P, "mismatch/p2p", DETECTED, "[4] float32", "[6] float32")
def batch_shape(c: Context) -> None:
    """batch_isend_irecv: number of elements."""
    n = 6 if c.odd else 4
    ops = [
        dist.P2POp(dist.isend, torch.ones(4), 1 - c.rank),
        dist.P2POp(dist.irecv, torch.ones(n), 1 - c.rank),
    ]
    for work in dist.batch_isend_irecv(ops):  # reported
        work.wait()


# --- async


@case("async", "mismatch/shape", DETECTED, "[5]", "[4]", sizes=BOTH)
def async_shape(c: Context) -> None:
    """all_reduce with async_op: number of elements."""
    dist.all_reduce(torch.ones(5 if c.odd else 4), async_op=True).wait()  # reported


@case("async", "mismatch/op", DETECTED, "`all_reduce`", "`broadcast`", sizes=BOTH)
def async_ops(c: Context) -> None:
    """all_reduce vs. broadcast, with async_op."""
    x = torch.ones(4)
    # reported
    work = dist.broadcast(x, 0, async_op=True) if c.odd else dist.all_reduce(x, async_op=True)
    work.wait()


@case("async", "mismatch/reduce-op", DETECTED, "SUM", "MAX")
def async_reduce_op(c: Context) -> None:
    """all_reduce with async_op: reduce op."""
    # reported
    dist.all_reduce(
        torch.ones(4), op=dist.ReduceOp.MAX if c.odd else dist.ReduceOp.SUM, async_op=True
    ).wait()


# --- coalesced, objects, groups


@case("coalesced", "mismatch/shape", DETECTED, "[5]", "[3]")
def coalesced_members(c: Context) -> None:
    """Members of different shapes."""
    with _coalescing_manager():
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(5 if c.odd else 3))


@case("coalesced", "mismatch/shape", DETECTED)
def coalesced_order(c: Context) -> None:
    """Members in a different order."""
    with _coalescing_manager():
        for n in (5, 2) if c.odd else (2, 5):
            dist.all_reduce(torch.ones(n))


@case("objects", "mismatch/op", PREVENTED, "`broadcast`", "`all_gather`", sizes=BOTH)
def object_kinds(c: Context) -> None:
    """broadcast_object_list vs. all_gather_object."""
    if c.odd:
        dist.all_gather_object([None] * c.size, 1)  # reported
    else:
        dist.broadcast_object_list([1], 0)  # reported


@case("objects", "mismatch/op", PREVENTED, "`all_reduce`", "`all_gather`")
def object_against_tensor(c: Context) -> None:
    """all_gather_object vs. all_reduce."""
    if c.odd:
        dist.all_reduce(torch.ones(1))  # reported
    else:
        dist.all_gather_object([None] * c.size, 1)  # reported


@case("groups", "missing", ENDED, "Rank 0", "torch.distributed.all_reduce", timeout_s=2.0)
def new_group_on_some(c: Context) -> None:
    """new_group called by some ranks only."""
    if not c.odd:
        dist.new_group(list(range(c.size)), timeout=timedelta(seconds=4))  # reported
    dist.all_reduce(torch.ones(2))


# --- collectives issued by libraries


@case("functional", "mismatch/shape", DETECTED, "[5]", "[4]", sizes=BOTH)
def functional_shape(c: Context) -> None:
    """all_reduce: number of elements."""
    functional.wait_tensor(
        # reported
        functional.all_reduce(torch.ones(5 if c.odd else 4), "sum", dist.group.WORLD)
    )


@case("functional", "mismatch/op", DETECTED, "`all_reduce`", "`all_gather`")
def functional_ops(c: Context) -> None:
    """all_reduce vs. all_gather."""
    x, world = torch.ones(4), dist.group.WORLD
    functional.wait_tensor(
        functional.all_gather_tensor(x, 0, world)  # reported
        if c.odd
        else functional.all_reduce(x, "sum", world)  # reported
    )


@case("functional", "mismatch/op", DETECTED, "`all_reduce`", "`broadcast`")
def functional_against_plain(c: Context) -> None:
    """all_reduce vs. a plain broadcast."""
    if c.odd:
        dist.broadcast(torch.ones(4), 0)  # reported
    else:
        # reported
        functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD))


@case("DTensor", "mismatch/shape", DETECTED, "[3, 4]", "[2, 4]", sizes=BOTH)
def dtensor_local_shapes(c: Context) -> None:
    """Local tensors of different shapes are reduced."""
    mesh = init_device_mesh("cpu", (c.size,))
    partial = DTensor.from_local(
        torch.ones(3 if c.odd else 2, 4), mesh, [Partial()], run_check=False
    )
    c.before_the_fault()
    partial.redistribute(mesh, [Replicate()]).to_local()  # reported


@case("DTensor", "mismatch/op", DETECTED, "`all_reduce`", "`all_gather`")
def dtensor_placements(c: Context) -> None:
    """Different placements."""
    mesh = init_device_mesh("cpu", (c.size,))
    placement = Shard(0) if c.odd else Partial()
    local = DTensor.from_local(torch.ones(2, 4), mesh, [placement], run_check=False)
    c.before_the_fault()
    local.redistribute(mesh, [Replicate()]).to_local()  # reported


@case("DDP", "mismatch/op", DETECTED, "`barrier`", "DistributedDataParallel", sizes=BOTH)
def ddp_skipped_step(c: Context) -> None:
    """A rank skips a step and issues something else."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(2 if c.odd else 3):
        model(torch.ones(2, 4)).sum().backward()
    if c.odd:
        dist.barrier()  # reported


@case(
    "DDP", "dead", DETECTED, "rank 1 has ended", "DistributedDataParallel", sizes=BOTH, leaves=True
)
def ddp_uneven_data(c: Context) -> None:
    """Uneven data: a rank has one batch less and ends."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(2 if c.odd else 3):
        model(torch.ones(2, 4)).sum().backward()


@case("DDP", "mismatch/shape", DETECTED, "DistributedDataParallel", "[20]", "[1]")
def ddp_extra_collective(c: Context) -> None:
    """A rank issues an extra collective between two steps."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        if c.odd and step == 2:
            dist.all_reduce(torch.ones(1))  # reported
        model(torch.ones(2, 4)).sum().backward()


@case("DDP", "mismatch/shape", DETECTED, "DistributedDataParallel", "[20]", "[1]", sizes=BOTH)
def ddp_caught(c: Context) -> None:
    """A rank issues an extra collective, catches the refusal and does something else: the others
    are woken in the backend.
    """
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        if c.odd and step == 2:
            time.sleep(0.5)
            try:
                dist.all_reduce(torch.ones(1))  # reported
            except commlens.DistributedOperationException:
                time.sleep(4)
                raise
        model(torch.ones(2, 4)).sum().backward()


@case(
    "DDP",
    "missing",
    DETECTED,
    "rank 1 did not take part",
    "DistributedDataParallel",
    "is in verify_cases.py",
    sizes=BOTH,
    timeout_s=2.0,
)
def ddp_never_comes(c: Context) -> None:
    """A rank does something else between two steps."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        if c.odd and step == 2:
            c.refused.wait(60)  # reported
        model(torch.ones(2, 4)).sum().backward()


@case(
    "DDP",
    "missing",
    DETECTED,
    "rank 1 did not take part",
    "DistributedDataParallel",
    "Held up by this",
    "of group outer for rank 2",
    sizes=(4,),
    timeout_s=2.0,
)
def ddp_held_up(c: Context) -> None:
    """A rank does something else, and others wait for a rank that waits for it, in another group."""
    inner, outer = (
        dist.new_group([1, 2], group_desc="inner"),
        dist.new_group([0, 2, 3], group_desc="outer"),
    )
    model = (
        DistributedDataParallel(torch.nn.Linear(4, 4), process_group=inner)
        if c.rank in (1, 2)
        else None
    )
    for step in range(2):
        if step and c.odd:
            c.refused.wait(60)  # reported
        if step and c.rank == 2:
            time.sleep(0.1)  # the others' time is over first
        if model is not None:
            model(torch.ones(2, 4)).sum().backward()  # reported
        if not c.odd:
            dist.all_reduce(torch.ones(4), group=outer)  # reported


@case("DDP", "mismatch/shape", DETECTED, "DistributedDataParallel")
def ddp_other_model(c: Context) -> None:
    """The model's parameters have other dimensions: the constructor compares them."""
    # reported
    DistributedDataParallel(
        torch.nn.Conv1d(4, 4, 1, bias=False) if c.odd else torch.nn.Linear(4, 4, bias=False)
    )


@case("DDP", "dead", DETECTED, "rank 1 has ended", "DistributedDataParallel", leaves=True)
def ddp_other_sizes(c: Context) -> None:
    """The model's parameters have other sizes: torch raises its own error on the ranks that differ
    from rank 0.
    """
    DistributedDataParallel(torch.nn.Linear(4, 5 if c.odd else 4))  # reported


@case("DDP", "dead", DETECTED, "rank 1 has ended", "DistributedDataParallel", leaves=True)
def ddp_unused_parameters(c: Context) -> None:
    """A rank does not use all parameters: torch raises its own error there, one step later."""
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    model(torch.ones(2, 4)).sum().backward()
    for _ in range(2):
        used = layers[0] if c.odd else torch.nn.Sequential(*layers)
        model.module = used
        model(torch.ones(2, 4)).sum().backward()


@case("DDP", "mismatch/op", DETECTED, "DistributedDataParallel")
def ddp_no_sync(c: Context) -> None:
    """no_sync on one rank only, then a barrier."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    with model.no_sync() if c.odd else contextlib.nullcontext():
        model(torch.ones(2, 4)).sum().backward()
    dist.barrier()


@case("FSDP2", "mismatch/shape", DETECTED, "fully_shard")
def fsdp_forward_order(c: Context) -> None:
    """Layers of different shapes, swapped."""
    layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)])
    mesh = init_device_mesh("cpu", (c.size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    c.before_the_fault()
    x = torch.ones(2, 8)
    for layer in reversed(layers) if c.odd else layers:
        x = layer(x)  # reported
    x.sum().backward()


def _sharded(c: Context) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (c.size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()
    c.before_the_fault()
    return model


@case(
    "FSDP2",
    "mismatch/shape",
    DETECTED,
    "fully_shard (forward)",
    "fully_shard (backward)",
    sizes=BOTH,
)
def fsdp_skipped_backward(c: Context) -> None:
    """A rank skips a backward."""
    model = _sharded(c)
    for step in range(2):
        loss = model(torch.ones(2, 8)).sum()  # reported
        if not c.odd or step:
            loss.backward()  # reported


@case("FSDP2", "mismatch/op", DETECTED, "`all_gather`", "`all_reduce`")
def fsdp_extra_collective(c: Context) -> None:
    """A rank issues an extra collective."""
    model = _sharded(c)
    if c.odd:
        dist.all_reduce(torch.ones(1))  # reported
    model(torch.ones(2, 8)).sum().backward()


@case("FSDP2", "dead", DETECTED, "rank 1 has ended", "fully_shard", leaves=True)
def fsdp_uneven_data(c: Context) -> None:
    """Uneven data: a rank has one batch less and ends."""
    model = _sharded(c)
    if not c.odd:
        model(torch.ones(2, 8)).sum().backward()


@case(
    "FSDP2",
    "missing",
    DETECTED,
    "rank 1 did not take part",
    "fully_shard",
    "is in verify_cases.py",
    timeout_s=2.0,
)
def fsdp_never_comes(c: Context) -> None:
    """A rank does something else between forward and backward."""
    model = _sharded(c)
    loss = model(torch.ones(2, 8)).sum()
    if c.odd:
        c.refused.wait(60)  # reported
    loss.backward()


def _pipeline(c: Context, width: int = _WIDTH, batches: int = 2) -> Callable[[], None]:
    x = torch.ones(2, width)
    stage = PipelineStage(
        torch.nn.Linear(width, width),
        c.rank,
        c.size,
        torch.device("cpu"),
        input_args=x,
        output_args=x,
    )
    schedule = ScheduleGPipe(stage, batches)
    batch = torch.ones(2 * batches, width)
    return lambda: schedule.step(batch) if c.rank == 0 else schedule.step()


@case("pipelining", "mismatch/p2p", DETECTED, "recv", "send")
def pipeline_shapes(c: Context) -> None:
    """Stages that expect different activation shapes."""
    step = _pipeline(c, _WIDTH // 2 if c.odd else _WIDTH)
    c.before_the_fault()
    step()


@case("pipelining", "dead", DETECTED, "rank 1 has ended", "send", leaves=True)
def pipeline_ends(c: Context) -> None:
    """The last stage ends one step early."""
    step = _pipeline(c)
    step()
    c.before_the_fault()
    if not c.odd:
        step()


@case("pipelining", "dead", DETECTED, "rank 1 has ended", "send", leaves=True)
def pipeline_batches(c: Context) -> None:
    """The last stage works on fewer microbatches, and ends."""
    step = _pipeline(c, batches=1 if c.odd else 2)
    c.before_the_fault()
    step()
    if c.odd:
        time.sleep(1)


@case("compiled", "mismatch/shape", DETECTED, "[5]", "[4]")
def compiled_shape(c: Context) -> None:
    """all_reduce inside a compiled function: number of elements."""

    def summed(x: Any) -> Any:
        return functional.all_reduce(x, "sum", dist.group.WORLD) + 1

    torch.compile(summed, backend="aot_eager", fullgraph=True)(torch.ones(5 if c.odd else 4))


# --- a rank that does not arrive

ABSENT: Final = "a rank is missing"


@case(
    ABSENT,
    "missing",
    PREVENTED,
    "rank 1 did not take part within",
    "is in verify_cases.py",
    sizes=BOTH,
    timeout_s=2.0,
    usable=False,
)
def never_comes(c: Context) -> None:
    """It does something else; the message names its line."""
    if c.odd:
        c.refused.wait(60)  # reported
    dist.all_reduce(torch.ones(4))  # reported


@case(
    ABSENT,
    "missing",
    PREVENTED,
    "rank 1 did not take part within",
    "Held up by this",
    "waits in all_reduce #1 of group outer for rank 2",
    sizes=(4,),
    timeout_s=2.0,
    usable=False,
)
def held_up(c: Context) -> None:
    """It does something else, and others wait for a rank that waits for it, in another group."""
    inner, outer = (
        dist.new_group([1, 2], group_desc="inner"),
        dist.new_group([0, 2, 3], group_desc="outer"),
    )
    if c.odd:
        c.refused.wait(60)  # reported
    if c.rank == 2:
        time.sleep(0.5)  # the others' time is over first
    if c.rank in (1, 2):
        dist.all_reduce(torch.ones(4), group=inner)  # reported
    if not c.odd:
        dist.all_reduce(torch.ones(4), group=outer)  # reported


@case(
    ABSENT,
    "dead",
    PREVENTED,
    "rank 1 has ended",
    "has finished",
    sizes=BOTH,
    usable=False,
    leaves=True,
)
def exits(c: Context) -> None:
    """It exits."""
    if c.odd:
        sys.exit(0)
    dist.all_reduce(torch.ones(4))  # reported


@case(ABSENT, "dead", PREVENTED, "rank 1 has ended", usable=False, leaves=True)
def raises(c: Context) -> None:
    """It raises."""
    if c.odd:
        raise ValueError("of its own")
    dist.all_reduce(torch.ones(4))  # reported


@case(
    ABSENT,
    "dead",
    PREVENTED,
    "rank 1 has ended",
    "was killed or crashed",
    sizes=BOTH,
    usable=False,
    leaves=True,
)
def sigkill(c: Context) -> None:
    """It dies by SIGKILL."""
    if c.odd:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))  # reported


@case(
    ABSENT,
    "missing",
    PREVENTED,
    "Rank 1",
    "is stopped by a signal",
    sizes=BOTH,
    timeout_s=1.5,
    usable=False,
    leaves=True,
)
def sigstop(c: Context) -> None:
    """It is stopped by SIGSTOP."""
    if c.odd:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4))  # reported


@case(ABSENT, "missing", PREVENTED, "Rank 1", "is the GIL held?", timeout_s=2.0, usable=False)
def holds_the_gil(c: Context) -> None:
    """It holds the GIL in C code."""
    if c.odd:
        ctypes.PyDLL(None).sleep(8)
    dist.all_reduce(torch.ones(4))  # reported


@case(ABSENT, "missing", DETECTED, "broadcast", "Rank 0", timeout_s=2.0, usable=False)
def root_never_comes(c: Context) -> None:
    """The root of a broadcast does something else."""
    if c.rank == 0:
        c.refused.wait(60)  # reported
    dist.broadcast(torch.ones(4), 0)  # reported


@case(ABSENT, "missing", DETECTED, "gather", "Rank 1", timeout_s=2.0, usable=False)
def giver_never_comes(c: Context) -> None:
    """A rank that a gather's root waits for does something else."""
    if c.odd:
        c.refused.wait(60)  # reported
    # reported
    dist.gather(torch.ones(4), [torch.empty(4) for _ in range(c.size)] if c.rank == 0 else None, 0)


@case(ABSENT, "missing", DETECTED, "recv from rank 0", timeout_s=2.0, usable=False)
def sender_never_comes(c: Context) -> None:
    """The sender of a message does something else."""
    if c.rank == 0:
        c.refused.wait(60)  # reported
        dist.send(torch.ones(4), 1)
    elif c.odd:
        dist.recv(torch.ones(4), 0)  # reported


# --- the table

_HEAD: Final = """# What strict verification does with each fault

What happens to each kind of fault under `commlens launch --debug`, on gloo, torch 2.13 and 2.15. torch 2.6 does not say whether a call
waits, so some faults that are prevented here are only detected there. `python tests/integration/verify_cases.py` writes this page;
`tests/integration/test_verify_strict.py` runs every row on 2 ranks, and those marked so on 4, and checks the page against the results.

- **prevented on all ranks**: every living rank raises the same message, and nothing of the operation reaches the backend.
- **detected**: every living rank raises the same message; on some of them the operation had already been issued. A rank that waits inside
  the backend's own code is woken: commlens closes the group's connections there, and the backend's error is raised as the message's cause.
- **job ended**: at least one rank raises the message. Others are inside other code that cannot be interrupted (here: torch's store).
  Once the first rank has ended, they print the same message from commlens's thread or end with their own error.
- **not refused**: the ranks' arguments do not differ.

Rooted operations (broadcast, reduce, scatter, gather) can complete on some ranks before others have arrived. For ranks
that it does not need, a rank waits only for a second in which they have a core, and not at all after one such wait in vain; a mismatch that shows up later is detected,
not prevented. The same holds for async operations and for those that libraries issue: the last rank to arrive finds the fault.
The last column says whether the group is usable afterwards.
"""


def table() -> str:
    """docs/verify_table.md."""
    lines = [_HEAD]
    for family in dict.fromkeys(case.family for case in CASES.values()):
        lines += [
            f"## {family[0].upper()}{family[1:]}",
            "",
            "| fault | what happens | kind | ranks | group usable afterwards |",
            "|---|---|---|---|---|",
        ]
        for one in CASES.values():
            if one.family == family:
                ranks = " and ".join(map(str, one.sizes))
                usable = "yes" if one.usable else "-" if one.ends == PASSES else "no"
                lines.append(
                    f"| {one.title} | {one.ends} | {one.kind or '-'} | {ranks} | {usable} |"
                )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    TABLE.write_text(table())
