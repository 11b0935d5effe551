"""What the meeting of 64 and 256 nodes of 8 ranks costs, and how soon a stall has its verdict.

The nodes run the real code (``commlens.watch.nodes.exchange``) in a few processes, each with its
own connection, and meet in a real TCPStore in a process of its own. Each has 8 ranks and 8 channels
that reach other nodes. When it is asked for records, it packs real black boxes of 2,000 records,
in which one rank of the job has not reached the last collective. The reporter has a process to
itself, so that its CPU and memory can be measured. With --woken, each node also waits in the store
for a moment after each exchange, as nodes that rest for long do. With --judge, it reads the newest records of all
ranks, as it does where a few ranks are not enough. As root, all run in a network namespace without
DNS: torch's store looks up the name of each client, which a slow DNS makes slow.

    python benchmarks/nodes_cost.py [NODES ...] [--write]     writes the table into docs/scale.md
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import signal
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from _report import machine, markdown_table, write_section

from commlens.blackbox import layout
from commlens.blackbox.reader import OpenBox
from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.fold.alike import RECORDS as RECORDS_ALIKE
from commlens.diagnosis.fold.alike import counts_for_all, state_key
from commlens.dumps.garbage import collector_paused
from commlens.model.ranklog import End, Observation, RankLog
from commlens.watch.evidence import WAITERS_ASKED
from commlens.watch.few_ranks import few_ranks
from commlens.watch.mismatches.channel_progress import ChannelDigest
from commlens.watch.nodes import exchange as meeting
from commlens.watch.nodes import (
    gathering,
    meeting_places,
    nodes_in_sight,
    periods,
    remote_evidence,
    states_tree,
)
from commlens.watch.nodes import states as node_states
from commlens.watch.nodes.beat import key, pack_digests
from commlens.watch.nodes.calls import wake_key
from commlens.watch.nodes.remote_evidence import (
    NodeEvidence,
    first_records_of_each,
    more_records_of_each,
)
from commlens.watch.nodes.states import States
from commlens.watch.nodes.status_answers import QUESTION
from commlens.watch.snapshot import one_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit" / "support"))
RANKS = 8
CHANNELS = 8
INNER = 32  # slot of a node that bundles values and, with more than 1024, has others below it
WOKEN = "NODES_COST_WOKEN"
REST_S = 20.0
SETTLE_S = 60.0
PER_PROCESS = 320
THREADS = 4  # of each process that runs nodes
RECORDS = 2000
# all nodes share the cores of one machine, so they need longer than in a job
states_tree.FIRST_S = gathering.GATHER_S = 60.0  # type: ignore[misc]
periods.LOST_S = meeting.LOST_S = nodes_in_sight.LOST_S = 60.0  # type: ignore[misc,attr-defined]
HEAD = 12  # bytes of a packed box before its compressed content
ASKED_AGAIN = 1 + WAITERS_ASKED  # nodes: the culprit's, and those of some that wait for it
MORE = more_records_of_each(ASKED_AGAIN * RANKS)


class Row(NamedTuple):
    """The figures of one number of nodes."""

    nodes: int
    start_cpu_s: float  # of the store, until all nodes know each other
    exchanges: float  # a second, over all nodes
    store_share: float  # of a core, at rest
    store_mb_s: float  # received and sent, at rest
    reporter_share: float  # of a core, at rest
    value_bytes: int
    inner_share: float  # of a core, at rest, of a node that bundles values and has others below it
    stall_share: float = 0.0  # of a core, of the store while ranks wait
    inner_stall_share: float = 0.0  # the same while ranks wait
    store_s: float = 0.0  # CPU time of the store while the evidence is gathered
    inner_s: float = 0.0  # of that node
    evidence_kb: float = 0.0  # states and records
    gather_s: float = 0.0  # and read
    diagnose_s: float = 0.0
    verdict_cpu_s: float = 0.0  # of the reporter, for both
    reporter_mb: float = 0.0
    verdict: str = ""


def cpu_s() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(pipe: Any) -> None:
    """Serve a store until the other side hangs up; answer with the CPU seconds used so far."""
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    pipe.send(store.port)
    while pipe.recv():
        pipe.send(cpu_s())


def template(world_size: int, behind: bool, records: int) -> bytes:
    """Return what is packed of a black box of 2,000 records, in the last of which its rank waits; a
    culprit's has one record less.
    """
    from boxes import MONO, WAIT_BEGAN, Box

    box = Box(0, world_size, capacity=RECORDS, pid=100)
    group = box.group(ranks=f"0-{world_size - 1}")
    stack = box.stack(("/home/me/train.py", 81, "step"), ("/home/me/train.py", 120, "<module>"))
    asked = box.asked()
    count = RECORDS + 400 - behind
    for number in range(1, count + 1):
        index = box.record(group=group, asked=asked, stack=stack, seq=number, step=number)
        if number < count or behind:
            box.complete(index, after=500_000 - number * 7 % 1000)
        else:
            box.mark(index, WAIT_BEGAN, MONO + index * 1_000_000 + 400_000)
            box.outcome(index, 0, 0, 4121)
    frame = ["/home/me/train.py", 57, "load_batch"] if behind else ["/home/me/train.py", 81, "step"]
    box.evidence([{"tid": 4121, "name": "MainThread", "main": True, "f": [frame]}], MONO)
    box.heartbeat(MONO + (count + 4000) * 1_000_000)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(box.bytes())
        file.flush()
        with OpenBox(Path(file.name)) as opened:
            packed = opened.packed(newest=remote_evidence.newest_records(opened.status(), records))
    return packed[:HEAD] + zlib.decompress(packed[HEAD:])


def pack_rank(content: bytes, rank: int, world_size: int) -> remote_evidence._RankEvidence:
    """Return what a node sends of one rank."""
    image = bytearray(content[HEAD:])
    fields = list(layout.STATIC.unpack_from(image))
    fields[10], fields[11] = 100 + rank, rank
    layout.STATIC.pack_into(image, 0, *fields)
    struct.pack_into("<I", image, layout.STATIC_CRC_AT, zlib.crc32(image[: layout.STATIC.size]))
    packed = content[:HEAD] + zlib.compress(bytes(image), 4)
    log = RankLog(
        rank=rank,
        world_size=world_size,
        host=f"node{rank // RANKS}",
        pid=100 + rank,
        captured_ns=time.time_ns(),
    )
    log.observation = Observation(end=End.RUNNING, cpu_s=1.0)
    return remote_evidence._RankEvidence(log, packed)


class Evidence:
    """What nodes answer; one rank in the middle of the job has not reached the last collective."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.culprit = world_size // 2 + 1
        self._templates: dict[tuple[bool, int], bytes] = {}
        self._key: bytes | None = None

    def packed(self, number: int, records: int) -> bytes:
        """Return the newest records of the ranks of a node."""
        ranks = []
        for rank in range(number * RANKS, (number + 1) * RANKS):
            which = (rank == self.culprit, records)
            if which not in self._templates:
                self._templates[which] = template(self._world_size, *which)
            ranks.append(pack_rank(self._templates[which], rank, self._world_size))
        return msgspec.msgpack.encode(ranks)

    def states(self, number: int) -> States:
        """Return the states of the ranks of a node."""
        if self._key is None:
            self._key = state_key(remote_evidence.unpack(self.packed(0, RECORDS_ALIKE), "").logs[0])
        assert self._key is not None
        ranks = range(number * RANKS, (number + 1) * RANKS)
        waiting = sum(1 << rank for rank in ranks if rank != self.culprit)
        return States({self._key: waiting}, 1 << self.culprit if self.culprit in ranks else 0)


