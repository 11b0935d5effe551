"""What the meeting of the nodes costs: the store's CPU, the traffic at rest, and the time until all evidence is with the reporter.

Simulated nodes with the real code (``commlens.watch.nodes``), as threads of one process, meet in a real TCPStore in a process of its own.
Each has 8 ranks, 8 channels that reach other nodes, and answers a request with evidence of real black boxes.

    python benchmarks/nodes_cost.py [NODES ...]
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import threading
import time
import zlib
from datetime import timedelta
from typing import Any

import msgspec

from commlens.watch import nodes as meeting
from commlens.watch.channel_progress import ChannelDigest

RANKS = 8
CHANNELS = 8
REST_S = 20.0
EVIDENCE_KB = 40  # of a rank, compressed; 12 with 120 records in the ring buffer


def serve(pipe: Any) -> None:
    """Serve a store until the other side hangs up; answer with the CPU seconds used so far."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    pipe.send(store.port)
    while pipe.recv():
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send((used.ru_utime + used.ru_stime, used.ru_maxrss / 1024))


def ask(pipe: Any) -> tuple[float, float]:
    """Return the store's CPU seconds and peak memory in MB."""
    pipe.send(True)
    return pipe.recv()


def digests() -> dict[str, Any]:
    """Return what a node tells of its channels."""
    found = {}
    for channel in range(CHANNELS):
        digest = ChannelDigest()
        for number in range(1, 5000):
            digest.add(number, number * 7)
        found[f"{zlib.crc32(str(channel).encode()):x}"] = digest.blocks()
    return found


def measure(count: int) -> None:
    """Simulate ``count`` nodes and print the figures."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    address = meeting.Address("127.0.0.1", here.recv())
    told = digests()
    evidence = os.urandom(RANKS * EVIDENCE_KB * 1000)
    members: list[meeting.Nodes] = []
    for number in range(count):
        node = meeting.Nodes(f"node{number}", lambda: None)
        node.update(ranks=list(range(number * RANKS, (number + 1) * RANKS)), digests=told)
        node._thread = threading.Thread(target=node._run, args=(address,), daemon=True)
        node._thread.start()
        members.append(node)
    end = time.monotonic() + 60
    while len(members[0].others) < count - 1 and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(3)
    before, began = ask(here)[0], time.monotonic()
    time.sleep(REST_S)
    share = (ask(here)[0] - before) / (time.monotonic() - began)
    beat = len(msgspec.msgpack.encode(members[1]._mine))

    stop = threading.Event()

    def answer() -> None:
        while not stop.wait(0.05):
            for node in members[1:]:
                if (request := node.take_request()) is not None:
                    node.answer(request, evidence)

    threading.Thread(target=answer, daemon=True).start()
    began = time.monotonic()
    gathered, silent = members[0].gather(timeout_s=60)
    took = time.monotonic() - began
    stop.set()
    size = sum(map(len, gathered.values())) / 1e6
    print(f"{count:5} nodes, {count * RANKS:6} ranks: at rest the store uses {100 * share:5.2f}% of a core, "
          f"and a node's value has {beat} bytes ({beat / RANKS:.0f} a rank);")  # fmt: skip
    print(f"{'':12} {size:.0f} MB of evidence from {len(gathered)} nodes in {took:.1f} s ({len(silent)} silent); "
          f"the store's peak memory is {ask(here)[1]:.0f} MB", flush=True)  # fmt: skip
    for node in members:
        node._closing.set()
        node._poke.set()
    process.kill()


if __name__ == "__main__":
    for text in sys.argv[1:] or ["2", "50", "200"]:
        measure(int(text))
