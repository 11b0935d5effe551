"""What a stall of 100,000 ranks costs the watchers: 12,500 nodes of 8 ranks in one process.

The nodes run the real code (``commlens.watch.nodes``, ``commlens.watch.few_ranks`` and the
diagnosis). They meet in memory, where each request and each byte is counted, and take turns, so
that two cores are enough: CPU time, bytes and rounds are measured, not seconds. The job has tensor
parallel groups of the 8 ranks of a node and 8 data parallel groups; one rank does not come to its
data parallel group. Nodes that are asked for records pack real black boxes of 2,000 records.

    python benchmarks/nodes_tree.py [NODES ...] [--write]     writes the table into docs/scale.md
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from _report import machine, markdown_table, write_section

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit" / "support"))

from boxes import MONO, WAIT_BEGAN, Box
from nodes_cost import digests

from commlens.blackbox.reader import OpenBox
from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.fold.alike import RECORDS, counts_for_all, state_key
from commlens.diagnosis.views.status import status_of
from commlens.dumps.garbage import collector_paused
from commlens.model.ranklog import End, Observation, RankLog
from commlens.model.verdict import Verdict
from commlens.text import format_ranks
from commlens.watch import other_nodes
from commlens.watch.few_ranks import few_ranks
from commlens.watch.nodes import (
    bundles,
    exchange,
    gathering,
    nodes_in_sight,
    periods,
    remote_evidence,
    states_tree,
)
from commlens.watch.nodes.beat import Request, key, pack_digests
from commlens.watch.nodes.bundles import GROUP
from commlens.watch.nodes.calls import wake_key
from commlens.watch.nodes.periods import QUICK_S, rest_period_s, rests_long
from commlens.watch.nodes.remote_evidence import newest_records
from commlens.watch.nodes.states import States
from commlens.watch.nodes.status_answers import QUESTION
from commlens.watch.other_nodes import AskedNodes
from commlens.watch.snapshot import one_run

RANKS: Final = 8
CALLS: Final = 1200  # of each rank in each of its two groups
CAPACITY: Final = 2000
NEVER_S: Final = 1e9
TICK_S: Final = 0.5  # between two looks of a watcher at its ranks
_REST_LOOKS: Final = 20
OBSERVED: Final = Observation(
    end=End.RUNNING, window_s=5.0, proc_state="S", cpu_s=0.0, stack_moved=False
)


class Memory:
    """The values under keys, and what was asked of them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.counters: dict[str, int] = {}


