"""Faults that the text of exceptions shows, where no record does.

torch compares some things itself and raises on every rank: DDP's "Rank 1 has 12 params, while rank
0 has inconsistent 14 params" tells that their models differ. Strict verification refuses calls; of
its exceptions the fields are read, not the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

from commlens.diagnosis.causes.context import Case, Context, collective_of, processes_of
from commlens.diagnosis.causes.dead import is_absorbed
from commlens.diagnosis.graph.wait_graph import WaitNode
from commlens.matching.errors import Claim, claim_of
from commlens.model.cause import (
    Cause,
    ErrorReport,
    Kind,
    Missing,
    RankWait,
    Refused,
    Side,
    ToldByErrors,
)
from commlens.model.collective import Collective
from commlens.model.grouping import grouped
from commlens.model.refusal import Refusal

_KINDS: dict[ErrorReport, Kind] = {
    "op": "mismatch/op",
    "shape": "mismatch/shape",
    "dtype": "mismatch/dtype",
    "parameters": "mismatch/shape",
}
_OF_ARGUMENTS: Kind = "mismatch/op"  # of a user's function: structure, value, argument


def find_told_by_errors(context: Context, sinks: Mapping[int, WaitNode]) -> frozenset[int]:
    """Find the errors that say that ranks differ, or that a rank failed.

    Returns:
        The ranks that ended with such an error, and need no other cause.
    """
    claims = _claims(context)
    for report, by_rank in claims.items():
        blocked = context.blocked_by([sinks[rank] for rank in by_rank if rank in sinks])
        if report == "checkpoint":
            cause = _failed(by_rank, blocked)
        elif report == "sizes":
            cause = _too_large(by_rank, blocked)
        elif report == "barrier":
            cause = _absent(by_rank, blocked)
        elif report == "parameters" and _is_contradicted(by_rank):
            cause = _not_exchanged(context, by_rank, blocked)
        else:
            cause = _differ(context, report, by_rank, blocked)
        view = context.job.views.get((cause.culprits or sorted(by_rank))[0])
        line = view.exit.source if view is not None else None
        context.cases.append(Case(cause, None, line, blocked=blocked))
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


def _differ(
    context: Context, report: ErrorReport, claims: Mapping[int, Claim], blocked: list[int]
) -> ToldByErrors:
    """Return the cause of errors that say that ranks differ. It blames the minority of the ranks
    whose actions the texts tell.
    """
    values = {(value, rank) for claim in claims.values() for rank, value in claim.values}
    by_value = grouped(sorted(values))
    sides = [Side(ranks, value) for value, ranks in by_value.items()]
    sides.sort(key=lambda side: (-len(side.ranks), side.ranks))
    global_ranks, told, most = _are_global(claims), {rank for _, rank in values}, sides[0].ranks
    decided = global_ranks and len(sides) > 1 and len(most) * 2 > len(told)
    culprits = sorted(told.difference(most)) if decided else []
    raised = sorted(claims)
    return ToldByErrors(
        kind=_KINDS[report],
        why="exception",
        root_cause=True,
        culprits=culprits,
        blamed_by="majority" if culprits else "undecided",
        victims=sorted({*raised, *blocked} - set(culprits)),
        confidence="low" if not culprits else "high" if len(told) == context.job.size else "medium",
        report=report,
        raised=raised,
        sides=sides,
        global_ranks=global_ranks,
    )


def _is_contradicted(claims: Mapping[int, Claim]) -> bool:
    """Return whether the errors' numbers of parameters cannot be true: a rank read 0 from another
    rank, although DDP refuses a model without parameters before; or it read another number than
    that rank's own error says.
    """
    own = dict(claim.values[0] for claim in claims.values())
    read = {claim.values[1] for claim in claims.values()}
    counts = [(rank, value) for rank, value in read if value.endswith(" parameters")]
    return any(value == "0 parameters" or own.get(rank, value) != value for rank, value in counts)


def _not_exchanged(
    context: Context, claims: Mapping[int, Claim], blocked: list[int]
) -> ToldByErrors:
    """Return the cause of ranks that read wrong numbers of one another: no model is known to
    differ. A rank that failed by itself did not send its numbers.
    """
    raised, views = sorted(claims), context.job.views
    failed = any(view.exit.kind == "own" for rank, view in views.items() if rank not in claims)
    own = grouped((claims[rank].values[0][1], rank) for rank in raised)
    return ToldByErrors(
        kind="dead",
        why="exception",
        root_cause=not failed,
        blamed_by="unknown",
        victims=sorted({*raised, *blocked}),
        confidence="low",
        report="not-exchanged",
        raised=raised,
        sides=[Side(ranks, did) for did, ranks in sorted(own.items())],
        global_ranks=_are_global(claims),
    )


def _are_global(claims: Mapping[int, Claim]) -> bool:
    """Return whether the errors number the ranks as the job does; else as a smaller group does."""
    return all(claim.own == rank for rank, claim in claims.items())


def _failed(claims: Mapping[int, Claim], blocked: list[int]) -> ToldByErrors:
    """Return the cause of a failed checkpoint: it blames the ranks that all errors name."""
    named = sorted(set.intersection(*(set(claim.ranks) for claim in claims.values())))
    # else the numbers may be those of a smaller group's ranks
    culprits = named if set(named) <= set(claims) else []
    raised = sorted(claims)
    return ToldByErrors(
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


def _absent(claims: Mapping[int, Claim], blocked: list[int]) -> ToldByErrors:
    """Return the cause of a barrier to which ranks did not come, as its first rank's error says."""
    named = sorted({rank for claim in claims.values() for rank in claim.ranks})
    global_ranks = _are_global(claims)
    raised = sorted(claims)
    culprits = named if global_ranks and not {*named} & {*raised} else []
    return ToldByErrors(
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


def _too_large(claims: Mapping[int, Claim], blocked: list[int]) -> ToldByErrors:
    """Return the cause of ranks that received more than they expect. Their errors do not show
    whether they or the senders are wrong.
    """
    raised = sorted(claims)
    return ToldByErrors(
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


# --- refusals of strict verification


def refused_ranks(context: Context) -> dict[int, Refusal]:
    """Return the refusals that ended ranks, by rank."""
    return {
        rank: view.log.refusal
        for rank, view in sorted(context.job.views.items())
        if view.log.refusal is not None and view.exit.refused
    }


def named_absent(context: Context) -> set[int]:
    """Return the ranks of which refusals say that they have ended or did not arrive."""
    return {rank for each in refused_ranks(context).values() for rank in each.absent}


def demote_refused(context: Context) -> None:
    """Demote causes that blame ranks only because a refusal ended them.

    A refusal names the rank that is the cause, or a cycle. A rank that raised a refusal but is
    named in none was only waiting. If several ranks finished, this does not hold: a refusal names
    just one of them.
    """
    refusals = refused_ranks(context)
    named = named_absent(context)
    for cause in (case.cause for case in context.cases):
        if not cause.root_cause or cause.kind not in ("missing", "stuck-inside", "waiting"):
            continue
        if not cause.culprits and cause.why == "finished" and named & {*cause.victims}:
            _decide_tie(cause, named)
        # others finished as well as the rank that a refusal names
        others = isinstance(cause, Missing) and cause.why == "finished" and {*cause.ranks} > named
        if not others and {*cause.culprits} <= {*refusals} - named:
            cause.root_cause = not _were_only_refused([refusals[rank] for rank in cause.culprits])


def _decide_tie(cause: Cause, named: set[int]) -> None:
    """Blame the victims that a refusal names, as the records do not show which side is wrong."""
    cause.culprits = sorted(named & {*cause.victims})
    cause.victims = sorted({*cause.victims} - named)
    cause.confidence = "medium"
    cause.blamed_by = "exit"


def _were_only_refused(refusals: Sequence[Refusal]) -> bool:
    """Return whether refusals are all that ended some ranks: each names its cause, or a cycle."""
    return bool(refusals) and all(
        each.absent or each.culprits or each.kind == "cycle" for each in refusals
    )


@dataclass(kw_only=True)
class RefusedCase(Case[Refused]):
    """Calls that strict verification refused. If ranks were absent, ``ops`` holds the call in which
    another rank missed them.
    """

    refusal: Refusal


def find_refused(context: Context) -> None:
    """Find why strict verification ended the job, if nothing else is its cause."""
    refusals = refused_ranks(context)
    if not refusals:
        return
    raised = sorted(refusals)
    refused = partial(Refused, root_cause=True, raised=raised)
    if wrong := next((each for each in refusals.values() if each.culprits), None):
        # a call that is wrong whatever the other ranks do
        cause = refused(
            kind=_kind_of(wrong),
            why="user-code",
            culprits=sorted(wrong.culprits),
            blamed_by="arguments",
            victims=sorted({*raised} - {*wrong.culprits}),
            confidence="high",
            refused_for="wrong-arguments",
        )
        case = RefusedCase(cause, refusal=wrong)
    elif ended := sorted(named_absent(context) - {*refusals}):
        teller = next(rank for rank, each in refusals.items() if {*ended} & {*each.absent})
        view, refusal = context.job.views[teller], refusals[teller]
        cause = _refused_absent(context, ended, refusal, view.last_op, raised)
        ops = {teller: view.last_op} if view.last_op is not None else {}
        case = RefusedCase(cause, None, view.exit.source, ops=ops, refusal=refusal)
    elif cycle := next((each for each in refusals.values() if each.kind == "cycle"), None):
        cause = refused(
            kind="cycle",
            why="in-collective",
            blamed_by="undecided",
            victims=sorted({*raised, *(wait.rank for wait in cycle.waits)}),
            confidence="medium",
            refused_for="cycle",
            waits=[RankWait(wait.rank, list(wait.absent)) for wait in cycle.waits],
        )
        case = RefusedCase(cause, refusal=cycle)
    else:
        # No record explains it: a call of a user's function. If the ranks raised different
        # refusals, report the lowest rank's.
        first, line = refusals[raised[0]], context.job.views[raised[0]].exit.source
        cause = refused(
            kind=_kind_of(first),
            why="exception",
            blamed_by="undecided",
            victims=list(raised),
            confidence="medium",
            refused_for="disagreement",
        )
        case = RefusedCase(cause, None, line, refusal=first)
    context.cases.append(case)


def _refused_absent(
    context: Context,
    absent: list[int],
    refusal: Refusal,
    op: Collective | None,
    raised: list[int],
) -> Refused:
    """Return the cause of refusals that report ranks as ended or absent, if no record shows it."""
    views = context.job.views
    finished = all(
        rank in views and views[rank].exit.kind in ("leaving", "clean") for rank in absent
    )
    is_dead = refusal.kind == "dead"
    return Refused(
        kind="dead" if is_dead else "missing",
        why="finished" if finished else "unknown",
        root_cause=True,
        culprits=list(absent),
        blamed_by="exit" if is_dead else "absence",
        victims=list(raised),
        confidence="medium",
        refused_for="ended" if is_dead else "not-arrived",
        raised=raised,
        absent=absent,
        processes=processes_of(context, absent),
        collective=collective_of(op) if op is not None else None,
    )


def _kind_of(refusal: Refusal) -> Kind:
    return next((kind for kind in get_args(Kind) if kind == refusal.kind), _OF_ARGUMENTS)
