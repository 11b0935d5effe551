"""Legal programs that a check could take for faulty ones: ``python legal_programs.py OUT
families:2:bare oddities:4:native ...``.

Each job runs in the way that it names last: bare, or under strict verification by an engine
(``python``, ``native``, or ``mixed``, which alternates them by rank). Every rank writes the bits
that it computed, to be compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import families
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from verify_forked import Job, Jobs, init, prepare, write

import commlens

Results = Sequence[torch.Tensor]
TIMEOUT_S: Final = 30.0
AT_FOUR: Final = (
    "ddp",
    "fsdp2_tp",
    "hsdp",
    "gpipe",
    "one_f_one_b",
    "save_and_load",
    "plain_calls",
    "objects",
    "other_threads",
    "point_to_point",
)
"""Families that run on four ranks, too: those that are another program there."""
FAMILIES: Final = "LEGAL_FAMILIES"

ODDITIES: dict[str, Callable[[int, int], Results]] = {}


def oddity(program: Callable[[int, int], Results]) -> Callable[[int, int], Results]:
    """Register a program: rank and world size to what it computed, under a fresh default group."""
    ODDITIES[program.__name__] = program
    return program


def store() -> Any:
    """The job's own, for what ranks tell each other past the collectives."""
    return dist.distributed_c10d._get_default_store()


# --- legal oddities


