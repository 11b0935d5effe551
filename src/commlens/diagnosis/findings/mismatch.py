"""Ranks that met in one collective or message but disagree on it, and ranks that are out of step."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.alignment import Trouble
from commlens.diagnosis.findings.context import Context, prose
from commlens.diagnosis.findings.dead import is_absorbed
from commlens.diagnosis.findings.next_steps import mismatch_step
from commlens.diagnosis.wait_graph import Node
from commlens.model.collective import Collective
from commlens.model.verdict import Confidence, Finding, Kind
from commlens.text import args_phrase, capital, count, frame_phrase, group_phrase, op_phrase, ranks_and_verb, ranks_phrase, verb

_ASPECTS = {"reduce-op": "reduce op", "layout": "memory layout"}


def find_mismatches(context: Context, sinks: dict[int, Node]) -> None:
    """Make one finding for each mismatch, whether it blocks ranks or is silent."""
    for number, trouble in enumerate(context.troubles):
        node = sinks.get(number)
        blocked = context.blocked_by([node]) if node is not None else []
        first = min((trouble.ops[rank].index for rank in trouble.culprits if rank in trouble.ops), default=0)
        order = (first, min(op.announced_ns for op in trouble.ops.values()))
        op = _odd_op(trouble)
        shown = trouble.shift.skipped if trouble.shift is not None and trouble.answer is None else op
        context.add(_finding(context, trouble, op, _name(trouble, shown), blocked), shown, op.source, blocked=len(blocked), order=order)


def _odd_op(trouble: Trouble) -> Collective:
    """Return the record of the first culprit that has one."""
    return next((trouble.ops[rank] for rank in sorted(trouble.culprits) if rank in trouble.ops), next(iter(trouble.ops.values())))


def _name(trouble: Trouble, op: Collective) -> str:
    if trouble.pair is None:
        return op_phrase(op)
    sent, received = trouble.pair
    return f"message #{trouble.number} from rank {received.peer} to rank {sent.peer} in {group_phrase(trouble.channel.group)}"


def _finding(context: Context, trouble: Trouble, op: Collective, name: str, blocked: Sequence[int]) -> Finding:
    views = context.world.views
    culprits = sorted(trouble.culprits)
    members = [rank for rank in trouble.ops if rank not in culprits]
    usual = trouble.ops[min(members)] if members else None
    failed = {rank for rank in trouble.key[2] if rank in views and views[rank].exit.failed} if not trouble.silent else set()
    aborted = sorted(rank for rank in failed if views[rank].exit.kind == "own" and is_absorbed(context, rank))
    held = sorted(set(blocked) - set(culprits))
    skip = _skip_evidence(trouble, culprits)
    if trouble.answer is None:
        sides, skip = skip, []
    else:
        sides = _sides(context, trouble, culprits, members)
    consequence = ""
    if trouble.silent:
        consequence = "Nothing hung: the result is wrong."
    elif held:
        consequence = f"{capital(ranks_and_verb(held, 'is', 'are'))} held up by it."
    kind: Kind = f"mismatch/{trouble.answer.aspect}" if trouble.answer is not None else "missing"  # type: ignore[assignment]
    confidence, more = _confidence(trouble)
    return Finding(
        kind=kind, why="skipped" if trouble.shift is not None or trouble.habit else "in-collective", root_cause=True, culprits=culprits,
        victims=sorted({*held, *members, *failed} - set(culprits)), confidence=confidence,
        summary=_summary(trouble, name, culprits, op, usual),
        explanation=prose(
            *sides,
            consequence,
            f"{capital(ranks_phrase(aborted))} {views[aborted[0]].exit.text} because of it." if aborted else "",
        ),
        next_step=mismatch_step(trouble, op, usual), evidence=_evidence(trouble, name, culprits, skip), would_raise_confidence=more,
    )  # fmt: skip


def _sides(context: Context, trouble: Trouble, culprits: Sequence[int], members: Sequence[int]) -> list[str]:
    """``["rank 2 (pid 7) issued all_reduce float32[50] SUM at train.py:20 step.", "Ranks 0-1,3 issued ..."]``."""
    odd = "; ".join(f"{context.name(rank)} {_issued(trouble.ops[rank])}" for rank in culprits[:3] if rank in trouble.ops)
    others = f"{capital(ranks_phrase(members))} {_issued(trouble.ops[min(members)])}." if members else ""
    return [f"{odd}." if odd else "", others]


def _issued(op: Collective) -> str:
    args = args_phrase(op)
    return f"issued {op.op}{f' {args}' if args else ''} at {frame_phrase(op.source) or 'an unknown line'}"


def _evidence(trouble: Trouble, name: str, culprits: Sequence[int], skip: list[str]) -> list[str]:
    evidence = []
    if trouble.answer is not None and (trouble.tie or len(trouble.answer.parties) > 2 or trouble.answer.aspect == "splits"):
        evidence.append(f"{name}: {trouble.answer.detail}.")
    evidence += skip
    if trouble.tie:
        evidence.append("No side has a majority, and no rank leaves its own routine, so the rank at fault cannot be determined.")
    elif trouble.by_history:
        evidence.append(f"No side has a majority, but {ranks_and_verb(culprits, 'leaves its', 'leave their')} own routine here.")
    if trouble.again:
        evidence.append(f"The same happened {count(trouble.again, 'more time')} later.")
    return evidence


def _confidence(trouble: Trouble) -> tuple[Confidence, str | None]:
    """Return the confidence, and what would raise it."""
    if trouble.uncertain:
        return "low", "Issue the group's collectives from one thread: with several, their order is uncertain."
    if trouble.tie:
        return "medium", "A third rank's record, or a run with more steps before the fault, would show which one is wrong."
    few = trouble.answer is None and trouble.shift is not None and trouble.shift.matches < 2
    return "medium" if trouble.by_history or few else "high", None


def _summary(trouble: Trouble, name: str, culprits: list[int], op: Collective, usual: Collective | None) -> str:
    who, shift, answer = ranks_phrase(culprits), trouble.shift, trouble.answer
    if answer is None:
        assert shift is not None
        if shift.by < 0:
            return f"{who} issued {count(-shift.by, 'collective')} too many, from {name} on; everything after it pairs up wrongly"
        extra = f" and {shift.by - 1} more" if shift.by > 1 else ""
        return f"{who} skipped {name}{extra}; everything after it pairs up wrongly"
    if trouble.tie or usual is None:
        sides = " against ".join(f"{party.phrase} ({ranks_phrase(party.ranks)})" for party in answer.parties[:3])
        return f"ranks disagree in {name}: {sides}"
    skip = "; it looks like a skipped collective" if shift is not None or trouble.habit else ""
    if answer.aspect == "op":
        group = group_phrase(trouble.channel.group)
        return f"{who} issued {op.op} where the others issued {usual.op} (#{trouble.number} of {group}){skip}"
    if answer.aspect == "p2p":
        return f"{name} does not match: {answer.detail}"
    odd, theirs = answer.parties[-1].phrase, answer.parties[0].phrase
    for party in answer.parties:
        if set(party.ranks) & set(culprits):
            odd = party.phrase
        elif set(party.ranks) - set(culprits):
            theirs = party.phrase
    aspect = _ASPECTS.get(answer.aspect, answer.aspect)
    return f"{who} {verb(culprits, 'disagrees', 'disagree')} on the {aspect} of {name}: {odd}, the others {theirs}{skip}"


def _skip_evidence(trouble: Trouble, culprits: list[int]) -> list[str]:
    shift, number, who = trouble.shift, trouble.number, ranks_phrase(culprits)
    if shift is not None and shift.by > 0:
        own, skipped = frame_phrase(shift.own.source), frame_phrase(shift.skipped.source)
        return [
            f"#{number} of {who} ({own}) matches #{number + shift.by} of the others, and so on for {count(shift.matches, 'collective')}; "
            f"the others' #{number} is {shift.skipped.op} at {skipped}, step {shift.skipped.step}."
        ]
    if shift is not None:
        match = f"#{number} matches their #{number + shift.by}"
        return [f"From #{number} on, the collectives of {who} match earlier ones of the others: {match}."]
    if trouble.habit:
        return [f"Until now, {who} issued this right after the collective that the others wait in; this time, that one is missing."]
    return []
