"""Words about a job in which no fault shows."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.index.job_index import JobIndex
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.told_by_logs import LOOK_AT_MORE
from commlens.model.cause import NoFault
from commlens.model.verdict import Verdict
from commlens.text import capital, count, joined, ranks_phrase

_LOGS_NAMED = 3


def words(job: JobIndex, cause: NoFault) -> Words:
    """Return what a verdict says about a job in which no fault shows."""
    finished = f"{capital(ranks_phrase(cause.finished))} finished." if cause.finished else ""
    return Words(
        summary=_summary(job, cause),
        explanation=finished,
        next_step=LOOK_AT_MORE if job.only_logs else "",
    )


def _summary(job: JobIndex, cause: NoFault) -> str:
    ranks = ranks_phrase(cause.ranks)
    match cause.state:
        case "unreadable":
            return f"nothing can be said: no record of {ranks} is readable"
        case "running":
            return (
                "nothing is wrong: the job was running when it was dumped, and its collectives"
                " complete"
            )
        case "logs-tell-none":
            return f"no line tells a fault of {ranks}"
        case "newest-unreadable":
            cut = ranks_phrase(cause.newest_unreadable)
            return f"no fault shows, but the newest records of {cut} are unreadable"
        case "files-unreadable":
            files = count(cause.files_unreadable, "file")
            return f"no fault shows in what {ranks} recorded, but {files} could not be read"
        case "part-agrees":
            return f"nothing is wrong in what {ranks} recorded"
        case "all-agree":
            recorded = any(view.history for view in job.views.values())
            agree = "all collectives agree and no rank waits"
            return f"nothing is wrong: {agree if recorded else 'no collective was recorded'}"


def nothing_to_diagnose(missing: list[str]) -> Verdict:
    """Return the verdict on a job of which no rank's records are readable."""
    return Verdict(
        kind="undetermined",
        summary="there is nothing to diagnose",
        confidence="low",
        missing_evidence=missing,
    )


def nothing_told(logs: Sequence[str], missing: list[str]) -> Verdict:
    """Return the verdict on logs of a distributed job of which no line tells a rank or a fault."""
    return Verdict(
        kind="undetermined",
        summary=f"no line of {joined(logs[:_LOGS_NAMED])} tells a fault or a rank",
        confidence="low",
        next_step=LOOK_AT_MORE,
        missing_evidence=missing,
        looked_at=count(len(logs), "text log"),
    )
