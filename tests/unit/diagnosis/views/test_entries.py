"""Entries around a fault, side by side: aligned, one column for all ranks that did the same, on one
screen.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from builders import Job, Stay, Step, all_reduce, at, recv, send, training

from commlens.diagnosis.examine import diagnose_logs, examine_logs
from commlens.diagnosis.views.entries import (
    EntrySelection,
    collect_entries,
    lay_out,
    lay_out_groups,
    read_entries,
    select_entries,
    select_group,
)
from commlens.formats.rank_log_columns import columns_from_log
from commlens.model.entries import EntryTable
from commlens.model.ranklog import RankLog
from commlens.reports.entries_terminal import print_entries, room


def table_of(
    logs: Sequence[RankLog],
    selection: EntrySelection | None = None,
    *,
    rows: int = 14,
) -> EntryTable:
    chosen = selection or select_entries(diagnose_logs(logs))
    return lay_out(
        [found for log in logs if (found := collect_entries(columns_from_log(log), chosen))],
        chosen,
        rows=rows,
        columns=3,
    )


def tables_of(
    logs: Sequence[RankLog], group: str, only: set[int] | None = None
) -> list[EntryTable]:
    examined = examine_logs(logs)
    selections = select_group(examined.job, group, select_entries(examined.verdict, only))
    return lay_out_groups(
        read_entries(examined.job, [], selections), selections, rows=14, columns=3
    )


def printed(table: EntryTable, *, stacks: bool = False, width: int = 100) -> list[str]:
    out = io.StringIO()
    print_entries(table, stacks=stacks, width=width, file=out)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return lines


def stuck(ranks: int, culprit: int) -> list[RankLog]:
    return Job(ranks).run(training(at(culprit, 5, Stay(57, "load_batch")))).logs()


def test_the_culprit_is_next_to_the_waiting_ranks() -> None:
    lines = printed(table_of(stuck(4, 2)))
    assert lines[0] == "Entries of the default group [0-3], by number: 4 ranks in 2 columns"
    assert lines[2].split() == ["rank", "2", "ranks", "0-1,3"]
    assert lines[3].split() == ["culprit", "waiting"]
    assert lines[-2].split() == [
        ">",
        "11",
        "all_reduce",
        "float32[100]",
        "SUM",
        "not",
        "issued",
        "in",
        "flight",
    ]
    assert lines[-1].split() == ["train.py:20", "step"]


def test_only_differing_tensors_and_lines_are_repeated() -> None:
    lines = printed(
        table_of(
            Job(4).run(training(at(2, 5, lambda job: all_reduce(job.world, 50, line=21)))).logs()
        )
    )
    assert "float32[50] SUM, in flight" in lines[-2]
    assert "train.py:21 step" in lines[-1]


def test_stacks_are_shown_once() -> None:
    lines = printed(table_of(stuck(4, 2)), stacks=True)
    assert lines.count("[1]") == 1
    assert "    /home/me/train.py:20 step" in lines


def test_many_ranks_fit_on_one_screen() -> None:
    rows, columns, width = room(100, 24)
    logs = stuck(8, 2)
    like = [
        found
        for log in logs
        if (found := collect_entries(columns_from_log(log), select_entries(diagnose_logs(logs))))
    ]
    several = []
    for rank in range(4096):
        one = like[2 if rank == 1234 else 0]
        copy = type(one)(rank, one.group, dict(one.cells), one.first, one.elsewhere)
        if rank % 600 == 7:  # seven stragglers, each in another place
            copy.cells = {
                number: cell for number, cell in copy.cells.items() if number < 11 - rank // 600
            }
        several.append(copy)
    selection = EntrySelection("0", tuple(range(4096)), 11, culprits=(1234,), kind="missing")
    lines = printed(lay_out(several, selection, rows=rows, columns=columns), width=width)
    assert len(lines) <= 24
    assert "rank 1234" in lines[2]
    assert "more columns are not shown" in lines[-1]


def test_a_window_around_a_fault_in_the_middle() -> None:
    logs = Job(4).run(training(lambda *_: None, steps=30)).logs()
    table = table_of(logs, EntrySelection("0", (0, 1, 2, 3), 20), rows=9)
    assert (table.numbers, table.fault) == ([15, 16, 17, 18, 19, 20, 21, 22, 23], 20)


def test_a_healthy_job_shows_its_newest_entries() -> None:
    table = table_of(Job(4).run(training(lambda *_: None)).logs(), rows=3)
    assert (table.numbers, table.fault, len(table.columns)) == ([14, 15, 16], 0, 1)
    assert "4 ranks, which all did the same" in printed(table)[0]


def test_an_overwritten_entry_is_not_reported_as_not_issued() -> None:
    logs = stuck(4, 2)
    logs[1].collectives = logs[1].collectives[5:]
    text = "\n".join(printed(table_of(logs)))
    assert "not kept" in text
    assert text.count("not issued") == 1


def test_messages_are_in_each_ranks_own_order() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(4):
            yield send(job.world, (rank + 1) % 4, 10, line=5)
            yield recv(job.world, (rank + (1 if (rank, i) == (2, 3) else 3)) % 4, 10, line=6)

    table = table_of(Job(4).run(program).logs())
    assert table.messages
    lines = printed(table)
    assert any("recv from 3 in flight" in line for line in lines)


def test_messages_that_a_rank_never_issued_are_not_counted_as_overwritten() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(2 if rank < 2 else 5):
            yield (
                send(job.world, rank ^ 1, 10, line=5)
                if rank % 2
                else recv(job.world, rank ^ 1, 10, line=6)
            )

    table = table_of(Job(4).run(program).logs(), EntrySelection("0", (0, 1, 2, 3), messages=True))
    assert len(table.numbers) == 5
    fewer = next(column for column in table.columns if column.ranks == [0])
    assert [cell is None for cell in fewer.cells] == [True, True, True, False, False]
    assert not any(fewer.forgotten)


def test_ranks_and_groups_can_be_chosen() -> None:
    logs = stuck(4, 2)
    verdict = diagnose_logs(logs)
    assert [
        column.ranks for column in table_of(logs, select_entries(verdict, only={0, 2})).columns
    ] == [[2], [0]]
    assert [table.fault for table in tables_of(logs, "default_pg")] == [11]
    assert tables_of(logs, "other") == []


def test_all_groups_of_a_name_are_shown_with_their_messages() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        row = job.group(str(1 + rank // 2), (rank // 2 * 2, rank // 2 * 2 + 1), "tp")
        yield all_reduce(job.world, 8, line=20)
        yield all_reduce(row, line=30)
        if rank >= 2:
            yield send(row, 3, 10, line=5) if rank == 2 else recv(row, 2, 10, line=6)
        yield all_reduce(row, line=31) if rank != 3 else Stay(57, "load_batch")

    tables = tables_of(Job(4).run(program).logs(), "tp")
    assert [(table.group, table.messages) for table in tables] == [
        ("group tp [2-3]", False),
        ("group tp [2-3]", True),
        ("group tp [0-1]", False),
    ]
    assert tables[0].fault == 2 and len(tables[2].numbers) == 2
    (only,) = tables_of(Job(4).run(program).logs(), "tp", {0})
    assert only.group == "group tp [0-1]"


def test_ops_in_flight_on_other_groups() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        pair = job.group("3", (0, 1), "tp")
        for i in range(3):
            yield all_reduce(job.world, 8, line=20)
            if rank < 2 and not (rank == 1 and i == 2):
                yield all_reduce(pair, line=30)
            yield Step()

    logs = Job(4).run(program).logs()
    selection = EntrySelection("0", (0, 1, 2, 3), 4, culprits=(1,), kind="missing")
    assert any(
        line == "Elsewhere, rank 0: all_reduce #3 of group tp [0-1], in flight"
        for line in printed(table_of(logs, selection))
    )
