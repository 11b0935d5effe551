"""Ranks that the errors of others name: torch compares some things itself, and raises on every
rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.dead import is_absorbed
from commlens.diagnosis.graph.wait_graph import Node
from commlens.matching.error_claims import Claim, claim_of
from commlens.model.cause import ErrorReport, Kind, Side, ToldByErrors
from commlens.model.collective import Frame

_KINDS: dict[ErrorReport, Kind] = {
    "op": "mismatch/op",
    "shape": "mismatch/shape",
    "dtype": "mismatch/dtype",
    "parameters": "mismatch/shape",
}


@dataclass
class FoundInErrors:
    """Ranks that errors name, and the evidence."""

    cause: ToldByErrors
    line: Frame | None  # the user's line at which the first rank raised its error
    told: set[int]  # the ranks whose actions an error tells


def find_told_by_errors(context: Context, sinks: Mapping[int, Node]) -> frozenset[int]:
    """Find the ranks whose errors say that ranks differ, or that one failed.

    Returns:
        The ranks that ended with such an error, and need no other cause.
    """
    claims = _claims(context)
    for report, by_rank in claims.items():
        blocked = context.blocked_by([sinks[rank] for rank in by_rank if rank in sinks])
        if report == "checkpoint":
            found = _failed(context, by_rank, blocked)
        elif report == "sizes":
            found = _too_large(context, by_rank, blocked)
        elif report == "barrier":
            found = _absent(context, by_rank, blocked)
        else:
            found = _differ(context, report, by_rank, blocked)
        line = _line(context, found.cause.culprits or sorted(by_rank))
        context.add(found, None, line, blocked=len(blocked))
    return frozenset(rank for by_rank in claims.values() for rank in by_rank)


def _claims(context: Context) -> dict[ErrorReport, dict[int, Claim]]:
    """Return what the error of each rank claims, by its subject."""
    claims: dict[ErrorReport, dict[int, Claim]] = defaultdict(dict)
    for rank, view in sorted(context.job.views.items()):
        if not view.exit.failed or view.exit.why != "exception":
            continue
        claim = claim_of(view.log.exception)
        if claim is not None and claim.about == "barrier" and not view.is_log:
            continue  # the records tell who did not come
        if claim is not None and claim.about != "worker" and not is_absorbed(context, rank):
            claims[claim.about][rank] = claim
    if not any(claim.ranks for claim in claims.get("barrier", {}).values()):
        claims.pop("barrier", None)
    return claims


def _line(context: Context, ranks: list[int]) -> Frame | None:
    """Return the user's line at which the first of these ranks raised the error, if it did."""
    view = context.job.views.get(ranks[0])
    return view.exit.source if view is not None else None


def _differ(
    context: Context, report: ErrorReport, claims: Mapping[int, Claim], blocked: list[int]
) -> FoundInErrors:
    """Return ranks that differ: the minority of those whose actions the texts tell."""
    sides: dict[str, set[int]] = defaultdict(set)
    for claim in claims.values():
        for rank, value in claim.values:
            sides[value].add(rank)
    global_ranks = _are_global(claims)
    ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), sorted(side[1])))
    told = set().union(*sides.values())
    (_, most), *others = ordered
    decided = global_ranks and len(others) > 0 and len(most) * 2 > len(told)
    culprits = sorted(told - most) if decided else []
    raised = sorted(claims)
    cause = ToldByErrors(
        kind=_KINDS[report],
        why="exception",
        root_cause=True,
        culprits=culprits,
        blamed_by="majority" if culprits else "undecided",
        victims=sorted({*raised, *blocked} - set(culprits)),
        confidence="low" if not culprits else "high" if len(told) == context.job.size else "medium",
        report=report,
        raised=raised,
        sides=[Side(sorted(ranks), value) for value, ranks in ordered],
        global_ranks=global_ranks,
    )
    return FoundInErrors(cause, _line(context, raised), told)


def _are_global(claims: Mapping[int, Claim]) -> bool:
    """Return whether the errors number the ranks as the job does; else as a smaller group does."""
    return all(claim.own == rank for rank, claim in claims.items())


def _failed(context: Context, claims: Mapping[int, Claim], blocked: list[int]) -> FoundInErrors:
    """Return the ranks that failed according to the errors of all ranks that raised one."""
    named = sorted(set.intersection(*(set(claim.ranks) for claim in claims.values())))
    # else the numbers may be those of a smaller group's ranks
    culprits = named if set(named) <= set(claims) else []
    raised = sorted(claims)
    cause = ToldByErrors(
        kind="dead",
        why="exception",
        root_cause=True,
        culprits=list(culprits),
        blamed_by="exit" if culprits else "unknown",
        victims=sorted({*raised, *blocked} - set(culprits)),
        confidence="high" if culprits else "low",
        report="checkpoint",
        raised=raised,
        named=named,
        global_ranks=set(named) <= set(claims),
        error=next((claim.error for claim in claims.values() if claim.error), None),
        file=next((claim.file for claim in claims.values() if claim.file), None),
    )
    return FoundInErrors(cause, _line(context, raised), set(named))


def _absent(context: Context, claims: Mapping[int, Claim], blocked: list[int]) -> FoundInErrors:
    """Return the ranks that did not come to a barrier, according to the error of its first rank."""
    named = sorted({rank for claim in claims.values() for rank in claim.ranks})
    global_ranks = _are_global(claims)
    raised = sorted(claims)
    culprits = named if global_ranks and not {*named} & {*raised} else []
    cause = ToldByErrors(
        kind="missing",
        why="unknown",
        root_cause=True,
        culprits=list(culprits),
        blamed_by="absence" if culprits else "unknown",
        victims=sorted({*raised, *blocked} - set(culprits)),
        certain=True,
        confidence="medium" if culprits else "low",
        report="barrier",
        raised=raised,
        named=named,
        global_ranks=global_ranks,
    )
    return FoundInErrors(cause, _line(context, raised), set(named))


def _too_large(context: Context, claims: Mapping[int, Claim], blocked: list[int]) -> FoundInErrors:
    """Return ranks that received more than they expect. Their errors do not show whether they or
    the senders are wrong.
    """
    raised = sorted(claims)
    cause = ToldByErrors(
        kind="mismatch/shape",
        why="exception",
        root_cause=True,
        blamed_by="undecided",
        victims=sorted({*raised, *blocked}),
        confidence="low",
        report="sizes",
        raised=raised,
        global_ranks=True,
        error=claims[raised[0]].error,
    )
    return FoundInErrors(cause, _line(context, raised), set(raised))