class Client:
    """A node's way to the values, with the calls of a store's client."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.requests = 0
        self.read: Counter[str] = Counter()  # bytes, by the kind of value

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self.requests += 1
        self._memory.values[key] = value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter. Returns the sum."""
        self.requests += 1
        self._memory.counters[key] = self._memory.counters.get(key, 0) + amount
        return self._memory.counters[key]

    def existing_keys(self, keys: Sequence[str]) -> list[str]:
        """Return those of these keys that exist."""
        self.requests += len(keys)
        there = self._memory
        return [key for key in keys if key in there.values or key in there.counters]

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist."""
        self.requests += len(keys)
        values = [self._memory.values[key] for key in keys]
        for name, value in zip(keys, values, strict=True):
            self.read[name.split("/")[2]] += len(value)
        return values

    def remove(self) -> None:
        """Delete all values."""
        self._memory.values.clear()

    def close(self) -> None:
        """Do nothing."""


class SimulatedJob(NamedTuple):
    """A job of which one rank stays in its data loader."""

    nodes: int
    culprit: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.nodes * RANKS

    def box(self, rank: int) -> bytes:
        """Return a rank's black box."""
        node, place = divmod(rank, RANKS)
        box = Box(rank, self.size, capacity=CAPACITY, pid=100 + rank, host=f"node{node}")
        of_node = f"{node * RANKS}-{node * RANKS + RANKS - 1}"
        of_place = format_ranks(range(place, self.size, RANKS))
        tensor = box.group(f"tp{node}", of_node, desc="tp")
        data = box.group(f"dp{place}", of_place, desc="dp")
        asked = box.asked()
        lines = [("/home/me/train.py", 120, "<module>")]
        stacks = [box.stack(("/home/me/train.py", line, "step"), *lines) for line in (70, 81)]
        calls = list(zip((tensor, data), stacks, strict=True))
        waits = rank != self.culprit
        behind = place == self.culprit % RANKS  # it waits for the culprit, the others for it
        count = 2 * CALLS + (not behind) - (not waits)
        for number in range(count):
            group, stack = calls[number % 2]
            seq = number // 2 + 1
            index = box.record(group=group, asked=asked, stack=stack, seq=seq, step=number // 2)
            if number < count - 1 or not waits:
                box.complete(index, after=500_000)
            else:
                box.mark(index, WAIT_BEGAN, MONO + index * 1_000_000 + 400_000)
                box.outcome(index, 0, 0, 4121)
        frame = ["/home/me/train.py", 57, "load_batch"]
        if waits:
            frame = ["/home/me/train.py", 81 if behind else 70, "step"]
        box.evidence([{"tid": 4121, "name": "MainThread", "main": True, "f": [frame]}], MONO)
        box.heartbeat(MONO + (2 * CALLS + 4000) * 1_000_000)
        return box.bytes()

    def read(self, rank: int, take: Callable[[OpenBox], Any]) -> Any:
        """Write a rank's black box, and return what ``take`` reads of it."""
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.write(self.box(rank))
            file.flush()
            with OpenBox(Path(file.name)) as opened:
                return take(opened)

    def log(self, rank: int, newest: int | None = None) -> RankLog:
        """Return a rank's log, or its newest records."""
        found = self.read(
            rank,
            lambda box: box.log(newest=newest and newest_records(box.status(), newest)),
        )
        found.observation = OBSERVED
        return found

    def evidence(self, node: int, records: int) -> bytes:
        """Return what a node sends of its ranks."""
        ranks = []
        for rank in range(node * RANKS, (node + 1) * RANKS):
            packed = self.read(
                rank, lambda box: box.packed(newest=newest_records(box.status(), records))
            )
            log = RankLog(
                rank, self.size, host=f"node{node}", pid=100 + rank, captured_ns=time.time_ns()
            )
            log.observation = OBSERVED
            ranks.append(remote_evidence._RankEvidence(log, packed))
        return msgspec.msgpack.encode(ranks)


def usual_keys(job: SimulatedJob) -> list[bytes]:
    """Return the states of the ranks of all nodes but the culprit's, read from the boxes of one."""
    keys = [state_key(job.log(rank, RECORDS)) for rank in range(RANKS)]
    assert all(keys)
    return [key for key in keys if key is not None]


def states_of_node(job: SimulatedJob, node: int, keys: Sequence[bytes]) -> States:
    """Return what a node answers if it is asked for the states of its ranks."""
    found = States({})
    for place, key_of_place in enumerate(keys):
        rank = node * RANKS + place
        if rank == job.culprit:
            found.alone |= 1 << rank
        else:
            found.by_key[key_of_place] = found.by_key.get(key_of_place, 0) | 1 << rank
    return found


class Asking(NamedTuple):
    """What ``commlens status`` costs while the job stands still."""

    requests: int  # of the command
    kb: float  # read by it
    cpu_s: float  # of it
    of_nodes: int  # requests of all nodes


class Row(NamedTuple):
    """The figures of one number of nodes."""

    nodes: int
    exchanges: float  # of all nodes, a second at rest
    all_ms: float  # CPU time of the reporter for a look at the values of all nodes
    all_kb: float  # read by it for that
    all_requests: int  # of it for that
    reporter_share: float  # of a core at rest
    bundler_ms: float  # CPU time of a node that bundles values, for each look
    leaf_ms: float  # CPU time of another node for each look
    requests: int  # of all nodes, from the request for states to the verdict
    inner_ms: float  # CPU time of a node below the root of the tree
    inner_kb: float  # read by it
    rounds: int  # looks of the reporter at the values of others until it had the last answer
    evidence_kb: float  # read by the reporter from the request to the verdict
    reporter_s: float  # its CPU time for states, records and diagnosis
    status: Asking
    verdict: Verdict


def simulate(count: int) -> Row:
    """Simulate so many nodes."""
    for module in (exchange, nodes_in_sight, periods):
        module.LOST_S = NEVER_S  # type: ignore[attr-defined]
    gathering.GATHER_S = other_nodes._ANSWERS_S = NEVER_S  # type: ignore[misc]
    states_tree.FIRST_S = NEVER_S  # type: ignore[misc]
    for module in (bundles, exchange):
        module.STALE_S = NEVER_S  # type: ignore[attr-defined]
    job = SimulatedJob(count, (count - 3) * RANKS + 5)
    memory, told, keys = Memory(), digests(), usual_keys(job)
    decode = exchange.decoded
    known = functools.lru_cache(maxsize=None)(decode)  # or the nodes would not fit into memory
    exchange.decoded = known  # type: ignore[assignment]
    nodes = []
    clients = [Client(memory) for _ in range(count)]
    for number, client in enumerate(clients):
        node = exchange.Nodes(f"node{number}", lambda: None)
        ranks = list(range(number * RANKS, (number + 1) * RANKS))
        slot = client.add(key("nodes"), 1) % QUESTION - 1
        node.update(ranks=ranks, world_size=job.size, digests=pack_digests(told), slot=slot)
        nodes.append(node)

    reads_all = True

    def look(number: int) -> float:
        nodes[number]._bundled_at = -NEVER_S if reads_all or number == GROUP else NEVER_S
        began = time.thread_time()
        if not number:
            exchange.decoded = decode
            nodes[0]._read_all_at = nodes[0]._bundled_at
        nodes[number]._exchange(clients[number], number)  # type: ignore[arg-type]
        exchange.decoded = known  # type: ignore[assignment]
        return time.thread_time() - began

    for _ in range(3):
        for number in range(count):
            look(number)
    gc.collect()
    gc.freeze()  # in a job, the nodes do not share a process
    reporter, of_reporter = nodes[0], clients[0]
    assert len(reporter.others) == count - 1
    of_reporter.read.clear()
    of_reporter.requests = 0
    all_s = [look(0) for _ in range(3)]
    all_kb, all_requests = of_reporter.read.total() / 3e3, of_reporter.requests // 3
    reads_all = False
    share = (min(all_s) + tick_s(reporter)) / rest_period_s(count)
    share += min(look(0) for _ in range(_REST_LOOKS)) / QUICK_S
    share += min(tick_s(reporter) for _ in range(_REST_LOOKS)) / TICK_S
    bundler_s = [look(GROUP) for _ in range(_REST_LOOKS)]
    leaf_s = [look(count - 1) for _ in range(_REST_LOOKS)]
    for client in clients:
        client.requests = 0
        client.read.clear()
    own = states_of_node(job, 0, keys)
    found: list[tuple[float, Verdict]] = []

    def diagnose() -> None:
        here = [job.log(rank) for rank in range(RANKS)]
        began = time.thread_time()
        with collector_paused():
            few = few_ranks(reporter, own, lambda: here)
            assert few is not None
            verdict = diagnose_logs(one_run(few.logs), stalled_after_s=1.0, alike=few.alike)
            assert counts_for_all(verdict, few.alike), (
                verdict,
                [(sorted(each.examined), len(each.others)) for each in few.alike.classes],
            )
        found.append((time.thread_time() - began, verdict))

    thread = threading.Thread(target=diagnose)
    thread.start()
    while reporter._mine.asked is None:
        time.sleep(0.01)
    spent = [0.0] * count
    rounds = 0
    active = list(range(count))
    while not found:
        if rounds > 100:
            raise RuntimeError("no verdict")
        waits = reporter._from_root is not None or reporter._gathering
        if not waits:  # it reads, or diagnoses
            time.sleep(0.01)
            continue
        rounds += 1
        time.sleep(0.05)  # the reporter's other thread
        for number in active:
            spent[number] += look(number)
            request = nodes[number].take_request()
            if request is not None:
                answer(job, nodes[number], number, request, keys)
        if rounds == 1:
            # the leaves store their answers, and have nothing more to do
            inner = [number for number in range(count) if number * states_tree.ARITY + 1 < count]
            for number in range(len(inner), count):
                spent[number] += look(number)
            active = inner
        asked = reporter._mine.asked
        if asked is not None and asked.tree is None:
            active = [0, *asked.nodes]
    thread.join()
    cpu_s, verdict = found[0]
    most = 1  # it has as many nodes below it as any but the root
    return Row(
        count,
        count / rest_period_s(count),
        1000 * min(all_s),
        all_kb,
        all_requests,
        share,
        1000 * min(bundler_s),
        1000 * min(leaf_s),
        sum(client.requests for client in clients),
        1000 * spent[most],
        clients[most].read["states"] / 1e3,
        rounds,
        of_reporter.read.total() / 1e3,
        cpu_s,
        ask_status(job, nodes, clients, look, keys),
        verdict,
    )


def tick_s(node: exchange.Nodes) -> float:
    """Return the CPU time for what a watcher asks of the other nodes each time it looks at its
    ranks.
    """
    began = time.thread_time()
    for _ in range(2):
        node.waits(time.monotonic_ns())
        assert node.reporter is None and node.dead_elsewhere == [] and node.others
    node.take_news()
    node.take_disagreement(time.monotonic())
    return time.thread_time() - began


def ask_status(
    job: SimulatedJob,
    nodes: list[exchange.Nodes],
    clients: list[Client],
    look: Callable[[int], float],
    keys: Sequence[bytes],
) -> Asking:
    """Let a command on the last node ask what all ranks are doing."""
    memory = clients[0]._memory
    for number, (node, client) in enumerate(zip(nodes, clients, strict=True)):
        node._status_answers._take = functools.partial(job.evidence, number)
        node._status_answers._take_states = functools.partial(states_of_node, job, number, keys)
        client.requests = 0
    nodes[0].update(wait_id=1, wait_s=30.0)
    look(0)
    asker, found = Client(memory), []
    last = len(nodes) - 1
    here = range(last * RANKS, (last + 1) * RANKS)

    def ask() -> None:
        logs = [job.log(rank) for rank in here]
        began = time.thread_time()
        asked = AskedNodes(asker, here)  # type: ignore[arg-type]
        few = other_nodes._ask_others(asked, here, lambda: logs)
        status = status_of("job", few.join(logs), few.lines, alike=few.alike, hosts=few.hosts)
        cpu_s = time.thread_time() - began
        assert status.verdict.culprits == [job.culprit], status.verdict
        assert sum(len(row.ranks) for row in status.rows) == job.size
        found.append(cpu_s)

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        woken = [number for number in range(len(nodes)) if is_woken(memory, number)]
        if not rests_long(len(nodes)) and memory.counters[key("nodes")] // QUESTION > looks_seen(
            nodes
        ):
            woken = list(range(len(nodes)))  # they look at the counter anyway
        collecting = [
            number for number in range(len(nodes)) if nodes[number]._status_answers.is_collecting
        ]
        for number in [*woken, *collecting]:
            look(number)
            if (taking := nodes[number]._status_answers._thread) is not None:
                taking.join()
                look(number)
        time.sleep(0.01)
    (cpu_s,) = found
    of_nodes = sum(client.requests for client in clients)
    return Asking(asker.requests, asker.read.total() / 1e3, cpu_s, of_nodes)


