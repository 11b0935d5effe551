"""The words about a receive whose message another one took."""

from __future__ import annotations

from builders import Job, from_any_then_from_one

from commlens.diagnosis.examine import diagnose_logs


def test_all_lines_are_named() -> None:
    finding = diagnose_logs(Job(3).run(from_any_then_from_one).logs()).findings[0]
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
