"""Words about latent faults."""

from __future__ import annotations

from commlens.diagnosis.causes.hazards import FoundHazard
from commlens.diagnosis.words.finding import Words
from commlens.text import hazard_phrase, ranks_phrase


def words(found: FoundHazard) -> Words:
    """Return what a finding says about a latent fault."""
    return Words(f"{hazard_phrase(found.hazard)} (on {ranks_phrase(found.cause.culprits)})")
