"""Draw the verdict from the ranks' records: index, alignment, wait-for graph, findings. No torch, no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.alignment import align_records
from commlens.diagnosis.examined import ExaminedJob
from commlens.diagnosis.findings.find_all import find_all
from commlens.diagnosis.index import World, build
from commlens.diagnosis.select_job import choose
from commlens.diagnosis.wait_graph import Builder
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Finding, Verdict
from commlens.text import capital, count, ranks_phrase


def diagnose_logs(logs: Sequence[RankLog], *, problems: Sequence[str] = (), stalled_after_s: float = 1.0) -> Verdict:
    """Find the fault of a job and the ranks to blame. The arguments are those of :func:`examine_logs`."""
    return examine_logs(logs, problems=problems, stalled_after_s=stalled_after_s).verdict


def examine_logs(logs: Sequence[RankLog], *, problems: Sequence[str] = (), stalled_after_s: float = 1.0) -> ExaminedJob:
    """Find the fault of a job and the ranks to blame, and keep the evidence.

    A pure function; the order of the logs does not matter.

    Args:
        logs: the ranks' records of one job. Of several jobs, the one with most ranks is diagnosed.
        problems: sentences on unreadable evidence; they become part of the verdict's missing evidence.
        stalled_after_s: a collective in flight for less than this in a process that runs is not stuck.
    """
    chosen, notes = choose(logs)
    examined = conclude(build(chosen, stalled_after_s), [*problems, *notes])
    if chosen:
        return examined
    missing = [*problems, *notes, "No rank's log could be read."]
    return examined._replace(verdict=Verdict(summary="there is nothing to diagnose", confidence="low", missing_evidence=missing))


def conclude(world: World, missing: list[str]) -> ExaminedJob:
    """From the indexed ranks to the verdict.

    Args:
        world: the ranks of one job.
        missing: what could not be known so far, in sentences.
    """
    mismatches = align_records(world)
    graph = Builder(world, mismatches).build()
    findings = find_all(world, mismatches, graph)
    missing += _not_known(world)
    looked_at = _looked_at(world)
    if findings:
        verdict = Verdict.from_findings(findings, missing_evidence=missing, looked_at=looked_at)
    else:
        verdict = _healthy(world, missing, looked_at)
    return ExaminedJob(verdict, world, mismatches, graph)


def _healthy(world: World, missing: list[str], looked_at: str) -> Verdict:
    everybody = len(world.views) == world.size
    known = "all collectives agree and no rank waits" if any(v.history for v in world.views.values()) else "no collective was recorded"
    summary = f"nothing is wrong: {known}" if everybody else f"nothing is wrong in what {ranks_phrase(world.views)} recorded"
    if world.moving:
        summary = "nothing is wrong: the job was running when it was dumped, and its collectives complete"
    ended = [rank for rank, view in world.views.items() if view.exit.kind == "clean"] if not world.foreign else []
    explanation = f"{capital(ranks_phrase(ended))} finished." if ended else ""
    finding = Finding(
        kind="healthy", why="unknown", root_cause=False, culprits=[], victims=[],
        confidence="high" if everybody else "medium", summary=summary, explanation=explanation,
    )  # fmt: skip
    verdict = Verdict.from_findings([finding], missing_evidence=missing, looked_at=looked_at)
    verdict.findings = []
    return verdict


def _looked_at(world: World) -> str:
    total = sum(len(view.history) for view in world.views.values())
    ranks = count(len(world.views), "rank")
    of = f" of {world.size}" if world.size != len(world.views) else ""
    unseen = sorted({text.rstrip(".").removesuffix(" are not seen") for view in world.views.values() for text in view.log.coverage})
    without = f"; not recorded: {'; '.join(unseen)}" if unseen else ""
    return f"{ranks}{of}, {count(total, 'record')} on {count(len(world.channels), 'channel')}{without}"


def _not_known(world: World) -> list[str]:
    """What could not be known from these logs, in sentences."""
    notes: list[str] = []
    if world.no_record:
        notes.append(f"{capital(ranks_phrase(world.no_record))} of {world.size} left no record.")
    if world.elsewhere:
        hosts = sorted({view.log.host for view in world.views.values() if view.log.host})
        of = f" of {', '.join(hosts[:4])}" if hosts else ""
        notes.append(
            f"There are no records of {ranks_phrase(world.elsewhere)} of {world.size}, which probably run on another node: "
            f"only those{of} are here."
        )
    by_text: dict[str, list[int]] = {}
    for rank, view in world.views.items():
        log = view.log
        for text in log.problems:
            by_text.setdefault(text.rstrip("."), []).append(rank)
        if log.issued > len(view.history) and not log.problems:
            dropped = log.issued - len(view.history)
            by_text.setdefault(f"the oldest {count(dropped, 'record')} had been overwritten", []).append(rank)
    for text, ranks in by_text.items():
        notes.append(f"{capital(ranks_phrase(ranks))}: {text}.")
    return notes