@oddity
def join_uneven(rank: int, size: int) -> Results:
    """Join: the ranks without data shadow the others' collectives."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    with Join([model]):
        for _ in range(2 + 2 * rank):
            model(torch.ones(2, 4)).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@oddity
def leaves_of_the_tree(rank: int, size: int) -> Results:
    """Rooted operations end on some ranks before the last rank comes, which waits for what one of
    them does then.
    """
    last = size - 1 if size > 2 else -1  # of two, none can leave before the other comes
    x, parts = torch.full((3,), float(rank)), [torch.full((3,), float(i)) for i in range(size)]
    for step in range(3):
        for name, leaver in (("broadcast", 0), ("scatter", 2), ("gather", 2)):
            key = f"{name} {step}"
            if rank == last:
                store().wait([key], timedelta(seconds=20))
            if name == "broadcast":
                dist.broadcast(x, 0)
            elif name == "scatter":
                dist.scatter(x, parts if rank == 0 else None, 0)
            else:
                dist.gather(x + step, parts if rank == 0 else None, 0)
            if rank == leaver:
                store().set(key, "1")
    return [x, *parts] if rank == 0 else [x]


@oddity
def message_after_broadcast(rank: int, size: int) -> Results:
    """The root leaves a broadcast and sends what the last rank receives before it comes: no ring of
    waiting ranks, though it looks so.
    """
    x, last = torch.full((3,), float(rank)), size - 1
    for _ in range(2):
        if rank == last and size > 2:
            dist.recv(x, 0)
        dist.broadcast(x, 0)
        if rank == 0 and size > 2:
            dist.send(x, last)
    return [x]


@oddity
def async_in_any_order(rank: int, size: int) -> Results:
    """Async operations of two groups, issued and waited for in other orders by every rank."""
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    sums = [torch.full((4,), float(rank + i)) for i in range(2)]
    for _ in range(5):
        order = [0, 1] if rank % 2 else [1, 0]
        works = {i: dist.all_reduce(sums[i], group=groups[i], async_op=True) for i in order}
        for i in reversed(order) if rank % 3 else order:
            works[i].wait()
    return sums


@oddity
def uneven_all_to_all(rank: int, size: int) -> Results:
    """Other splits in every step, as experts have them."""
    choose, outs = random.Random(5), []
    for _ in range(8):
        counts = [[choose.randint(0, 3) for _ in range(size)] for _ in range(size)]
        receive = [counts[peer][rank] for peer in range(size)]
        out = torch.empty(sum(receive), 2)
        dist.all_to_all_single(
            out, torch.full((sum(counts[rank]), 2), float(rank)), receive, counts[rank]
        )
        outs.append(out)
    return outs


@oddity
def sub_groups(rank: int, size: int) -> Results:
    """Groups that run other programs, and overlapping ones."""
    halves = [dist.new_group(list(range(size // 2))), dist.new_group(list(range(size // 2, size)))]
    pairs = [dist.new_group(sorted({i, (i + 1) % size})) for i in range(size)]
    x = torch.full((2,), float(rank))
    for step in range(4):
        mine = int(rank >= size // 2)
        for _ in range(step if mine else 3 - step):
            dist.all_reduce(x, group=halves[mine])
        for i, pair in enumerate(pairs):
            if rank in (i, (i + 1) % size):
                dist.broadcast(x, i, group=pair)
    return [x]


@oddity
def other_lines_and_forms(rank: int, size: int) -> Results:
    """The same operation on two lines, and in forms that meet on the wire."""
    x, flat = torch.full((4,), float(rank)), torch.zeros(4 * size)
    if rank == 0:
        dist.broadcast(x, 0)
        dist.all_gather(list(flat.chunk(size)), x)
    else:
        dist.broadcast(x.view(4), 0)
        dist.all_gather_into_tensor(flat, x)
    dist.all_reduce(flat if rank else flat.view(size * 4, 1))
    return [x, flat]


@oddity
def messages_out_of_order(rank: int, size: int) -> Results:
    """Tags decide on gloo; a ring of sends and receives; receiving from anybody."""
    received = [torch.zeros(n) for n in (3, 2)]
    if rank == 0:
        works = [dist.isend(torch.ones(2), 1, tag=1), dist.isend(torch.ones(3), 1, tag=2)]
        for work in works:
            work.wait()
    elif rank == 1:
        dist.recv(received[0], 0, tag=2)
        dist.recv(received[1], 0, tag=1)
    token = torch.full((1,), 1.0)
    if rank == 0:
        dist.send(token, 1)
        dist.recv(token, size - 1)
    else:
        dist.recv(token, rank - 1)
        dist.send(token + 1, (rank + 1) % size)
    total = torch.zeros(1)
    if rank == 0:
        for _ in range(size - 1):
            one = torch.zeros(1)
            dist.recv(one, tag=9)
            total += one
    else:
        dist.send(torch.full((1,), float(rank)), 0, tag=9)
    return [*received, token, total]


@oddity
def all_to_all_without_some(rank: int, size: int) -> Results:
    """Splits of nothing for the last rank, which comes late."""
    last = size - 1
    counts = [[0 if last in (i, j) and i != j else 1 for j in range(size)] for i in range(size)]
    out = torch.zeros(sum(row[rank] for row in counts))
    if rank == last:
        time.sleep(0.5)
    dist.all_to_all_single(
        out,
        torch.full((sum(counts[rank]),), float(rank)),
        [row[rank] for row in counts],
        counts[rank],
    )
    return [out]


@oddity
def several_threads(rank: int, size: int) -> Results:
    """Threads with a group each, at their own pace."""
    groups = [dist.new_group(list(range(size))) for _ in range(3)]
    sums = [torch.full((4,), float(rank + i)) for i in range(3)]

    def work(i: int) -> None:
        for step in range(30):
            dist.all_reduce(sums[i], op=dist.ReduceOp.MAX, group=groups[i])
            if step % 10 == 3 * i:
                dist.broadcast(sums[i], step % size, group=groups[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


@oddity
def a_straggler(rank: int, size: int) -> Results:
    """A rank that is late by a second in an all_reduce, a message and a group's operation, while
    others wait for others.
    """
    pair = dist.new_group([0, 1])
    x = torch.full((4,), float(rank))
    for step in range(2):
        if rank == 1:
            time.sleep(0.8)
        if rank == 0:
            dist.send(x, 1) if step else dist.recv(x, 1)
        elif rank == 1:
            dist.recv(x, 0) if step else dist.send(x, 0)
        if rank < 2:
            dist.all_reduce(x, group=pair)
        dist.all_reduce(x)
    return [x]


@oddity
def refused_by_the_backend(rank: int, size: int) -> Results:
    """The backend refuses an operation on one rank, or on all of them: it was never issued, and the
    next one is everybody's next.
    """
    group = dist.new_group([0, 1])
    x, found = torch.full((2,), float(rank + 1)), []
    wrong = [torch.empty(3) for _ in range(size)]
    attempts = [
        lambda: dist.broadcast(x, 99),
        lambda: dist.reduce(x, 99),
        lambda: dist.all_gather(wrong, x),
        lambda: dist.all_gather_into_tensor(torch.empty(3), x),
    ]
    for number, attempt in enumerate(attempts):
        for ranks in ([number % size], range(size)):
            if rank in ranks:
                with contextlib.suppress(RuntimeError, ValueError):
                    attempt()
                    raise AssertionError("the backend took it")
            dist.all_reduce(x)
            found.append(x.clone())
            if rank < 2:
                dist.broadcast(x, 0, group=group)
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None
            dist.barrier()
    return found


@oddity
def groups_of_a_former_world(rank: int, size: int) -> Results:
    """``torch.distributed.nn.functional`` keeps the default group of its import as its default
    argument.
    """
    former, used = dist.group.WORLD, dist.new_group(list(range(size)))
    x = torch.full((2,), float(rank))
    dist.all_reduce(x, group=used)
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size
    )
    for step in range(4):
        for group in (former, None, used) if step % 2 else (None, used):
            opts = dist.AllreduceOptions()
            (group or dist.group.WORLD).allreduce([x], opts).wait()
            x = x.clone() / size
        dist.broadcast(x, step % size)
    return [x]


@oddity
def wrong_splits(rank: int, size: int) -> Results:
    """Gloo refuses an all_to_all in its wait: on all ranks, whatever the splits; or on one that
    alone uses a group.
    """
    x, found = torch.ones(2 * size), []
    alone = dist.new_group(list(range(size)))
    splits = {
        "sum": ([2] * size, [3 + rank] * size),
        "count": ([2] * size, [2 * size]),
        "only one": ([], [3] * size if rank % 2 else [1] * size),
    }
    for receive, send in splits.values():
        for group in (None, alone) if rank == 1 else (None,):
            try:
                dist.all_to_all_single(torch.empty(2 * size), x, receive, send, group=group)
            except RuntimeError as error:
                assert type(error) is RuntimeError, error  # the backend's own
            else:
                raise AssertionError("the backend took it")
        y = torch.full((2,), float(rank))
        dist.all_reduce(y)
        found.append(y)
    return found


@oddity
def groups_made_again(rank: int, size: int) -> Results:
    """Groups that are destroyed and made again, with other numbers of operations on each."""
    x = torch.full((2,), float(rank))
    for step in range(4):
        group = dist.new_group(list(range(size)) if step % 2 else [0, 1])
        if step % 2 or rank < 2:
            for _ in range(step + 1):
                dist.all_reduce(x, group=group)
            dist.destroy_process_group(group)
    return [x]


@oddity
def one_stops_recording(rank: int, size: int) -> Results:
    """A rank switches commlens off, and goes on; the last of the oddities, since it stays so."""
    x = torch.full((2,), float(rank))
    dist.all_reduce(x)
    if rank == 1:
        commlens.disable()
    for step in range(3):
        dist.all_reduce(x)
        dist.broadcast(x, step % size)
        dist.all_reduce(y := x.clone(), async_op=True).wait()
    return [x, y]


# --- random programs


class Randoms:
    """A random legal program: all ranks draw the same operations, and take part in those of their
    groups.
    """

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.rank, self.size = rank, size
        self.shared, self.own = random.Random(seed), random.Random(seed * 100 + rank)
        sets = {
            tuple(range(size)),
            tuple(range(0, size, 2)),
            tuple(range(size // 2)),
            tuple(range(size // 2, size)),
        }
        sets |= {
            tuple(sorted(self.shared.sample(range(size), self.shared.randint(2, size))))
            for _ in range(4)
        }
        self.groups = [
            (ranks, dist.new_group(list(ranks))) for ranks in sorted(sets) if len(ranks) > 1
        ]
        self.pending: list[tuple[Any, torch.Tensor]] = []
        self.hash = hashlib.sha256()

    def run(self, count: int) -> Results:
        """So many operations."""
        for number in range(count):
            self.one(number)
            while self.pending and self.own.random() < 0.3:
                self.finish(self.own.randrange(len(self.pending)))
        while self.pending:
            self.finish(0)
        return [torch.frombuffer(bytearray(self.hash.digest()), dtype=torch.uint8)]

    def finish(self, which: int) -> None:
        work, result = self.pending.pop(which)
        work.wait()
        self.unordered(result)

    def unordered(self, result: torch.Tensor) -> None:
        """Async results come in an order of the rank's own, which is the same in both runs."""
        self.hash.update(result.numpy().tobytes())

    def one(self, number: int) -> None:  # noqa: C901 - one case per operation
        draw = self.shared
        ranks, group = draw.choice(self.groups)
        kind = draw.choice(
            (
                "all_reduce",
                "async",
                "gather_into",
                "scatter_from",
                "to_all",
                "broadcast",
                "reduce",
                "gather",
                "scatter",
                "barrier",
                "objects",
                "message",
                "messages",
                "functional",
                "coalesced",
            )
        )
        n, root, other, dtype = (
            draw.randint(1, 40),
            draw.choice(ranks),
            draw.choice(ranks),
            draw.choice((torch.float32, torch.int64)),
        )
        op = draw.choice((dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN))
        splits = [[draw.randint(0, 3) for _ in ranks] for _ in ranks]
        if self.rank not in ranks:
            return
        w, me = len(ranks), ranks.index(self.rank)
        x, wide = torch.full((n,), number % 7 + me, dtype=dtype), torch.zeros(n * w, dtype=dtype)
        if kind == "all_reduce":
            dist.all_reduce(x, op=op, group=group)
        elif kind == "async":
            self.pending.append((dist.all_reduce(x, op=op, group=group, async_op=True), x))
            return
        elif kind == "gather_into":
            dist.all_gather_into_tensor(wide, x, group=group)
            x = wide
        elif kind == "scatter_from":
            dist.reduce_scatter_tensor(x, wide + me, op=op, group=group)
        elif kind == "to_all":
            receive = [row[me] for row in splits]
            out = torch.zeros(sum(receive))
            dist.all_to_all_single(
                out, torch.full((sum(splits[me]),), float(me)), receive, splits[me], group=group
            )
            x = out
        elif kind == "broadcast":
            dist.broadcast(x, root, group=group)
        elif kind == "reduce":
            dist.reduce(x, root, op=op, group=group)
            if self.rank != root:
                return
        elif kind == "gather":
            parts = list(wide.chunk(w)) if self.rank == root else None
            dist.gather(x, parts, root, group=group)
            x = wide
        elif kind == "scatter":
            dist.scatter(
                x, list((wide + 3).chunk(w)) if self.rank == root else None, root, group=group
            )
        elif kind == "barrier":
            dist.barrier(group=group)
        elif kind == "objects":
            everything: list[object] = [None] * w
            dist.all_gather_object(everything, "x" * (n + me), group=group)
        elif kind in ("message", "messages"):
            if root == other:
                return
            if self.rank == root:
                if kind == "message":
                    dist.send(x, other, group=group, tag=n)
                else:
                    self.pending.append((dist.isend(x, other, group=group, tag=n), torch.zeros(1)))
            elif self.rank == other:
                dist.recv(x, root, group=group, tag=n)
        elif kind == "functional":
            x = functional.wait_tensor(functional.all_gather_tensor(x, 0, group))
        elif kind == "coalesced":
            pair = [x, wide]
            with dist.distributed_c10d._coalescing_manager(group):
                for tensor in pair:
                    dist.all_reduce(tensor, op=op, group=group)
            x = torch.cat(pair)
        self.hash.update(x.numpy().tobytes())


