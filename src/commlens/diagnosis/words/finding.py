"""Build a finding from a cause and its words: facts are copied from the cause, sentences from the
words, and the place from the case's op and line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commlens.diagnosis.causes.context import collective_of, group_of
from commlens.model.cause import AnyCause
from commlens.model.collective import Collective, Frame
from commlens.model.verdict import Finding


class Words(NamedTuple):
    """The words of a finding about its cause."""

    summary: str
    explanation: str = ""
    next_step: str = ""
    evidence: Sequence[str] = ()
    would_raise_confidence: str | None = None
    # the part of the summary about other ranks than the culprits: those that wait
    waits: str = ""
    # the next step tells already how to find the kernel of the program that failed
    finds_kernel: bool = False


def finding_of(
    cause: AnyCause, words: Words, op: Collective | None = None, frame: Frame | None = None
) -> Finding:
    """Return the finding of a cause, with the group and collective of ``op``, and the source of
    ``frame``.
    """
    return Finding(
        kind=cause.kind,
        why=cause.why,
        root_cause=cause.root_cause,
        culprits=cause.culprits,
        victims=cause.victims,
        confidence=cause.confidence,
        certain=cause.certain,
        cause=cause,
        summary=words.summary,
        explanation=words.explanation,
        next_step=words.next_step,
        evidence=[*words.evidence],
        would_raise_confidence=words.would_raise_confidence,
        group=group_of(op) if op is not None else None,
        collective=collective_of(op) if op is not None else None,
        source=frame.where if frame is not None else None,
        source_file=f"{frame.file}:{frame.line}" if frame is not None else None,
        function=frame.function if frame is not None else None,
    )
