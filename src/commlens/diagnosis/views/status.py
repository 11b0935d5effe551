"""What every rank of a job is doing right now, as rows; ranks that do the same share a row: "0-1,3
sleeping, in all_reduce #41, for 12 s, waits for 2".
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from commlens.diagnosis.examine import ExaminedJob, examine_logs
from commlens.diagnosis.fold.alike import NONE_ALIKE, AlikeRanks, is_small
from commlens.diagnosis.index.activity import activity_of, quiet_ns
from commlens.diagnosis.index.process_exit import process_exit_of
from commlens.model.collective import Collective, State
from commlens.model.grouping import grouped
from commlens.model.ranklog import UNREMARKABLE, RankLog
from commlens.model.verdict import NOTHING_FOUND, Verdict
from commlens.speed.rhythm import first_moments
from commlens.text import (
    count,
    duration,
    frame_phrase,
    group_label,
    members_text,
    naming_worlds,
    op_phrase,
    process_phrase,
)

_STEPS_TIMED: Final = 20
Order = Literal["rank", "for", "state"]


class StatusRow(msgspec.Struct):
    """The status of one rank, or of several that do the same."""

    ranks: list[int]
    pid: int = 0  # of a single rank
    host: str = ""
    process: str = ""  # "sleeping", "stopped", "killed by SIGKILL"
    activity: str = ""  # "in-collective", "data-loading", ...
    collective: str = ""  # "in all_reduce #41 of the default group [0-3]"
    short_collective: str = ""  # "in all_reduce #41"
    for_ns: int = 0  # how long it is in flight, or has been over; of several ranks, the longest
    waits_for: list[int] = []
    step: int = 0
    at: str = ""  # the user's line and function, or the exception
    short_at: str = ""  # the line, or the exception's class

    @property
    def age(self) -> str:
        """The time in words; empty if it is unknown."""
        return duration(self.for_ns) if self.for_ns else ""


class JobStatus(msgspec.Struct):
    """The status of one job."""

    name: str
    heading: str  # "train-20261121: 4 ranks on n03, train.py --lr 0.1"
    verdict: Verdict
    rows: list[StatusRow]  # one for each rank
    steps: str = ""  # "step 812, 0.21 s per step"
    logs: list[RankLog] = []
    other_nodes: list[str] = []  # sentences

    @property
    def processes(self) -> frozenset[tuple[str, int]]:
        """The hosts and pids of the ranks with records."""
        return frozenset((log.host, log.pid) for log in self.logs)

    @property
    def needs_attention(self) -> bool:
        """Whether something is wrong, or a rank waits or does not run."""
        return self.verdict.kind not in NOTHING_FOUND or any(
            log.observation.state not in (*UNREMARKABLE, "finished") for log in self.logs
        )

    @property
    def answer(self) -> str:
        """The answer in one line."""
        if not self.needs_attention:
            moves = f"; {self.steps}" if self.steps else ""
            return f"{self.verdict.summary}{moves}"
        return self.verdict.summary


def status_of(
    name: str,
    logs: Sequence[RankLog],
    other_nodes: Sequence[str] = (),
    *,
    alike: AlikeRanks = NONE_ALIKE,
    hosts: Mapping[int, str] = MappingProxyType({}),
) -> JobStatus:
    """Return the status of a job.

    Args:
        name: of the job.
        logs: of its ranks, joined with observations of their processes.
        other_nodes: sentences about the nodes whose ranks are not among these.
        alike: ranks without a log that are in the state of ranks with one.
        hosts: of these, by rank.
    """
    examined = examine_logs(logs, alike=alike)
    waits = _waits(examined)
    with naming_worlds(examined.verdict.worlds):
        rows = [_row(log, waits.get(log.rank, [])) for log in logs]
    if alike.others:
        rows += _rows_alike(rows, logs, alike, hosts)
    return JobStatus(
        name,
        heading(name, logs, {rank: hosts.get(rank, "") for rank in alike.others}),
        examined.verdict,
        rows,
        _steps(logs),
        list(logs),
        list(other_nodes),
    )


def heading(
    name: str, logs: Sequence[RankLog], alike: Mapping[int, str] = MappingProxyType({})
) -> str:
    """Return the line above a job's table: ``"train-20261121: 4 ranks on n03, train.py --lr
    0.1"``.

    Args:
        name: of the job.
        logs: of its ranks.
        alike: the hosts of more ranks, which are known to be in the state of some of these.
    """
    world = max((log.world_size for log in logs), default=0)
    hosts = sorted({*(log.host for log in logs), *alike.values()} - {""})
    script = next((log.script for log in logs if log.script), "")
    known = len(logs) + len(alike)
    ranks = f"{known} of {world} ranks" if world > known else count(known, "rank")
    where = hosts[0] if len(hosts) == 1 else count(len(hosts), "host")
    return f"{name}: {ranks} on {where}" + (f", {script}" if script else "")


def _rows_alike(
    rows: Sequence[StatusRow],
    logs: Sequence[RankLog],
    alike: AlikeRanks,
    hosts: Mapping[int, str],
) -> list[StatusRow]:
    """Return the rows of ranks without a log: those of the ranks in the same state. Where these are
    in a small group, the others are in other groups of its kind, so their rows name neither its
    members nor the ranks that they wait for.
    """
    by_rank = {row.ranks[0]: (row, log) for row, log in zip(rows, logs, strict=True)}
    found: list[StatusRow] = []
    for each in alike.classes:
        known = [by_rank[rank] for rank in sorted(each.examined) if rank in by_rank]
        if not known:
            continue
        row, log = known[0]
        current = log.current_collective
        if current is not None and is_small(current.channel.group, log.world_size):
            row = msgspec.structs.replace(row, collective=row.short_collective, waits_for=[])
        found += [
            msgspec.structs.replace(row, ranks=[rank], pid=0, host=hosts.get(rank, ""))
            for rank in sorted(each.others)
        ]
    return found


def add_hosts(
    job: JobStatus,
    rows: Sequence[StatusRow],
    headings: Sequence[str],
    lines: Sequence[Sequence[str]],
) -> tuple[list[str], list[list[str]]]:
    """Return a table's headings and lines, with each row's host after its ranks if the job runs on
    several hosts.
    """
    if len({row.host for row in job.rows}) < 2:
        return list(headings), [list(line) for line in lines]
    return [headings[0], "host", *headings[1:]], [
        [line[0], row.host, *line[1:]] for line, row in zip(lines, rows, strict=True)
    ]


def fold(rows: Sequence[StatusRow]) -> list[StatusRow]:
    """Join the rows of ranks that do the same."""
    found = grouped(
        ((row.process, row.activity, row.collective, tuple(row.waits_for), row.step, row.at), row)
        for row in rows
    )
    folded = []
    for same in found.values():
        hosts = {row.host for row in same}
        folded.append(
            msgspec.structs.replace(
                same[0],
                ranks=sorted(rank for row in same for rank in row.ranks),
                pid=same[0].pid if len(same) == 1 else 0,
                host=same[0].host if len(hosts) == 1 else count(len(hosts), "host"),
                for_ns=max(row.for_ns for row in same),
            )
        )
    return folded


def arrange(rows: Sequence[StatusRow], order: Order) -> list[StatusRow]:
    """Sort rows: by rank, by time (the longest first), or by state (ranks in a collective last, and
    of the others, rows of few ranks first).
    """
    if order == "for":
        return sorted(rows, key=lambda row: (-row.for_ns, row.ranks))
    if order == "state":
        return sorted(
            rows, key=lambda row: (row.activity == "in-collective", len(row.ranks), row.ranks)
        )
    return sorted(rows, key=lambda row: row.ranks)


def cells(row: StatusRow, *, narrow: bool = False) -> tuple[str, ...]:
    """Return a row as text: ranks, process, step, collective, time, the ranks waited for, the line.

    Args:
        row: the row.
        narrow: for 80 columns: no step, no members of the group, no function.
    """
    waits = members_text(row.waits_for)
    if len(waits) > _RANKS_MAX:
        waits = f"{len(row.waits_for)} ranks"
    says_nothing = row.activity in ("", "in-collective", "unknown", "user-code")
    process = (
        row.process
        if says_nothing
        else row.activity
        if narrow
        else f"{row.process}, {row.activity}"
    )
    ranks = _short_ranks(row.ranks)
    if narrow:
        return (ranks, process, "", row.short_collective, row.age, waits, row.short_at)
    return (ranks, process, str(row.step or ""), row.collective, row.age, waits, row.at)


def _short_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in few characters: ``"0-3,5-7"``, ``"0,2,5-9,.. (5000)"``."""
    text = members_text(ranks)
    if len(text) <= _RANKS_MAX:
        return text
    head = text[: _RANKS_MAX - 10]
    return f"{head[: head.rindex(',')] if ',' in head else head},.. ({len(ranks)})"


