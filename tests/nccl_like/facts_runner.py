"""Runs a check of facts.py: each of its ranks is a fork of this process, on the emulation or on
real NCCL, under a time limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from nccl_like.one_gpu import one_gpu_for_all  # noqa: E402

Answer = tuple[bool, str]
# how long a kernel occupies the compute stream, so that collectives behind it stay in flight
OCCUPIED_S = 0.8
LIMIT_S = 40.0


@dataclass(frozen=True)
class Fact:
    """A claim and the function that checks it in each rank."""

    name: str
    claim: str
    check: Callable[[Here], Answer]
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    # judges when the ranks have ended, because they do not survive
    after: Callable[[Ended], Answer] | None = None
    only_emulated: bool = False  # nothing makes it happen on a GPU
    engines: tuple[str, ...] = ("nccl", "nccl2")  # of which it is claimed


@dataclass
class Ended:
    """What is left of a check's ranks."""

    statuses: list[int]
    outputs: list[str]
    answers: list[list[Any] | None]
    folder: Path

    def dump(self, rank: int) -> dict[str, Any] | None:
        path = self.folder / f"dump_{rank}"
        return _Plain(path.open("rb")).load() if path.exists() else None


class _Plain(pickle.Unpickler):
    """Reads data only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


class Here:
    """A rank on one of the backends."""

    def __init__(self, backend: str, rank: int, ranks: int) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.rank, self.ranks = torch, dist, rank, ranks
        self.is_real = backend == "nccl"
        self.engine = os.environ.get("NCCL_LIKE_ENGINE", "nccl")
        self.backend_name = backend
        if self.is_real:
            if torch.cuda.device_count() < ranks:
                os.environ.update(one_gpu_for_all(rank))
            torch.cuda.set_device(rank % torch.cuda.device_count())
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            import nccl_like

            nccl_like.register()
            self.device = torch.device("cpu")

    def init(self, timeout_s: float = 30.0, **options: Any) -> None:
        """The default group, with its communicator made and nothing in flight."""
        self.begin(timeout_s, **options)
        self.dist.all_reduce(self.tensor())
        self.synchronize()
        self.settle(self.group)

    def begin(self, timeout_s: float = 30.0, **options: Any) -> None:
        """The default group, without a communicator."""
        self.dist.init_process_group(
            self.backend_name, timeout=timedelta(seconds=timeout_s), **options
        )

    @property
    def group(self) -> Any:
        return self.dist.group.WORLD

    @property
    def backend(self) -> Any:
        return self.backend_of(self.group)

    def backend_of(self, group: Any) -> Any:
        return group._get_backend(self.device)

    def tensor(self, *sizes: int) -> Any:
        return self.torch.ones(sizes or (4,), device=self.device)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize() if self.is_real else self.torch.cpu.synchronize()

    def occupy(self, seconds: float = OCCUPIED_S) -> None:
        """A kernel on the compute stream, behind which later collectives stay."""
        if self.is_real:
            self.torch.cuda._sleep(int(seconds * 1.5e9))
        else:
            import nccl_like

            nccl_like.launch_kernel(seconds)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Any]:
        if self.is_real:
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph):
                yield graph
        else:
            import nccl_like

            with nccl_like.capture() as graph:
                yield graph

    def recorded(self, *, collectives: bool = True) -> dict[str, Any]:
        c10d = self.torch._C._distributed_c10d
        if self.engine == "nccl":
            return json.loads(c10d._dump_nccl_trace_json(includeCollectives=collectives))
        made = c10d._dump_fr_trace_json(includeCollectives=collectives, backend=self.engine)
        return json.loads(made)

    def entries(self) -> list[dict[str, Any]]:
        return self.recorded().get("entries", [])

    def status(self, group: Any = None) -> dict[str, int]:
        """Last enqueued, started and completed."""
        group = group or self.group
        all_of_them = self.recorded(collectives=False)["pg_status"]
        if self.engine == "nccl":
            of = all_of_them.get(str(self.backend_of(group).uid), {})
        else:  # numbered in the order of the hooks
            hooks = self.dist.distributed_c10d._world.pg_flight_recorder_hooks
            of = all_of_them.get(str(list(hooks).index(group)) if group in hooks else "", {})
        return {name.split("_")[1]: int(value) for name, value in of.items()}

    def completed(self, group: Any) -> int:
        """How many entries of a group are completed."""
        name = group.group_name
        return sum(
            entry["process_group"][0] == name and entry["state"] == "completed"
            for entry in self.entries()
        )

    def settle(self, group: Any) -> None:
        """Wait until the watchdog has seen all that is complete."""
        if self.engine == "nccl":
            until(lambda: self.status(group).get("completed") == self.status(group).get("enqueued"))
        else:
            until(lambda: all(entry["state"] == "completed" for entry in self.entries()))

    def send_to_self(self) -> list[Any]:
        dist, tensor, into = self.dist, self.tensor(), self.tensor()
        return dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, self.rank), dist.P2POp(dist.irecv, into, self.rank)]
        )


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    result = call()
    return time.monotonic() - began, result


# --- running them


def run(chosen: Fact, backend: str, engine: str) -> dict[str, Any]:
    """Run a check. Returns its row of the table."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        ended = _run_ranks(chosen, backend, engine, Path(scratch))
        try:
            holds, observed = _judge(chosen, ended)
        except Exception as error:
            holds, observed = False, f"{type(error).__name__}: {error}"
        if not holds:
            observed += "".join(
                f"\n--- rank {rank}\n{text[-2000:]}" for rank, text in enumerate(ended.outputs)
            )
    return {
        "name": chosen.name,
        "engine": engine,
        "claim": chosen.claim,
        "ranks": chosen.ranks,
        "holds": holds,
        "observed": observed,
        "seconds": round(time.monotonic() - began, 1),
    }


