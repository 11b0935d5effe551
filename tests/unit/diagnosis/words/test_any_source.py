"""The words about a receive whose message another one took."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, all_reduce, recv, send

from commlens.diagnosis.examine import diagnose_logs


def test_all_lines_are_named() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        if rank == 0:
            yield recv(job.world, None, line=10)
            yield recv(job.world, 1, line=11)
        else:
            yield send(job.world, 0, line=20 + rank)
        yield all_reduce(job.world, line=30)

    finding = diagnose_logs(Job(3).run(program).logs()).findings[0]
    assert finding.summary == (
        "rank 0 waits for a message from rank 1 at train.py:11 step, but its receive from any"
        " source at train.py:10 step took that message"
    )
    assert finding.explanation == (
        "Rank 1 sent it at train.py:21 step. Rank 2 sent one, too, at train.py:22 step, which rank"
        " 0 does not receive. Nothing orders the two messages: the receive from any source may"
        " take either. Ranks 1-2 wait behind it."
    )
    assert finding.next_step.startswith("name the sender at train.py:10 step, use another tag")
    assert finding.would_raise_confidence == (
        "It is not known whether rank 1 should have sent another message."
    )
