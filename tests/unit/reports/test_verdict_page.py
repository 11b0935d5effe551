"""What the verdict's page is given to show: roles, classes, the folded graph, the tables; bounded,
whatever it is made of.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from builders import Die, Job, Stay, Step, all_reduce, recv, send
from flight_recorder_dumps import dump, entry
from starting_ranks import in_store
from verdict_pages import classes, edges, page_of, stays

from commlens.diagnosis.api import examine_paths
from commlens.model.ranklog import End, Observation
from commlens.reports.verdict_page import verdict_page


def test_a_rank_that_does_not_come() -> None:
    page = page_of(Job(4).run(stays).logs())
    assert classes(page) == [
        ("culprit", "2", "is in load_batch"),
        ("victim", "0-1,3", "wait in all_reduce #4 of the default group"),
    ]
    assert edges(page) == {("0-1,3", "2", "all_reduce #4 of the default group")}
    assert [node.root for node in page.graph.nodes if node.cls == 0] == [True]
    table = page.tables[0]
    assert [column.ranks for column in table.columns] == ["2", "0-1,3"]
    row = table.rows[-1]
    assert (row.number, row.fault, row.cells[0].op, row.cells[0].differs, row.cells[1].state) == (
        "#4",
        True,
        "not issued",
        True,
        "in-flight",
    )
    arrivals = page.timeline.arrivals[0]
    assert (sorted(arrivals.ranks), arrivals.absent) == ([0, 1, 3], "2")
    assert arrivals.at[0] == 0 and arrivals.at == sorted(arrivals.at)
    assert page.stacks[0].frames[0].place == "train.py:57"
    assert "VERDICT  rank 2 never reached" in page.text


def test_who_disagrees_is_marked_and_waited_for() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for step in range(5):
            yield all_reduce(job.world, 24 if (rank, step) == (1, 3) else 32, line=20)
            yield Step()

    page = page_of(Job(4).run(program).logs())
    assert edges(page) == {
        ("0,2-3", "1", "all_reduce #4 of the default group"),
        ("1", "0,2-3", "all_reduce #4 of the default group"),
    }
    row = next(row for row in page.tables[0].rows if row.fault)
    marked = {
        column.ranks: cell.differs
        for column, cell in zip(page.tables[0].columns, row.cells, strict=True)
    }
    assert marked == {"1": True, "0,2-3": False}
    assert row.note == "shape differs"


def test_messages_have_the_order_of_issue() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for step in range(4):
            if rank == 0:
                yield recv(job.world, 1, line=11)
            elif step < 3:
                yield send(job.world, 0, line=21)
            else:
                yield Stay(30, "think")
            yield Step()

    page = page_of(Job(2).run(program).logs())
    assert edges(page) == {("0", "1", "recv #4 from rank 1")}
    assert [table.name for table in page.tables] == ["In the order of issue"]


def test_the_dead_and_those_who_left_nothing() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for step in range(4):
            if (rank, step) == (3, 2):
                yield Die(Observation(End.KILLED, signal="SIGKILL"), line=40)
            yield all_reduce(job.world, line=20)

    logs = Job(4).run(program).logs()
    assert classes(page_of(logs))[0][0:2] == ("culprit", "3")
    assert "SIGKILL" in classes(page_of(logs))[0][2]
    page = page_of(logs[:3])
    assert 3 in page.ranks.rank
    assert any(one.ranks == "3" and "record" in one.doing for one in page.classes)


@pytest.mark.parametrize("ranks", [512, 4096])
def test_many_ranks_make_a_page_of_the_same_size(ranks: int) -> None:
    few = Job(4).run(stays).logs()
    logs = [
        msgspec.structs.replace(
            few[2 if rank == 2 else 0], rank=rank, world_size=ranks, pid=1000 + rank
        )
        for rank in range(ranks)
    ]
    page = page_of(logs)
    assert len(page.classes) < 10 and len(page.timeline.lanes) <= 48 and len(page.tables) <= 7
    assert page.timeline.left_out == ranks - len(page.timeline.lanes)
    assert sum(len(lane.ops.start) for lane in page.timeline.lanes) <= 16_000
    assert len(page.ranks.rank) == ranks


def test_groups_without_a_table_are_counted() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank % 2:
            yield Stay(57, "load_batch")
        yield all_reduce(pairs[rank // 2], line=21)

    job = Job(16)
    pairs = [job.group(f"pair{rank}", (rank, rank + 1)) for rank in range(0, 16, 2)]
    tables = page_of(job.run(program).logs()).tables
    notes = [table.left_out for table in tables if "no table" in table.left_out]
    assert notes == ["2 more groups in which ranks wait have no table."]


def test_ranks_that_wait_for_many_keys_are_one_class() -> None:
    logs = [
        msgspec.structs.replace(in_store(rank, f"part-{rank}"), world_size=12) for rank in range(12)
    ]
    assert ("0-11", "wait in the store") in {one[1:] for one in classes(page_of(logs))}


def test_a_flight_recorders_dump_shows_where_a_collective_completed_and_no_time_in_flight(
    tmp_path: Path,
) -> None:
    open_ = {"state": "started", "retired": False, "time_discovered_completed_ns": None}
    behind, ahead = [entry(0), entry(1, **open_)], [entry(0), entry(1), entry(2, **open_)]
    for rank in range(4):
        (tmp_path / f"rank_{rank}").write_bytes(
            pickle.dumps(dump(behind if rank == 2 else ahead, pg_status={}), 2)
        )
    examined = examine_paths(tmp_path)
    assert examined.verdict.summary.endswith("which completed on ranks 0-1,3")
    page = verdict_page(examined)
    assert [node.title for node in page.graph.nodes if node.cls < 0] == [
        "Completed on ranks 0-1,3, but not on rank 2"
    ]
    assert {one.detail for one in page.classes} == {"float32[4,2]"}
    assert (
        not page.timeline.captured_known
        and "how long an operation has been in flight is unknown" in page.timeline.notes[0]
    )


def test_nothing_to_show() -> None:
    page = page_of([])
    assert (page.classes, page.graph.nodes, page.tables, page.timeline.lanes) == ([], [], [], [])
