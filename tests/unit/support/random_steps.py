"""Random programs of which all ranks repeat one step, and faults to inject into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from builders import Die, Job, Stay, Step, Wait, all_reduce, collective, recv, send
from chosen import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from commlens.model.ranklog import End, Observation

STEPS = 7
FAULT_STEP = 4

SLOW = settings(
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
sizes = st.sampled_from([2, 4, 8])


@dataclass(frozen=True)
class Item:
    """One op of the step that all ranks repeat."""

    op: str
    group: str
    size: int
    line: int
    root: int = 0  # position in the group
    is_async: bool = False

    def action(self, job: Job, rank: int, **other: object) -> object:
        group = groups(job)[self.group][rank]
        size = other.get("size", self.size)
        dtype = other.get("dtype", "float32")
        if self.op == "ring":
            return None
        if self.op == "all_reduce":
            reduce_op = other.get("reduce_op", "SUM")
            return all_reduce(
                group,
                size,
                line=self.line,
                dtype=dtype,
                reduce_op=reduce_op,
                is_async=self.is_async,
                handle=str(self.line),
            )
        root = (
            group.ranks[(self.root + other.get("turn", 0)) % len(group.ranks)]
            if self.op in ("broadcast", "reduce")
            else None
        )
        reduce_op = "SUM" if self.op in ("reduce", "reduce_scatter") else None
        op = other.get("op", self.op)
        return collective(
            op, group, size, line=self.line, dtype=dtype, root=root, reduce_op=reduce_op
        )


def groups(job: Job) -> dict[str, dict[int, object]]:
    """World, rows of two, columns: for each rank the group of that kind that it is in."""
    half = job.size // 2
    rows = {
        r: job.group(f"row{r // 2}", [r // 2 * 2, r // 2 * 2 + 1], "tp") for r in range(job.size)
    }
    columns = {
        r: job.group(f"col{r % 2}", range(r % 2, job.size, 2), "dp") for r in range(job.size)
    }
    again = job.group("w2", range(job.size), "statistics")
    return {
        "world": dict.fromkeys(range(job.size), job.world),
        "again": dict.fromkeys(range(job.size), again),
        "row": rows,
        "column": columns,
    } | ({} if half > 1 else {"column": rows})


@st.composite
def steps(draw: st.DrawFn, *, plain: bool = False) -> tuple[Item, ...]:
    ops = st.sampled_from(
        [
            "all_reduce",
            "all_reduce",
            "all_gather",
            "broadcast",
            "reduce_scatter",
            "barrier",
            *([] if plain else ["ring"]),
        ]
    )
    items = []
    for i in range(draw(st.integers(1, 5))):
        op = draw(ops)
        where = (
            "world" if op == "ring" else draw(st.sampled_from(["world", "again", "row", "column"]))
        )
        is_async = op == "all_reduce" and not plain and draw(st.booleans())
        items.append(
            Item(
                op,
                where,
                draw(st.sampled_from([4, 4, 64])),
                10 + i,
                draw(st.integers(0, 1)),
                is_async,
            )
        )
    # Every rank meets every other, or an order could be free.
    return (*items, Item("all_reduce", "world", 100, 99))


def one_step(job: Job, rank: int, items: tuple[Item, ...]) -> Iterator[object]:
    pending = []
    for item in items:
        if item.op == "ring":
            yield send(job.world, (rank + 1) % job.size, item.size, line=item.line)
            yield recv(job.world, (rank - 1) % job.size, item.size, line=item.line)
            continue
        yield item.action(job, rank)
        if item.is_async:
            pending.append(Wait(str(item.line)))
    yield from pending
    yield Step()


def applies(fault: str, item: Item, items: tuple[Item, ...], i: int, size: int) -> bool:
    """Whether the fault in the item at ``i`` is one that a verdict must name."""
    if fault in ("sleep", "die", "skip"):
        return True
    if fault in ("size", "dtype"):
        return item.op != "barrier"
    if fault == "op":
        return item.op in ("all_gather", "broadcast")
    if fault == "root":
        return item.op == "broadcast" and size > 2 and item.group in ("world", "again")
    if fault == "reduce_op":
        return item.op == "all_reduce"
    # Two groups of which both have the culprit and somebody else in common, used one after the
    # other.
    following = items[i + 1] if i + 1 < len(items) else None
    blocking = {"all_reduce", "all_gather", "barrier", "reduce_scatter"}
    return (
        following is not None
        and item.op in blocking
        and following.op in blocking
        and item.group != following.group
        and {item.group, following.group} <= {"world", "again", "row"}
    )


def broken(
    job: Job, rank: int, items: tuple[Item, ...], fault: str, place: int
) -> Iterator[object]:
    item = items[place]
    order = list(range(len(items)))
    if fault == "swap":
        order[place], order[place + 1] = order[place + 1], order[place]
    other: dict[str, object] = {
        "size": {"size": item.size - 1},
        "dtype": {"dtype": "bfloat16"},
        "op": {"op": "all_reduce"},
        "root": {"turn": 1},
        "reduce_op": {"reduce_op": "MAX"},
    }.get(fault, {})
    for i in order:
        if i != place:
            yield items[i].action(job, rank)
        elif fault == "sleep":
            yield Stay(57, "load_batch")
        elif fault == "die":
            yield Die(Observation(End.KILLED, signal="SIGKILL"))
        elif fault != "skip":
            yield item.action(job, rank, **other)
    yield Step()


def with_fault(
    items: tuple[Item, ...], fault: str, place: int, culprit: int
) -> Callable[[Job, int], Iterator[object]]:
    """One rank has a fault in one step."""

    def program(job: Job, rank: int) -> Iterator[object]:
        for step in range(STEPS):
            if (rank, step) == (culprit, FAULT_STEP):
                yield from broken(job, rank, items, fault, place)
            else:
                yield from one_step(job, rank, items)

    return program
