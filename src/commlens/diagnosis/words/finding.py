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


def finding_of(cause: AnyCause, words: Words) -> Finding:
    """Return the finding of a cause. :func:`locate` adds its group, collective and source line."""
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
    )


def locate(finding: Finding, op: Collective | None, frame: Frame | None) -> Finding:
    """Fill in a finding's group and collective from ``op``, and its source from ``frame``."""
    if op is not None:
        finding.group, finding.collective = group_of(op), collective_of(op)
    if frame is not None:
        finding.source, finding.source_file, finding.function = (
            frame.where,
            f"{frame.file}:{frame.line}",
            frame.function,
        )
    return finding
