"""Latent faults, which stopped nobody: causes of a kind of their own, after all others."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.cause import LatentFault
from commlens.model.collective import Frame
from commlens.model.hazard import Hazard


@dataclass
class FoundHazard:
    """A latent fault of a line, and the evidence."""

    cause: LatentFault
    hazard: Hazard  # of the first of the ranks


def find_hazards(job: JobIndex) -> list[FoundHazard]:
    """Return the latent faults, one for each line or pair of lines. None changes the verdict."""
    by_line: dict[tuple[str, object, object], dict[int, Hazard]] = defaultdict(dict)
    for rank, view in sorted(job.views.items()):
        for hazard in view.log.hazards:
            by_line[hazard.lines].setdefault(rank, hazard)
    return [_of_line(ranks) for ranks in by_line.values()]


def _of_line(ranks: dict[int, Hazard]) -> FoundHazard:
    first = next(iter(ranks.values()))
    touch = first.touch
    cause = LatentFault(
        kind="hazard",
        why="user-code",
        root_cause=False,
        culprits=sorted(ranks),
        blamed_by="arguments",
        confidence="high",
        what=first.what,
        op=first.op,
        times=first.times,
        source=_where(first.source),
        touched_by=touch.op if touch is not None else None,
        touched_at=_where(touch.source) if touch is not None else None,
        access=touch.access if touch is not None else None,
        operand=touch.operand if touch is not None else None,
        tensor=touch.tensor if touch is not None else None,
    )
    return FoundHazard(cause, first)


def _where(frame: Frame | None) -> str | None:
    return frame.where if frame is not None else None
