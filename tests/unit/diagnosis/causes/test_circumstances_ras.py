"""NCCL's RAS service as one more witness."""

from __future__ import annotations

import pytest
from builders import Job, Stay, at, training

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.health import NodeHealth, RankPlace, RasCommunicator, RasRank, RasReport
from commlens.model.verdict import Verdict

PIDS = [1000, 1001, 1002, 1003]


def verdict_with(*told: RasCommunicator, answered: bool = True) -> Verdict:
    """The verdict on a job whose rank 2 does not arrive, with what RAS tells."""
    logs = Job(4).run(training(at(2, 5, Stay(57, "load_batch")))).logs()
    report = RasReport(answered=answered, communicators=list(told))
    places = [RankPlace(log.rank, log.pid) for log in logs]
    logs[0].health = NodeHealth("n03", ranks=places, ras=report)
    return diagnose_logs(logs)


def of_world(**what: object) -> RasCommunicator:
    return RasCommunicator(name="0x1", size=4, pids=PIDS, op="AllReduce", **what)  # type: ignore[arg-type]


def named(*ranks: int) -> list[RasRank]:
    return [RasRank(rank, PIDS[rank]) for rank in ranks]


@pytest.mark.parametrize(
    ("told", "says", "sentence"),
    [
        (
            of_world(apart=True, behind=named(2)),
            "agrees",
            "agrees: rank 2 has launched fewer AllReduce operations than the others.",
        ),
        (of_world(silent=named(2)), "agrees", "agrees: rank 2 does not answer it."),
        (of_world(), "silent", "names no rank: it sees no difference between the ranks."),
        (
            of_world(apart=True, behind=named(0, 1)),
            "disagrees",
            "disagrees: ranks 0-1 have launched fewer AllReduce operations than the others. Either"
            " it or this verdict is wrong.",
        ),
        (
            # in text, RAS names only ranks that differ
            RasCommunicator(name="1", op="AllReduce", apart=True, behind=named(2)),
            "agrees",
            "agrees: rank 2 has launched fewer",
        ),
    ],
)
def test_it_agrees_disagrees_or_is_silent(told: RasCommunicator, says: str, sentence: str) -> None:
    verdict = verdict_with(told)
    assert (verdict.kind, verdict.culprits) == ("missing", [2])
    assert verdict.cause is not None and verdict.cause.ras.says == says  # type: ignore[union-attr]
    (said,) = [each for each in verdict.findings[0].evidence if "RAS" in each]
    assert said.startswith(f"NCCL's RAS service {sentence}")


@pytest.mark.parametrize(
    "told",
    [
        RasCommunicator(name="0x2", size=2, pids=PIDS[:2], apart=True, behind=named(0)),
        RasCommunicator(name="0x3", size=4, pids=[7, 8, 9, 10], apart=True),
        RasCommunicator(name="0x5", size=4, pids=[7, 8, PIDS[2], 10], apart=True, behind=named(2)),
        RasCommunicator(name="6", apart=True, behind=[RasRank(1, 8), RasRank(2, PIDS[2])]),
        RasCommunicator(name="0x4", size=4, pids=PIDS[::-1], apart=True, behind=named(1)),
    ],
    ids=[
        "a smaller group",
        "another job",
        "another job with one of the pids",
        "another job with one of the pids, in text",
        "another order",
    ],
)
def test_what_is_told_of_another_group_is_left_out(told: RasCommunicator) -> None:
    verdict = verdict_with(told)
    assert verdict.cause is not None and verdict.cause.ras is None  # type: ignore[union-attr]


def test_no_answer_is_no_witness() -> None:
    verdict = verdict_with(of_world(apart=True, behind=named(0)), answered=False)
    assert verdict.cause is not None and verdict.cause.ras is None  # type: ignore[union-attr]
