"""Ranks that met, but not for the same thing, in words."""

from __future__ import annotations

from commlens.diagnosis.alignment import Trouble
from commlens.diagnosis.findings.context import Context, make_finding
from commlens.diagnosis.findings.dead import is_absorbed
from commlens.diagnosis.findings.next_steps import mismatch_step
from commlens.diagnosis.wait_graph import Node
from commlens.model.collective import Collective
from commlens.model.verdict import Confidence, Finding, Kind, Why
from commlens.text import args_phrase, capital, count, frame_phrase, group_phrase, op_phrase, ranks_phrase, verb


def find_disagreements(context: Context, sinks: dict[int, Node]) -> None:
    """One finding for each trouble, whether it holds anybody up or is silent."""
    for i, trouble in enumerate(context.troubles):
        node = sinks.get(i)
        held = context.blocked_by([node]) if node is not None else []
        context.add(_disagreement(context, trouble, held), node, (min(op.announced_ns for op in trouble.ops.values()),))
        context.cases[-1].order = (_first_index(trouble), *context.cases[-1].order)


def _first_index(trouble: Trouble) -> int:
    return min((trouble.ops[rank].index for rank in trouble.culprits if rank in trouble.ops), default=0)


def _disagreement(context: Context, trouble: Trouble, held: list[int]) -> Finding:
    culprits = sorted(trouble.culprits)
    first = next((trouble.ops[rank] for rank in culprits if rank in trouble.ops), next(iter(trouble.ops.values())))
    usual_rank = next((rank for rank in sorted(trouble.ops) if rank not in culprits), None)
    usual = trouble.ops[usual_rank] if usual_rank is not None else None
    members = [rank for rank in trouble.ops if rank not in culprits]
    failed = {r for r in trouble.key[2] if r in context.world.views and context.world.views[r].fate.failed} if not trouble.silent else set()
    aborted = sorted(r for r in failed if context.world.views[r].fate.kind == "own" and is_absorbed(context, r))
    held = sorted(set(held) - set(culprits))
    victims = sorted(({*held, *members} | failed) - set(culprits))
    skipped = trouble.shift is not None or trouble.habit
    kind: Kind = f"mismatch/{trouble.answer.aspect}" if trouble.answer is not None else "missing"  # type: ignore[assignment]
    reason: Why = "skipped" if skipped else "in-collective"
    op = first
    if trouble.shift is not None and trouble.answer is None:
        op = trouble.shift.skipped
    name = op_phrase(op)
    if trouble.pair is not None:
        sent, received = trouble.pair
        sender, receiver = received.peer, sent.peer
        name = f"message #{trouble.number} from rank {sender} to rank {receiver} in {group_phrase(trouble.channel.group)}"
    summary = _summary(trouble, name, culprits, first, usual)
    own = "; ".join(
        f"{context.name(rank)} is at {frame_phrase(trouble.ops[rank].source) or 'an unknown line'} with "
        f"{trouble.ops[rank].op} {args_phrase(trouble.ops[rank])}".rstrip()
        for rank in culprits[:3]
        if rank in trouble.ops
    )
    explanation = f"{own}. " if own else ""
    skips = _skip_evidence(trouble, culprits)
    if trouble.answer is None:
        explanation = " ".join(skips) + " "
        skips = []
    elif usual is not None and members:
        explanation += (
            f"{capital(ranks_phrase(members))} {verb(members, 'is', 'are')} at {frame_phrase(usual.source) or 'an unknown line'} "
            f"with {usual.op} {args_phrase(usual)}".rstrip()
            + ". "
        )
    if trouble.silent:
        explanation += "Nothing hung: the result is wrong."
    elif held:
        explanation += f"{capital(ranks_phrase(held))} {verb(held, 'is', 'are')} held up by it."
    if aborted:
        explanation += f" {capital(ranks_phrase(aborted))} {context.world.views[aborted[0]].fate.text} because of it."
    evidence = []
    if trouble.answer is not None and (trouble.tie or len(trouble.answer.parties) > 2 or trouble.answer.aspect == "splits"):
        evidence.append(f"{name}: {trouble.answer.detail}.")
    evidence += skips
    if trouble.tie:
        evidence.append("No side has a majority, and no rank leaves its own routine: it cannot be told which is wrong.")
    elif trouble.by_history:
        evidence.append(
            f"No side has a majority: {ranks_phrase(culprits)} {verb(culprits, 'does', 'do')} here what it never did before in this place."
        )
    if trouble.again:
        evidence.append(f"The same happened {count(trouble.again, 'more time')} later.")
    confidence: Confidence = "high"
    more = None
    if trouble.uncertain:
        confidence, more = "low", "Issue the group's collectives from one thread: with several, their order is not sure."
    elif trouble.tie:
        confidence, more = "medium", "A third rank's record, or a run with more steps before the fault, would show which one is wrong."
    elif trouble.by_history or (trouble.answer is None and trouble.shift is not None and trouble.shift.matches < 2):
        confidence = "medium"
    return make_finding(
        kind, reason, culprits, victims, confidence, summary, explanation.strip(),
        mismatch_step(trouble, first, usual), op, first.source, evidence, more,
    )  # fmt: skip


