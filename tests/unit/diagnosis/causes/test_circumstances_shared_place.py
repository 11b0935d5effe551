"""The place that the affected ranks share, and no other rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import builders
import pytest
from builders import Die, Job, Step, all_reduce, training
from goldens import hold
from incidents import CAUSES, PER_NODE, RANKS, tell

from commlens.diagnosis.causes.circumstances import Affected, shared_place
from commlens.diagnosis.examine import examine_logs, straggler_verdict
from commlens.diagnosis.fold.alike import Alike, AlikeRanks
from commlens.diagnosis.index.nodes import Whereabouts
from commlens.model.cause import Dead, OfHardware, SharedPlace
from commlens.model.collective import State
from commlens.model.health import NodeHealth, RankPlace
from commlens.model.ranklog import End, Observation, RankLog
from commlens.model.topology import HostPlace, Inventory
from commlens.model.verdict import Verdict
from commlens.speed.pace import SlowRanks

LEAVES = Inventory(
    {f"n{node}": HostPlace(leaf=f"leaf-{node // 2}", rack=f"r{node // 4}") for node in range(8)}
)


def cluster(hosts: int, per_host: int) -> dict[int, Whereabouts]:
    """Two hosts on each leaf, four in each rack, and an adapter for two GPUs."""
    return {
        rank: Whereabouts(
            f"n{host}",
            f"leaf-{host // 2}",
            f"r{host // 4}",
            str(gpu // 2),
            str(gpu),
            f"mlx5_{gpu // 2}",
        )
        for rank in range(hosts * per_host)
        for host, gpu in [divmod(rank, per_host)]
    }


def shared(bad: Sequence[int], hosts: int = 8, per_host: int = 4) -> SharedPlace | None:
    where = cluster(hosts, per_host)
    return shared_place(Affected(bad, where), where)


@pytest.mark.parametrize(
    ("bad", "kind", "name"),
    [
        pytest.param(range(4, 8), "host", "n1", id="all ranks of a host"),
        pytest.param(range(8, 16), "leaf", "leaf-1", id="both hosts of a leaf"),
        pytest.param(range(16), "rack", "r0", id="all hosts of a rack"),
        pytest.param([r for r in range(32) if r % 4 > 1], "rail", "1", id="a rail"),
        pytest.param(range(3, 32, 4), "gpu", "3", id="a GPU's index"),
    ],
)
def test_the_smallest_place_that_only_they_share(bad: Sequence[int], kind: str, name: str):
    found = shared(bad)
    assert found is not None
    assert (found.kind, found.name, found.ranks, found.others) == (
        kind,
        name,
        list(bad),
        32 - len(bad),
    )


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param([5], id="one rank"),
        pytest.param([4, 5, 6], id="a rank of the host is well"),
        pytest.param([3, 7], id="ranks of the GPU's index are well"),
        pytest.param([4, 5, 6, 7, 9], id="one is elsewhere"),
        pytest.param(range(32), id="all ranks"),
    ],
)
def test_no_place_is_named_that_others_share_or_some_do_not(bad: Sequence[int]):
    assert shared(bad) is None


def test_a_rank_whose_place_is_not_known_leaves_it_open():
    where = cluster(2, 4)
    where[5] = Whereabouts()
    assert shared_place(Affected([4, 5, 6, 7], where), where) is None
    del where[5]
    assert shared_place(Affected([4, 5, 6, 7], [0, 1]), where) is None


def test_the_chance_counts_hosts_where_whole_hosts_are_affected():
    whole, leaf = shared(range(8), hosts=4), shared([0, 1, 2, 3], hosts=2)
    assert whole is not None and leaf is not None
    assert whole.kind == "leaf" and whole.chance == pytest.approx(2 / 6, abs=1e-4)
    assert leaf.kind == "host" and leaf.chance == pytest.approx(2 / 70, abs=1e-4)


# --- in verdicts


def place_of(verdict: Verdict) -> tuple[str, str, list[int]] | None:
    cause = verdict.cause
    place = cause.place if isinstance(cause, OfHardware) else None
    return (place.kind, place.name, place.ranks) if place is not None else None


def on_nodes(logs: list[RankLog], per_node: int) -> list[RankLog]:
    for log in logs:
        node, gpu = divmod(log.rank, per_node)
        log.host, log.local_rank = f"n{node}", gpu
        if not gpu:
            ranks = [
                RankPlace(log.rank + i, 0, f"0000:1{i}:00.0", False, i, f"mlx5_{i}", str(i))
                for i in range(per_node)
            ]
            log.health = NodeHealth(log.host, taken_ns=log.captured_ns, ranks=ranks)
    return logs


def slow_logs(ranks: int, per_node: int) -> list[RankLog]:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, 100, line=20)
            yield Step()

    return on_nodes(Job(ranks).run(program).logs(), per_node)


def test_slow_ranks_on_one_rail():
    logs = slow_logs(32, 8)
    verdict = straggler_verdict(SlowRanks([3, 11, 19, 27], 0.4, 12, 1.0, 0.0, 0.0), logs)
    assert place_of(verdict) == ("rail", "3", [3, 11, 19, 27])
    hold("shared-place/slow-on-one-rail", verdict)


def test_slow_ranks_on_several_rails():
    logs = slow_logs(16, 8)
    verdict = straggler_verdict(SlowRanks([3, 10], 0.4, 12, 1.0, 0.0, 0.0), logs)
    assert place_of(verdict) is None


def dead_logs(dead: Sequence[int]) -> list[RankLog]:
    def fault(job: Job, rank: int, step: int) -> Iterator[object] | None:
        if rank in dead and step == 5:
            return iter([Die(Observation(End.KILLED, signal="SIGKILL"), line=12)])
        return None

    return on_nodes(Job(16).run(training(fault)).logs(), 4)


def test_dead_ranks_on_one_leaf():
    verdict = examine_logs(dead_logs(range(8)), inventory=LEAVES).verdict
    assert isinstance(verdict.cause, Dead) and verdict.culprits == list(range(8))
    assert place_of(verdict) == ("leaf", "leaf-0", list(range(8)))


def test_no_place_where_the_places_of_some_ranks_are_not_known():
    """Of ranks in one state some are examined: the others may be anywhere."""
    alike = AlikeRanks(
        Alike(frozenset(range(first, first + 4)), frozenset(range(first + 4, first + 8)))
        for first in (0, 8)
    )
    logs = [log for log in dead_logs(range(8)) if log.rank % 8 < 4]
    verdict = examine_logs(logs, inventory=LEAVES, alike=alike).verdict
    assert verdict.kind == "dead" and place_of(verdict) is None


def test_two_nodes_on_one_leaf_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Four nodes; the nodes 2 and 3 are on one leaf."""
    monkeypatch.setattr(builders, "MS", builders.S // 2)
    incident = next(each for each in CAUSES if each.name == "two nodes on one leaf cut")
    logs = Job(RANKS).run(training(lambda *_: None)).logs()
    for log in logs:
        log.host, log.local_rank = f"n{log.rank // PER_NODE}", log.rank % PER_NODE
        del log.collectives[11:]
        log.issued = 11
        last = log.collectives[-1]
        last.state, last.done_ns, last.wait_ended_ns = State.ISSUED, 0, 0
        log.closed = False
        log.observation = Observation(End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False)
    stalled_ns = max(log.collectives[-1].announced_ns for log in logs)
    tell(incident, logs, stalled_ns, max(log.captured_ns for log in logs), tmp_path)
    leaves = {"n0": "leaf-0", "n1": "leaf-1", "n2": "leaf-1", "n3": "leaf-2"}
    inventory = Inventory({host: HostPlace(leaf) for host, leaf in leaves.items()})
    verdict = examine_logs(logs, inventory=inventory).verdict
    assert verdict.culprits == [2, 3, 4, 5]
    assert place_of(verdict) == ("leaf", "leaf-1", [2, 3, 4, 5])
    hold("shared-place/two-nodes-on-one-leaf-cut", verdict)
    inventory.hosts["n3"] = HostPlace("leaf-1")  # type: ignore[index]
    assert place_of(examine_logs(logs, inventory=inventory).verdict) is None, "n3 is well"
