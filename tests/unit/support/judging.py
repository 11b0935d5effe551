"""Diagnoses simulated jobs, and holds the verdict to what is true of every verdict."""

from __future__ import annotations

import random

from two_sides import tell_sides_apart
from verdict_schema import hold_to_schema

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict
from commlens.reports.terminal import render


def judge(logs: list[RankLog], **options: object) -> Verdict:
    """Diagnose; hold the result to the schema, the terminal, and the order of the logs."""
    verdict = diagnose_logs(logs, **options)
    hold_to_schema(verdict)
    assert all(
        finding.confidence == "high" or finding.would_raise_confidence
        for finding in verdict.findings
    ), "no reason is given"
    shuffled = list(logs)
    random.Random(3).shuffle(shuffled)
    assert diagnose_logs(shuffled, **options) == verdict
    text = render(verdict)
    print(text)
    assert tell_sides_apart(verdict)
    assert max(map(len, text.splitlines())) <= 80
    return verdict


def blame(verdict: Verdict) -> tuple[str, str, list[int], str | None]:
    """Return the facts that most tests assert."""
    return verdict.kind, verdict.why, verdict.culprits, verdict.source
