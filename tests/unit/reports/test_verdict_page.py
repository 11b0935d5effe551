"""What the verdict's page is given to show: roles, classes, the folded graph, the tables; bounded,
whatever it is made of.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from builders import MS, Die, Job, Stay, Step, all_reduce, recv, send
from flight_recorder_dumps import dump, entry

from commlens.diagnosis.api import examine_paths
from commlens.diagnosis.examine import examine_logs
from commlens.model.ranklog import End, Observation, RankLog
from commlens.reports.verdict_page import verdict_page
from commlens.reports.verdict_page.data import SourceLines, VerdictPage
from commlens.reports.verdict_page.source_lines import source_lines


def page_of(logs: list[RankLog]) -> VerdictPage:
    page = verdict_page(examine_logs(logs))
    assert msgspec.json.decode(msgspec.json.encode(page), type=VerdictPage) == page
    return page


def classes(page: VerdictPage) -> list[tuple[str, str, str]]:
    return [(one.role, one.ranks, one.doing) for one in page.classes]


def edges(page: VerdictPage) -> set[tuple[str, str, str]]:
    """Who waits for whom in what; what is no rank by its title."""

    def name(index: int) -> str:
        node = page.graph.nodes[index]
        return page.classes[node.cls].ranks if node.cls >= 0 else node.title

    return {(name(edge.source), name(edge.target), edge.label) for edge in page.graph.edges}


def stays(job: Job, rank: int) -> Iterator[object]:
    for step in range(6):
        if (rank, step) == (2, 3):
            yield Stay(57, "load_batch")
        yield all_reduce(job.world, line=20)
        yield Step()


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
    assert edges(page) == {("0,2-3", "1", "all_reduce #4 of the default group")} | {
        edge
        for edge in edges(page)
        if edge[0] == "1" and edge[1].startswith("These ranks disagree")
    }
    row = next(row for row in page.tables[0].rows if row.fault)
    marked = {
        column.ranks: cell.differs
        for column, cell in zip(page.tables[0].columns, row.cells, strict=True)
    }
    assert marked == {"1": True, "0,2-3": False}
    assert row.note == "shape differs"


def test_a_cycle_has_an_edge_each_way() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        one, two = job.group("1", range(4), "gradients"), job.group("2", range(4), "statistics")
        for step in range(5):
            order = [(two, 24), (one, 19)] if (rank, step) == (2, 3) else [(one, 19), (two, 24)]
            for group, line in order:
                yield all_reduce(group, line=line)
            yield Step()

    page = page_of(Job(4).run(program).logs())
    assert edges(page) == {
        ("2", "0-1,3", "all_reduce #4 of statistics"),
        ("0-1,3", "2", "all_reduce #4 of gradients"),
    }
    assert {table.name for table in page.tables} == {
        "statistics [0-3]",
        "gradients [0-3]",
        "In the order of issue",
    }
    # Who does not come because it waits elsewhere for the one that left its routine is not marked
    # as the odd one.
    statistics = next(table for table in page.tables if table.name.startswith("statistics"))
    assert [cell.differs for cell in statistics.rows[-1].cells] == [False, False]


def test_an_arrow_is_not_left_out_for_a_path_that_only_other_ranks_of_the_class_take() -> None:
    """Of two ranks that wait at one line, one waits for the culprit itself, and the other behind a
    third.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        first, side = rank - rank % 2, rank % 2
        row, column = (
            job.group(f"1{first}", (first, first + 1), "row"),
            job.group(f"2{side}", (side, side + 2), "column"),
        )
        for step in range(4):
            if (rank, step) == (2, 3):
                yield Stay(57, "load_batch")
            yield all_reduce(column, line=10)
            yield all_reduce(row, line=20)
            yield Step()

    page = page_of(Job(4).run(program).logs())
    by_ends = {(source, target): label for source, target, label in edges(page)}
    assert set(by_ends) == {("0", "2"), ("1,3", "0"), ("1,3", "2")}
    assert by_ends["1,3", "0"].startswith("Rank 1: all_reduce") and by_ends["1,3", "2"].startswith(
        "Rank 3: all_reduce"
    )


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


def test_records_without_times_have_tables_but_no_timeline() -> None:
    logs = Job(4).run(stays).logs()
    for log in logs:
        for op in log.collectives:
            op.announced_ns = op.entered_ns = op.returned_ns = op.done_ns = op.wait_ended_ns = 0
            op.wait_began_ns = MS if op.wait_began_ns else 0
    page = page_of(logs)
    assert page.timeline.lanes == [] and page.timeline.notes
    assert page.tables


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


class TestSourceLines:
    def script(
        self,
        folder: Path,
        text: str = "import time\n\n\ndef load():\n\ttime.sleep(9)  # </script>\n",
    ) -> Path:
        (folder / "train.py").write_text(text)
        return folder / "train.py"

    def test_the_lines_around_the_culprits(self, tmp_path: Path) -> None:
        file = self.script(
            tmp_path,
            "".join(f"line {i}\n" for i in range(1, 60)) + "def load():\n" + "x = 1\n" * 20,
        )
        found = source_lines(f"{file}:62", "load", time.time_ns())
        assert found == SourceLines(58, 62, ["line 58", "line 59", "def load():", *["x = 1"] * 6])

    def test_bounded(self, tmp_path: Path) -> None:
        file = self.script(tmp_path, "def load():\n\t</script>" + "x" * 10_000 + "\n")
        found = source_lines(f"{file}:2", "load", 0)
        assert found is not None and found.lines[0] == "def load():"
        assert found.lines[1].startswith("    </script>xx") and len(found.lines[1]) < 200

    def test_no_file_that_is_not_the_one_that_ran(self, tmp_path: Path) -> None:
        file = self.script(tmp_path)
        now = time.time_ns()
        assert source_lines(f"{file}:5", "load", now) is not None
        assert source_lines(f"{file}:5", "load", now - 3_600_000_000_000) is None, "changed since"
        assert source_lines(f"{file}:5", "save", now) is None, "has no such function"
        assert source_lines(f"{file}:50", "load", now) is None, "is shorter"
        assert source_lines("train.py:5", "load", now) is None, "a folder that is not known"
        (tmp_path / "secret.txt").write_text("def load(): 1\n")
        assert source_lines(f"{tmp_path / 'secret.txt'}:1", "load", now) is None
        os.mkfifo(tmp_path / "pipe.py")
        assert source_lines(f"{tmp_path / 'pipe.py'}:1", "load", now) is None
        assert source_lines("", "", now) is None


def test_the_timeline_of_a_job_with_a_single_collective_shows_a_span_in_which_times_differ() -> (
    None
):
    def program(job: Job, rank: int) -> Iterator[object]:
        yield Stay(20, "load") if rank else all_reduce(job.world, line=10)

    begin, end = page_of(Job(2).run(program).logs()).timeline.window  # type: ignore[arg-type]
    assert end - begin >= 300, "microseconds"
