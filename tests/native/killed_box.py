"""What a killed writer leaves in a black box, read by the reader that commlens has."""

from __future__ import annotations

import json
import random
import struct
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import stepped

from commlens.blackbox import layout as L
from commlens.blackbox.reader import read_box
from commlens.blackbox.writer import BoxWriter
from commlens.model.collective import Collective, LearnedHow, State
from commlens.model.ranklog import RankLog

MONO, UNIX = 1_000_000_000_000, 1_700_000_000_000_000_000  # the moment of creation
CAPACITY, SIDE, SLOT = 4, 1536, 64  # as small as they can be, so that both rings are lapped often
SIDE_AT = 2 * L.HEADER_SIZE
FILE = "/home/me/train.py"
SAID = (
    "not recorded because",
    "torn or damaged",
    "group was overwritten",
    "without what was asked",
    "without their stacks",
)
STATES = {L.OUTCOME_COMPLETED: State.COMPLETED, L.OUTCOME_UNKNOWN: State.UNKNOWN}
LEARNED = {
    L.HOW_RETURN: LearnedHow.RETURN,
    L.HOW_WAIT: LearnedHow.WAIT,
    L.HOW_POLL: LearnedHow.POLL,
    L.HOW_UNKNOWN: LearnedHow.UNKNOWN,
}


def empty_box() -> bytearray:
    """A box before its first record."""
    about = json.dumps({"job": "job"}).encode()
    evidence_at = SIDE_AT + SIDE
    static = L.STATIC.pack(
        L.MAGIC,
        L.VERSION,
        L.HEADER_SIZE,
        L.RECORD_SIZE,
        CAPACITY,
        SIDE_AT,
        SIDE,
        evidence_at,
        SLOT,
        evidence_at + 2 * SLOT,
        4121,
        0,
        2,
        0,
        777,
        MONO,
        UNIX,
        len(about),
        zlib.crc32(about),
    )
    image = bytearray(evidence_at + 2 * SLOT)
    image[: len(static)] = static
    image[L.STATIC_CRC_AT : L.STATIC_CRC_AT + 4] = zlib.crc32(static).to_bytes(4, "little")
    image[L.ABOUT_AT : L.ABOUT_AT + len(about)] = about
    return image


@dataclass(frozen=True)
class Known:
    """What a reader must find after a line of the script."""

    # from the first; those of the last lap are in the ring
    records: tuple[dict[str, Any], ...] = ()
    head: int = 0  # of the side table
    steps: int = 0
    lost: int = 0

    def alive(self, position: int) -> bool:
        return position > self.head - SIDE

    def visible(self) -> dict[int, dict[str, Any]]:
        """By index: the fields of the records that can be read."""
        found = {}
        for record in self.records[-CAPACITY:]:
            if self.alive(record["at"]["group"]):
                known = {name: value for name, value in record.items() if name != "at"}
                if not self.alive(record["at"]["asked"]):
                    known |= {"op": "unknown", "shape": (), "reduce_op": None}
                if not self.alive(record["at"]["stack"]):
                    known["lines"] = ()
                found[record["index"]] = known
        return found


