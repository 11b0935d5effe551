"""Executes the programs of all ranks on simulated streams until nothing moves any more.

The rules are those of NCCL. The host issues and runs ahead. An op starts when the op before it on
its stream has completed, and all that the compute stream had been told to wait for when it was
issued. A collective completes when all members have started it and ask for the same; a message when
both ends have. An op that has not started has not arrived: it is only enqueued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from dumpgen.mesh import Mesh
from dumpgen.program import Op

Key = tuple[Hashable, ...]
WATCHDOG_TURN_NS = 100_000_000


class Plan:
    """A rank's ops with what can be known of them before anything runs. Ranks that run the same
    share it.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.before: list[int] = []  # the op before it on its stream, -1
        self.needs: list[tuple[int, ...]] = []
        # for each message or collective in it: which of its kind this is
        self.numbers: list[tuple[int, ...]] = []
        last: dict[Hashable, int] = {}
        counts: dict[Hashable, int] = {}
        for index, op in enumerate(ops):
            stream = (op.role, op.name, op.stage) if op.is_p2p else op.role
            self.before.append(last.get(stream, -1))
            last[stream] = index
            self.needs.append(op.waits)
            numbers = []
            for part in op.members or (op,):
                kind = (part.role, part.name, part.stage) if part.is_p2p else part.role
                counts[kind] = counts.get(kind, -1) + 1
                numbers.append(counts[kind])
            self.numbers.append(tuple(numbers))


@dataclass
class Meeting:
    """A collective or message that takes place once all are there."""

    wanted: int
    # rank, op, when, signature
    arrived: list[tuple[int, int, int, tuple[object, ...]]] = field(default_factory=list)


@dataclass
class Course:
    """How far a rank came. Times in true ns since the simulation began, -1 for never."""

    plan: Plan
    stops_at: int  # the host never calls this op
    created: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    open_meetings: list[int] = field(default_factory=list)
    base: int = 0  # everything before it has completed
    latest: int = 0  # the latest completion so far


class Simulation:
    """All ranks of a mesh, each with its plan."""

    def __init__(
        self,
        mesh: Mesh,
        plans: dict[int, Plan],
        *,
        stops: dict[int, int] | None = None,
        delays: dict[tuple[int, int], int] | None = None,
        jams: frozenset[tuple[str, int, int]] = frozenset(),
        run_ahead: int = 1000,
    ) -> None:
        """Prepare.

        Args:
            mesh: where the ranks are.
            plans: of every rank.
            stops: rank to the index of the op that its host never calls.
            delays: (rank, op) to ns that its host is late there.
            jams: (role, any member, number) of collectives that never complete.
            run_ahead: how many ops a host may be ahead of its oldest one that is not complete.
        """
        self.mesh, self.run_ahead, self.delays, self.jams = mesh, run_ahead, delays or {}, jams
        self.courses = {
            rank: Course(plan, (stops or {}).get(rank, len(plan.ops)))
            for rank, plan in plans.items()
        }
        self.meetings: dict[Key, Meeting] = {}
        self.jammed = {(mesh.group(role, member).name, number) for role, member, number in jams}

    def run(self) -> dict[int, Course]:
        """Until nothing moves."""
        queue = deque(self.courses)
        queued = set(queue)
        while queue:
            rank = queue.popleft()
            queued.discard(rank)
            for other in self._advance(rank):
                if other not in queued:
                    queued.add(other)
                    queue.append(other)
        return self.courses

    def _advance(self, rank: int) -> list[int]:
        """Issue and start what can be. Returns the ranks for which something completed."""
        course = self.courses[rank]
        plan = course.plan
        woken: list[int] = []
        completed, started = course.completed, course.started
        while course.base < len(completed) and completed[course.base] >= 0:
            course.base += 1
        self._issue(rank, course)
        for index in range(course.base, len(course.created)):
            if any(completed[need] < 0 for need in plan.needs[index]):
                break
            if started[index] >= 0:
                continue
            before = plan.before[index]
            if before >= 0 and completed[before] < 0:
                continue
            ready = max(
                course.created[index],
                completed[before] if before >= 0 else 0,
                self._compute_ready(course, index),
            )
            started[index] = ready
            woken += self._arrive(rank, course, index, ready)
        if woken and rank not in woken:
            return woken
        return woken

    def _compute_ready(self, course: Course, index: int) -> int:
        return max((course.completed[need] for need in course.plan.needs[index]), default=0)

    def _issue(self, rank: int, course: Course) -> None:
        plan, created = course.plan, course.created
        while len(created) < course.stops_at and len(created) - course.base < self.run_ahead:
            index = len(created)
            op = plan.ops[index]
            clock = (
                (created[-1] if created else 0)
                + op.gap_us * 1000
                + self.delays.get((rank, index), 0)
            )
            if op.host_syncs:
                if course.base < index:
                    return
                clock = max(clock, course.latest + 20_000)
            elif index - course.base >= self.run_ahead - 1:
                clock = max(clock, course.latest)
            created.append(clock)
            course.started.append(-1)
            course.completed.append(-1)
            course.open_meetings.append(len(op.members) or 1)

    def _arrive(self, rank: int, course: Course, index: int, when: int) -> list[int]:
        op = course.plan.ops[index]
        woken: list[int] = []
        for part, number in zip(op.members or (op,), course.plan.numbers[index], strict=True):
            key, wanted = self._meeting(rank, part, number)
            meeting = self.meetings.get(key)
            if meeting is None:
                meeting = self.meetings[key] = Meeting(wanted)
            meeting.arrived.append(
                (rank, index, when, part.signature[1:] if part.is_p2p else part.signature)
            )
            if len(meeting.arrived) < wanted:
                continue
            if key in self.jammed or len({arrival[3] for arrival in meeting.arrived}) > 1:
                continue
            done = max(arrival[2] for arrival in meeting.arrived) + part.takes_us * 1000
            for member, its_op, _, _ in meeting.arrived:
                its = self.courses[member]
                its.open_meetings[its_op] -= 1
                if its.open_meetings[its_op] == 0:
                    its.completed[its_op] = max(done, its.completed[its_op])
                    its.latest = max(its.latest, done)
                    woken.append(member)
            del self.meetings[key]
        return woken

    def _meeting(self, rank: int, part: Op, number: int) -> tuple[Key, int]:
        group = self.mesh.group(part.role, rank)
        if not part.is_p2p:
            return (group.name, number), len(group.ranks)
        mine = self.mesh.place(rank)[0]
        ends = (mine, part.stage) if part.name == "send" else (part.stage, mine)
        return (group.name, *ends, number), 2