def digests() -> dict[str, Any]:
    """Return what a node tells of its channels."""
    found = {}
    for channel in range(CHANNELS):
        digest = ChannelDigest()
        for number in range(1, 5000):
            digest.add(number, number * 7)
        found[f"{zlib.crc32(str(channel).encode()):x}"] = digest.blocks()
    return found


def new_node(number: int, address: meeting_places.Store, told: dict[str, Any]) -> meeting.Nodes:
    """Return a node that is to meet the others."""
    node = meeting.Nodes(f"node{number}", lambda: None)
    node.update(ranks=list(range(number * RANKS, (number + 1) * RANKS)), digests=pack_digests(told))
    node._contact.places = [address]
    return node


def start_node(number: int, address: meeting_places.Store, told: dict[str, Any]) -> meeting.Nodes:
    """Let a node meet the others, in a thread of its own."""
    node = new_node(number, address, told)
    node._thread = threading.Thread(target=node._run, daemon=True)
    node._thread.start()
    return node


def run_nodes(nodes: list[meeting.Nodes], spent: dict[int, float]) -> None:
    """Do for many nodes, each with its own connection, what the thread of each does: hundreds of
    threads would fight for one GIL.

    Args:
        nodes: the nodes.
        spent: gets the CPU time of each, by its slot.
    """
    pauses = WOKEN in os.environ
    clients = {}
    due = dict.fromkeys(range(len(nodes)), 0.0)
    while True:
        for at, node in enumerate(nodes):
            if time.monotonic() < due[at] and not node._poke.is_set():
                continue
            if at not in clients:
                clients[at] = node._contact.places[0].open(lambda waited_s: True)
                node.update(slot=clients[at].add(key("nodes"), 1) % QUESTION - 1)
            node._poke.clear()
            began = time.thread_time()
            slot = node._mine.slot
            node._exchange(clients[at], slot)
            if pauses:
                clients[at].wait_for(wake_key(slot), 0.0, node._poke.fileno())
            spent[slot] = spent.get(slot, 0.0) + time.thread_time() - began
            due[at] = time.monotonic() + node._period_s()
        time.sleep(0.01)


