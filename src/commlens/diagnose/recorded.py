"""The verdict on what other tools recorded, from the extracts of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnose import conclude
from commlens.diagnose.extract import Extract
from commlens.diagnose.foreign import build_world
from commlens.model.verdict import Verdict


def diagnose_extracts(extracts: Sequence[Extract], *, problems: Sequence[str] = (), stalled_after_s: float = 1.0) -> Verdict:
    """Say what is wrong with a job, and who did it.

    Args:
        extracts: one of each file.
        problems: what could not be read, in sentences.
        stalled_after_s: a collective in flight for less than this in a job that runs is not stuck.
    """
    missing = list(problems)
    chosen = {found.rank: found for found in extracts if found.rank >= 0}
    if not chosen:
        return Verdict(
            summary="there is nothing to diagnose", confidence="low", missing_evidence=[*missing, "No rank's dump could be read."]
        )
    return conclude(build_world(list(chosen.values()), stalled_after_s), missing)
