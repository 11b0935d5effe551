"""The verdict on what other tools recorded, from the extracts of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.conclusion import conclude, examine_logs
from commlens.diagnosis.dump_index import build_world
from commlens.diagnosis.examined import ExaminedJob
from commlens.diagnosis.extract import Extract
from commlens.diagnosis.select_dumps import choose_extracts
from commlens.model.verdict import Finding, Verdict
from commlens.text import ranks_phrase


def diagnose_extracts(extracts: Sequence[Extract], *, problems: Sequence[str] = (), stalled_after_s: float = 1.0) -> Verdict:
    """Find the fault of a job and the ranks to blame. The arguments are those of :func:`examine_extracts`."""
    return examine_extracts(extracts, problems=problems, stalled_after_s=stalled_after_s).verdict


def examine_extracts(extracts: Sequence[Extract], *, problems: Sequence[str] = (), stalled_after_s: float = 1.0) -> ExaminedJob:
    """Find the fault of a job and the ranks to blame, and keep the evidence.

    Args:
        extracts: one of each file.
        problems: sentences on unreadable evidence.
        stalled_after_s: a collective in flight for less than this in a job that runs is not stuck.
    """
    unplaced = sorted(
        {f"{ranks_phrase([found.rank])}: {text}" if found.rank >= 0 else text for found in extracts for text in found.troubles}
    )
    waited = sorted({found.rank for found in extracts if found.troubles and found.rank >= 0})
    chosen, notes = choose_extracts(extracts)
    missing = [*problems, *notes]
    if not chosen and not unplaced:
        missing.append("No rank's dump could be read.")
        empty = Verdict(summary="there is nothing to diagnose", confidence="low", missing_evidence=missing)
        return examine_logs([])._replace(verdict=empty)
    examined = conclude(build_world(chosen, stalled_after_s), missing) if chosen else examine_logs([])
    verdict = examined.verdict if chosen else Verdict(missing_evidence=missing)
    if unplaced and not verdict.is_fault:
        verdict = Verdict.from_findings([_timed_out(unplaced, waited)], missing_evidence=missing, looked_at=verdict.looked_at)
    elif unplaced:
        verdict.missing_evidence += [f"{text}." for text in unplaced]
    return examined._replace(verdict=verdict)


def _timed_out(told: Sequence[str], waited: list[int]) -> Finding:
    """What logs tell of a hang when they do not tell in which group it was: that there was one, and nothing of who caused it."""
    return Finding(
        kind="missing",
        why="unknown",
        root_cause=True,
        culprits=[],
        victims=waited,
        confidence="low",
        summary=f"{told[0]}; the ranks that it waited for are unknown",
        next_step="diagnose the logs of all ranks, or the Flight Recorder's dumps (by default ~/.cache/torch/comm_lib_trace_rank_* or "
        "/tmp/nccl_trace_rank_*)",
        evidence=[f"{text}." for text in told[1:]],
        would_raise_confidence="The last collectives that each rank enqueued and completed in that group would show the missing ranks.",
    )
