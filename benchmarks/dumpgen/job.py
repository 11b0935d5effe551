"""A job with a fault, as the files that its ranks leave."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from dumpgen.faults import Fault, Injection, Site, Truth
from dumpgen.mesh import Mesh
from dumpgen.pickler import Numbers, Record, Stream, Template, header, template
from dumpgen.program import Op, Shape, step
from dumpgen.running import WATCHDOG_TURN_NS, Course, Plan, Simulation
from dumpgen.stacks import frames_of

BEGAN_NS = 1_771_000_000_000_000_000
GPUS_OF_A_HOST = 8
TIMEOUT_NS = 600_000_000_000
"""After this long the watchdog dumps what hangs."""
HEALTHY_PAUSE_NS = 60_000_000_000
"""A job that is done is dumped that long after its last step began."""


@dataclass(frozen=True)
class Conditions:
    """What else is so, beside the fault."""

    version: str = "2.10"
    timing: bool = False  # TORCH_NCCL_ENABLE_TIMING
    stacks: bool = True
    skew_s: float = 0.02  # how far the clocks of hosts are apart
    history: int = 40  # steps before; more than fit in the ring
    ring: int = 2000
    batched_p2p: bool = False
    in_flight_only: bool = False  # completed entries are left out
    seed: int = 7


@dataclass(frozen=True, eq=False)
class Row:
    """One entry of the ring within a step: what does not depend on the rank or the time."""

    op: int
    part: Op
    closes: bool  # it stands for a work that can complete
    sequence: int
    p2p_sequence: int
    op_id: int


@dataclass
class Program:
    """A rank's steps as rows of a ring."""

    ops: list[Op]
    rows: list[Row]
    # of each role: collectives, p2p and op ids of all of it
    counts: dict[str, tuple[int, int, int]]

    @classmethod
    def of(cls, ops: list[Op]) -> Program:
        """Number them."""
        rows: list[Row] = []
        counts: dict[str, list[int]] = {}
        for index, op in enumerate(ops):
            count = counts.setdefault(op.role, [0, 0, 0])
            if op.is_p2p or op.members:
                count[1] += 1
            else:
                count[0] += 1
            for part in op.members:
                count[2] += 1
                rows.append(Row(index, part, False, *count))
            count[2] += not op.members
            rows.append(Row(index, op, True, *count))
        return cls(ops, rows, {role: (c[0], c[1], c[2]) for role, c in counts.items()})


@dataclass
class Past:
    """The steps before the fault, as all ranks of one kind remember them."""

    entries: list[tuple[Row, Numbers]]
    created: np.ndarray  # true ns, one of each entry
    started: np.ndarray
    completed: np.ndarray


