"""The verdict on the sequences of all ranks: schedule them, and diagnose how far they come."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from commlens.check import words
from commlens.check.branches import BranchLine, merged
from commlens.check.branches import doubtful as doubtful_decisions
from commlens.check.files import changing
from commlens.check.records import logs_of
from commlens.check.schedule import RULES, Outcome, RankState, Rules, schedule
from commlens.check.sequence import Guess, Issue, RankSequence
from commlens.diagnosis.examine import ExaminedJob, examine_logs
from commlens.diagnosis.live import find_swaps
from commlens.model.cause import Fewer
from commlens.model.ranklog import End
from commlens.model.verdict import Finding, Verdict

_NEEDS_SOMEONE_STUCK = ("missing", "cycle", "stuck", "waiting", "unrecorded")


class Checked(NamedTuple):
    """A checked program with its verdict."""

    verdict: Verdict
    examined: ExaminedJob
    """The job at the moment when no rank goes on, for reports."""
    outcome: Outcome
    backend: str
    steps: int  # that the rank with the fewest has done
    hinges_on_numbers: bool = False
    """The verdict is open only because of numbers that were read and that may decide nothing."""


def judge(sequences: Mapping[int, RankSequence], *, backend: str = "", script: str = "") -> Checked:
    """Return the verdict on a program.

    Args:
        sequences: of all ranks.
        backend: "gloo" or "nccl"; empty: the one that the program asks for.
        script: the program's name.
    """
    backend = backend or _asked(sequences)
    outcome, examined = _examine(sequences, RULES[backend], script)
    found = examined.verdict
    steps = min((sequence.steps for sequence in sequences.values()), default=0)
    limits = words.limits(sequences, outcome)
    fault = found.is_fault and (bool(outcome.stuck) or found.kind not in _NEEDS_SOMEONE_STUCK)
    reached = {rank: _reached(state, found) for rank, state in outcome.ranks.items()}
    decisions = _decisions(outcome, found.culprits, reached)
    guesses = _guesses(outcome, found.culprits, reached)
    certain_but_for_numbers = not guesses and all(each.replaceable for each in decisions)
    hinges_on_numbers = fault and bool(decisions) and certain_but_for_numbers
    guesses += [Guess("value", (each.frame,)) for each in decisions]
    if fault and guesses:
        verdict = words.unproven(found, guesses)
    elif fault:
        verdict = words.fault(found, outcome, backend)
    else:
        found.findings += _latent(examined, sequences) if certain_but_for_numbers else []
        verdict = words.no_fault(found, sequences, outcome, backend, steps)
        verdict.explanation = _sentence_on_other_backend(sequences, backend, script)
    verdict.missing_evidence = [*verdict.missing_evidence, *limits]
    return Checked(
        verdict,
        examined._replace(verdict=verdict),
        outcome,
        backend,
        steps,
        hinges_on_numbers,
    )


def _examine(
    sequences: Mapping[int, RankSequence], rules: Rules, script: str
) -> tuple[Outcome, ExaminedJob]:
    outcome = schedule(sequences, rules)
    logs = logs_of(outcome, rules.backend, script=script)
    return outcome, examine_logs(logs, stalled_after_s=0.0, foreseen=True)


def _latent(examined: ExaminedJob, sequences: Mapping[int, RankSequence]) -> list[Finding]:
    """Return the latent faults of a program that runs to its end: ranks that swapped collectives,
    and calls that some ranks of a group left out although no rank waits for them there.
    """
    found = find_swaps(examined.job)
    if not any(each.cut_off or each.problem for each in sequences.values()):
        found += [each for each in examined.verdict.findings if isinstance(each.cause, Fewer)]
    return [
        msgspec.structs.replace(
            each,
            kind="hazard",
            root_cause=False,
            cause=msgspec.structs.replace(each.cause, kind="hazard", root_cause=False),
        )
        for each in found
        if each.cause is not None
    ]


def _asked(sequences: Mapping[int, RankSequence]) -> str:
    """Return the backend with rules that is most like the one that the program asks for."""
    asked = next((each.backend for each in sequences.values() if each.backend), "")
    return "nccl" if "ccl" in asked else "gloo"


def _sentence_on_other_backend(
    sequences: Mapping[int, RankSequence], backend: str, script: str
) -> str:
    """Return a sentence about the other backend if the program would hang there."""
    for name, rules in RULES.items():
        if name != backend:
            outcome, examined = _examine(sequences, rules, script)
            if outcome.stuck and examined.verdict.is_fault:
                return words.elsewhere(name, backend, examined.verdict)
    return ""


class _Reached(NamedTuple):
    """The point that a rank reaches: the call at which it waits for ever, or at which the ranks
    differ.
    """

    events: float  # number of its events before that call
    calls: float  # number of its calls up to that one


def _reached(state: RankState, found: Verdict) -> _Reached:
    """Return how far a rank comes before the fault that was found stops it."""
    sequence, group, differs = state.sequence, found.group, found.collective
    reached = _Reached(state.came_to, len(state.ops) if state.blocked_in else math.inf)
    if group is None or differs is None or not found.kind.startswith("mismatch/"):
        return reached
    for number, event in reversed(list(enumerate(sequence.events))):
        if (
            isinstance(event, Issue)
            and not event.op.is_point_to_point
            and event.op.sequence_number == differs.sequence_number
            and event.op.channel.group.name == group.name
            and sequence.rank in group.ranks
        ):
            return _Reached(min(reached.events, number), min(reached.calls, event.op.index))
    return reached


def _decisions(
    outcome: Outcome, culprits: Sequence[int], reached: Mapping[int, _Reached]
) -> list[BranchLine]:
    """Return the values by which ranks may have taken other branches than in a real run, or by
    which the culprits may have failed: a rank that runs alone fails at an assertion about a value
    that other ranks send.
    """
    states = outcome.ranks
    doubtful = doubtful_decisions(
        [state.sequence.decisions for state in states.values()],
        [reached[rank].calls for rank in states],
    )
    failed = [
        each
        for sequence in _failed(outcome, culprits)
        for each in sequence.decisions
        if each.is_open
    ]
    return merged([*doubtful, *failed])


def _failed(outcome: Outcome, culprits: Sequence[int]) -> list[RankSequence]:
    sequences = [outcome.ranks[rank].sequence for rank in culprits]
    return [sequence for sequence in sequences if sequence.end is not End.CLEAN]


def _guesses(
    outcome: Outcome, culprits: Sequence[int], reached: Mapping[int, _Reached]
) -> list[Guess]:
    """Return the program's guesses, and the files by which ranks may have taken other branches than
    in a real run, or by which the culprits may have failed: a rank that runs alone does not find a
    file that other ranks write.
    """
    states = outcome.ranks
    guesses = [
        guess
        for rank, state in states.items()
        for guess in state.sequence.guesses
        if guess.after <= reached[rank].events
    ]
    looks = changing([state.sequence.looks for state in states.values()])
    return [
        *guesses,
        *(Guess("file", (frame,)) for frame in looks),
        *(
            Guess("file", sequence.exception_stack)
            for sequence in _failed(outcome, culprits)
            if sequence.misses_a_file
        ),
    ]
