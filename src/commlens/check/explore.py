"""Check a program with all answers of ``--branch``, up to a bound."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from commlens.check.branches import (
    Branch,
    BranchLine,
    Choice,
    combinations,
    merged,
    number_of_combinations,
)
from commlens.check.judge import Checked
from commlens.check.run_world import Judge
from commlens.model.cause import LatentFault
from commlens.model.verdict import Finding, Verdict

_TRIED_MAX = 16

Choices = tuple[Choice, ...]


class Alone(NamedTuple):
    """A fault that occurs if one rank alone gets an answer that ranks need not get alike."""

    rank: int
    choice: Choice
    checked: Checked


class Latent(NamedTuple):
    """A latent fault that another run has and the worst run does not."""

    choices: Choices
    """The answers of the first run that has it."""
    finding: Finding


class Explored(NamedTuple):
    """The results of a program with several combinations of answers."""

    checked: Checked
    """The worst run: one with a fault, else one that proves nothing, else the first."""
    choices: Choices
    """Of that run."""
    deciding: Choices
    """The answers without which the verdict may be another one."""
    tried: list[Choices]
    combinations: int
    """That there are."""
    decisions: list[BranchLine]
    """Of all runs."""
    alone: list[Alone]
    latent: Sequence[Latent] = ()


def to_try(branches: Sequence[Branch]) -> list[Choices]:
    """Return the combinations of answers to try, at most ``_TRIED_MAX``."""
    return list(itertools.islice(combinations(branches), _TRIED_MAX))


def explore(
    run: Callable[[Choices], Checked], judge: Judge, branches: Sequence[Branch]
) -> Explored:
    """Run and judge a program with each combination of answers to try."""
    tried = to_try(branches)
    runs = {choices: run(choices) for choices in tried}
    decisions = merged(
        decision
        for checked in runs.values()
        for sequence in checked.sequences.values()
        for decision in sequence.decisions
    )
    verdicts = {choices: checked.verdict for choices, checked in runs.items()}
    worst = max(tried, key=lambda each: (verdicts[each].is_fault, verdicts[each].kind != "healthy"))
    is_fault = verdicts[worst].is_fault
    combined = number_of_combinations(branches)
    return Explored(
        runs[worst],
        choices=worst,
        deciding=_deciding(worst, verdicts) if len(tried) == combined else worst,
        tried=tried,
        combinations=combined,
        decisions=decisions,
        alone=[] if is_fault else list(_with_one_rank_alone(runs, judge, decisions)),
        latent=list(_latent(verdicts, worst)),
    )


def _deciding(worst: Choices, verdicts: Mapping[Choices, Verdict]) -> Choices:
    """Leave out each answer without which the verdict stays the same."""
    found = verdicts[worst].summary
    deciding = set(worst)
    for choice in worst:
        others = deciding - {choice}
        if all(
            verdict.summary == found
            for choices, verdict in verdicts.items()
            if others <= set(choices)
        ):
            deciding = others
    return tuple(choice for choice in worst if choice in deciding)


def _latent(verdicts: Mapping[Choices, Verdict], worst: Choices) -> Iterator[Latent]:
    """Yield the latent faults that only other runs than the worst one have."""
    seen = set[tuple[object, ...]]()
    for choices in (worst, *verdicts):
        for finding in verdicts[choices].findings:
            cause = finding.cause
            if isinstance(cause, LatentFault):
                place = cause.what, finding.source_file, finding.source, cause.touched_at
                if place not in seen and choices != worst:
                    yield Latent(choices, finding)
                seen.add(place)


def _with_one_rank_alone(
    runs: Mapping[Choices, Checked],
    judge: Judge,
    decisions: Sequence[BranchLine],
) -> Iterator[Alone]:
    """Yield the faults that occur if one rank alone, the last or the first one, gets another
    answer.
    """
    first, *others = runs
    for choices in others:
        changed = [choice for choice in choices if choice not in first]
        if len(changed) != 1 or all(
            each.alike for each in decisions if changed[0].is_at(each.frame.file, each.frame.line)
        ):
            continue
        usual, other = runs[first].sequences, runs[choices].sequences
        for rank in (max(usual), min(usual)):
            checked = judge({**usual, rank: other[rank]})
            if checked.verdict.is_fault:
                yield Alone(rank, changed[0], checked)
                break
