"""The page's graph of who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, Stay, Step, all_reduce
from verdict_pages import edges, page_of


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
