"""One rank of gpu_check.py, in a process of its own: each function is one check, and returns what
it saw.

    python benchmarks/_gpu_rank.py CHECK SETTINGS

SETTINGS is JSON, such as ``{"way": "python", "device": "cuda", "backend": "nccl", "folder":
"/tmp/x", "quick": false}``.

The last line of its output is the result as JSON. With ``"device": "cpu"``, every line of this file
runs except CUDA's own calls.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Finds = dict[str, Any]
LEARNS_S = 2.6
"""The recorder asks torch's about once a second; after this time it has asked twice."""


class Rank:
    """A process group of one rank, recorded or bare, and a device."""

    def __init__(self, given: Finds) -> None:
        self.way: str = given["way"]  # "bare", "python" or "native"
        self.on_gpu = given["device"] == "cuda"
        self.quick: bool = given["quick"]
        self.folder = Path(given["folder"])
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="0",
        )
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.backend = torch, dist, given["backend"]
        self.session: Any = None
        self._clock = 0.0
        if self.way != "bare":
            from commlens import config
            from commlens.capture import session
            from commlens.launch import recording

            folder = str(self.folder)
            settings = {
                "engine": self.way,
                "watched": True,
                "stall_timeout": 600.0,
                **given.get("settings", {}),
            }
            recording.start(
                config.Settings(box_dir=folder, dump_dir=folder, job=f"gpu-{self.way}", **settings)
            )
            self.session = session
        if self.on_gpu:
            torch.cuda.set_device(0)
        dist.init_process_group(
            self.backend,
            store=dist.FileStore(str(self.folder / f"store-{os.getpid()}"), 1),
            rank=0,
            world_size=1,
        )
        if self.session is not None:
            self.recorder = self.session.recording().recorder

    @property
    def engine(self) -> str:
        """The engine that really records."""
        return type(self.recorder).__name__ if self.session is not None else "none"

    def tensor(self, numel: int, value: float = 1.0) -> Any:
        """Return a tensor on the device."""
        return self.torch.full((numel,), value, device="cuda" if self.on_gpu else "cpu")

    def busy(self, seconds: float) -> None:
        """Enqueue a kernel that keeps the device busy for that time. On a CPU, only pretend to."""
        if not self.on_gpu:
            return
        if not self._clock:
            self.torch.cuda.synchronize()
            began = time.perf_counter()
            self.torch.cuda._sleep(200_000_000)
            self.torch.cuda.synchronize()
            self._clock = 200_000_000 / (time.perf_counter() - began)
        self.torch.cuda._sleep(int(self._clock * seconds))

    def sync(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def pause(self, seconds: float) -> None:
        """Sleep; hardly at all in a dry run."""
        time.sleep(seconds if self.on_gpu else min(seconds, 0.1))

    def warm(self, pause_s: float = 0.0) -> None:
        """Make the communicator, and give the recorder time to learn that the first collectives are
        complete.
        """
        self.dist.all_reduce(self.tensor(4))
        self.gather(4)()
        self.busy(0.01)
        self.sync()
        self.pause(pause_s)

    def gather(self, numel: int) -> Callable[[], Any]:
        """Return an all_gather out of place. NCCL launches nothing for one in place on one rank."""
        source, target = self.tensor(numel), self.tensor(numel, 0.0)
        return lambda: self.dist.all_gather_into_tensor(target, source)

    def log(self) -> Any:
        """Read the own black box as the watcher does."""
        from commlens.blackbox.reader import read_box

        return read_box(self.recorder.writer.path)

    def states(self, after: int) -> list[Finds]:
        """Return what the box says about the collectives after an index."""
        return [
            {
                "op": one.op,
                "state": one.state.value,
                "how": one.learned_how.value,
                "duration_us": (one.duration_ns or 0) / 1000 or None,
            }
            for one in self.log().collectives
            if one.index > after
        ]

    def end(self) -> None:
        """End as a program does."""
        self.sync()
        self.dist.destroy_process_group()


def engine(rank: Rank) -> Finds:
    """Record one collective, and say with which engine."""
    rank.warm()
    return {
        "engine": rank.engine,
        "recorded": rank.recorder.writer.last_index,
        "lost": rank.recorder.lost,
    }


def states(rank: Rank) -> Finds:
    """Enqueue collectives behind a kernel of three seconds, and read their records before, and
    after it has ended.
    """
    rank.warm(1.3)
    before = rank.recorder.writer.last_index
    gather, reduced = rank.gather(1024), rank.tensor(1024)
    rank.busy(3.0)
    began = time.perf_counter()
    gather()
    rank.dist.all_reduce(reduced)
    rank.dist.broadcast(reduced, 0)
    work = rank.dist.all_reduce(reduced, async_op=True)
    returned_s = time.perf_counter() - began
    rank.pause(max(0.1, 2.2 - returned_s))
    during = rank.states(before)
    work.wait()
    waited_s = time.perf_counter() - began
    if waited_s < 2.8 and rank.on_gpu:  # wait() returns at once, too, before the kernel has ended
        during += rank.states(before)
    rank.sync()
    done_s = time.perf_counter() - began
    rank.pause(LEARNS_S)
    return {
        "engine": rank.engine,
        "returned_s": returned_s,
        "waited_s": waited_s,
        "done_s": done_s,
        "during": during,
        "after": rank.states(before),
        "lost": rank.recorder.lost,
        "torch": what_torch_says(rank),
    }


def what_torch_says(rank: Rank) -> Finds:
    """Return the status in torch's recorder, and the ids under which it could be filed."""
    from commlens.tap import backends, recorder_dumps

    device = "cuda" if rank.on_gpu else "cpu"
    backend = rank.dist.group.WORLD._get_backend(rank.torch.device(device))
    return {
        "status": [
            content.get("pg_status", {})
            for content in recorder_dumps.read_recorders(entries=False, backends=[rank.backend])
        ],
        "behaviour": backends.backend_of(rank.dist.group.WORLD, device)._asdict(),
        "id": str(rank.dist.group.WORLD._id()) if hasattr(rank.dist.group.WORLD, "_id") else None,
        "sequence_number": backend._get_sequence_number_for_group(),
        "dumps": [dump.name for dump in recorder_dumps.dumps()],
        "completion": backends.completion_by_class(),
    }


def cpu_share(rank: Rank) -> Finds:
    """Measure how much processor time the main thread takes while it waits for a kernel of 1.5 s in
    each of three ways.
    """
    rank.warm()
    tensor, finds = rank.tensor(16), {}
    ways: dict[str, Callable[[], Any]] = {
        ".item()": lambda: tensor[0].item(),
        "synchronize": rank.sync,
        "barrier": rank.dist.barrier,
    }
    for name, wait in ways.items():
        rank.busy(1.5)
        rank.dist.all_reduce(tensor)
        wall, cpu = time.perf_counter(), time.thread_time()
        wait()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        finds[name] = {"wall_s": wall, "cpu_share": cpu / wall if wall else 0.0}
        rank.sync()
    return finds


def graph(rank: Rank) -> Finds:
    """Capture three all_reduces in a CUDA graph, in the mode in which any query of an event ends
    the capture, and replay it.
    """
    torch, dist = rank.torch, rank.dist
    rank.warm()
    tensor = rank.tensor(1024)
    index = rank.recorder.writer.last_index if rank.session is not None else 0
    finds: Finds = {"error": "", "captured_after": index}
    if rank.on_gpu:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                dist.all_reduce(tensor)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(captured, capture_error_mode="global"):
                tensor.mul_(2)
                for _ in range(3):
                    dist.all_reduce(tensor)
                # a recorder that asks about works from another thread would do so now, and end the
                # capture
                time.sleep(2.2)
            tensor.fill_(1)
            finds["recorded_by_capture"] = (
                rank.recorder.writer.last_index - index if rank.session is not None else 0
            )
            for _ in range(5):
                captured.replay()
            torch.cuda.synchronize()
            if tensor[0].item() != 32.0:
                finds["error"] = f"the result is {tensor[0].item()}, not 32"
        except Exception as error:
            finds["error"] = f"{type(error).__name__}: {error}"
    dist.all_reduce(tensor)  # after a graph, all goes on
    rank.sync()
    rank.pause(LEARNS_S)
    if rank.session is not None:
        finds["recorded"] = rank.recorder.writer.last_index - index
        finds["after"] = rank.states(index)
    return finds


def ring(rank: Rank) -> Finds:
    """Enqueue 3,000 collectives behind a kernel of eight seconds: more than the ring buffer keeps."""
    rank.warm(1.3)
    before = rank.recorder.writer.last_index
    tensor = rank.tensor(4)
    rank.busy(8.0)
    began = time.perf_counter()
    for _ in range(3000 if rank.on_gpu or not rank.quick else 2100):
        rank.dist.all_reduce(tensor)
    issued_s = time.perf_counter() - began
    rank.pause(max(0.5, min(3.0, 6.5 - issued_s)))
    log = rank.log()
    ours = [one for one in log.collectives if one.index > before]
    finds: Finds = {
        "issued_s": issued_s,
        "kept": len(ours),
        "oldest_kept": ours[0].index - before if ours else None,
        "states": dict(Counter(f"{one.state.value}/{one.learned_how.value}" for one in ours)),
        "first_in_flight": next((one.index - before for one in ours if one.in_flight), None),
        "problems": log.problems[:3],
        "still_busy_after_s": None,
    }
    rank.sync()
    finds["still_busy_after_s"] = time.perf_counter() - began
    rank.pause(LEARNS_S)
    finds["states_after"] = dict(
        Counter(f"{one['state']}/{one['how']}" for one in rank.states(before))
    )
    finds["lost"] = rank.recorder.lost
    return finds


def torch_dump(rank: Rank) -> Finds:
    """Save the dump of torch's recorder, to be diagnosed from outside."""
    rank.warm()
    rank.dist.all_reduce(rank.tensor(4))
    rank.sync()
    c10d = rank.torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    path = rank.folder / "dump" / "nccl_trace_rank_0"
    path.parent.mkdir()
    path.write_bytes(dump() if dump is not None else b"")
    return {"dump": str(path.parent), "bytes": path.stat().st_size}


def cost(rank: Rank) -> Finds:
    """Issue a block of collectives for each line on standard input, and print how long each call
    took.
    """
    ops = 60 if rank.quick else 300
    rank.warm()
    tensor = rank.tensor(1024)
    calls = {
        "all_gather 4 kB": rank.gather(1024),
        "all_reduce 4 kB": lambda: rank.dist.all_reduce(tensor),
    }
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        block = {}
        for name, call in calls.items():
            taken = []
            for _ in range(ops):
                began = time.perf_counter_ns()
                call()
                taken.append((time.perf_counter_ns() - began) / 1000)
            began = time.perf_counter_ns()
            rank.sync()
            cuts = statistics.quantiles(taken, n=100)
            block[name] = {
                "p50_us": cuts[49],
                "p99_us": cuts[98],
                "then_sync_us": (time.perf_counter_ns() - began) / 1000,
            }
        print(json.dumps(block), flush=True)
    return {"engine": rank.engine, "lost": rank.recorder.lost if rank.session is not None else 0}


def fork(rank: Rank) -> Finds:
    """Load batches in forked processes while collectives are recorded, and fork a child that leaves
    as a program does.
    """
    torch = rank.torch
    rank.warm()
    loader = torch.utils.data.DataLoader(
        torch.arange(32.0), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    seen = 0
    for batch in loader:
        tensor = batch.to("cuda" if rank.on_gpu else "cpu")
        rank.dist.all_reduce(tensor)
        seen += len(batch)
    rank.sync()
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()  # these must leave the parent's box alone
        # as multiprocessing's children do: gloo's group cannot be destroyed in one that lacks its
        # threads (torch 2.13)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    rank.dist.all_reduce(rank.tensor(4))
    rank.sync()
    return {
        "seen": seen,
        "child": status,
        "is_recording": rank.session.recording().is_recording,
        "lost": rank.recorder.lost,
    }


def driver(given: Finds) -> Finds:
    """Switch recording on, fork before anything has used CUDA, and use CUDA in the child."""
    folder = Path(given["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    import torch

    from commlens import config
    from commlens.launch import recording

    recording.start(
        config.Settings(
            box_dir=str(folder), dump_dir=str(folder), job="gpu-driver", watched=True, debug=True
        )
    )
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1
    )
    dist.all_reduce(torch.ones(2))  # a barrier would start the driver: torch does, also bare
    initialised = torch.cuda.is_initialized()
    devices = open_devices(os.getpid())
    out = folder / "child"
    child = os.fork()
    if child == 0:
        said = ""
        try:
            if given["device"] == "cuda":
                said = str(torch.ones(2, device="cuda").sum().item())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        out.write_text(said, encoding="utf-8")
        os._exit(0)
    os.waitpid(child, 0)
    dist.destroy_process_group()
    return {
        "initialised": initialised,
        "devices": devices,
        "child": out.read_text(encoding="utf-8"),
    }


def open_devices(pid: int) -> list[str]:
    """Return the devices of GPUs that a process holds open."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                found.add(target)
    return sorted(found)


def watcher(rank: Rank) -> Finds:
    """Look which processes use the GPU while a watcher runs beside this rank."""
    rank.warm()
    pid = rank.session.recording().watcher_pid
    rank.pause(2.0)
    folder = Path(f"/proc/{pid}")
    finds: Finds = {
        "watcher": pid,
        "is_running": folder.exists(),
        "devices": open_devices(pid),
        "own_devices": open_devices(os.getpid()),
    }
    with contextlib.suppress(OSError):
        mapped = (folder / "maps").read_text()
        finds["libraries"] = [
            name for name in ("libcuda.so", "libnccl", "libcudart") if name in mapped
        ]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(
            [
                "nvidia-smi",
                "--query-compute-apps=pid,process_name,used_memory",
                "--format=csv,noheader",
            ],
            capture_output=True,
            text=True,
            timeout=15,
        )
        finds["nvidia_smi"] = (
            asked.stdout.strip().splitlines()
            if asked.returncode == 0
            else asked.stderr.strip()[:200]
        )
    finds["pid"] = os.getpid()
    return finds


CHECKS: dict[str, Callable[[Rank], Finds]] = {
    check.__name__: check
    for check in (engine, states, cpu_share, graph, ring, torch_dump, cost, fork, watcher)
}


def main() -> None:
    """Run one check."""
    name, given = sys.argv[1], json.loads(sys.argv[2])
    if name == "driver":
        finds = driver(given)
    else:
        rank = Rank(given)
        finds = CHECKS[name](rank)
        rank.end()
    print(json.dumps(finds), flush=True)


if __name__ == "__main__":
    main()
