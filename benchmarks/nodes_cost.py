"""What the meeting of the nodes costs at 64, 256 and 1,250 nodes of 8 ranks, and how soon a stall of 10,000 ranks has its verdict.

The nodes run the real code (``commlens.watch.nodes``) as threads of a few processes, and meet in a real TCPStore in a process of its own.
Each has 8 ranks and 8 channels that reach other nodes. When it is asked for evidence, it packs real black boxes of 2,000 records, in which
one rank of the job has not reached the last collective. The reporter has a process to itself, so that its CPU and memory can be measured.
As root, all run in a network namespace without DNS: torch's store looks up the name of each client, which a slow DNS makes slow.

    python benchmarks/nodes_cost.py [NODES ...] [--write]     writes the table into docs/scale.md
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import struct
import sys
import tempfile
import threading
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from _report import machine, write_section

from commlens.blackbox import layout
from commlens.blackbox.reader import OpenBox
from commlens.diagnosis.examine import diagnose_logs
from commlens.model.ranklog import End, Observation, RankLog
from commlens.watch import meeting_places, remote_evidence
from commlens.watch import nodes as meeting
from commlens.watch.channel_progress import ChannelDigest
from commlens.watch.reporting import HEAD_RECORDS, MANY_NODES

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
RANKS = 8
CHANNELS = 8
REST_S = 20.0
SETTLE_S = 60.0
PER_PROCESS = 320
RECORDS = 2000
HEAD = 12  # bytes of a packed box before its compressed content


class Row(NamedTuple):
    """The figures of one number of nodes."""

    nodes: int
    start_cpu_s: float  # of the store, until all nodes know each other
    exchanges: float  # a second, over all nodes
    store_share: float  # of a core, at rest
    store_mb_s: float  # received and sent, at rest
    reporter_share: float  # of a core, at rest
    value_bytes: int
    stall_share: float  # of a core, of the store while ranks wait
    evidence_mb: float
    gather_s: float
    unpack_s: float
    diagnose_s: float
    reporter_mb: float
    verdict: str


def cpu_s() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(pipe: Any) -> None:
    """Serve a store until the other side hangs up; answer with the CPU seconds used so far."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    pipe.send(store.port)
    while pipe.recv():
        pipe.send(cpu_s())


def template(world_size: int, behind: bool, records: int = 0) -> bytes:
    """Return what is packed of a black box of 2,000 records, in the last of which its rank waits; a culprit's has one record less."""
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
            packed = opened.packed(newest=records or remote_evidence._newest(opened.status(), world_size))
    return packed[:HEAD] + zlib.decompress(packed[HEAD:])


def pack_rank(content: bytes, rank: int, world_size: int) -> remote_evidence._Rank:
    """Return what a node sends of one rank."""
    image = bytearray(content[HEAD:])
    fields = list(layout.STATIC.unpack_from(image))
    fields[10], fields[11] = 100 + rank, rank
    layout.STATIC.pack_into(image, 0, *fields)
    struct.pack_into("<I", image, layout.STATIC_CRC_AT, zlib.crc32(image[: layout.STATIC.size]))
    packed = content[:HEAD] + zlib.compress(bytes(image), 4)
    log = RankLog(rank=rank, world_size=world_size, host=f"node{rank // RANKS}", pid=100 + rank, captured_ns=time.time_ns())
    log.observation = Observation(end=End.RUNNING, cpu_s=1.0)
    return remote_evidence._Rank(log, packed)


def digests() -> dict[str, Any]:
    """Return what a node tells of its channels."""
    found = {}
    for channel in range(CHANNELS):
        digest = ChannelDigest()
        for number in range(1, 5000):
            digest.add(number, number * 7)
        found[f"{zlib.crc32(str(channel).encode()):x}"] = digest.blocks()
    return found


def start_node(number: int, address: meeting_places.Store, told: dict[str, Any]) -> meeting.Nodes:
    """Let a node meet the others."""
    node = meeting.Nodes(f"node{number}", lambda: None)
    node.update(ranks=list(range(number * RANKS, (number + 1) * RANKS)), digests=told)
    node._places = [address]
    node._thread = threading.Thread(target=node._run, daemon=True)
    node._thread.start()
    return node


