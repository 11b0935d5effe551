"""Words about a job in which no rank has moved for long."""

from __future__ import annotations

from commlens.diagnosis.causes.motionless import FoundMotionless
from commlens.diagnosis.words.finding import Words
from commlens.text import capital, duration, frame_phrase, ranks_and_verb, ranks_phrase

_SHOWN = 4  # places


def words(found: FoundMotionless) -> Words:
    """Return what a finding says about a job that does not move."""
    cause = found.cause
    still = dict(zip(cause.ranks, cause.still_s, strict=True))
    where = ", ".join(
        [
            f"{ranks_and_verb(ranks, 'is', 'are')} in {frame_phrase(frame)}"
            for (frame, _), ranks in found.places.items()
            if frame is not None
        ][:_SHOWN]
    )
    evidence = []
    for (_, frames), ranks in found.places.items():
        for_how_long = duration(round(min(still[rank] for rank in ranks) * 1e9))
        chain = ", called by ".join(frame_phrase(frame) for frame in frames)
        evidence.append(f"{capital(ranks_phrase(ranks))}, for {for_how_long}: {chain}.")
    return Words(
        summary=(
            f"no rank has moved for {duration(round(min(cause.still_s) * 1e9))}, and none is in a"
            f" collective{f': {where}' if where else ''}"
        ),
        next_step="find out what the ranks wait for: a lock, a file, a child process or a server",
        evidence=evidence[:_SHOWN],
        would_raise_confidence=(
            "A rank's waits outside of collectives are not recorded; `py-spy dump --native` may"
            " show what it waits for."
        ),
    )