def looks_seen(nodes: list[exchange.Nodes]) -> int:
    """Return the number of the last look that all nodes have seen."""
    return min(node._status_answers._number for node in nodes)


def is_woken(memory: Memory, number: int) -> bool:
    """Return whether a node has been woken, once."""
    with contextlib.suppress(KeyError):
        del memory.values[wake_key(number)]
        return True
    return False


def answer(
    job: SimulatedJob, node: exchange.Nodes, number: int, request: Request, keys: Sequence[bytes]
) -> None:
    """Do what a node's watcher does when it is asked."""
    if request.tree is not None:
        node.answer(request, states_of_node(job, number, keys))
    else:
        node.answer(request, job.evidence(number, request.records))


COLUMNS = (
    "nodes",
    "ranks",
    "exchanges of all nodes at rest",
    "the reporter's look at all values",
    "the reporter at rest",
    "a look of a node that bundles",
    "of another node",
    "in a stall, requests of all nodes",
    "inner node: CPU, read",
    "reporter: rounds",
    "reporter: read",
    "reporter: CPU",
    "`commlens status`: requests, read, CPU",
    "requests of all nodes for it",
)


def cells(row: Row) -> list[str]:
    """Return a row of the table."""
    status = row.status
    return [
        f"{row.nodes:,}",
        f"{row.nodes * RANKS:,}",
        f"{row.exchanges:.0f}/s",
        f"{row.all_requests} requests, {row.all_kb:.0f} kB, {row.all_ms:.0f} ms",
        f"{100 * row.reporter_share:.1f}%",
        f"{row.bundler_ms:.1f} ms",
        f"{row.leaf_ms:.1f} ms",
        f"{row.requests:,}",
        f"{row.inner_ms:.0f} ms, {row.inner_kb:.0f} kB",
        f"{row.rounds}",
        f"{row.evidence_kb:.0f} kB",
        f"{row.reporter_s:.1f} s",
        f"{status.requests:,}, {status.kb:.0f} kB, {status.cpu_s:.1f} s",
        f"{status.of_nodes:,}",
    ]


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", nargs="*", type=int, default=[1250, 12_500])
    parser.add_argument("--write", action="store_true", help="write the table into docs/scale.md")
    asked = parser.parse_args()
    rows = []
    for count in asked.nodes:
        rows.append(simulate(count))
        row = rows[-1]
        print(row._replace(verdict=row.verdict.kind))  # type: ignore[arg-type]
        print(row.verdict.summary, row.verdict.looked_at, sep="\n", flush=True)
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{memory_mb:.0f} MB of memory", file=sys.stderr)
    table = markdown_table(COLUMNS, map(cells, rows), aligned="---:")
    text = f"{machine()}\n\n{table}"
    print(text)
    if asked.write:
        write_section(Path(__file__).resolve().parents[1] / "docs" / "scale.md", "tree", text)


if __name__ == "__main__":
    main()