def simulate(pipe: Any, address: meeting_places.Store, numbers: range, world_size: int) -> None:
    """Run some nodes until the other side hangs up; answer with the number of exchanges so far."""
    threading.stack_size(1 << 20)
    os.nice(10)  # in a job, these nodes do not take the CPUs of the store and the reporter
    told = digests()
    boxes = {records: [template(world_size, behind, records) for behind in (False, True)] for records in (0, HEAD_RECORDS)}
    chosen = world_size // 2 + 1
    evidence = {
        (number, records): msgspec.msgpack.encode([
            pack_rank(boxes[records][rank == chosen], rank, world_size)
            for rank in range(number * RANKS, (number + 1) * RANKS)
        ])
        for number in numbers
        for records in (0, HEAD_RECORDS)
    }  # fmt: skip
    nodes = {number: start_node(number, address, told) for number in numbers}

    def answer() -> None:
        while True:
            time.sleep(0.05)
            for number, node in nodes.items():
                if (request := node.take_request()) is not None:
                    node.answer(request, evidence[number, request.records])

    threading.Thread(target=answer, daemon=True).start()
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        if order == "stall":
            for number, node in nodes.items():
                node.update(wait_id=number + 1, wait_s=5.0)
        pipe.send(sum(node._mine.count for node in nodes.values()))


def tell(pipes: list[Any], order: str) -> int:
    """Send an order to all, and return how many exchanges their nodes have made."""
    for pipe in pipes:
        pipe.send(order)
    return sum(pipe.recv() for pipe in pipes)


