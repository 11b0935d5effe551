"""The verdict on the sequences of all ranks: schedule them, and diagnose how far they come."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from commlens.check import words
from commlens.check.branches import BranchLine, merged
from commlens.check.branches import doubtful as doubtful_decisions
from commlens.check.classes import Classes
from commlens.check.files import lines_of_changed_files
from commlens.check.schedule import RULES, Op, Outcome, RankState, Rules, schedule
from commlens.check.sequence import Guess, Issue, RankSequence
from commlens.diagnosis.examine import ExaminedJob, examine_logs
from commlens.diagnosis.live import find_swaps
from commlens.model.cause import Fewer, Kind
from commlens.model.collective import Channel, Collective, LearnedHow, State
from commlens.model.ops import key_kind
from commlens.model.ranklog import End, Observation, RankLog, ThreadStack
from commlens.model.verdict import Finding, Verdict

# faults of these kinds are none in a program in which no rank waits for ever
_FAULTS_OF_WAITING_RANKS: Final[tuple[Kind, ...]] = ("missing", "cycle", "stuck-inside")


class Checked(NamedTuple):
    """A checked program."""

    examined: ExaminedJob
    """The job at the moment when no rank goes on, with the verdict, for reports."""
    outcome: Outcome
    hinges_on_numbers: bool = False
    """The only doubt left: the program branched on numbers that commlens could not compute, and the
    branch may not matter.
    """
    classes: Classes | None = None
    """None if all ranks were run."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on the program."""
        return self.examined.verdict

    @property
    def sequences(self) -> dict[int, RankSequence]:
        """The sequences of all ranks."""
        return {rank: state.sequence for rank, state in self.outcome.ranks.items()}

    def with_verdict(self, verdict: Verdict) -> Checked:
        """Return the same with another verdict."""
        return self._replace(examined=self.examined._replace(verdict=verdict))


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
    reached = {rank: _reached(state, found) for rank, state in outcome.ranks.items()}
    decisions = _decisions(outcome, found.culprits, reached)
    guesses = _guesses(outcome, found.culprits, reached)
    certain_but_for_numbers = not guesses and all(each.replaceable for each in decisions)
    is_fault = found.is_fault and (
        bool(outcome.stuck) or found.kind not in _FAULTS_OF_WAITING_RANKS
    )
    if not is_fault:
        if certain_but_for_numbers:
            found.findings += _latent(examined, sequences)
        verdict = words.no_fault(found, sequences, outcome, backend)
        verdict.explanation = _sentence_on_other_backend(sequences, backend, script)
    elif guesses or decisions:
        values = [Guess("value", (each.frame,)) for each in decisions]
        verdict = words.unproven(found, [*guesses, *values])
    else:
        verdict = words.fault(found, outcome, backend)
    verdict.missing_evidence = [*verdict.missing_evidence, *words.limits(sequences, outcome)]
    hinges_on_numbers = is_fault and bool(decisions) and certain_but_for_numbers
    return Checked(examined._replace(verdict=verdict), outcome, hinges_on_numbers)


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
    """Return the branches that ranks may take differently in a real run, and those by which the
    culprits may have failed: a rank that runs alone fails at an assertion about a value that other
    ranks send.
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
    """Return the guesses on which the fault depends, and the files because of which ranks may take
    other branches in a real run, or the culprits may have failed: a rank that runs alone does not
    find a file that other ranks write, and its GPU is no real one.
    """
    states = outcome.ranks
    guesses = [
        guess
        for rank, state in states.items()
        for guess in state.sequence.guesses
        if guess.after <= reached[rank].events
    ]
    changed = lines_of_changed_files([state.sequence.file_lookups for state in states.values()])
    return [
        *guesses,
        *(Guess("file", (frame,)) for frame in changed),
        *(
            Guess(sequence.misses, sequence.exception_stack)
            for sequence in _failed(outcome, culprits)
            if sequence.misses is not None
        ),
    ]


# --- the records that a real job would leave when its ranks have come as far

_BEGAN_NS = 1_000_000_000_000_000_000


def logs_of(outcome: Outcome, backend: str, *, script: str = "") -> list[RankLog]:
    """Return the log of each rank, at the moment when no rank can go on.

    If a rank's sequence was cut off, it may still do what other ranks wait for. The logs of ranks
    that wait for such a rank do not show their waits.
    """
    channels: dict[int, Channel] = {}  # by id of the recorded one

    def channel_of(op: Op) -> Channel:
        recorded = op.record.channel
        found = channels.get(id(recorded))
        if found is None:
            group = msgspec.structs.replace(recorded.group, backend=backend)
            found = channels[id(recorded)] = Channel(group, recorded.device)
        return found

    def records(ops: list[Op], state: RankState) -> list[Collective]:
        goes_on = state.sequence.rank in outcome.open_ranks
        return [_record(op, channel_of(op)) for op in ops if op.done or not goes_on]

    def store_wait(state: RankState) -> Collective | None:
        waits = [op for op in state.blocked_in if op.record.is_store_wait]
        return next(iter(records(waits, state)), None)

    return [
        _log(
            state,
            records(state.ops, state),
            records(state.setups, state),
            store_wait=store_wait(state),
            keys_written=records(_first_of_each_kind(state.keys_written), state),
            blocked_in=[] if rank in outcome.open_ranks else state.blocked_in,
            now=_at(outcome.now),
            script=script,
        )
        for rank, state in sorted(outcome.ranks.items())
    ]


def _first_of_each_kind(writes: list[Op]) -> list[Op]:
    """Return the first write of each kind of key, as a black box has them."""
    first: dict[str, Op] = {}
    for op in writes:
        first.setdefault(key_kind(op.record.channel.group.name), op)
    return list(first.values())


def _at(moment: int) -> int:
    """Return the time of a moment of the schedule; 0 if it is 0, which stands for never."""
    return _BEGAN_NS + moment if moment else 0


def _log(
    state: RankState,
    ops: list[Collective],
    setups: list[Collective],
    *,
    store_wait: Collective | None,
    keys_written: list[Collective],
    blocked_in: list[Op],
    now: int,
    script: str,
) -> RankLog:
    sequence = state.sequence
    observation = Observation(end=End.RUNNING, seen_ns=now)
    if state.has_ended:
        observation = Observation(
            end=sequence.end,
            exit_code=sequence.exit_code,
            ended_ns=_at(state.ended_at),
            seen_ns=now,
        )
    main = next((op.issue_thread for op in (*setups, *ops)), 1)
    return RankLog(
        rank=sequence.rank,
        world_size=sequence.world_size,
        collectives=ops,
        setups=setups,
        store_wait=store_wait,
        keys_written=keys_written,
        issued=len(ops),
        stacks=[
            ThreadStack(op.waiter, "", op.record.stack, now, op.waiter == main) for op in blocked_in
        ],
        stacks_ns=now,
        heartbeat_ns=_at(state.ended_at) if state.has_ended else now,
        captured_ns=now,
        steps=sequence.steps,
        closed=state.has_ended and sequence.end is End.CLEAN,
        left=state.has_ended and sequence.left,
        exception=sequence.exception if state.has_ended else None,
        exception_stack=sequence.exception_stack if state.has_ended else (),
        hazards=sequence.hazards if state.has_ended or state.came_to_cut else [],
        initialised=any(op.state is State.COMPLETED for op in setups),
        observation=observation,
        script=script,
    )


def _record(op: Op, channel: Channel) -> Collective:
    issued, done, waited = _at(op.issued_at), _at(op.done_at), _at(op.waited_at)
    return msgspec.structs.replace(
        op.record,
        channel=channel,
        state=State.COMPLETED if done else State.ISSUED,
        announced_ns=issued,
        entered_ns=issued,
        returned_ns=done if op.record.is_setup else issued,
        wait_began_ns=waited,
        wait_ended_ns=done if waited else 0,
        wait_thread=op.waiter,
        done_ns=done,
        learned_how=LearnedHow.WAIT if done else LearnedHow.NOT_YET,
        took_from=op.source if op.record.peer is None and done else None,
    )