_RANKS_MAX: Final = 22
HEADINGS: Final = ("ranks", "process", "step", "collective", "for", "waits for", "at")


def _row(log: RankLog, waits_for: list[int]) -> StatusRow:
    current = log.current_collective
    exit_ = process_exit_of(log)
    blocked = current is not None and current.in_flight
    doing = activity_of(log, exit_, quiet_ns=quiet_ns(log))
    activity: str = (
        "in-collective" if blocked and doing.why not in ("stopped", "holding-gil") else doing.why
    )
    if log.observation.has_ended:
        activity = exit_.why
    if activity in ("killed", "exit", "exception", "finished", "stopped", "holding-gil"):
        activity = ""  # the process's state says it
    collective, short_collective, age_ns = _collective(log, current)
    at, short_at = _location(log, current)
    return StatusRow(
        [log.rank],
        log.pid,
        log.host,
        process_phrase(log.observation),
        activity,
        collective,
        short_collective,
        age_ns,
        waits_for,
        log.steps,
        at,
        short_at,
    )


def _collective(log: RankLog, current: Collective | None) -> tuple[str, str, int]:
    """Return a rank's collective in words, the same in few words, and for how long it is in flight
    or over.
    """
    wait = log.store_wait
    if wait is not None:
        text = f"in {op_phrase(wait)}"
        return text, text, max(0, log.captured_ns - wait.announced_ns)
    slow = f" (expects to be slow: {log.expecting})" if log.expecting else ""
    if current is None:
        text = "none yet" if log.initialised or not log.setups else "in init_process_group"
        return f"{text}{slow}", f"{text}{slow}", 0
    if current.in_flight:
        state, since = "in", current.announced_ns
    else:
        state = "after" if current.state is State.COMPLETED else current.state.value
        since = current.ended_ns or current.announced_ns
    text, short = op_phrase(current), _short_phrase(current)
    return f"{state} {text}{slow}", f"{state} {short}{slow}", max(0, log.captured_ns - since)