@dataclass
class Script:
    """A text for the driver, and what must be known after each of its lines."""

    lines: list[str] = field(default_factory=list)
    after: list[Known] = field(default_factory=lambda: [Known()])
    positions: list[int] = field(default_factory=lambda: [0])

    @property
    def now(self) -> Known:
        return self.after[-1]

    def say(self, line: str, **change: Any) -> None:
        self.lines.append(line)
        self.after.append(replace(self.now, **change))

    def append(self, content: dict[str, Any]) -> int:
        """A blob: its number."""
        text = json.dumps(content, separators=(",", ":"))
        need = (L.BLOB.size + len(text) + 7) // 8 * 8
        head, room = self.now.head, SIDE - self.now.head % SIDE
        if room < need:
            head += room
        self.positions.append(head + 1)
        self.say(f"append {text}", head=head + need)
        return len(self.positions) - 1

    def announce(
        self,
        group: tuple[int, str],
        asked: tuple[int, dict[str, Any]],
        stack: tuple[int, int],
        **values: int,
    ) -> int:
        """A record: its index. Of the blobs their numbers, and what is in them."""
        index = len(self.now.records) + 1
        at = MONO + index * 1000
        v = {
            "step": self.now.steps,
            "coalescing": 0,
            "tag": 0,
            "flags": L.FLAG_ENTERED,
            "peer": -1,
            "members": 0,
        } | values
        thread = 4121 + index % 3
        self.say(
            f"announce {at} {group[0]} {asked[0]} {stack[0]} {index * 3} {v['step']}"
            f" {v['coalescing']} {v['tag']} {thread} {v['flags']} {v['peer']} {v['members']}",
            records=(
                *self.now.records,
                {
                    "index": index,
                    "sequence_number": index * 3,
                    "announced_ns": at - MONO + UNIX,
                    "step": v["step"],
                    "coalescing_id": v["coalescing"],
                    "tag": v["tag"],
                    "issue_thread": thread,
                    "peer": v["peer"] if v["peer"] >= 0 else None,
                    "concurrent": bool(v["flags"] & L.FLAG_CONCURRENT),
                    "coalesced_members": v["members"] if v["flags"] & L.FLAG_COALESCED_END else 0,
                    "entered_ns": at - MONO + UNIX if v["flags"] & L.FLAG_ENTERED else 0,
                    "returned_ns": 0,
                    "wait_began_ns": 0,
                    "wait_ended_ns": 0,
                    "done_ns": 0,
                    "wait_thread": 0,
                    "state": State.ISSUED if v["flags"] & L.FLAG_ENTERED else State.ANNOUNCED,
                    "learned_how": LearnedHow.NOT_YET,
                    "group": group[1],
                    "op": asked[1]["op"],
                    "shape": tuple(asked[1]["in"][0][0]),
                    "reduce_op": None,
                    "lines": (stack[1],),
                    "at": {
                        "group": self.positions[group[0]],
                        "asked": self.positions[asked[0]],
                        "stack": self.positions[stack[0]],
                    },
                },
            ),
        )
        return index

    def life(self, line: str, index: int, **change: Any) -> None:
        """A line about a record, which no longer has an effect where its slot has a newer owner."""
        records = list(self.now.records)
        if index > len(records) - CAPACITY:
            records[index - 1] = {**records[index - 1], **change}
        self.say(line, records=tuple(records))


