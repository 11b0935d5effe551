"""Makes the logs of ranks that start: in init_process_group, in new_group, for a mesh, for a key of the store."""

from __future__ import annotations

from collections.abc import Sequence

from builders import MS, SCRIPT, START, S
from judging import judge

from commlens.model.collective import (
    SETUP,
    STORE,
    UNMADE_STORE,
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    ProcessGroup,
    State,
    TensorSpec,
)
from commlens.model.ranklog import End, Observation, RankLog, ThreadStack
from commlens.model.verdict import Verdict

WORLD = 4
IDLE = Observation(End.RUNNING, window_s=6.0, stack_moved=False, cpu_s=0.0, proc_state="S")


def call(
    op: str,
    ranks: Sequence[int],
    line: int,
    *,
    number: int = 1,
    name: str = "",
    asked: str | None = None,
    inc: int = 0,
    members: Sequence[int] = (),
) -> Collective:
    names = {
        "init_process_group": "default_pg",
        "new_group": str(number),
        "init_device_mesh": "mesh",
    }
    group = ProcessGroup(
        name or names[op], tuple(ranks), "", "gloo", None, inc, members=tuple(members)
    )
    at = START + line * MS
    stack = (Frame(SCRIPT, line, "build"),)
    return Collective(
        0,
        Channel(group, SETUP),
        number,
        CollectiveArgs(op, op),
        State.COMPLETED,
        at,
        at,
        stack=stack,
        module=asked,
    )


def init(line: int = 5, **more: object) -> Collective:
    return call("init_process_group", range(WORLD), line, **more)  # type: ignore[arg-type]


def groups(*ranks: Sequence[int], line: int = 10) -> list[Collective]:
    return [call("new_group", members, line + i, number=i) for i, members in enumerate(ranks, 1)]


def rank(
    number: int,
    *calls: Collective,
    inside: bool = True,
    issued: str = "",
    at: int = 57,
    log: RankLog | None = None,
) -> RankLog:
    """A rank that made these calls and is inside the last one, or has left it; then it is in a
    collective, or at a line of its own.
    """
    log = log or RankLog(
        number,
        WORLD,
        "job-1",
        "n03",
        1000 + number,
        number,
        script=SCRIPT,
        captured_ns=START + 60 * S,
    )
    log.setups = list(calls)
    log.initialised = bool(calls) and (len(calls) > 1 or not inside)
    log.observation = IDLE
    frame = Frame(SCRIPT, at, "prepare")
    if issued:
        group = ProcessGroup("0", tuple(range(WORLD)), "default_pg", "gloo")
        frame = Frame(SCRIPT, at, "step")
        args = CollectiveArgs(issued, issued, (TensorSpec((4,), "float32"),))
        op = Collective(
            1,
            Channel(group, "cpu"),
            1,
            args,
            State.ISSUED,
            START + S,
            START + S,
            START + S,
            START + S,
            stack=(frame,),
        )
        op.issue_thread = op.wait_thread = log.pid
        log.collectives, log.issued = [op], 1
    elif calls and inside:
        calls[-1].state = State.ISSUED
        frame = calls[-1].stack[0]
    log.stacks = [ThreadStack(log.pid, "MainThread", (frame,), START + 59 * S, is_main=True)]
    return log


def verdict(*logs: RankLog) -> Verdict:
    return judge(list(logs))


def key(op: str, name: str, line: int, state: State = State.COMPLETED) -> Collective:
    group, at = ProcessGroup(name, tuple(range(WORLD)), "", ""), START + S
    return Collective(
        0,
        Channel(group, UNMADE_STORE if op.startswith("TCPStore") else STORE),
        1,
        CollectiveArgs(op, op),
        state,
        at,
        at,
        stack=(Frame(SCRIPT, line, "share"),),
    )


def in_store(number: int, name: str, *, op: str = "store.get") -> RankLog:
    log = rank(number, init(), inside=False, at=30)
    log.store_wait = key(op, name, 30, State.ISSUED)
    log.store_wait.issue_thread = log.pid
    return log


def wrote(log: RankLog, *names: str) -> RankLog:
    log.keys_written = [key("store.set", name, 20) for name in names]
    return log