def _short_phrase(op: Collective) -> str:
    """``"all_reduce #41"``, ``"all_reduce #41 of dp"``."""
    if op.is_store_wait or op.is_setup or op.is_point_to_point:
        return op_phrase(op)
    label = group_label(op.channel.group, "")
    return op_phrase(op, group=False) + (f" of {label}" if label else "")


_EXCEPTION_MAX: Final = 80


def _location(log: RankLog, current: Collective | None) -> tuple[str, str]:
    """Return where a rank is, and the same in one word: its line, or the exception that it
    raised.
    """
    stack = log.main_stack
    frame = stack.source if stack is not None and not log.observation.has_ended else None
    if frame is None and log.exception:
        text, short = log.exception.splitlines()[0], log.exception.split(":", 1)[0]
        return text if len(text) <= _EXCEPTION_MAX else f"{text[: _EXCEPTION_MAX - 1]}…", short
    # While nothing is issued, a stack is taken once a second: a younger record is newer than the
    # stack.
    if current is not None and (
        frame is None or stack is None or current.announced_ns > stack.taken_ns
    ):
        frame = current.source or frame
    return frame_phrase(frame), frame.where if frame is not None else ""


def _waits(examined: ExaminedJob) -> dict[int, list[int]]:
    """Return the ranks that each rank waits for, from the wait-for graph."""
    graph = examined.graph
    found: dict[int, set[int]] = defaultdict(set)
    for node, targets in graph.edges.items():
        if node.kind == "wait":
            for target in targets:
                # "at": a collective, which waits for the ranks that have not reached it
                ends = graph.edges.get(target, {}) if target.kind == "at" else [target]
                found[node.rank] |= {end.rank for end in ends if end.rank >= 0}
    return {rank: sorted(ranks - {rank}) for rank, ranks in found.items()}


def _steps(logs: Sequence[RankLog]) -> str:
    """Return the optimizer step that the ranks are in, and the time of a step, as far as they are
    recorded.
    """
    steps = sorted({log.steps for log in logs if log.steps})
    if not steps:
        return ""
    words = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    times = [time for time in map(step_time_s, logs) if time]
    return f"{words}, {duration(median(times) * 1e9)} per step" if times else words


def step_time_s(log: RankLog) -> float:
    """Return the median time of the last steps in the record, from one step's first collective to
    the next one's; 0.0 if unknown.
    """
    moments = list(first_moments(log).values())[-_STEPS_TIMED:]
    times = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return median(times) / 1e9 if times else 0.0
