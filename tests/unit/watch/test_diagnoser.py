"""Which evidence the diagnosis of a running job reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, Stay, all_reduce

from commlens.config import Settings
from commlens.diagnosis.fold.alike import Alike, AlikeRanks
from commlens.model.ranklog import RankLog
from commlens.watch.diagnoser import Diagnoser
from commlens.watch.evidence import Collected
from commlens.watch.nodes.beat import Beat
from commlens.watch.nodes.known_nodes import Lost


class FewOrAll:
    """The evidence of a job of which some ranks wait like others."""

    def __init__(self, logs: list[RankLog], few: list[int], classes: list[Alike]) -> None:
        self.vanished: list[Lost] = []
        self.lost: list[Lost] = []
        self.read: list[str] = []
        self._logs, self._few, self._classes = logs, few, classes

    def collect_few(self) -> Collected:
        self.read.append("few")
        logs = [self._logs[rank] for rank in self._few]
        return self._lacking_nodes(Collected(logs, alike=AlikeRanks(self._classes)))

    def collect(self) -> Collected:
        self.read.append("all")
        return self._lacking_nodes(Collected(self._logs))

    def _lacking_nodes(self, found: Collected) -> Collected:
        found.lost, found.vanished = self.lost, self.vanished
        return found


def few_or_all(stay: set[int], few: list[int]) -> FewOrAll:
    """Return the evidence of eight ranks, of which some stay away from a collective, and a few are
    examined.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, 8, line=10)
        if rank in stay:
            yield Stay(57, "load_batch")
        yield all_reduce(job.world, 8, line=10)

    classes = [
        Alike(frozenset(ranks & set(few)), frozenset(ranks - set(few)))
        for ranks in (stay, set(range(8)) - stay)
    ]
    return FewOrAll(Job(8).run(program).logs(), few, classes)


@pytest.mark.parametrize("vanished", [False, True])
def test_all_ranks_are_read_where_the_awaited_one_is_on_a_node_that_is_lost(
    vanished: bool,
) -> None:
    evidence = few_or_all({3}, [0, 1, 3])
    evidence.lost = [Lost(Beat(1, "b", [3], world_size=8), 6.0, True)]
    evidence.vanished = evidence.lost if vanished else []
    diagnoser = Diagnoser(evidence, Settings())  # type: ignore[arg-type]
    diagnoser.diagnose(stands_still=True)
    assert evidence.read == ["few", "all"]


@pytest.mark.parametrize(
    ("stay", "few", "stands_still", "read"),
    [
        pytest.param({3}, [0, 1, 3], True, ["few"], id="the-one-awaited-was-examined"),
        pytest.param({1, 3}, [0, 1], True, ["few", "all"], id="it-stands-for-another"),
        pytest.param({3}, [0, 1, 3], False, ["all"], id="the-job-ends"),
    ],
)
def test_all_ranks_are_read_where_a_few_do_not_tell_what_is_wrong_with_all(
    stay: set[int], few: list[int], stands_still: bool, read: list[str]
) -> None:
    evidence = few_or_all(stay, few)
    diagnoser = Diagnoser(evidence, Settings())  # type: ignore[arg-type]
    verdict = diagnoser.diagnose(stands_still=stands_still)
    assert evidence.read == read
    assert verdict.culprits == sorted(stay)
    assert verdict.victims == sorted(set(range(8)) - stay)
