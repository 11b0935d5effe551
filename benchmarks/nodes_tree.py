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
from commlens.diagnosis.fold.alike import counts_for_all
from commlens.diagnosis.fold.state_key import RECORDS, state_key
from commlens.dumps.garbage import collector_paused
from commlens.model.ranklog import End, Observation, RankLog
from commlens.model.verdict import Verdict
from commlens.text import format_ranks
from commlens.watch.few_ranks import few_ranks
from commlens.watch.nodes import bundles, exchange, known_nodes, remote_evidence, states_tree
from commlens.watch.nodes.beat import Request, key, pack_digests
from commlens.watch.nodes.bundles import GROUP
from commlens.watch.nodes.looks import LOOK
from commlens.watch.nodes.remote_evidence import newest_records
from commlens.watch.nodes.states import States
from commlens.watch.snapshot import one_run

RANKS: Final = 8
CALLS: Final = 1200  # of each rank in each of its two groups
CAPACITY: Final = 2000
NEVER_S: Final = 1e9
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

    def existing(self, keys: Sequence[str]) -> list[str]:
        """Return those of these keys that exist."""
        self.requests += len(keys)
        return [key for key in keys if key in self._memory.values]

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
            ranks.append(remote_evidence._Rank(log, packed))
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


class Row(NamedTuple):
    """The figures of one number of nodes."""

    nodes: int
    rest_ms: float  # CPU time of the reporter for each look at the values of all nodes
    rest_kb: float  # read by it for each look
    rest_requests: int  # of it for each look
    bundler_ms: float  # CPU time of a node that bundles values, for each look
    leaf_ms: float  # CPU time of another node for each look
    requests: int  # of all nodes, from the request for states to the verdict
    inner_ms: float  # CPU time of a node below the root of the tree
    inner_kb: float  # read by it
    rounds: int  # looks of the reporter at the values of others until it had the last answer
    evidence_kb: float  # read by the reporter: states and records
    reporter_s: float  # its CPU time for states, records and diagnosis
    verdict: Verdict


def simulate(count: int) -> Row:
    """Simulate so many nodes."""
    for module in (exchange, known_nodes):
        module.LOST_S = NEVER_S  # type: ignore[attr-defined]
    exchange.GATHER_S = NEVER_S  # type: ignore[misc]
    states_tree.FIRST_S = NEVER_S  # type: ignore[misc]
    bundles.STALE_S = NEVER_S  # type: ignore[misc]
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
        slot = client.add(key("nodes"), 1) % LOOK - 1
        node.update(ranks=ranks, world_size=job.size, digests=pack_digests(told), slot=slot)
        nodes.append(node)

    def look(number: int) -> float:
        began = time.thread_time()
        if not number:
            exchange.decoded = decode
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
    rest_s = [look(0) for _ in range(3)]
    rest_kb, rest_requests = of_reporter.read.total() / 3e3, of_reporter.requests // 3
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
    while not reporter._mine.asks:
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
        if reporter._mine.asked_tree is None:
            active = [0, *reporter._mine.asked_nodes]
    thread.join()
    cpu_s, verdict = found[0]
    most = 1  # it has as many nodes below it as any but the root
    return Row(
        count,
        1000 * min(rest_s),
        rest_kb,
        rest_requests,
        1000 * min(bundler_s),
        1000 * min(leaf_s),
        sum(client.requests for client in clients),
        1000 * spent[most],
        clients[most].read["states"] / 1e3,
        rounds,
        (of_reporter.read["states"] + of_reporter.read["evidence"]) / 1e3,
        cpu_s,
        verdict,
    )


def answer(
    job: SimulatedJob, node: exchange.Nodes, number: int, request: Request, keys: Sequence[bytes]
) -> None:
    """Do what a node's watcher does when it is asked."""
    if request.tree is not None:
        node.answer_states(request, states_of_node(job, number, keys))
    else:
        node.answer(request, job.evidence(number, request.records))


COLUMNS = (
    "nodes",
    "ranks",
    "at rest, a look of the reporter",
    "of a node that bundles",
    "of another node",
    "in a stall, requests of all nodes",
    "inner node: CPU, read",
    "reporter: rounds",
    "reporter: read",
    "reporter: CPU",
)


def cells(row: Row) -> list[str]:
    """Return a row of the table."""
    return [
        f"{row.nodes:,}",
        f"{row.nodes * RANKS:,}",
        f"{row.rest_requests} requests, {row.rest_kb:.0f} kB, {row.rest_ms:.0f} ms",
        f"{row.bundler_ms:.1f} ms",
        f"{row.leaf_ms:.1f} ms",
        f"{row.requests:,}",
        f"{row.inner_ms:.0f} ms, {row.inner_kb:.0f} kB",
        f"{row.rounds}",
        f"{row.evidence_kb:.0f} kB",
        f"{row.reporter_s:.1f} s",
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