def simulate(pipe: Any, address: meeting_places.Store, numbers: range, world_size: int) -> None:
    """Run some nodes until the other side hangs up; answer with the number of exchanges so far."""
    os.nice(10)  # in a job, these nodes do not take the CPUs of the store and the reporter
    told = digests()
    evidence = Evidence(world_size)
    nodes = {number: new_node(number, address, told) for number in numbers}
    spent: dict[int, float] = {}
    for first in range(THREADS):
        threading.Thread(
            target=run_nodes, args=(list(nodes.values())[first::THREADS], spent), daemon=True
        ).start()

    def answer() -> None:
        while True:
            time.sleep(0.05)
            for number, node in nodes.items():
                if (request := node.take_request()) is None:
                    continue
                if request.tree is not None:
                    node.answer(request, evidence.states(number))
                else:
                    node.answer(request, evidence.packed(number, request.records))

    threading.Thread(target=answer, daemon=True).start()
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        if order == "stall":
            for number, node in nodes.items():
                node.update(wait_id=number + 1, wait_s=5.0)
        pipe.send(
            spent.get(INNER, 0.0)
            if order == "inner"
            else sum(node._mine.count for node in nodes.values())
        )


def tell(pipes: list[Any], order: str) -> float:
    """Send an order to all, and return how many exchanges their nodes have made, or the CPU seconds
    of the node that bundles values and has nodes below it in the tree.
    """
    for pipe in pipes:
        pipe.send(order)
    return sum(pipe.recv() for pipe in pipes)


def measure(count: int) -> Row:
    """Simulate ``count`` nodes."""
    context = multiprocessing.get_context("spawn")
    store, there = multiprocessing.Pipe()
    server = context.Process(target=serve, args=(there,), daemon=True)
    server.start()
    there.close()
    processes = [server]
    try:
        return measure_with(count, store, processes)
    finally:
        for process in processes:  # those that are stopped would not end by themselves
            process.kill()


