"""What the verdict on a checked program says about the branches that data decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from commlens.check.branches import Choice, Decision, Value
from commlens.check.classes import Classes
from commlens.check.explore import Alone, Explored
from commlens.model.verdict import Verdict
from commlens.text import capital, count, joined, ranks_phrase, sentence

_LINES_NAMED = 8


def verdict(explored: Explored) -> Verdict:
    """Return the verdict on what was explored, with what exactly was proven."""
    found = explored.checked.verdict
    unanswered = _unanswered(explored)
    limits = [*found.missing_evidence, *_limits(explored, unanswered)]
    summary = found.summary
    if explored.classes is not None:
        limits.insert(0, _ranks(explored.classes))
    if explored.choices and found.kind != "healthy":
        if explored.deciding:
            summary = f"{summary} if {_answers(explored.deciding)}"
    elif len(explored.tried) > 1:
        summary = f"{summary}, {_tried(explored)}"
    elif any(each.certain for each in unanswered):
        summary = f"{summary} on the branches taken"
    findings = found.findings
    if findings and findings[0].summary == found.summary:
        findings = [msgspec.structs.replace(findings[0], summary=summary), *findings[1:]]
    latent = [
        msgspec.structs.replace(
            each.finding, summary=f"{each.finding.summary} if {_answers(each.choices)}"
        )
        for each in explored.latent
    ]
    return msgspec.structs.replace(
        found,
        summary=summary,
        findings=[*findings, *latent],
        missing_evidence=limits,
    )


def no_such_branch(branch: str, decisions: Sequence[Decision]) -> str:
    """Return what to say about a ``--branch`` at whose line nothing was asked."""
    lines = _lines(decisions)
    return f"--branch {branch}: no rank asked for a value of a tensor at this line. " + (
        f"They did so at {lines}." if lines else "No line did so where it matters."
    )


def _ranks(classes: Classes) -> str:
    """Return a sentence about the ranks that were not run."""
    ran, all_ranks = len(classes.ran), len(classes.sequences)
    if classes.surprising:
        return sentence(
            f"{ran} of {all_ranks} ranks were run, and the others are taken to do what those like"
            f" them do. {capital(ranks_phrase(classes.surprising))}, drawn at random, did something"
            " else: --ranks all runs all"
        )
    return sentence(
        f"{ran} of {all_ranks} ranks were run, which do {_ways(len(classes.classes))}. The others"
        f" are taken to do what those like them do, as {classes.drawn} drawn at random did:"
        " --ranks all runs all"
    )


def _ways(number: int) -> str:
    return "the same, each in its groups" if number == 1 else f"{number} different things"


def _tried(explored: Explored) -> str:
    places = list(dict.fromkeys(f"{each.file}:{each.line}" for each in explored.choices))
    some = len(explored.tried) < explored.combinations
    return (
        f"in {len(explored.tried)} of the {explored.combinations}"
        if some
        else f"in all {explored.combinations}"
    ) + f" combinations of answers at {joined(places)}"


def _unanswered(explored: Explored) -> list[Decision]:
    """Return the decisions at lines to which no answer was given."""
    return [
        each
        for each in explored.decisions
        if not any(choice.is_at(each.frame.file, each.frame.line) for choice in explored.choices)
    ]


def _limits(explored: Explored, unanswered: Sequence[Decision]) -> list[str]:
    found = [_alone(each) for each in explored.alone]
    branches = [each for each in unanswered if each.how == "truth"]
    if branches:
        one = branches[0].frame.where
        found.append(
            f"{capital(count(len(branches), 'data-dependent branch', 'data-dependent branches'))}"
            f" went the way of the values at hand: {_lines(branches, taken=True)}."
            f" --branch {one}=true,false tries both ways."
        )
    apart = [each for each in branches if not each.alike]
    if apart:
        found.append(f"Ranks may decide differently at {_lines(apart)}.")
    numbers = [each for each in unanswered if each.how == "number" and not each.idle]
    if numbers:
        found.append(
            f"Numbers that were read may decide something: {_lines(numbers)}."
            f" --branch {numbers[0].frame.where}=0,1 gives other numbers."
        )
    shapes = [each for each in unanswered if each.how == "shape"]
    if shapes:
        found.append(f"Shapes depend on values that other ranks send: {_lines(shapes)}.")
    if len(explored.tried) < explored.combinations:
        found.append(
            f"{len(explored.tried)} of {explored.combinations} combinations of answers were"
            f" tried: --combinations {explored.combinations} tries all."
        )
    return found


def _alone(alone: Alone) -> str:
    choice = alone.choice
    return sentence(
        f"Ranks may decide differently at {choice.file}:{choice.line}: if rank {alone.rank} alone"
        f" gets {_value(choice.value)}, {alone.checked.verdict.summary}"
    )


def _answers(choices: Iterable[Choice]) -> str:
    return joined([f"{each.file}:{each.line} is {_value(each.value)}" for each in choices])


def _lines(decisions: Iterable[Decision], *, taken: bool = False) -> str:
    lines: dict[str, list[Value]] = {}
    for each in decisions:
        lines.setdefault(each.frame.where, []).extend(each.taken)
    texts = [
        f"{line} ({' and '.join(map(_value, values))})" if taken and values else line
        for line, values in lines.items()
    ]
    more = len(texts) - _LINES_NAMED
    return joined([*texts[:_LINES_NAMED], *([f"{more} more"] if more > 0 else [])])


def _value(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
