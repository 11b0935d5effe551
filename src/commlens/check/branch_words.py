"""The words of the verdict on a checked program about the branches that depend on data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from commlens.check.branches import BranchLine, Choice, Value
from commlens.check.classes import Classes
from commlens.check.explore import Explored
from commlens.diagnosis.words.whole_job import first_line
from commlens.model.verdict import Verdict
from commlens.text import capital, count, joined, ranks_phrase, sentence

_LINES_NAMED = 8


def verdict(explored: Explored) -> Verdict:
    """Return the verdict on all combinations that were tried, and say what they prove."""
    found = explored.checked.verdict
    unanswered = [
        each
        for each in explored.decisions
        if not any(choice.is_at(each.frame.file, each.frame.line) for choice in explored.choices)
    ]
    limits = [*found.missing_evidence, *_differing(explored), *_open_lines(unanswered)]
    if len(explored.tried) < explored.combinations:
        limits.append(
            f"{len(explored.tried)} of {explored.combinations} combinations of answers were"
            " tried: check again with fewer answers (--branch) for the others."
        )
    summary = found.summary + _condition(explored, unanswered)
    if explored.checked.classes is not None:
        limits.insert(0, _ranks(explored.checked.classes))
    findings = found.findings
    if findings and findings[0].summary == found.summary:
        findings = [msgspec.structs.replace(findings[0], summary=summary), *findings[1:]]
    latent = [
        msgspec.structs.replace(
            each.finding, summary=f"{each.finding.summary} if {_answers(each.choices)}"
        )
        for each in explored.latent
    ]
    if found.kind == "healthy" and (findings or latent):
        summary = first_line(summary, [*findings, *latent])
    return msgspec.structs.replace(
        found,
        summary=summary,
        findings=[*findings, *latent],
        missing_evidence=limits,
    )


def _condition(explored: Explored, unanswered: Sequence[BranchLine]) -> str:
    """Return the answers under which the verdict's first line holds."""
    if explored.choices and explored.checked.verdict.kind != "healthy":
        return f" if {_answers(explored.deciding)}" if explored.deciding else ""
    if len(explored.tried) > 1:
        return f", {_places_tried(explored)}"
    return " on the branches taken" if any(each.certain for each in unanswered) else ""


def no_such_branch(branch: str, decisions: Sequence[BranchLine]) -> str:
    """Return a sentence about a ``--branch`` for a line at which no value was read."""
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
    number = len(classes.classes)
    ways = "the same, each in its groups" if number == 1 else f"{number} different things"
    return sentence(
        f"{ran} of {all_ranks} ranks were run, which do {ways}. The others"
        f" are taken to do what those like them do, as {classes.drawn} drawn at random did:"
        " --ranks all runs all"
    )


def _places_tried(explored: Explored) -> str:
    places = list(dict.fromkeys(f"{each.file}:{each.line}" for each in explored.choices))
    some = len(explored.tried) < explored.combinations
    return (
        f"in {len(explored.tried)} of the {explored.combinations}"
        if some
        else f"in all {explored.combinations}"
    ) + f" combinations of answers at {joined(places)}"


def _differing(explored: Explored) -> list[str]:
    """Return a sentence about the fault that occurs if one rank alone gets another answer."""
    return [
        sentence(
            f"Ranks may decide differently at {choice.file}:{choice.line}: if rank {rank} alone"
            f" gets {_value(choice.value)}, {checked.verdict.summary}"
        )
        for rank, choice, checked in explored.alone
    ]


def _open_lines(unanswered: Sequence[BranchLine]) -> list[str]:
    """Return the lines at which unknown values decide."""
    found = []
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
    return found


def _answers(choices: Iterable[Choice]) -> str:
    return joined([f"{each.file}:{each.line} is {_value(each.value)}" for each in choices])


def _lines(decisions: Iterable[BranchLine], *, taken: bool = False) -> str:
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
