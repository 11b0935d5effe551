"""The records that a real job would leave when its ranks have come as far as they do in a check."""

from __future__ import annotations

import msgspec

from commlens.check.schedule import Op, Outcome, RankState
from commlens.model.collective import Channel, Collective, LearnedHow, State
from commlens.model.ops import key_kind
from commlens.model.ranklog import End, Observation, RankLog, ThreadStack

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
    came_to_the_cut = sequence.cut_off and state.ended_at > 0 and not state.blocked_in
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
        hazards=sequence.hazards if state.has_ended or came_to_the_cut else [],
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
