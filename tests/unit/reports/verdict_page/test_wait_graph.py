"""The page's graph of who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, Stay, Step, all_reduce, collective
from verdict_pages import edges, page_of

from commlens.reports.verdict_page.wait_graph import NamedOp, _edge_label


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
    assert {edge[:2] for edge in edges(page)} == {("0", "2"), ("1,3", "0"), ("1,3", "2")}
    parted = {edge.waiting: edge.label for edge in page.graph.edges if edge.parted}
    assert set(parted) == {"1", "3"} and all(
        each.startswith("all_reduce") for each in parted.values()
    )


def test_an_arrow_names_what_its_box_names_too() -> None:
    """Ranks wait in a later collective than the one that the other rank issued differently."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=10)
        if rank == 0:
            yield collective("all_gather", job.world, line=13)
        else:
            yield collective("broadcast", job.world, root=1, line=15, is_async=True)
            yield all_reduce(job.world, line=19)

    page = page_of(Job(3).run(program).logs())
    assert edges(page) == {
        ("1-2", "0", "broadcast #2 and all_reduce #3 of the default group"),
        ("0", "1-2", "all_gather #2 of the default group"),
    }
    assert [one.doing for one in page.classes if one.ranks == "1-2"] == [
        "wait in all_reduce #3 of the default group"
    ]


def test_an_arrow_counts_the_ops_of_other_groups() -> None:
    """The first and the last are of one group; the one between them is not."""
    ops: dict[NamedOp, set[int]] = {
        (4, "all_reduce #4", "dp"): {1},
        (5, "broadcast #5", "tp"): {2, 3},
        (6, "all_reduce #6", "dp"): {4},
    }
    assert _edge_label(ops) == "broadcast #5 of tp and 2 more"


def test_an_arrow_counts_messages_and_keys() -> None:
    messages: dict[NamedOp, set[int]] = {
        (number, f"recv #{number} from rank {rank}", ""): {rank + 1}
        for number, rank in ((3, 0), (4, 1), (5, 2))
    }
    assert _edge_label(messages) == "recv #5 from rank 2 and 2 more"
    keys: dict[NamedOp, set[int]] = {
        (0, "store.wait of key 'best of 3'", ""): {1, 2},
        (0, "store.wait of key 'worst of 3'", ""): {3},
    }
    assert _edge_label(keys) == "store.wait of key 'best of 3' and 1 more"


def test_an_arrow_joins_the_ops_of_a_group_with_of_in_its_name() -> None:
    ops: dict[NamedOp, set[int]] = {
        (4, "broadcast #4", "tower of experts"): {1},
        (6, "all_reduce #6", "tower of experts"): {2},
    }
    assert _edge_label(ops) == "broadcast #4 and all_reduce #6 of tower of experts"
