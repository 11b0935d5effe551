"""The words of the verdict on a checked program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from commlens.check.schedule import Outcome
from commlens.check.sequence import Guess, RankSequence
from commlens.diagnosis.words.phrases import COMPILER
from commlens.launchers import AGENT_STORE
from commlens.model.cause import TakenMessage
from commlens.model.verdict import Verdict
from commlens.text import capital, count, frame_phrase, joined, ranks_phrase, sentence, verb

_GUESSES_NAMED = 3

_GUESSES = {
    "value": "reads a value that other ranks decide",
    "object": "gathers objects, of which a rank alone knows only its own",
    "exchange": "takes numbers of other ranks that are different in each run",
    "store": "asks for a key of the store that several ranks may write",
    "poll": "asks whether a collective has completed",
    "source": "uses the number of the rank whose message a receive from any rank took",
    "file": "needs a file that another rank may write",
    "thread": "issues collectives from several threads",
    "gpu": "needs what the fake GPU of this check may lack",
    "graph": "captures a CUDA graph, which this check runs once, at its capture, and not at each"
    " replay",
}

_UNSEEN = {
    "address": "init_process_group at {at} meets at {name}, where nobody listens if the launcher"
    f" sets {AGENT_STORE}=True, as torchrun does: then no rank makes the store",
    "store": "the program makes the store at {name} itself, at {at}: whether its port is free, and"
    " whether a rank listens there, shows only in a real run",
    "world": "init_process_group at {at} asks for {name}",
    "group": "the program makes a group of {name} by hand, which it uses at {at}: this check does"
    " not know its members, and does not follow what they do in it",
    "graph": "what is captured in a CUDA graph at {at} is issued here at the capture, and in a real"
    " run at each replay",
    **{  # of torch.compile
        part: f"what is compiled by torch.compile at {{at}} is not compiled here: {COMPILER[part]}"
        for part in ("guards", "sizes", "partitioner", "autotuning")
    },
}


def fault(found: Verdict, outcome: Outcome, backend: str) -> Verdict:
    """Return the verdict on a fault, and say which runs meet it: every run; every run that takes
    the same branches, if the program decides by values that a rank alone cannot know; or a run in
    which messages come in one order, if a receive from any rank may take several.
    """
    decides = any(
        not each.idle for state in outcome.ranks.values() for each in state.sequence.decisions
    )
    runs, order = "every such run" if decides else "every run", ""
    if isinstance(found.cause, TakenMessage):
        runs, order = "a run", " in which the messages come in this order"
    explanation = found.explanation
    if outcome.stuck:
        waits = f"{capital(ranks_phrase(outcome.stuck))} {verb(outcome.stuck, 'waits', 'wait')}"
        stops = f"{waits} for ever in {runs} on {backend}{order}"
        explanation = f"{stops}: {explanation}" if explanation else f"{stops}."
    first = msgspec.structs.replace(found.findings[0], explanation=explanation)
    return msgspec.structs.replace(
        found, explanation=explanation, findings=[first, *found.findings[1:]]
    )


def no_fault(
    found: Verdict,
    sequences: Mapping[int, RankSequence],
    outcome: Outcome,
    backend: str,
) -> Verdict:
    """Return the verdict on a program in which nothing is wrong."""
    steps = min((sequence.steps for sequence in sequences.values()), default=0)
    ranks = count(len(sequences), "rank")
    of = f"{count(steps, 'step')} of {ranks}" if steps else ranks
    problems = {rank: sequence.problem for rank, sequence in sequences.items() if sequence.problem}
    unseen = _unseen(sequences)
    latent = [finding for finding in found.findings if finding.kind == "hazard"]
    summary = f"{'nothing hangs' if latent else 'no mismatch or deadlock'} in {of} on {backend}"
    if problems:
        rank, problem = next(iter(problems.items()))
        summary = f"not proven: rank {rank} is not known to its end, since {problem}"
    elif unseen:
        summary = f"not proven: {unseen[0]}"
    elif outcome.stuck:
        reason = _unexplained_waits(outcome)
        summary = f"not proven: {reason}"
        found.missing_evidence.append(sentence(capital(reason)))
    is_open = bool(problems or unseen or outcome.stuck)
    return Verdict(
        kind="undetermined" if is_open else "healthy",
        confidence="low" if is_open else "high",
        summary=summary,
        findings=latent,
        missing_evidence=found.missing_evidence,
        looked_at=found.looked_at,
    )


def unproven(found: Verdict, guesses: Sequence[Guess]) -> Verdict:
    """Return the verdict on a fault that may not occur, since the check had to guess a value that a
    rank asked for.
    """
    return Verdict(
        kind="undetermined",
        confidence="low",
        summary=f"not proven: if the guesses of this check are right, {found.summary}",
        explanation=f"{capital('; '.join(_guess_phrases(guesses)[:_GUESSES_NAMED]))}.",
        next_step=_check_guesses_first(guesses, found.next_step),
        findings=[],
        missing_evidence=found.missing_evidence,
        looked_at=found.looked_at,
    )


def elsewhere(other: str, backend: str, found: Verdict) -> str:
    """Return a sentence about a backend on which the program would hang."""
    return f"It runs on {backend} only: on {other}, {found.summary}."


def limits(sequences: Mapping[int, RankSequence], outcome: Outcome) -> list[str]:
    """Return sentences about the limits of this check."""
    found = [
        f"Rank {rank} is not known to its end: {sequence.problem}."
        for rank, sequence in sequences.items()
        if sequence.problem
    ]
    found += [sentence(capital(each)) for each in _unseen(sequences)]
    hurried = [sequence.steps for sequence in sequences.values() if sequence.out_of_time]
    if hurried:
        found.append(
            f"The time of this check was over after {count(min(hurried), 'step')}: later ones were"
            " not run. --steps goes on to the step that it names."
        )
    if outcome.open_ranks:
        ranks = outcome.open_ranks
        found.append(
            f"{capital(ranks_phrase(ranks))} {verb(ranks, 'waits', 'wait')} at the end of this"
            " check for ranks that have more to do."
        )
    if outcome.incomplete:
        found.append(
            "Not all orders were tried in which messages may reach the receives from any rank."
        )
    guesses = [guess for sequence in sequences.values() for guess in sequence.guesses]
    found += [f"{capital(each)}: only one answer was tried." for each in _guess_phrases(guesses)]
    return found


def _unexplained_waits(outcome: Outcome) -> str:
    """Return the places at which ranks wait for ever although no fault was found."""
    op = outcome.ranks[outcome.stuck[0]].blocked_in[0].record
    waits = f"{ranks_phrase(outcome.stuck)} {verb(outcome.stuck, 'waits', 'wait')} for ever"
    where = f"{op.op} at {frame_phrase(op.source) or 'an unknown line'}"
    return f"{waits} in {where}, and it is not known for which rank"


def _unseen(sequences: Mapping[int, RankSequence]) -> list[str]:
    """Return a phrase for each thing of the program that this check does not show."""
    found = (
        _UNSEEN[each.what].format(at=frame_phrase(each.frame) or "an unknown line", name=each.name)
        for sequence in sequences.values()
        for each in sequence.unseen
    )
    return list(dict.fromkeys(found))


def _guess_phrases(guesses: Iterable[Guess]) -> list[str]:
    """Return one phrase for each line and kind of guess."""
    phrases = (f"at {_place(guess)}, the program {_GUESSES[guess.what]}" for guess in guesses)
    return list(dict.fromkeys(phrases))


def _check_guesses_first(guesses: Iterable[Guess], next_step: str) -> str:
    """Put the check of the guesses before the advice on the fault."""
    places = list(dict.fromkeys(map(_place, guesses)))
    named = joined(places[:_GUESSES_NAMED])
    first = (
        f"first check whether the guess at {named} is right"
        if len(places) == 1
        else f"first check whether the guesses at {named} are right"
    )
    return f"{first}; if so, {next_step}" if next_step else first


def _place(guess: Guess) -> str:
    return frame_phrase(guess.source) or "an unknown line"