def _judge(chosen: Fact, ended: Ended) -> Answer:
    if chosen.after is not None:
        return chosen.after(ended)
    for rank, answer in enumerate(ended.answers):
        if answer is None:
            return False, f"rank {rank} ended with status {ended.statuses[rank]} and said nothing"
    wrong = [answer for answer in ended.answers if answer is not None and not answer[0]]
    shown = (wrong or ended.answers)[0]
    assert shown is not None
    return not wrong, str(shown[1])


def _run_ranks(chosen: Fact, backend: str, engine: str, folder: Path) -> Ended:
    ranks = chosen.ranks
    port_file = folder / "port"
    store = _fork(lambda: _serve_store(port_file), folder / "store.out", {})
    pids = []
    try:
        assert until(lambda: port_file.exists() and port_file.read_text() != "", 20), (
            "the store does not start"
        )
        for rank in range(ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port_file.read_text(),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCH_FR_DUMP_TEMP_FILE": str(folder / "dump_"),
                "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "dump_"),
                "TORCH_NCCL_TRACE_BUFFER_SIZE": "200",
                "NCCL_LIKE_ENGINE": engine,
                **chosen.environment,
            }
            answer = folder / f"answer{rank}"
            pids.append(
                _fork(
                    lambda rank=rank, answer=answer: _be_rank(chosen, backend, rank, ranks, answer),
                    folder / f"{rank}.out",
                    environment,
                )
            )
        statuses = _await(pids, LIMIT_S)
    finally:
        _await([store], 0)
    answers = [
        json.loads(path.read_text()) if path.exists() else None
        for path in (folder / f"answer{rank}" for rank in range(ranks))
    ]
    outputs = [(folder / f"{rank}.out").read_text(errors="replace") for rank in range(ranks)]
    return Ended(statuses, outputs, answers, folder)


def _fork(do: Callable[[], None], output: Path, environment: Mapping[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(environment)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        do()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


def _be_rank(chosen: Fact, backend: str, rank: int, ranks: int, answer: Path) -> None:
    written = answer.with_suffix(".new")
    written.write_text(json.dumps(chosen.check(Here(backend, rank, ranks))))
    written.replace(answer)
    time.sleep(0.2 if ranks > 1 else 0)  # the others may still ask this rank


def _serve_store(port_file: Path) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    written = port_file.with_suffix(".new")
    written.write_text(str(store.port))
    written.replace(port_file)
    signal.pause()


def _await(pids: list[int], seconds: float) -> list[int]:
    """End all at the limit, and a few seconds after one was aborted. Returns exit statuses, or
    minus a signal's number.
    """
    statuses: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
                    if statuses[pid] < 0:
                        end = min(end, time.monotonic() + 3)
        if time.monotonic() > end:
            for pid in pids:
                if pid not in statuses:
                    os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + 10
        time.sleep(0.01)
    return [statuses[pid] for pid in pids]


def prepare(backend: str) -> None:
    """Import what the forks need."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed

    if backend != "nccl":
        import nccl_like

        os.environ[nccl_like.LIBRARY] = str(nccl_like.build())
    torch.set_num_threads(1)
