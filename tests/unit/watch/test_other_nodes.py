"""What commands say of the other nodes of a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from builders import Job, Stay, all_reduce

from commlens.diagnosis.fold.alike import state_key
from commlens.diagnosis.views.status import fold, status_of
from commlens.model.ranklog import End, Observation, RankLog
from commlens.watch import other_nodes as module
from commlens.watch.nodes.beat import Beat
from commlens.watch.nodes.remote_evidence import NodeEvidence
from commlens.watch.nodes.states import States
from commlens.watch.other_nodes import OtherNodes, other_node_lines

NODES, PER_NODE = 40, 2
SLEEPS = Observation(End.RUNNING, window_s=5.0, proc_state="S", cpu_s=0.0, stack_moved=False)
HERE = range(PER_NODE)


class Asked:
    """The nodes of a simulated job, which answer at once."""

    unread = ""

    def __init__(self, logs: Sequence[RankLog], *, wait_s: float = 0.0) -> None:
        self.logs = logs
        self.asked: list[int] = []
        self.dumb: set[int] = set()  # answer nothing
        self.beats = [
            Beat(
                slot,
                f"n{slot}",
                list(range(slot * PER_NODE, (slot + 1) * PER_NODE)),
                wait_s=wait_s,
            )
            for slot in range(len(logs) // PER_NODE)
        ]

    @property
    def others(self) -> list[Beat]:
        return [beat for beat in self.beats[1:] if not beat.finished]

    def of(self, slot: int) -> list[RankLog]:
        return list(self.logs[slot * PER_NODE : (slot + 1) * PER_NODE])

    def host(self, slot: int) -> str:
        return f"n{slot}"

    def gather_states(self, own: States) -> States:
        for beat in self.beats:
            for log in self.of(beat.slot) if beat.slot not in self.dumb else ():
                key = state_key(log)
                own.add(States({key: 1 << log.rank}) if key else States({}, 1 << log.rank))
        return own

    def gather(self, read: object, *, of: list[int], records: int) -> Any:
        self.asked += of
        return {
            slot: NodeEvidence(f"n{slot}", logs=self.of(slot))
            for slot in of
            if slot not in self.dumb
        }, [beat for beat in self.others if beat.slot in self.dumb.intersection(of)]

    def look(self) -> OtherNodes:
        return module._ask_others(self, list(HERE), lambda: self.of(0))  # type: ignore[arg-type]


def run(nodes: int = NODES, late: int = 51) -> list[RankLog]:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, 8, line=10)
        if rank == late:
            yield Stay(57, "load_batch", SLEEPS)
        yield all_reduce(job.world, 8, line=10)

    logs = Job(nodes * PER_NODE).run(program).logs(after_s=30)
    for log in logs:
        log.host = f"n{log.rank // PER_NODE}"
    return logs


def test_a_few_ranks_tell_of_all_if_ranks_wait() -> None:
    asked = Asked(run(), wait_s=30.0)
    found = asked.look()
    assert sorted(asked.asked) == [1, 25, 39]
    assert found.lines == []
    logs = found.join(asked.of(0))
    job = status_of("train", logs, found.lines, alike=found.alike, hosts=found.hosts)
    assert job.heading.startswith("train: 80 ranks on 40 hosts")
    assert job.verdict.culprits == [51]
    rows = {tuple(row.ranks): row for row in fold(job.rows)}
    waiting = tuple(rank for rank in range(NODES * PER_NODE) if rank != 51)
    assert rows.keys() == {waiting, (51,)}
    assert rows[waiting].waits_for == [51] and rows[waiting].host == "40 hosts"


def test_nodes_whose_states_did_not_come_are_named() -> None:
    asked = Asked(run(), wait_s=30.0)
    asked.dumb = {7}
    found = asked.look()
    assert found.lines == [
        "Node n7 (ranks 14-15) did not answer. Its watcher said last: the longest wait is 30 s."
    ]
    assert not found.alike.others & {14, 15}


def test_all_nodes_are_asked_if_none_waits_and_they_are_few() -> None:
    asked = Asked(run(late=-1))
    asked.dumb = {9}
    asked.beats[5] = msgspec.structs.replace(asked.beats[5], finished=True)
    found = asked.look()
    assert sorted({*asked.asked, 5}) == list(range(1, NODES))
    assert found.lines == [
        "Node n9 (ranks 18-19) did not answer. Its watcher said last: no rank waits for long.",
        "ranks 10-11 on n5: finished.",
    ]


def test_some_of_very_many_nodes_are_asked_if_none_waits() -> None:
    asked = Asked(run(nodes=100, late=-1))
    asked.beats[77] = msgspec.structs.replace(asked.beats[77], dead=[155])
    (line,) = asked.look().lines
    assert len(asked.asked) <= 16 and 77 in asked.asked
    left = 99 - len(asked.asked)
    assert f"on {left} nodes were not asked. Their watchers said last: no rank waits for" in line


def test_the_other_nodes_are_told_in_a_line_each() -> None:
    beats = [Beat(0, "n0", [0, 1]), Beat(1, "n1", [2, 3], dead=[3]), Beat(2, "n2", [4], wait_s=7.0)]
    assert other_node_lines(beats, [0, 1]) == [
        "ranks 2-3 on n1: rank 3 has died.",
        "rank 4 on n2: the longest wait is 7.0 s.",
    ]