# --- the jobs


def bits(tensors: Results) -> list[str]:
    """Every bit of them."""
    return [
        hashlib.sha256(
            t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for t in tensors
    ]


def under_group(
    rank: int, size: int, result: Path, name: str, program: Callable[[], list[Any]]
) -> dict[str, Any]:
    """Run it under a fresh default group: what it computed, or its error."""
    began = time.monotonic()
    torch.manual_seed(7)
    random.seed(7)
    init(result.parent, rank, size, TIMEOUT_S, f"store-{name}")
    try:
        record: dict[str, Any] = {"bits": program()}
    except Exception as error:
        record = {"error": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return {**record, "seconds": time.monotonic() - began}


def run_families(rank: int, size: int, result: Path) -> None:
    """The families that the variable names, one after the other."""
    from families.inspection import digest, state_of

    records = {}
    world = families.World(families.GLOO, rank, size)
    wanted = os.environ[FAMILIES].split(",")
    for family in families.cases(families.GLOO, size):
        if family.name not in wanted or (size > 2 and family.name not in AT_FOUR):
            continue

        def program(family: families.Family = family) -> list[Any]:
            built = family.build(world)
            outputs = family.step(built)
            return repr([*digest(built, outputs), *state_of(built)]).split("), (")

        records[family.name] = under_group(rank, size, result, family.name, program)
        write(result, records)
        if "error" in records[family.name]:
            break  # the others are somewhere else


def run_oddities(rank: int, size: int, result: Path) -> None:
    """Every oddity."""
    records = {}
    for name, program in ODDITIES.items():
        records[name] = under_group(
            rank, size, result, name, lambda program=program: bits(program(rank, size))
        )  # type: ignore[misc]
        write(result, records)
        if "error" in records[name]:
            break


def run_random(rank: int, size: int, result: Path, count: int, seed: int) -> None:
    """A random program."""
    write(
        result,
        {
            "random": under_group(
                rank, size, result, "random", lambda: bits(Randoms(rank, size, seed).run(count))
            )
        },
    )


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    families.load()
    jobs = []
    for which in sys.argv[2:]:
        name, size, way = which.split(":")
        body: Callable[[int, int, Path], None]
        if name == "families":
            body = run_families
        elif name == "oddities":
            body = run_oddities
        else:
            _, count, seed = name.split("-")

            def body(rank, world, result, count=int(count), seed=int(seed)):
                return run_random(rank, world, result, count, seed)

        settings = {
            "verify_timeout": 20.0,
            "engine": "mixed" if way in ("nodes", "sample") else way,
        }
        if way == "sample":
            settings["debug"] = "sample"
        nodes = 2 if way in ("nodes", "sample") else 1
        jobs.append(
            Job(which, int(size), body, settings, way != "bare", timeout_s=90.0, nodes=nodes)
        )
    prepare()
    Jobs(out).run(jobs, at_once=2)


if __name__ == "__main__":
    main()