def measure_with(count: int, store: Any, processes: list[Any]) -> Row:
    """Simulate ``count`` nodes that meet in a store, and add their processes to others."""
    context = multiprocessing.get_context("spawn")
    world_size = count * RANKS
    address = meeting_places.Store("127.0.0.1", store.recv())

    def used() -> float:
        store.send(True)
        return float(store.recv())

    before = used()
    first = start_node(0, address, digests())
    pipes = []
    for begin in range(1, count, PER_PROCESS):
        here, away = multiprocessing.Pipe()
        numbers = range(begin, min(begin + PER_PROCESS, count))
        process = context.Process(
            target=simulate, args=(away, address, numbers, world_size), daemon=True
        )
        process.start()
        away.close()
        pipes.append(here)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    end = time.monotonic() + SETTLE_S
    while len(first.others) < count - 1 and time.monotonic() < end:
        time.sleep(0.5)
    print(
        f"{count} nodes: {len(first.others)} of {count - 1} are known", file=sys.stderr, flush=True
    )
    time.sleep(5)
    start_cpu = used() - before
    done, at, began, own = tell(pipes, "count"), used(), time.monotonic(), cpu_s()
    inner = tell(pipes, "inner")
    received = loopback_bytes()
    time.sleep(REST_S)
    spent = time.monotonic() - began
    share, own_share = (used() - at) / spent, (cpu_s() - own) / spent
    exchanges, mb_s = (
        (tell(pipes, "count") - done) / spent,
        (loopback_bytes() - received) / spent / 1e6,
    )
    rest = Row(
        count,
        start_cpu,
        exchanges,
        share,
        mb_s,
        own_share,
        len(msgspec.msgpack.encode(first._mine)),
        (tell(pipes, "inner") - inner) / (time.monotonic() - began),
    )
    print(rest, file=sys.stderr, flush=True)
    row = measure_stall(rest, first, pipes, processes, used)
    first._closing.set()
    first._poke.set()
    return row


def measure_stall(
    row: Row,
    first: meeting.Nodes,
    pipes: list[Any],
    processes: list[Any],
    used: Callable[[], float],
) -> Row:
    """Let all nodes' ranks wait for one, and measure what the verdict takes."""
    world_size = row.nodes * RANKS
    tell(pipes, "stall")
    time.sleep(3)
    at, began, inner = used(), time.monotonic(), tell(pipes, "inner")
    time.sleep(5)
    spent = time.monotonic() - began
    stall_share, inner_stall_share = (used() - at) / spent, (tell(pipes, "inner") - inner) / spent
    at, inner = used(), tell(pipes, "inner")

    gc.collect()
    gc.freeze()
    read = [0]  # bytes

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(content: bytes, *arguments: Any) -> Any:
            read[0] += len(content)
            return function(content, *arguments)

        return call

    evidence = Evidence(world_size)
    here = remote_evidence.unpack(evidence.packed(0, RECORDS), "node0").logs
    own = evidence.states(0)
    node_states.unpack_states = counted(node_states.unpack_states)
    remote_evidence.unpack = counted(remote_evidence.unpack)
    began, cpu_began = time.monotonic(), cpu_s()
    few = few_ranks(first, own, lambda: here)
    gather_s = time.monotonic() - began
    assert few is not None
    store_s, inner_s = used() - at, tell(pipes, "inner") - inner
    for process in processes[1:]:  # in a job, they run elsewhere
        os.kill(process.pid or 0, signal.SIGSTOP)
    began = time.monotonic()
    with collector_paused():
        verdict = diagnose_logs(one_run(few.logs), stalled_after_s=1.0, alike=few.alike)
    assert counts_for_all(verdict, few.alike)
    diagnose_s = time.monotonic() - began
    verdict_cpu_s = cpu_s() - cpu_began
    for process in processes[1:]:
        os.kill(process.pid or 0, signal.SIGCONT)
    return row._replace(
        stall_share=stall_share,
        inner_stall_share=inner_stall_share,
        store_s=store_s,
        inner_s=inner_s,
        evidence_kb=read[0] / 1e3,
        gather_s=gather_s,
        diagnose_s=diagnose_s,
        verdict_cpu_s=verdict_cpu_s,
        reporter_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        verdict=f"{verdict.kind} {verdict.culprits} {verdict.missing_evidence[:2]}",
    )