def script(seed: int = 6, records: int = 36) -> Script:
    """Several laps of the ring and of the side table, with every kind of word that the native code
    writes.
    """
    draw = random.Random(seed)
    s = Script()
    group = asked = stack = None
    for n in range(1, records + 1):
        floor = max(0, s.now.head - SIDE // 2)
        if group is None or s.positions[group[0]] <= floor:
            name = "g" * draw.randint(1, 9)
            group = s.append({"k": "group", "name": name, "ranks": "0-3"}), name
        if asked is None or draw.random() < 0.6 or s.positions[asked[0]] <= floor:
            what = {
                "k": "asked",
                "op": "o" * draw.randint(1, 9),
                "in": [[[n, draw.randint(1, 10**6)], "float32"]],
            }
            asked = s.append(what), what
        if stack is None or draw.random() < 0.6 or s.positions[stack[0]] <= floor:
            stack = s.append({"k": "stack", "f": [[FILE, n, "f" * draw.randint(1, 30)]]}), n
        ended = MONO + n * 1000
        match n % 6:
            case 0:  # waited for
                index = s.announce(group, asked, stack)
                then = _ticks(ended + 300)
                s.life(f"mark {index} {L.RETURNED} {ended + 300}", index, returned_ns=then)
                s.life(f"value {index} {L.REDUCE_OP} 4", index, reduce_op="MIN")
                _waits(s, index, ended + 500, returned=False)
            case 1:  # its caller waits in its next breath
                index = s.announce(group, asked, stack, flags=L.FLAG_ENTERED | L.FLAG_CONCURRENT)
                _waits(s, index, ended + 400, returned=True)
                _waits(s, index, ended + 900, returned=False)  # a second thread, later
            case 2:  # held back by a verifier, then a send
                index = s.announce(group, asked, stack, flags=0, peer=2, tag=-n)
                s.life(
                    f"mark {index} {L.ENTERED} {ended + 200}",
                    index,
                    entered_ns=_ticks(ended + 200),
                    state=State.ISSUED,
                )
                _ends(s, index, ended + 700, L.OUTCOME_COMPLETED, L.HOW_RETURN)
            case 3:  # a member of a coalesced group
                index = s.announce(
                    group,
                    asked,
                    stack,
                    flags=L.FLAG_ENTERED | L.FLAG_COALESCED_MEMBER,
                    coalescing=n,
                )
                s.life(
                    f"outcome {index} {L.OUTCOME_UNKNOWN} {L.HOW_UNKNOWN} 0",
                    index,
                    state=State.UNKNOWN,
                    learned_how=LearnedHow.UNKNOWN,
                )
            case 4:  # the record that closes it, and a step
                index = s.announce(
                    group,
                    asked,
                    stack,
                    flags=L.FLAG_ENTERED | L.FLAG_COALESCED_END,
                    coalescing=n - 1,
                    members=1,
                )
                s.say(f"word {L.STEPS} {n}", steps=n)
                _ends(s, index, ended + 600, L.OUTCOME_COMPLETED, L.HOW_POLL)
                s.life(f"value {index} {L.DURATION} 77", index, duration_ns=7700)
            # in flight for ever; what others say of a record whose slot is taken has no effect
            case 5:
                s.announce(group, asked, stack)
                if (late := n - 1 - CAPACITY) > 0:
                    s.life(f"mark {late} {L.DONE} {ended}", late)
                    s.life(f"began {late} {ended} 1 1", late)
                    s.life(f"completed {late} {ended} 1", late)
                s.say(f"lost {n // 6}", lost=max(s.now.lost, n // 6))
                s.say("lost 1", lost=max(s.now.lost, 1))
    return s


def _ticks(moment: int) -> int:
    return moment // L.TICK_NS * L.TICK_NS - MONO + UNIX


def _waits(s: Script, index: int, began: int, *, returned: bool) -> None:
    also = {"returned_ns": _ticks(began)} if returned else {}
    ended = {
        "wait_ended_ns": _ticks(began + 200),
        "done_ns": _ticks(began + 200),
        "state": State.COMPLETED,
        "learned_how": LearnedHow.WAIT,
    }
    waiting = {
        "wait_ended_ns": 0,
        "done_ns": 0,
        "state": State.ISSUED,
        "learned_how": LearnedHow.NOT_YET,
        "wait_thread": began % 4096,
    }
    s.life(
        f"began {index} {began} {began % 4096} {int(returned)}",
        index,
        wait_began_ns=_ticks(began),
        **waiting,
        **also,
    )
    s.life(f"completed {index} {began + 200} {began % 4096}", index, **ended)


def _ends(s: Script, index: int, moment: int, outcome: int, how: int) -> None:
    s.life(f"mark {index} {L.RETURNED} {moment}", index, returned_ns=_ticks(moment))
    s.life(f"mark {index} {L.DONE} {moment}", index, done_ns=_ticks(moment))
    s.life(
        f"outcome {index} {outcome} {how} 5",
        index,
        state=STATES[outcome],
        learned_how=LEARNED[how],
        wait_thread=5,
    )


def read(image: bytes) -> RankLog:
    return read_box(image, captured_ns=UNIX + 10**9)


def check(log: RankLog, before: Known, later: Known, where: object) -> None:
    """That a log is what was known before a line of the script, what is known after it, or
    something in between.
    """
    old, new = before.visible(), later.visible()
    got = {collective.index: collective for collective in log.collectives}
    assert old.keys() & new.keys() <= got.keys() <= old.keys() | new.keys(), where
    for index, collective in got.items():
        for name, value in fields(collective).items():
            allowed = [known[index].get(name) for known in (old, new) if index in known]
            assert value in allowed, (
                f"{where}: record {index} has {name} {value!r}, not one of {allowed}"
            )
    assert log.issued in (len(before.records), len(later.records)), where
    assert log.steps in (before.steps, later.steps), where
    assert _problems(log, "not recorded because") <= {before.lost, later.lost}, where
    torn = _problems(log, "torn or damaged")
    assert torn <= ({1} if len(later.records) > max(CAPACITY, len(before.records)) else set()), (
        where
    )
    assert all(any(words in problem for words in SAID) for problem in log.problems), (
        f"{where}: {log.problems}"
    )


def _problems(log: RankLog, words: str) -> set[int]:
    return {int(problem.split()[0]) for problem in log.problems if words in problem}


def fields(collective: Collective) -> dict[str, Any]:
    """What the script knows by name."""
    names = (
        "index",
        "sequence_number",
        "announced_ns",
        "step",
        "coalescing_id",
        "tag",
        "issue_thread",
        "peer",
        "concurrent",
        "coalesced_members",
        "entered_ns",
        "returned_ns",
        "wait_began_ns",
        "wait_ended_ns",
        "done_ns",
        "duration_ns",
        "wait_thread",
        "state",
        "learned_how",
    )
    return {
        **{name: getattr(collective, name) for name in names},
        "group": collective.channel.group.name,
        "op": collective.op,
        "shape": collective.args.inputs[0].shape if collective.args.inputs else (),
        "reduce_op": collective.args.reduce_op,
        "lines": tuple(frame.line for frame in collective.stack),
    }


def step_through(driver: Path, folder: Path, records: int = 36) -> str:
    """Kill the writer at every instruction."""
    s = script(records)
    image = empty_box()
    file = folder / "stepped.box"
    file.write_bytes(image)
    found = stepped.step(driver, "box", file, s.lines, folder)
    count, last = 0, stepped.State(0, 0, 0)
    partly = torn = 0
    for last in stepped.states(found, image):
        before, later = s.after[last.done], s.after[last.begun]
        log = read(bytes(image))
        check(log, before, later, last)
        count += 1
        torn += bool(_problems(log, "torn or damaged"))
        partly += last.begun != last.done
    assert (last.begun, last.done) == (len(s.lines), len(s.lines)), last
    assert torn and s.now.head > SIDE, "the script does not lap the rings"
    return (
        f"{last.instructions} instructions of {len(s.lines)} calls left {count} states, {partly} of"
        f" them in the middle of a call, {torn} with a torn record: each was read, with every"
        " record that had been announced"
    )


def kill_at_random(driver: Path, folder: Path, times: int, seed: int = 6) -> str:
    """Kill many threads that write one box, at moments of chance."""
    draw, threads, capacity = random.Random(seed), 4, 256
    records = torn = 0
    for n in range(times):
        file = folder / f"rank0.{n}.box"
        BoxWriter(
            file, capacity=capacity, rank=0, world_size=1, local_rank=0, start_ticks=1, about={}
        )
        stepped.kill_after(driver, file, threads, draw.uniform(0, 0.05))
        image = file.read_bytes()
        log = read_box(file)
        check_written(log, image, capacity)
        under_way = sum(_problems(log, "torn or damaged"))
        # A thread that lost the processor for a lap of the side table has announced what refers to
        # blobs that are gone.
        late = sum(_problems(log, "group was overwritten"))
        assert min(log.issued, capacity) == len(log.collectives) + under_way + late, log.problems
        assert under_way <= threads and late <= threads * 5, f"by {threads} threads: {log.problems}"
        records, torn = records + log.issued, torn + under_way
        file.unlink()
    assert records > times * capacity, f"only {records} records were written"
    return (
        f"{times} processes of {threads} threads were killed at random moments, after"
        f" {records // times} records on average: {torn} records torn, all of them under way, and"
        " every other one read"
    )


def check_written(log: RankLog, image: bytes, capacity: int) -> None:
    """That a log holds what ``crowd.hpp`` writes."""
    (issued,) = struct.unpack_from("<Q", image, L.NEXT_INDEX)
    assert log.issued - 4 <= issued <= log.issued
    assert all(any(words in problem for words in SAID) for problem in log.problems), log.problems
    start = None
    for got in log.collectives:
        index, n, tag = got.index, got.sequence_number, got.index & L.TAG_MASK
        assert log.issued - capacity < index <= log.issued
        start = got.announced_ns - index * 1000 if start is None else start
        assert got.announced_ns == start + index * 1000
        assert (got.step, got.coalescing_id, got.tag, got.issue_thread) == (
            index * 7,
            index * 11,
            -index,
            index & 0x7FFFFFFF,
        )
        assert got.peer == (index % 5 - 1 if index % 5 else None)
        assert got.op == "unknown" or (got.op == str(n) and got.args.inputs[0].shape == (n, n))
        assert [frame.line for frame in got.stack] in ([], [n % 1_000_000] * (n % 10 + 1))
        assert got.channel.group.ranks == tuple(range(int(got.channel.group.name) % 1000 + 2))
        began, ended = ((tag * 16 + life + 1) * L.TICK_NS + start for life in (0, 1))
        # One before the announcement counts as none: the driver's times start again where the
        # words' tags do.
        assert got.returned_ns in (0, began) and got.wait_began_ns in (0, began), got
        assert got.wait_ended_ns in (0, ended) and got.done_ns in (0, ended), got
        assert got.wait_thread in (0, tag)
        assert got.state in (State.ISSUED, State.COMPLETED)
