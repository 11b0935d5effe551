"""Latent faults, which stopped nobody: findings of a kind of their own, after all others."""

from __future__ import annotations

from collections import defaultdict

from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.hazard import Hazard
from commlens.model.verdict import Finding
from commlens.text import hazard_phrase, ranks_phrase


def hazard_findings(job: JobIndex) -> list[Finding]:
    """Return one finding for each line with a latent fault. None changes the verdict."""
    by_line: dict[tuple[str, object], dict[int, Hazard]] = defaultdict(dict)
    for rank, view in sorted(job.views.items()):
        for hazard in view.log.hazards:
            by_line[hazard.what, hazard.source].setdefault(rank, hazard)
    findings = []
    for ranks in by_line.values():
        first = next(iter(ranks.values()))
        source = first.source
        findings.append(
            Finding(
                kind="hazard",
                why="user-code",
                root_cause=False,
                culprits=sorted(ranks),
                victims=[],
                confidence="high",
                summary=f"{hazard_phrase(first)} (on {ranks_phrase(ranks)})",
                source=source.where if source is not None else None,
                source_file=f"{source.file}:{source.line}" if source is not None else None,
                function=source.function if source is not None else None,
            )
        )
    return findings