def loopback_bytes() -> int:
    """Return the bytes that passed the loopback interface, other programs' too."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def in_process(count: int, pipe: Any) -> None:
    """Measure in a process of its own, so that the peak memory is of this number of nodes."""
    pipe.send(measure(count))


COLUMNS = (
    "nodes",
    "ranks",
    "store, at rest",
    "traffic",
    "reporter, at rest",
    "inner node, at rest",
    "store, in a stall",
    "inner node, in a stall",
    "gathering: store, inner node",
    "evidence",
    "gathered and read in",
    "diagnosed in",
    "reporter's CPU time for both",
    "reporter's memory",
)


def cells(row: Row) -> list[str]:
    """Return a row of the table."""
    return [
        f"{row.nodes:,}",
        f"{row.nodes * RANKS:,}",
        f"{100 * row.store_share:.1f}%",
        f"{row.exchanges:.0f} exchanges/s, {row.store_mb_s:.1f} MB/s",
        f"{100 * row.reporter_share:.1f}%",
        f"{100 * row.inner_share:.1f}%",
        f"{100 * row.stall_share:.0f}%",
        f"{100 * row.inner_stall_share:.1f}%",
        f"{row.store_s:.1f} s, {1000 * row.inner_s:.0f} ms",
        f"{row.evidence_kb:.0f} kB",
        f"{row.gather_s:.1f} s",
        f"{row.diagnose_s:.1f} s",
        f"{row.verdict_cpu_s:.1f} s",
        f"{row.reporter_mb:.0f} MB",
    ]


def judge(count: int) -> str:
    """Read and diagnose the evidence of all nodes in this process as the reporter does, without a
    store, and return what it costs.
    """
    world_size = count * RANKS
    culprit = world_size - 3

    def packed(records: int, nodes: range) -> list[bytes]:
        usual, behind = (template(world_size, late, records) for late in (False, True))
        ranks = (range(node * RANKS, (node + 1) * RANKS) for node in nodes)
        return [
            msgspec.msgpack.encode(
                [pack_rank(behind if rank == culprit else usual, rank, world_size) for rank in each]
            )
            for each in ranks
        ]

    looks = [
        packed(first_records_of_each(world_size), range(count)),
        packed(MORE, range(count - ASKED_AGAIN, count)),
    ]
    size_mb = sum(len(content) for look in looks for content in look) / 1e6
    found: dict[int, NodeEvidence] = {}
    read_s = diagnose_s = 0.0
    with collector_paused():
        for look in looks:
            began = cpu_s()
            found |= {
                count - len(look) + at: remote_evidence.unpack(content, f"node{at}")
                for at, content in enumerate(look)
            }
            read_s += cpu_s() - began
            began = cpu_s()
            verdict = diagnose_logs(
                [log for node in found.values() for log in node.logs], stalled_after_s=1.0
            )
            diagnose_s += cpu_s() - began
            assert verdict.culprits == [culprit], verdict
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    spent = (
        f"read in {read_s:.1f} s of CPU time, diagnosed twice in {diagnose_s:.1f} s,"
        f" {memory_mb:.0f} MB of memory"
    )
    return f"{world_size:,} ranks: {size_mb:.1f} MB {spent}"


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", nargs="*", type=int, default=[64, 256])
    parser.add_argument("--write", action="store_true", help="write the table into docs/scale.md")
    parser.add_argument(
        "--judge", action="store_true", help="only read and diagnose the evidence, without a store"
    )
    parser.add_argument(
        "--woken", action="store_true", help="wait in the store after each exchange, as many do"
    )
    asked = parser.parse_args()
    if asked.woken:
        os.environ[WOKEN] = "1"
    if os.geteuid() == 0 and "NODES_COST_NETWORK" not in os.environ:
        command = [
            "unshare",
            "--net",
            "sh",
            "-c",
            'ip link set lo up; exec "$@"',
            "sh",
            sys.executable,
            *sys.argv,
        ]
        os.execvpe(command[0], command, os.environ | {"NODES_COST_NETWORK": "1"})
    if asked.judge:
        print("\n".join(map(judge, asked.nodes)), f"({machine()})")
        return
    rows = []
    for count in asked.nodes:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=in_process, args=(count, there)
        )
        process.start()
        there.close()  # or nothing would tell here that it has failed
        rows.append(here.recv())
        process.join()
        print(rows[-1], flush=True)
    table = markdown_table(COLUMNS, map(cells, rows), aligned="---:")
    text = f"{machine()} Load while measuring: {os.getloadavg()[1]:.0f}.\n\n{table}"
    print(text)
    if asked.write:
        write_section(Path(__file__).resolve().parents[1] / "docs" / "scale.md", "measured", text)


if __name__ == "__main__":
    main()
