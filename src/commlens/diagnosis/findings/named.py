"""Ranks that the errors of others name: torch compares some things itself, and raises on every
rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.dead import is_absorbed
from commlens.diagnosis.graph.wait_graph import Node
from commlens.diagnosis.words.phrases import prose
from commlens.matching.error_claims import About, Claim, claim_of
from commlens.model.cause import Kind
from commlens.model.collective import Frame
from commlens.model.verdict import Finding
from commlens.text import capital, frame_phrase, ranks_and_verb, ranks_phrase, verb

_KINDS: dict[str, Kind] = {
    "op": "mismatch/op",
    "shape": "mismatch/shape",
    "dtype": "mismatch/dtype",
    "parameters": "mismatch/shape",
}
_DO = {
    "op": ("issues {}", "issue {}"),
    "shape": ("passes a tensor of shape {}", "pass tensors of shape {}"),
    "dtype": ("passes a tensor of dtype {}", "pass tensors of dtype {}"),
    "parameters": ("passes {} to DDP", "pass {} to DDP"),
}
"""What one rank does, and what several do."""


def find_named(context: Context, sinks: Mapping[int, Node]) -> frozenset[int]:
    """Make one finding for all ranks whose errors say that ranks differ, or that one failed.

    Returns:
        The ranks that ended with such an error, which no other finding need tell.
    """
    views = context.job.views
    claims: dict[About, dict[int, Claim]] = defaultdict(dict)
    for rank, view in sorted(views.items()):
        claim = (
            claim_of(view.log.exception)
            if view.exit.failed and view.exit.why == "exception"
            else None
        )
        if claim is not None and claim.about != "worker" and not is_absorbed(context, rank):
            claims[claim.about][rank] = claim
    for about, by_rank in claims.items():
        nodes = [sinks[rank] for rank in by_rank if rank in sinks]
        blocked = context.blocked_by(nodes)
        if about == "checkpoint":
            finding = _failed(context, by_rank, blocked)
        elif about == "sizes":
            finding = _too_large(context, by_rank, blocked)
        else:
            finding = _differ(context, about, by_rank, blocked)
        context.add(
            finding, None, _line(context, finding.culprits or sorted(by_rank)), blocked=len(blocked)
        )
    return frozenset(rank for by_rank in claims.values() for rank in by_rank)


def _line(context: Context, ranks: list[int]) -> Frame | None:
    """Return the user's line at which the first of these ranks raised the error, if it did."""
    view = context.job.views.get(ranks[0])
    return view.exit.source if view is not None else None


def _differ(
    context: Context, about: About, claims: Mapping[int, Claim], blocked: list[int]
) -> Finding:
    """Report ranks that differ: the minority of those of which a text tells what they did."""
    sides: dict[str, set[int]] = defaultdict(set)
    for claim in claims.values():
        for rank, value in claim.values:
            sides[value].add(rank)
    # else they are those of a smaller group
    global_ranks = all(claim.own == rank for rank, claim in claims.items())
    ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), sorted(side[1])))
    told = set().union(*sides.values())
    (usual, most), *others = ordered
    decided = global_ranks and len(others) > 0 and len(most) * 2 > len(told)
    culprits = sorted(told - most) if decided else []
    raised = sorted(claims)
    where = frame_phrase(_line(context, raised))
    shown = [*others[:3], (usual, most)] if culprits else ordered[:4]
    phrases = [
        ranks_and_verb(sorted(ranks), *(words.format(value) for words in _DO[about]))
        for value, ranks in shown
    ]
    summary = f"{' where '.join(phrases)}, as torch's own check tells"
    subject = ranks_phrase(culprits) if culprits else "these ranks"
    steps = {
        "parameters": (
            f"compare the model of {subject} with that of the others: its parameters, and those"
            " that DDP ignores"
        )
    }
    return Finding(
        kind=_KINDS[about],
        why="exception",
        root_cause=True,
        culprits=culprits,
        victims=sorted({*raised, *blocked} - set(culprits)),
        confidence="low" if not culprits else "high" if len(told) == context.job.size else "medium",
        summary=summary,
        explanation=prose(
            f"{capital(ranks_phrase(raised))} raised its error{f' at {where}' if where else ''}.",
            (
                ""
                if global_ranks
                else "The numbers in the texts are those of a smaller group's ranks."
            ),
        ),
        would_raise_confidence=(
            None
            if culprits and len(told) == context.job.size
            else (
                f"The texts tell what {ranks_phrase(told)} did, not the others."
                if culprits
                else "The texts do not tell which side is wrong."
            )
        ),
        next_step=steps.get(
            about,
            f"find the branch in which {subject} {verb(culprits or raised, 'comes', 'come')} to"
            " another collective",
        ),
        evidence=_texts(context, raised),
    )


def _failed(context: Context, claims: Mapping[int, Claim], blocked: list[int]) -> Finding:
    """Report the ranks that failed according to the errors of all ranks that raised one."""
    named = sorted(set.intersection(*(set(claim.ranks) for claim in claims.values())))
    # else the numbers may be those of a smaller group's ranks
    culprits = named if set(named) <= set(claims) else []
    error = next((claim.error for claim in claims.values() if claim.error), "").partition(". ")[0]
    raised = sorted(claims)
    others = sorted(set(raised) - set(culprits))
    subject = f"{ranks_phrase(named) if named else 'a rank'}{'' if culprits else ' of its group'}"
    where = frame_phrase(_line(context, raised))
    return Finding(
        kind="dead",
        why="exception",
        root_cause=True,
        culprits=culprits,
        victims=sorted({*raised, *blocked} - set(culprits)),
        confidence="high" if culprits else "low",
        summary=(
            f"{subject} failed in a distributed"
            f" checkpoint{f' at {where}' if where else ''}{f': {error}' if error else ''}"
        ),
        explanation=(
            f"{capital(ranks_and_verb(others, 'raises', 'raise'))} its error: a checkpoint fails on"
            " all ranks."
            if others
            else ""
        ),
        next_step=(
            f"look at the files of the checkpoint that {subject}"
            f" {verb(culprits, 'reads or writes', 'read or write')}"
        ),
        evidence=_texts(context, raised),
        would_raise_confidence=(
            None if culprits else "The texts do not name one rank of the whole job."
        ),
    )


def _too_large(context: Context, claims: Mapping[int, Claim], blocked: list[int]) -> Finding:
    """Report ranks that received more than they expect. Whether they or the senders are wrong does
    not show.
    """
    raised = sorted(claims)
    where = frame_phrase(_line(context, raised))
    return Finding(
        kind="mismatch/shape",
        why="exception",
        root_cause=True,
        culprits=[],
        victims=sorted({*raised, *blocked}),
        confidence="low",
        summary=(
            f"{ranks_phrase(raised)} received {claims[raised[0]].error}: ranks pass tensors of"
            " different sizes to one collective"
        ),
        next_step=(
            "compare the sizes that all ranks"
            f" pass{f' at {where}' if where else ' to their last collective'}"
        ),
        evidence=_texts(context, raised),
        would_raise_confidence="The records of `commlens launch` would show the size on each rank.",
    )


def _texts(context: Context, ranks: list[int]) -> list[str]:
    """``["rank 0 raised RuntimeError: DDP expects same model ..."]``; ranks with one text share a
    sentence.
    """
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_text[context.job.views[rank].exit.text].append(rank)
    return [
        f"{ranks_phrase(same)} {text}{'' if text.endswith('.') else '.'}"
        for text, same in by_text.items()
    ][:4]