def measure(count: int) -> Row:
    """Simulate ``count`` nodes."""
    context = multiprocessing.get_context("spawn")
    world_size = count * RANKS
    store, there = multiprocessing.Pipe()
    server = context.Process(target=serve, args=(there,), daemon=True)
    server.start()
    address = meeting_places.Store("127.0.0.1", store.recv())

    def used() -> float:
        store.send(True)
        return float(store.recv())

    before = used()
    first = start_node(0, address, digests())
    pipes, processes = [], [server]
    for begin in range(1, count, PER_PROCESS):
        here, away = multiprocessing.Pipe()
        numbers = range(begin, min(begin + PER_PROCESS, count))
        process = context.Process(target=simulate, args=(away, address, numbers, world_size), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    end = time.monotonic() + SETTLE_S
    while len(first.others) < count - 1 and time.monotonic() < end:
        time.sleep(0.5)
    print(f"{count} nodes: {len(first.others)} of {count - 1} are known", file=sys.stderr, flush=True)
    time.sleep(5)
    start_cpu = used() - before
    done, at, began, own = tell(pipes, "count"), used(), time.monotonic(), cpu_s()
    received = loopback_bytes()
    time.sleep(REST_S)
    spent = time.monotonic() - began
    share, own_share = (used() - at) / spent, (cpu_s() - own) / spent
    exchanges, mb_s = (tell(pipes, "count") - done) / spent, (loopback_bytes() - received) / spent / 1e6
    tell(pipes, "stall")
    time.sleep(3)
    at, began = used(), time.monotonic()
    time.sleep(5)
    stall_share = (used() - at) / (time.monotonic() - began)

    gc.collect()
    began = time.monotonic()
    if count > MANY_NODES + 1:
        gathered, silent = first.gather(records=HEAD_RECORDS, timeout_s=60)
        culprits = next(beat.slot for beat in first.others if world_size // 2 + 1 in beat.ranks)
        gathered |= first.gather(of=[culprits], timeout_s=60)[0]
    else:
        gathered, silent = first.gather(timeout_s=60)
    gather_s = time.monotonic() - began
    for process in processes:
        process.kill()
    first._closing.set()
    first._poke.set()
    logs = [log for number in range(RANKS) for log in remote_evidence.unpack(own_evidence(number, world_size), "node0").logs]
    began = time.monotonic()
    kept = []
    gc.freeze()
    for slot, content in sorted(gathered.items()):
        kept.append(remote_evidence.unpack(content, f"node{slot}"))
        logs += kept[-1].logs
    unpack_s, began = time.monotonic() - began, time.monotonic()
    verdict = diagnose_logs(logs, problems=[f"Node {beat.host} did not answer." for beat in silent], stalled_after_s=1.0)
    diagnose_s = time.monotonic() - began
    return Row(
        count, start_cpu, exchanges, share, mb_s, own_share, len(msgspec.msgpack.encode(first._mine)), stall_share,
        sum(map(len, gathered.values())) / 1e6, gather_s, unpack_s, diagnose_s,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, f"{verdict.kind} {verdict.culprits} {verdict.missing_evidence[:2]}",
    )  # fmt: skip


def own_evidence(rank: int, world_size: int) -> bytes:
    """Return the evidence of one rank of the reporter's node."""
    return msgspec.msgpack.encode([pack_rank(template(world_size, False), rank, world_size)])


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


COLUMNS = ("nodes", "ranks", "store, at rest", "traffic", "store, in a stall", "reporter, at rest", "evidence", "gathered in", "read in",
           "diagnosed in", "reporter's memory")  # fmt: skip


def cells(row: Row) -> list[str]:
    """Return a row of the table."""
    return [
        f"{row.nodes:,}", f"{row.nodes * RANKS:,}", f"{100 * row.store_share:.1f}%",
        f"{row.exchanges:.0f} exchanges/s, {row.store_mb_s:.1f} MB/s", f"{100 * row.stall_share:.0f}%",
        f"{100 * row.reporter_share:.1f}%",
        f"{row.evidence_mb:.1f} MB", f"{row.gather_s:.1f} s", f"{row.unpack_s:.1f} s",
        f"{row.diagnose_s:.1f} s", f"{row.reporter_mb:.0f} MB",
    ]  # fmt: skip


def judge(count: int) -> str:
    """Read and diagnose the evidence of all nodes in this process, without a store, and return what it costs."""
    world_size = count * RANKS
    usual, behind = template(world_size, False), template(world_size, True)
    culprit = world_size - 3
    evidence = [
        msgspec.msgpack.encode([pack_rank(behind if rank == culprit else usual, rank, world_size) for rank in range(first, first + RANKS)])
        for first in range(0, world_size, RANKS)
    ]
    began = cpu_s()
    logs = [log for number, content in enumerate(evidence) for log in remote_evidence.unpack(content, f"node{number}").logs]
    read_s = cpu_s() - began
    verdict = diagnose_logs(logs)
    assert verdict.culprits == [culprit], verdict
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{world_size} ranks: read in {read_s:.1f} s, diagnosed in {cpu_s() - began - read_s:.1f} s of CPU time, {memory_mb:.0f} MB in all"
    )


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", nargs="*", type=int, default=[64, 256, 1250])
    parser.add_argument("--write", action="store_true", help="write the table into docs/scale.md")
    parser.add_argument("--judge", action="store_true", help="only read and diagnose the evidence, without a store")
    asked = parser.parse_args()
    if os.geteuid() == 0 and "NODES_COST_NETWORK" not in os.environ:
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", sys.executable, *sys.argv]
        os.execvpe(command[0], command, os.environ | {"NODES_COST_NETWORK": "1"})
    if asked.judge:
        print("\n".join(map(judge, asked.nodes)), f"({machine()})")
        return
    rows = []
    for count in asked.nodes:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=in_process, args=(count, there))
        process.start()
        rows.append(here.recv())
        process.join()
        print(rows[-1], flush=True)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---:|" * len(COLUMNS), *("| " + " | ".join(cells(row)) + " |" for row in rows)]
    text = f"{machine()} Load while measuring: {os.getloadavg()[1]:.0f}.\n\n" + "\n".join(lines)
    print(text)
    if asked.write:
        write_section(Path(__file__).resolve().parents[1] / "docs" / "scale.md", "measured", text)


if __name__ == "__main__":
    main()
