"""Jobs in which recording was switched on while they ran, on each rank at another moment."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from builders import Job, Stay, Step, all_reduce, recv, send

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.ranklog import RankLog


def joined(logs: list[RankLog], ahead: dict[int, int] | None = None) -> list[RankLog]:
    """Number the collectives as the backend does, which is ``ahead`` on some ranks; messages have
    no numbers.
    """
    found = []
    for log in logs:
        later = 100 + (ahead or {}).get(log.rank, 0)
        collectives = [
            msgspec.structs.replace(
                op, sequence_number=0 if op.is_point_to_point else op.sequence_number + later
            )
            for op in log.collectives
        ]
        found.append(msgspec.structs.replace(log, joined=True, collectives=collectives))
    return found


def stuck(*, messages: bool = False) -> list[RankLog]:
    def program(job: Job, rank: int) -> Iterator[object]:
        for step in range(12):
            if rank == 1 and step == 10:
                yield Stay(57, "load_batch")
            if messages and rank > 0:
                yield recv(job.world, rank - 1, 8, line=20)
            if messages and rank < 3:
                yield send(job.world, rank + 1, 8, line=21)
            yield all_reduce(job.world, 10, line=30)
            yield all_reduce(job.world, 20, line=31)
            yield Step()

    return Job(4).run(program).logs()


def test_the_backends_numbers_serve_where_they_agree() -> None:
    verdict = diagnose_logs(joined(stuck()))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [1], [0, 2, 3])
    assert (
        "rank 1 never reached all_reduce #121" in verdict.summary and not verdict.missing_evidence
    )


def test_numbers_that_contradict_the_times_are_not_compared() -> None:
    for ahead in ({0: 1}, {1: 1}, {1: 3, 2: 3}, {3: 2}):
        verdict = diagnose_logs(joined(stuck(), ahead))
        assert (verdict.kind, verdict.culprits, verdict.confidence) == (
            "missing",
            [],
            "low",
        ), verdict.summary
        assert verdict.summary.startswith(
            "ranks 0,2-3 wait in all_reduce of the default group [0-3];"
        )
        assert verdict.missing_evidence[0].startswith(
            "The default group [0-3]: its collectives have different numbers on different ranks"
        )


def test_a_message_without_a_number_waits_for_its_peer() -> None:
    # gloo has counted the messages
    for ahead, victims in (({}, [0, 2, 3]), ({0: 10, 1: 20, 2: 20, 3: 10}, [2, 3])):
        verdict = diagnose_logs(joined(stuck(messages=True), ahead))
        assert (verdict.kind, verdict.culprits, verdict.victims) == (
            "missing",
            [1],
            victims,
        ), verdict.summary
        assert "which send belongs to which receive is not known." in verdict.missing_evidence[-1]
        assert "#0" not in verdict.summary + verdict.explanation
