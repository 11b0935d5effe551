"""The verdict on what other tools recorded, from the extracts of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnose import conclude
from commlens.diagnose.extract import Extract
from commlens.diagnose.foreign import build_world
from commlens.diagnose.whose import choose_extracts
from commlens.diagnose.world import World
from commlens.model.verdict import Verdict


def diagnose_extracts(extracts: Sequence[Extract], *, problems: Sequence[str] = (), stalled_after_s: float = 1.0) -> Verdict:
    """Say what is wrong with a job, and who did it.

    Args:
        extracts: one of each file.
        problems: what could not be read, in sentences.
        stalled_after_s: a collective in flight for less than this in a job that runs is not stuck.
    """
    return examine_extracts(extracts, problems=problems, stalled_after_s=stalled_after_s)[0]


def examine_extracts(
    extracts: Sequence[Extract], *, problems: Sequence[str] = (), stalled_after_s: float = 1.0
) -> tuple[Verdict, World | None]:
    """The same, with the ranks as the verdict saw them; None where there are none."""
    chosen, notes = choose_extracts(extracts)
    missing = [*problems, *notes]
    if not chosen:
        verdict = Verdict(
            summary="there is nothing to diagnose", confidence="low", missing_evidence=[*missing, "No rank's dump could be read."]
        )
        return verdict, None
    world = build_world(chosen, stalled_after_s)
    return conclude(world, missing), world
