"""Every collective with what it must carry: ``cases`` for gloo and the fake backend, each rank its
own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

ITEM = 4  # bytes of a float32


class Case(NamedTuple):
    """A call, and the number of elements that go in, come out and are on the wire."""

    name: str
    op: str
    call: Callable[[], object]
    sent: int
    received: int
    wire: float
    fake_only: bool = False


def ones(*lengths: int) -> list[torch.Tensor]:
    """Return a tensor of each length."""
    return [torch.ones(length) for length in lengths]


def cases(rank: int, size: int) -> Iterator[Case]:
    """Yield the cases. Uneven lengths are 1, 2, 3, ... by rank, and their sum is ``total``."""
    share = (size - 1) / size
    uneven = [1 + each for each in range(size)]
    total = sum(uneven)
    yield Case(
        "all_reduce", "all_reduce", lambda: dist.all_reduce(torch.ones(10)), 10, 10, 2 * share * 10
    )
    yield Case(
        "all_gather",
        "all_gather",
        lambda: dist.all_gather(ones(*[3] * size), torch.ones(3)),
        3,
        3 * size,
        share * 3 * size,
    )
    yield Case(
        "all_gather_into_tensor",
        "all_gather",
        lambda: dist.all_gather_into_tensor(torch.ones(3 * size), torch.ones(3)),
        3,
        3 * size,
        share * 3 * size,
    )
    yield Case(
        "uneven all_gather",
        "all_gather",
        lambda: dist.all_gather(ones(*uneven), torch.ones(uneven[rank])),
        uneven[rank],
        total,
        share * total,
        fake_only=True,
    )
    yield Case(
        "reduce_scatter",
        "reduce_scatter",
        lambda: dist.reduce_scatter(torch.ones(5), ones(*[5] * size)),
        5 * size,
        5,
        share * 5 * size,
    )
    yield Case(
        "reduce_scatter_tensor",
        "reduce_scatter",
        lambda: dist.reduce_scatter_tensor(torch.ones(5), torch.ones(5 * size)),
        5 * size,
        5,
        share * 5 * size,
    )
    yield Case(
        "uneven reduce_scatter",
        "reduce_scatter",
        lambda: dist.reduce_scatter(torch.ones(uneven[rank]), ones(*uneven)),
        total,
        uneven[rank],
        share * total,
        fake_only=True,
    )
    yield Case(
        "all_to_all",
        "all_to_all",
        lambda: dist.all_to_all(ones(*[2] * size), ones(*[2] * size)),
        2 * size,
        2 * size,
        share * 2 * size,
        fake_only=True,
    )
    yield Case(
        "all_to_all_single",
        "all_to_all",
        lambda: dist.all_to_all_single(torch.ones(2 * size), torch.ones(2 * size)),
        2 * size,
        2 * size,
        share * 2 * size,
    )
    # Rank r sends 1 + r elements to each rank, so it receives 1, 2, 3, ... of them.
    mine = size * uneven[rank]
    yield Case(
        "uneven all_to_all_single",
        "all_to_all",
        lambda: dist.all_to_all_single(
            torch.ones(total), torch.ones(mine), uneven, [uneven[rank]] * size
        ),
        mine,
        total,
        share * mine,
    )
    yield Case(
        "uneven all_to_all",
        "all_to_all",
        lambda: dist.all_to_all(ones(*uneven), ones(*[uneven[rank]] * size)),
        mine,
        total,
        share * mine,
        fake_only=True,
    )
    for root in (0, size - 1):
        at_root = rank == root
        yield Case(
            f"broadcast from {root}",
            "broadcast",
            lambda root=root: dist.broadcast(torch.ones(7), root),
            7,
            7,
            7,
        )
        yield Case(
            f"reduce to {root}",
            "reduce",
            lambda root=root: dist.reduce(torch.ones(7), root),
            7,
            7,
            7,
        )
        yield Case(
            f"gather to {root}",
            "gather",
            lambda root=root, at_root=at_root: dist.gather(
                torch.ones(3), ones(*[3] * size) if at_root else None, root
            ),
            3,
            3 * size if at_root else 0,
            share * 3 * size,
        )
        yield Case(
            f"scatter from {root}",
            "scatter",
            lambda root=root, at_root=at_root: dist.scatter(
                torch.ones(3), ones(*[3] * size) if at_root else None, root
            ),
            3 * size if at_root else 0,
            3,
            share * 3 * size,
        )
        # Off the root, the whole is taken to be so many times the rank's own part.
        seen = total if at_root else size * uneven[rank]
        yield Case(
            f"uneven gather to {root}",
            "gather",
            lambda root=root, at_root=at_root: dist.gather(
                torch.ones(uneven[rank]), ones(*uneven) if at_root else None, root
            ),
            uneven[rank],
            total if at_root else 0,
            share * seen,
            fake_only=True,
        )
        yield Case(
            f"uneven scatter from {root}",
            "scatter",
            lambda root=root, at_root=at_root: dist.scatter(
                torch.ones(uneven[rank]), ones(*uneven) if at_root else None, root
            ),
            total if at_root else 0,
            uneven[rank],
            share * seen,
            fake_only=True,
        )
    yield Case("barrier", "barrier", dist.barrier, 0, 0, 0)
    if rank < 2:
        call = (
            (lambda: dist.send(torch.ones(9), 1))
            if rank == 0
            else (lambda: dist.recv(torch.ones(9), 0))
        )
        yield Case("message", ("send", "recv")[rank], call, 9 * (rank == 0), 9 * (rank == 1), 9)


def run(rank: int, size: int, *, fake: bool = False) -> None:
    """Issue all of them."""
    for case in cases(rank, size):
        if fake or not case.fake_only:
            # the fake backend copies, and cannot copy uneven tensors
            with contextlib.suppress(RuntimeError if case.fake_only else ()):
                case.call()