def _summary(trouble: Trouble, name: str, culprits: list[int], first: Collective, usual: Collective | None) -> str:
    who = ranks_phrase(culprits)
    shift = trouble.shift
    if shift is not None and trouble.answer is None:
        if shift.by < 0:
            return f"{who} issued {count(-shift.by, 'collective')} too many, from {name} on; everything after pairs up wrongly"
        extra = f" and {shift.by - 1} more" if shift.by > 1 else ""
        return f"{who} skipped {name}{extra}; everything after it pairs up wrongly"
    answer = trouble.answer
    assert answer is not None
    if trouble.tie or usual is None:
        sides = " against ".join(f"{party.what} ({ranks_phrase(party.ranks)})" for party in answer.parties[:3])
        return f"ranks disagree in {name}: {sides}"
    odd, theirs = answer.parties[-1].what, answer.parties[0].what
    for party in answer.parties:
        if set(party.ranks) & set(culprits):
            odd = party.what
        elif set(party.ranks) - set(culprits):
            theirs = party.what
    if answer.aspect == "op":
        group = group_phrase(trouble.channel.group)
        looks = ": it looks like a skipped collective" if shift is not None or trouble.habit else ""
        return f"{who} issued {first.op} where the others issued {usual.op} (#{trouble.number} of {group}){looks}"
    if answer.aspect == "p2p":
        return f"{name} does not fit: {answer.detail}"
    words = {"reduce-op": "the reduce op", "dtype": "the dtype", "shape": "the shape", "layout": "the memory layout"}
    what = words.get(answer.aspect, f"the {answer.aspect}")
    skip = ": it looks like a skipped collective" if shift is not None or trouble.habit else ""
    return f"{who} {verb(culprits, 'disagrees', 'disagree')} on {what} of {name}: {odd}, the others {theirs}{skip}"


def _skip_evidence(trouble: Trouble, culprits: list[int]) -> list[str]:
    shift = trouble.shift
    number = trouble.number
    who = ranks_phrase(culprits)
    if shift is not None and shift.by > 0:
        own, skipped = frame_phrase(shift.own.source), frame_phrase(shift.skipped.source)
        return [
            f"What {who} issued as #{number} ({own}) is what the others issue as #{number + shift.by}, and so on "
            f"for {count(shift.matches, 'collective')}; the others' #{number} is {shift.skipped.op} at {skipped}, "
            f"step {shift.skipped.step}."
        ]
    if shift is not None:
        return [f"From #{number} on, what {who} issues is what the others issued {-shift.by} before."]
    if trouble.habit:
        return [f"{capital(who)} used to issue this right after what the others wait in, and this time did not issue that."]
    return []