@dataclass
class Job:
    """Everything about one generated job. ``write`` leaves a file of each rank."""

    mesh: Mesh
    fault: Fault
    conditions: Conditions = Conditions()
    shape: Shape = field(default_factory=Shape)
    _templates: dict[object, tuple[Template, Stream]] = field(default_factory=dict)
    _tails: dict[object, Template] = field(default_factory=dict)

    @property
    def truth(self) -> Truth:
        """The verdict that is right."""
        truth = self._injection.truth
        if self.conditions.in_flight_only and truth.twin >= 0:
            return replace(truth, also=(*truth.also, tuple(sorted((*truth.culprits, truth.twin)))))
        return truth

    def ranks(self) -> list[int]:
        """Those that leave a dump."""
        return [rank for rank in range(self.mesh.size) if rank not in self._injection.no_dump]

    def write(self, folder: Path, *, prefix: str = "rank_", processes: int = 1) -> None:
        """One file of each rank that leaves one."""
        folder.mkdir(parents=True, exist_ok=True)
        _ = self._courses, self._pasts  # once, before the processes part
        ranks = self.ranks()
        parts = min(processes, len(ranks))
        children = []
        for part in range(1, parts):
            child = os.fork()
            if child == 0:
                try:
                    self._write(folder, prefix, ranks[part::parts])
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        self._write(folder, prefix, ranks[::parts])
        for child in children:
            if os.waitpid(child, 0)[1] != 0:
                raise RuntimeError(f"A process that writes dumps into {folder} failed.")

    def _write(self, folder: Path, prefix: str, ranks: list[int]) -> None:
        for rank, data in self.files(ranks):
            path = folder / f"{prefix}{rank}"
            path.write_bytes(data)
            os.utime(path, ns=(self.captured_ns(rank),) * 2)

    def captured_ns(self, rank: int) -> int:
        """When the rank's dump was made, Unix ns by the clock of its host; files are given this
        time.
        """
        if self._injection.runs:
            return self._clock(rank) + self._cut_of(rank)
        return self._clock(rank) + (TIMEOUT_NS if self._hangs else HEALTHY_PAUSE_NS)

    @cached_property
    def _hangs(self) -> bool:
        return any(
            when < 0 for course in self._courses.values() for when in course.completed
        ) or bool(self._injection.stops)

    def _clock(self, rank: int) -> int:
        """Of the rank's host, at the beginning of the step with the fault."""
        skew = (
            random.Random(f"{self.conditions.seed} host {rank // GPUS_OF_A_HOST}").gauss(0, 1)
            * self.conditions.skew_s
        )
        return BEGAN_NS + round(skew * 1e9)

    def _cut_of(self, rank: int) -> int:
        spread = random.Random(f"{self.conditions.seed} cut {rank}").uniform(
            0, self._injection.spread_s
        )
        return self._cut + round(spread * 1e9)

    def files(self, ranks: list[int] | None = None) -> Iterator[tuple[int, bytes]]:
        """Rank and content."""
        for rank in self.ranks() if ranks is None else ranks:
            yield rank, self._file(rank)

    # --- what happens

    @cached_property
    def _injection(self) -> Injection:
        return self.fault.inject(
            Site(self.mesh, {stage: self._step(stage, 0) for stage in range(self.mesh.pp)})
        )

    @cached_property
    def _shape(self) -> Shape:
        return replace(self.shape, batched_p2p=self.conditions.batched_p2p)

    def _step(self, stage: int, expert: int) -> list[Op]:
        return step(
            self.mesh, stage, replace(self.shape, batched_p2p=self.conditions.batched_p2p), expert
        )

    def _kind(self, rank: int) -> tuple[int, int]:
        stage, dp, _ = self.mesh.place(rank)
        return stage, dp % self.mesh.ep

    @cached_property
    def _plain(self) -> dict[tuple[int, int], list[Op]]:
        return {
            kind: self._step(*kind) for kind in {self._kind(rank) for rank in range(self.mesh.size)}
        }

    @cached_property
    def _tail_programs(self) -> dict[int, Program]:
        """The steps that are executed with the fault, of every rank."""
        syncs = self._injection.syncs

        def steps(first: list[Op], others: list[Op]) -> Program:
            joined: list[Op] = []
            for ops in [first, *[others] * (self._injection.steps - 1)]:
                begin = len(joined)
                joined += [
                    replace(
                        op,
                        waits=tuple(w + begin for w in op.waits),
                        host_syncs=op.host_syncs and syncs and begin > 0,
                    )
                    for op in ops
                ]
            return Program.of(joined)

        healthy = {kind: steps(ops, ops) for kind, ops in self._plain.items()}
        programs = {rank: healthy[self._kind(rank)] for rank in range(self.mesh.size)}
        for rank, edit in self._injection.edits.items():
            ops = self._plain[self._kind(rank)]
            programs[rank] = steps(edit(list(ops)), ops)
        return programs

    @cached_property
    def _courses(self) -> dict[int, Course]:
        plans: dict[int, Plan] = {}
        made: dict[int, Plan] = {}
        for rank, program in self._tail_programs.items():
            plans[rank] = made.setdefault(id(program), Plan(program.ops))
        lengths = {
            rank: len(self._plain[self._kind(rank)])
            for rank in {rank for rank, _ in self._injection.late}
        }
        delays = {
            (rank, op + number * lengths[rank]): round(seconds * 1e9)
            for (rank, op), seconds in self._injection.late.items()
            for number in range(self._injection.steps)
        }
        return Simulation(
            self.mesh,
            plans,
            stops=self._injection.stops,
            delays=delays,
            jams=self._injection.jams,
            run_ahead=self._injection.run_ahead,
        ).run()

    @cached_property
    def _usual(self) -> tuple[dict[int, Course], int]:
        """A healthy step of each stage, with the smallest groups that show its times, and how long
        it takes.
        """
        small = Mesh(self.mesh.pp, self.mesh.ep, 1, ep=self.mesh.ep, megatron=self.mesh.megatron)
        plans = {
            kind: Plan([replace(op, host_syncs=False) for op in ops])
            for kind, ops in self._plain.items()
        }
        courses = Simulation(
            small,
            {
                rank: plans[(small.place(rank)[0], small.place(rank)[1])]
                for rank in range(small.size)
            },
        ).run()
        length = max(max(course.completed) for course in courses.values()) + 1_000_000
        return {small.place(rank)[0]: course for rank, course in courses.items()}, length

    @cached_property
    def _cut(self) -> int:
        """When a job that goes on is dumped: in the middle of its second step."""
        _, length = self._usual
        return round(length * 1.43)

    # --- files

    @cached_property
    def _pasts(self) -> dict[tuple[int, int], Past]:
        return {kind: self._past(kind) for kind in self._plain}

    def _past(self, kind: tuple[int, int]) -> Past:
        courses, length = self._usual
        course = courses[kind[0]]
        program = Program.of(self._plain[kind])
        history = self.conditions.history
        tail = max(
            len(self._tail_programs[r].rows) for r in self._tail_programs if self._kind(r) == kind
        )
        tail = min(tail, self._injection.run_ahead) if self._injection.syncs else 0
        wanted = min(
            max(self.conditions.ring, tail) + len(program.rows), history * len(program.rows)
        )
        first = (history * len(program.rows) - wanted) // len(program.rows)
        numbers = np.array([row.op for row in program.rows])
        end = np.array(course.completed)[numbers]
        begin = np.array(course.started)[numbers]
        call = np.array(course.created)[numbers]
        offsets = (np.arange(first, history) - history) * length
        entries = [
            (row, self._numbers(row, program, s, i))
            for s in range(first, history)
            for i, row in enumerate(program.rows)
        ]
        return Past(
            entries, *((offsets[:, None] + times[None, :]).ravel() for times in (call, begin, end))
        )

    @staticmethod
    def _numbers(row: Row, program: Program, steps_before: int, number: int) -> Numbers:
        """``program``: a step; ``number``: of the row, since those steps."""
        collectives, messages, ids = program.counts[row.part.role]
        return (
            steps_before * len(program.rows) + number,
            steps_before * collectives + row.sequence,
            steps_before * messages + row.p2p_sequence,
            steps_before * ids + row.op_id,
        )

    def _record(
        self, row: Row, state: str, stage: int, pg_id: int, group: tuple[str, str]
    ) -> Record:
        op, timing = row.part, self.conditions.timing
        name = op.name
        if op.is_p2p:
            name = f"send {stage}->{op.stage}" if name == "send" else f"recv {stage}<-{op.stage}"
        state = state if row.closes and (timing or state == "completed") else "scheduled"
        done = state == "completed"
        return Record(
            frames=frames_of(op) if self.conditions.stacks else (),
            pg_id=pg_id,
            group=group,
            name=f"nccl:{name}",
            inputs=op.inputs,
            outputs=op.outputs,
            dtype=op.dtype,
            state=state,
            timed_start=timing and state != "scheduled",
            timed_end=done,
            retired=done,
            is_p2p=op.is_p2p or bool(op.members),
            duration_ms=op.takes_us / 1000 if timing and done else None,
            thread=int("backward" in op.site or "gradients" in op.site),
        )

    def _file(self, rank: int) -> bytes:
        conditions, kind = self.conditions, self._kind(rank)
        chance = random.Random(f"{conditions.seed} {rank}")
        clock = self._clock(rank)
        groups = self.mesh.groups(rank)
        ids = {group.role: number for number, group in enumerate(groups)}
        names = {group.role: (group.name, group.description) for group in groups}

        past, program, course = self._pasts[kind], self._tail_programs[rank], self._courses[rank]
        tail, times = self._tail_rows(rank, program, course, chance)
        keep = max(0, min(len(past.entries), conditions.ring - len(tail)))
        tail, times = tail[-conditions.ring :], times[:, -conditions.ring :]
        first = len(past.entries) - keep
        if conditions.in_flight_only:
            first, chosen = (
                len(past.entries),
                [
                    i
                    for i, (_, state) in enumerate(tail)
                    if state != "completed" or not tail[i][0].closes
                ],
            )
            tail, times = [tail[i] for i in chosen], times[:, chosen]

        status = self._status(program, course, kind, ids)
        head = header(
            conditions.version, [(g.name, g.description, g.rank_list) for g in groups], status
        )
        known = tuple(head.memo[text] for pair in names.values() for text in pair)
        # ranks share bytes, not names of groups
        stand_ins = {role: (f"name of {role}", f"description of {role}") for role in names}
        shared = (kind, first, head.puts, known)
        records: dict[tuple[int, str], Record] = {}

        def record(row: Row, state: str) -> Record:
            made = records.get((id(row), state))
            if made is None:
                role = row.part.role
                made = records[id(row), state] = self._record(
                    row, state, kind[0], ids[role], stand_ins[role]
                )
            return made

        if shared not in self._templates:
            texts = [text for pair in stand_ins.values() for text in pair]
            body = Stream(
                memo={**head.memo, **dict(zip(texts, known, strict=True))}, puts=head.puts
            )
            entries = [(record(row, "completed"), numbers) for row, numbers in past.entries[first:]]
            self._templates[shared] = (
                template(conditions.version, body, entries, opens=True),
                body,
            )
        begin, memory = self._templates[shared]
        states = (shared, id(program), tuple((id(row), state) for row, state in tail))
        if states not in self._tails:
            stream = Stream(memo={**memory.memo, **head.memo}, puts=memory.puts)
            steps, places = (
                Program.of(self._plain[kind]),
                {id(row): number for number, row in enumerate(program.rows)},
            )
            entries = [
                (record(row, state), self._numbers(row, steps, conditions.history, places[id(row)]))
                for row, state in tail
            ]
            self._tails[states] = template(conditions.version, stream, entries, closes=True)
        jitter = np.random.default_rng(conditions.seed * 100_003 + rank)
        old = [
            past.created[first:]
            + jitter.integers(0, 30_000, keep if first < len(past.entries) else 0)
        ]
        phase = chance.randrange(WATCHDOG_TURN_NS)
        old += [_noticed(past.started[first:], phase), _noticed(past.completed[first:], phase)]
        parts = [head.getvalue(), begin.fill(*(clock + t for t in old)).tobytes()]
        parts.append(self._tails[states].fill(*(clock + t for t in times)).tobytes())
        return b"".join(parts)

    def _tail_rows(
        self, rank: int, program: Program, course: Course, chance: random.Random
    ) -> tuple[list[tuple[Row, str]], np.ndarray]:
        """The rows since the fault's step began with their states, and their times: 3 x n."""
        rows: list[tuple[Row, str]] = []
        times: list[tuple[int, int, int]] = []
        cut = self._cut_of(rank) if self._injection.runs else 1 << 62
        phase = chance.randrange(WATCHDOG_TURN_NS)
        for row in program.rows:
            if row.op >= len(course.created) or course.created[row.op] > cut:
                break
            created, started, completed = (
                course.created[row.op],
                course.started[row.op],
                course.completed[row.op],
            )
            noticed_start, noticed_end = (
                _turn(t, phase) if t >= 0 else -1 for t in (started, completed)
            )
            ended, began = 0 <= noticed_end <= cut, 0 <= noticed_start <= cut
            rows.append((row, "completed" if ended else "started" if began else "scheduled"))
            times.append((created, max(noticed_start, 0), max(noticed_end, 0)))
        return rows, np.array(times, dtype=np.int64).reshape(-1, 3).T

    def _status(
        self, program: Program, course: Course, kind: tuple[int, int], ids: dict[str, int]
    ) -> list[tuple[str, tuple[int, int, int]]]:
        """``pg_status``: messages and collectives of a group write over each other there, as in
        torch.
        """
        usual = (
            Program.of(self._plain[kind])
            if kind not in self._usual_programs
            else self._usual_programs[kind]
        )
        self._usual_programs[kind] = usual
        last: dict[str, list[int]] = {}
        for role, (collectives, messages, _) in usual.counts.items():
            number = (collectives or messages) * self.conditions.history
            last[role] = [number, number if self.conditions.timing else -1, number]
        for row in program.rows:
            if not row.closes or row.op >= len(course.created):
                continue
            messages = row.part.is_p2p or bool(row.part.members)
            base = usual.counts[row.part.role][int(messages)] * self.conditions.history
            number = base + (row.p2p_sequence if messages else row.sequence)
            values = last[row.part.role]
            values[0] = number
            if course.started[row.op] >= 0 and self.conditions.timing:
                values[1] = number
            if course.completed[row.op] >= 0:
                values[2] = number
        return [(str(ids[role]), (v[0], v[1], v[2])) for role, v in last.items()]

    @cached_property
    def _usual_programs(self) -> dict[tuple[int, int], Program]:
        return {}


def _turn(when: int, phase: int) -> int:
    """When the watchdog notices what happened then."""
    return -(-(when - phase) // WATCHDOG_TURN_NS) * WATCHDOG_TURN_NS + phase


def _noticed(when: np.ndarray, phase: int) -> np.ndarray:
    return -(-(when - phase) // WATCHDOG_TURN_NS) * WATCHDOG_TURN_NS + phase
