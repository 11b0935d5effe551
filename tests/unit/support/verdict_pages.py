"""Takes from the page of a verdict what tests compare."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from builders import Job, Stay, Step, all_reduce

from commlens.diagnosis.examine import examine_logs
from commlens.model.ranklog import RankLog
from commlens.reports.verdict_page import verdict_page
from commlens.reports.verdict_page.data import VerdictPage


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
