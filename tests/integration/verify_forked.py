"""Runs jobs of real gloo ranks under strict verification: ``python verify_forked.py OUT ENGINE
all_reduce_shape:2 all_reduce_shape:4 ...``.

The engine is ``python``, ``native``, or ``mixed``, which alternates them by rank.

One process imports torch; every rank of every job is forked from it. Each rank writes its outcome
to ``OUT/<job>/<rank>.json`` and prints to ``OUT/<job>/<rank>.out``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import says_whether_a_call_waits

GROUP_TIMEOUT_S = 7
JOB_TIMEOUT_S = 60.0
AT_ONCE = 3  # jobs; most of them wait most of the time
MIXED = ("python", "native")  # by rank, in turns


@dataclass
class Job:
    """Ranks that run one function."""

    name: str
    size: int
    body: Callable[[int, int, Path], None]  # rank, world size, the rank's result file
    settings: dict[str, Any] = field(default_factory=dict)
    verified: bool = True
    group_timeout_s: float = GROUP_TIMEOUT_S
    timeout_s: float = JOB_TIMEOUT_S
    nodes: int = 1  # rank r is on node r % nodes: each node has a folder of black boxes of its own


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a rank's outcome, completely or not at all."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(record))
    draft.rename(path)


def init(folder: Path, rank: int, size: int, timeout_s: float, name: str = "store") -> None:
    """Create the default group, with a file as its store."""
    store = dist.FileStore(str(folder / name), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )


def engine_here() -> str:
    """Which one records in this process."""
    from commlens.capture import session

    session = session.recording()
    recorder = session.recorder if session is not None else None
    return "" if recorder is None else "python" if recorder.make_exchange is None else "native"


def sequence_numbers(groups: Sequence[Any]) -> list[int]:
    """How many operations the backend of each group was given: the witness that a refused one never
    reached it.
    """
    return [
        group._get_backend(torch.device("cpu"))._get_sequence_number_for_group() for group in groups
    ]


class Jobs:
    """Runs them, a few at once."""

    def __init__(self, out: Path) -> None:
        self.out = out
        # job to its start and pids by rank
        self._running: dict[str, tuple[Job, float, dict[int, int]]] = {}
        self._ended: dict[int, int] = {}

    def run(self, jobs: Sequence[Job], at_once: int = AT_ONCE) -> None:
        """All of them; one that takes too long is ended by force, and says so in ``hung``."""
        waiting = list(jobs)
        while waiting or self._running:
            while waiting and len(self._running) < at_once:
                self._start(waiting.pop(0))
            time.sleep(0.005)
            self._reap()

    def _start(self, job: Job) -> None:
        folder = self.out / job.name
        folder.mkdir(parents=True)
        pids = {rank: self._fork(job, rank, folder) for rank in range(job.size)}
        self._running[job.name] = (job, time.monotonic(), pids)

    def _fork(self, job: Job, rank: int, folder: Path) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            descriptor = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            local, per_node = rank // job.nodes, job.size // job.nodes
            environment = {
                "RANK": rank,
                "WORLD_SIZE": job.size,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": per_node,
            }
            os.environ.update({name: str(value) for name, value in environment.items()})
            warnings.simplefilter("ignore")
            if job.verified:
                import commlens

                box_dir = folder if job.nodes == 1 else folder / f"node{rank % job.nodes}"
                settings = {
                    "watched": True,
                    "box_dir": str(box_dir),
                    "job": "job",
                    "debug": True,
                    **job.settings,
                }
                if job.nodes > 1:
                    wait_longer_for_ranks_of_other_nodes()
                if settings.get("engine") == "mixed":
                    settings["engine"] = MIXED[rank % 2]
                commlens.enable(**settings)
            job.body(rank, job.size, folder / f"{rank}.json")
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            if job.verified:
                from commlens.capture import session

                session.recording().at_exit()  # as the interpreter would
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            self._ended[pid] = status
        for name, (job, began, pids) in list(self._running.items()):
            folder = self.out / name
            left = {rank: pid for rank, pid in pids.items() if pid not in self._ended}
            stopped = [rank for rank, pid in left.items() if _state(pid) == "T"]
            # a rank that stopped itself, and its peers have ended
            if left and len(stopped) == len(left):
                for pid in left.values():
                    os.kill(pid, signal.SIGKILL)
                continue
            hung = bool(left) and time.monotonic() - began > job.timeout_s
            if hung:
                for pid in left.values():
                    os.kill(pid, signal.SIGKILL)
                    self._ended[pid] = os.waitpid(pid, 0)[1]
            if hung or not left:
                codes = {
                    rank: os.waitstatus_to_exitcode(self._ended.pop(pid))
                    for rank, pid in pids.items()
                }
                write(
                    folder / "job.json",
                    {"hung": sorted(left), "codes": codes, "seconds": time.monotonic() - began},
                )
                del self._running[name]


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def prepare() -> None:
    """Do once, before the forks, the work that every rank would repeat."""
    import commlens.capture.watchdog
    import commlens.tap.tap
    import commlens.tap.torch_patches
    import commlens.verification.verifier  # noqa: F401

    torch.set_num_threads(1)
    if torch.__version__.startswith("2.6."):
        _destroy_later()
    gc.collect()
    gc.freeze()


def wait_longer_for_ranks_of_other_nodes() -> None:
    """Prolong the short wait before a broadcast: a fault is prevented if all ranks arrive within it,
    and a rank on another node may have no core here, which its peers cannot know.
    """
    from commlens.verification import channels

    channels.ROOTED_PATIENCE_NS = 4_000_000_000  # type: ignore[misc]


def _destroy_later() -> None:
    """Delay destruction on torch 2.6, which joins gloo's threads with the GIL held: a deadlock if
    one of them still waits for it.
    """
    original = dist.destroy_process_group

    def destroy_process_group(*group: Any) -> None:
        time.sleep(0.2)
        original(*group)

    dist.destroy_process_group = destroy_process_group


# --- the cases of verify_cases.py


def run_case(rank: int, size: int, result: Path, name: str) -> None:
    """Run one rank of one case."""
    import verify_cases

    from commlens.errors import DistributedOperationException

    case = verify_cases.CASES[name]
    init(result.parent, rank, size, GROUP_TIMEOUT_S)
    context = verify_cases.Context(rank, size)
    context.groups = [dist.new_group(list(range(size))) for _ in range(2)]
    groups = [dist.group.WORLD, *context.groups]
    dist.all_reduce(torch.ones(3))
    before: list[int] = []

    def note() -> None:
        before[:] = sequence_numbers(groups)

    note()
    context.before_the_fault = note
    record: dict[str, Any] = {
        "raised": None,
        "kind": "",
        "text": "",
        "issued": 0,
        "usable": None,
        "engine": engine_here(),
    }
    began = time.monotonic()
    try:
        case.body(context)
        record["issued"] = sum(sequence_numbers(groups)) - sum(before)
        dist.destroy_process_group()
    except DistributedOperationException as error:
        record.update(raised="DistributedOperationException", kind=error.kind, text=str(error))
    except Exception as error:
        record.update(raised=type(error).__name__, text=str(error))
    record["seconds"] = time.monotonic() - began
    if dist.is_initialized():
        record["issued"] = sum(sequence_numbers(groups)) - sum(before)
    write(result, record)
    if case.usable and dist.is_initialized():
        write(result, {**record, "usable": are_usable(groups, rank, size)})
        dist.destroy_process_group()
    if record["raised"]:
        sys.exit(1)


def are_usable(groups: Sequence[Any], rank: int, size: int) -> bool:
    """Return whether groups of all ranks still compute correctly."""
    usable = True
    for group in (*groups, *reversed(groups)):
        tensor = torch.full((2,), float(rank))
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, 0, group=group)
        usable = usable and tensor.tolist() == [sum(range(size))] * 2
    return usable


CAUGHT = (
    "order_swap_groups",
    "all_reduce_shape",
    "order_swap_groups",
    "all_reduce_shape",
    "broadcast_root",
    "gather_or_scatter",
)


def run_caught(rank: int, size: int, result: Path) -> None:
    """Run one rank of a program that catches one refusal after the other and continues, sooner on
    some ranks than on others.
    """
    import verify_cases

    from commlens.errors import DistributedOperationException

    init(result.parent, rank, size, GROUP_TIMEOUT_S)
    context = verify_cases.Context(rank, size)
    context.groups = [dist.new_group(list(range(size))) for _ in range(2)]
    seen: list[Any] = []
    for turn, name in enumerate(CAUGHT):
        try:
            verify_cases.CASES[name].body(context)
        except DistributedOperationException as error:
            seen.append(error.kind)
            if (rank + turn) % size == 0:
                time.sleep(0.05)
        write(result, {"seen": seen})
        seen.append(are_usable([dist.group.WORLD, *context.groups], rank, size))
        write(result, {"seen": seen})
    dist.destroy_process_group()


ROUNDS = 20
REPEATED_FAULTS = {("async", ""): "dead"}
"""(op of the other ranks, op of rank 1; "" if it ends) -> the kind of the refusal. All ops have
been issued before.
"""
if says_whether_a_call_waits():
    swapped = (("all_reduce", "broadcast"), ("gather", "scatter"), ("all_to_all", "reduce_scatter"))
    REPEATED_FAULTS = {**dict.fromkeys(swapped, "mismatch/op"), **REPEATED_FAULTS}


def run_repeated(rank: int, size: int, result: Path) -> None:
    """Run one rank of a program that repeats some ops, then misuses the same ops.

    It counts how often each kind of op reaches Python's verifier in the second half of the correct
    part.
    """
    from torch.distributed import _functional_collectives as functional

    from commlens.errors import DistributedOperationException
    from commlens.verification.verifier import Verifier

    init(result.parent, rank, size, GROUP_TIMEOUT_S)
    pair = dist.new_group([0, 1])
    x, wide = torch.ones(4), torch.ones(4 * size)
    parts = list(torch.ones(4 * size).chunk(size)) if rank == 0 else None
    ops: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "async": lambda: dist.all_reduce(x, async_op=True).wait(),
        "all_gather": lambda: dist.all_gather_into_tensor(wide, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, wide),
        "all_to_all": lambda: dist.all_to_all_single(wide, wide.clone()),
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(x, 0),
        "gather": lambda: dist.gather(x, parts),
        "scatter": lambda: dist.scatter(x, parts),
        "functional": lambda: functional.wait_tensor(
            functional.all_reduce(x, "sum", dist.group.WORLD)
        ),
        "pair": lambda: dist.all_reduce(x, group=pair) if rank < 2 else None,
        "message": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None,
    }
    entered, continued, seen, now, counts = dict.fromkeys(ops, 0), 0, [], "", False

    def counted(name: str) -> None:
        original = getattr(Verifier, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal continued
            entered[now] += counts
            continued += name == "before_planned_wait" or (
                name == "before_issue" and args[0].announced is not None
            )
            return original(self, *args, **kwargs)

        setattr(Verifier, name, method)

    for name in ("before_issue", "before_wait", "before_planned_wait"):
        counted(name)
    each = [name for name in ops for _ in range(ROUNDS)]
    again = [name for name in ops for _ in range(2)]
    schedule = [(name, name) for name in each + each]
    for fault in REPEATED_FAULTS:
        schedule += [*((name, name) for name in again), fault]
    # one line issues all of them: the call site is part of a plan's key
    for at, (usual, odd) in enumerate(schedule):
        now, counts = odd if rank == 1 else usual, len(each) <= at < 2 * len(each)
        try:
            if now:
                ops[now]()
            else:
                # gloo may drop the data of a process that ends, which a slower rank has yet to
                # receive
                time.sleep(1.0)
        except DistributedOperationException as error:
            seen.append(error.kind)
    write(
        result, {"engine": engine_here(), "entered": entered, "continued": continued, "seen": seen}
    )


def main() -> None:
    import verify_cases

    out, engine = Path(sys.argv[1]), sys.argv[2]
    jobs = []
    for which in sys.argv[3:]:
        # all_reduce_shape:4, or all_reduce_shape:4:2 on two nodes
        name, size, *more = which.split(":")
        nodes = int(more[0]) if more else 1
        if name == "caught":
            jobs.append(
                Job(
                    which,
                    int(size),
                    run_caught,
                    {"engine": engine, "verify_timeout": 4.0},
                    nodes=nodes,
                )
            )
            continue
        if name == "repeated":
            jobs.append(
                Job(
                    which,
                    int(size),
                    run_repeated,
                    {"engine": engine, "verify_timeout": 4.0},
                    timeout_s=60.0,
                    nodes=nodes,
                )
            )
            continue
        case = verify_cases.CASES[name]
        body = lambda rank, world_size, result, name=name: run_case(rank, world_size, result, name)  # noqa: E731
        jobs.append(
            Job(
                which,
                int(size),
                body,
                {"engine": engine, "verify_timeout": case.timeout_s},
                nodes=nodes,
            )
        )
    prepare()
    Jobs(out).run(jobs)


if __name__ == "__main__":
    main()
