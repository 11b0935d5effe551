"""Small real processes that keep a black box as a rank does, without torch: they do what they are
told on their stdin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from boxes import busy_box

from commlens.blackbox import job_dirs, layout
from commlens.blackbox.reader import OpenBox
from commlens.processes import process
from commlens.processes.ranks import RankProcess
from commlens.watch.roster import Member

CHILD = r"""
import json, os, signal, sys, threading, time
from pathlib import Path
from commlens.blackbox.writer import BoxWriter
from commlens.blackbox import job_dirs, layout as L

folder, rank, world, options = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
folder.mkdir(parents=True, exist_ok=True)
box = BoxWriter(folder / job_dirs.box_name(rank, os.getpid()), capacity=64, rank=rank, world_size=world, local_rank=rank,
    start_ticks=job_dirs.start_ticks(os.getpid()),
    about={"job": folder.name, "host": os.uname().nodename, "pid_namespace": os.readlink("/proc/self/ns/pid"), "prefixes": {}} | options)
box.word(L.PHASE, 1)
box.word(L.TIMEOUT_MS, int(options.get("timeout_s", 0) * 1000))
group = box.add_blob({"k": "group", "name": "0", "desc": "default_pg", "ranks": f"0-{world - 1}", "backend": "gloo",
    "device": "cpu", "mesh_dim": None, "inc": 0})
asked = box.add_blob({"k": "asked", "op": "all_reduce", "dop": "allreduce_", "in": [[[5], "float32", "cpu", "strided", None]], "out": [],
    "rop": "SUM", "root": None, "is": [], "os": [], "async": False})
stack = box.add_blob({"k": "stack", "f": [["/home/me/train.py", 81, "step"]]})
beating = True
def beat():
    while True:
        if beating:
            box.heartbeat()
        time.sleep(0.1)
threading.Thread(target=beat, daemon=True).start()
offset = index = 0
print("ready", flush=True)
for line in sys.stdin:
    word, *rest = line.split()
    if word == "announce":
        index, now = box.next_index(), time.monotonic_ns()
        offset = box.announce(L.Record(index, now, group, asked, stack, sequence_number=index, thread=os.getpid(), flags=L.FLAG_ENTERED))
        box.word(L.OLDEST_SINCE, now); box.word(L.OLDEST_INDEX, index)
    elif word in ("done", "fail"):
        box.mark(offset, L.DONE, index, time.monotonic_ns())
        box.mark_outcome(offset, index, L.OUTCOME_COMPLETED if word == "done" else L.OUTCOME_FAILED, L.HOW_WAIT)
        box.word(L.OLDEST_INDEX, 0); box.word(L.OLDEST_SINCE, 0)
    elif word == "phase":
        box.word(L.PHASE, int(rest[0]))
    elif word == "where":
        box.write_evidence([{"tid": os.getpid(), "name": "MainThread", "main": True, "f": [["/home/me/train.py", 57, rest[0]]]}],
            time.monotonic_ns())
        box.word(L.MAIN_STACK_SINCE, time.monotonic_ns())
    elif word == "silence":
        beating = False
    elif word == "exit":
        os._exit(int(rest[0]))
    elif word == "spin":
        end = time.monotonic() + float(rest[0])
        while time.monotonic() < end: pass
    print("done", flush=True)
"""


class Rank:
    """One such process."""

    def __init__(self, folder: Path, rank: int, world_size: int, **options: object) -> None:
        source = str(Path(__file__).parents[3] / "src")
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
        }
        self.rank = rank
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                CHILD,
                str(folder),
                str(rank),
                str(world_size),
                json.dumps(options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            text=True,
        )
        self.pid = self.process.pid
        self._read("ready")

    def _read(self, expected: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line == expected, f"rank {self.rank} said {line!r}"

    def tell(self, command: str, *, answers: bool = True) -> None:
        """Do this, and wait until it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        if answers:
            self._read("done")

    def end(self) -> None:
        """End it if it has not ended."""
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def sleeper() -> subprocess.Popen[bytes]:
    """Start a process that lives until its stdin closes."""
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )


def eventually(condition: object, timeout_s: float = 15.0) -> None:
    """Wait for a condition, which is what an event-driven program can be tested for."""
    assert callable(condition)
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def member(folder: Path, rank: int, *, box: bool = True, **options: int) -> Member:
    pid = os.getpid() if rank == 2 else 4000 + rank
    found = Member.of(RankProcess(rank, pid, 0, world_size=4), process.Handle.invisible(pid))
    if box:
        path = folder / job_dirs.box_name(rank, pid)
        content = busy_box(rank, pid=pid, **options)
        content.word(layout.PHASE, layout.PHASE_INITIALISED)
        path.write_bytes(content.bytes())
        found.box = OpenBox(path)
        found.status = found.box.status()
    return found
