"""Ranks as they are seen from outside: samples of stacks, made without processes."""

from __future__ import annotations

import os

from commlens.model.collective import Frame, FrameKind
from commlens.model.ranklog import End, Observation, RankLog, ThreadStack
from commlens.outside.calls import counters, find_call
from commlens.outside.sample import HostSamples, RankSample
from commlens.processes.pyspy import SeenFrame

LOGGER = "/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py"
FUNCTIONAL = "/env/lib/python3.11/site-packages/torch/distributed/_functional_collectives.py"
C10D = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
GROUP = "<torch._C._distributed_c10d.ProcessGroup at 0x7f>"


def frame(function: str, line: int, file: str = "/home/me/train.py", **values: object) -> SeenFrame:
    kind = FrameKind.TORCH if "/torch/" in file else FrameKind.USER
    addresses = {name: 7 if value == GROUP else 1 for name, value in values.items()}
    return SeenFrame(
        Frame(file, line, function, kind),
        {name: str(value) for name, value in values.items()},
        addresses,
    )


def call(
    op: str, line: int, *, step: int = 6, passed: str = "", **values: object
) -> list[SeenFrame]:
    """A rank in one of torch.distributed's functions, called at a line of the user's code."""
    # under Python 3.10, py-spy has no more of its name
    wrapper = frame("wrapper", 83, LOGGER, args=f"({passed})", kwargs="{}")
    return [
        frame(op, 3252, C10D, group=GROUP, **values),
        wrapper,
        frame("step", line),
        frame("main", 90, step=step),
    ]


def stay(function: str, line: int) -> list[SeenFrame]:
    return [frame(function, line), frame("main", 88, step=6)]


def sample(
    rank: int,
    frames: list[SeenFrame],
    *,
    moved: bool | None = False,
    world: int = 4,
    state: str = "S",
    cpu_s: float = 0.0,
) -> RankSample:
    seen = Observation(
        end=End.RUNNING,
        window_s=2.5,
        cpu_s=cpu_s,
        proc_state=state,
        stopped_fraction=float(state == "T"),
        running_fraction=0.0,
        stack_moved=moved,
        stacks=[ThreadStack(1, "MainThread", tuple(one.frame for one in frames), 1, True)],
    )
    log = RankLog(
        rank=rank,
        world_size=world,
        host="n1",
        pid=100 + rank,
        initialised=True,
        script="train.py",
        source="pid",
        captured_ns=1,
        observation=seen,
    )
    return RankSample(log, find_call(frames, os.getpid()), moved, counters(frames))


def seen_on(*frames: list[SeenFrame], **options: object) -> list[HostSamples]:
    """One host with a rank for each of these stacks."""
    samples = [sample(rank, each, world=len(frames), **options) for rank, each in enumerate(frames)]
    return [HostSamples("n1", samples, len(frames), list(range(len(frames))), window_s=2.5)]


def two_worlds(
    trainers: list[list[SeenFrame]],
    rollouts: list[list[SeenFrame]],
    linked: str = "t0-r0 t0-r1",
    **options: object,
) -> list[HostSamples]:
    """One host with the ranks of two worlds, and connections like those of a group's members
    between them.
    """
    hosts, pids = [], {}
    for name, first, stacks in (("trainer", 100, trainers), ("rollout", 200, rollouts)):
        samples = [
            sample(rank, each, world=len(stacks), **options) for rank, each in enumerate(stacks)
        ]
        for one in samples:
            one.log.pid, one.log.script = first + one.rank, f"rl.py {name}"
            pids[f"{name[0]}{one.rank}"] = one
        hosts.append(HostSamples("n1", samples, len(stacks), [], window_s=2.5, world=name))
    for link in linked.split():
        one, other = (pids[each] for each in link.split("-"))
        one.linked.append(other.log.pid)
        other.linked.append(one.log.pid)
    return hosts


def synced(line: int) -> list[SeenFrame]:
    """A rank in a collective of a group that a variable holds."""
    seen = call("all_reduce", line, passed=GROUP)
    seen.insert(3, frame("sync", line, weights=GROUP))
    return seen
