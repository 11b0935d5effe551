"""Index the black boxes of one job, and find the op that each thread is blocked in.

A record tells when a call began and returned, and when a thread began and ended to wait for it. Of
a rank that has issued ``all_reduce #7`` and stands in its wait, the view gets the record in the
track of the channel under number 7, and a :class:`BlockedThread` of that thread. Where no thread is
seen in a wait, it is inferred, from the oldest op in flight on the device and from the stack of the
main thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from commlens.diagnosis.fold.alike import NONE_ALIKE, AlikeRanks
from commlens.diagnosis.index import activity
from commlens.diagnosis.index.job_index import (
    DEVICE,
    STALL_TIMEOUT_S,
    BlockedThread,
    How,
    JobIndex,
    RankView,
    Track,
    lacks,
)
from commlens.diagnosis.index.process_exit import ProcessExit, attribute_exits, process_exit_of
from commlens.diagnosis.select.job import absent_ranks, last_moment, world_size
from commlens.matching.error_texts import is_peer_error, is_refusal
from commlens.model.collective import Channel, ChannelKey, Collective, LearnedHow, State
from commlens.model.grouping import grouped
from commlens.model.ranklog import RankLog, ThreadStack

_ON_DEVICE: Final = (LearnedHow.NATIVE_RECORDER, LearnedHow.ENQUEUED, LearnedHow.STARTED)
"""How it was learned that an op in flight has not completed on its device. This is unknown for an
op that was just enqueued.
"""

_ASKED_WITHIN_NS: Final = 4_000_000_000
"""The time within which a rank asks torch's recorder about the last op on a device, with a margin
(capture/device_queues.py).
"""


def index_logs(
    logs: Sequence[RankLog], stalled_after_s: float, alike: AlikeRanks = NONE_ALIKE
) -> JobIndex:
    """Index the black boxes of one job, in time linear in their records.

    Args:
        logs: of the job's ranks.
        stalled_after_s: a shorter wait is not stuck.
        alike: ranks without a log that are in the state of ranks with one.
    """
    stalled_after_ns = int(stalled_after_s * 1e9)
    stall_timeout_s = max((log.stall_timeout_s for log in logs), default=0.0) or STALL_TIMEOUT_S
    exits = attribute_exits(
        {log.rank: process_exit_of(log) for log in logs}, {log.rank: log for log in logs}
    )
    size = world_size(logs)
    strangers = {log.rank: log for log in logs if log.unrecorded}
    logs = [log for log in logs if not log.unrecorded]
    no_record, elsewhere = absent_ranks(logs, size, alike.others)
    job = JobIndex(
        {},
        {},
        size,
        sorted({*no_record, *strangers}),
        [rank for rank in elsewhere if rank not in strangers],
        stalled_after_ns,
        strangers=strangers,
        stall_timeout_ns=int(stall_timeout_s * 1e9),
        stands_for=alike.stands_for,
    )
    for log in logs:
        indexer = _RankIndexer(log, exits[log.rank], stalled_after_ns)
        indexer.add_records(job.channels)
        job.views[log.rank] = indexer.view
        for key in indexer.view.tracks:
            job.users.setdefault(key, []).append(log.rank)
        indexer.add_setups()
        indexer.add_store_wait()
    _move_unknown_blocks(job)
    _mark_waits_for_dead_ranks(job)
    return job


def _move_unknown_blocks(job: JobIndex) -> None:
    """Move each block of unknown completion to the first collective that not all ranks have issued:
    later ones cannot have completed.
    """
    for view in job.views.values():
        for block in view.blocks.values():
            if block.how != "unknown":
                continue
            key = block.op.channel.key
            reached = min((track.last for track in job.tracks_on(key).values()), default=0)
            first = view.tracks[key].ops.get(reached + 1)
            if first is not None and reached < block.op.sequence_number:
                block.op, block.parts = first, [first]


def _mark_waits_for_dead_ranks(job: JobIndex) -> None:
    """Mark threads that wait for a dead rank as stuck, however short their wait: it never ends."""
    dead = [view for view in job.views.values() if view.died]
    for view in job.views.values():
        for block in view.blocks.values():
            if not block.stuck and block.how != "assumed":
                block.stuck = any(
                    not other.wrapped and lacks(other, part)
                    for other in dead
                    for part in block.parts
                )


class _RankIndexer:
    """Indexes the records of one rank, and finds its blocked threads.

    Args:
        log: the rank's records.
        end: how its process ended.
        stalled_after_ns: a shorter wait is not stuck.
    """

    def __init__(self, log: RankLog, end: ProcessExit, stalled_after_ns: int) -> None:
        main = log.main_stack
        self.view = RankView(
            log.rank,
            log,
            end,
            log.captured_ns or last_moment(log),
            main_thread=(main.thread if main is not None else 0) or log.pid,
            history=log.collectives,
            wrapped=log.issued > len(log.collectives) or bool(log.problems),
            head_lost=log.head_lost,
        )
        self._stalled_after_ns = stalled_after_ns
        # of coalesced groups, by id: the record that closes each and has its state; the members
        coalesced = [op for op in log.collectives if op.coalescing_id]
        self._closers = {op.coalescing_id: op for op in coalesced if op.coalesced_members}
        self._groups = grouped(
            (op.coalescing_id, op) for op in coalesced if not op.coalesced_members
        )

    def add_records(self, channels: dict[ChannelKey, Channel]) -> None:
        """Index all records, and add their channels to the job's."""
        failed: list[Collective] = []
        open_ops: list[Collective] = []
        # building a key costs more than looking it up by the channel's identity
        keys: dict[int, ChannelKey] = {}
        for op in self.view.log.collectives:
            key = keys.get(id(op.channel))
            if key is None:
                key = keys[id(op.channel)] = op.channel.key
                channels.setdefault(key, op.channel)
            closer = self._closers.get(op.coalescing_id, op)
            if op.is_point_to_point:
                self._add_message(key, op, closer)
            elif closer is op:
                self._add_to_track(key, op)
            if op.in_flight and closer is op:
                open_ops.append(op)
            elif op.state is State.FAILED:
                failed.append(op)
        for track in self.view.tracks.values():
            # If no thread waits for an op, a later completed op of its channel implies its
            # completion: gloo's reduce_scatter never reports its own.
            track.open = sorted(
                n
                for n in track.open
                if n > track.completed or track.ops[n].waited_for or not track.ops[n].returned_ns
            )
        self._find_blocks(open_ops, failed)

    def _add_message(self, key: ChannelKey, op: Collective, closer: Collective) -> None:
        """Add a message, with the record that closes its batch, else itself."""
        peer = -1 if op.peer is None else op.peer
        self.view.pairs.setdefault((key, peer, op.op), []).append(op)
        if op.in_flight or closer.in_flight:
            self.view.open_pairs.add(op.index)

    def _add_to_track(self, key: ChannelKey, op: Collective) -> None:
        number = op.sequence_number
        if number <= 0:
            if op.channel.library and op.args.op != "rendezvous":  # only the first one has a number
                self.view.unnumbered[key] = op.index  # after an error that the program caught
            return
        track = self.view.tracks.setdefault(key, Track())
        track.ops[number] = op  # type: ignore[index]
        if op.coalescing_id:
            members = self._groups.get(op.coalescing_id, [])
            track.members[number] = [one.args for one in members if not one.is_point_to_point]
        if number >= track.last:
            track.last, track.thread = number, op.issue_thread
        if op.state is State.COMPLETED:
            track.completed = max(track.completed, number)
        elif op.in_flight:
            track.open.append(number)

    def add_setups(self) -> None:
        """Add the calls that make the rank's process groups: each is the only collective of its own
        channel.
        """
        view = self.view
        calls = [
            op
            for op in view.log.setups
            if op.op != "init_device_mesh" and view.rank in op.channel.group.ranks
        ]
        for op in calls:
            self._add_to_track(op.channel.key, op)
        newest = calls[-1] if calls and calls[-1] is view.log.setups[-1] else None
        if newest is None or (newest.state is State.FAILED and view.exit.kind != "peer"):
            return
        _note_lost_store(newest, view.log.exception or "")
        if newest.state is not State.COMPLETED:
            how: How = "issue" if newest.in_flight else "failed"
            self._block_in_call(newest, how, newest.issue_thread or view.main_thread)

    def add_store_wait(self) -> None:
        """Add the wait for a key of the store, if it is newer than all records."""
        wait, ops = self.view.log.store_wait, self.view.log.collectives
        if wait is not None and (not ops or ops[-1].announced_ns < wait.announced_ns):
            self._block_in_call(wait, "issue", wait.issue_thread)

    def _block_in_call(self, op: Collective, how: How, thread: int) -> None:
        """Add a block in place of an op in flight for which the main thread was assumed to wait."""
        self.view.blocks.pop(self.view.main_thread, None)
        self._block(op, how, thread, op.announced_ns)

    def _find_blocks(self, open_ops: list[Collective], failed: list[Collective]) -> None:
        """Find the blocked threads, given the ops in flight and those that failed, oldest first."""
        view = self.view
        unwaited: list[Collective] = []  # returned, and no thread was seen to wait for them
        enqueued: list[Collective] = []
        for op in open_ops:
            if op.channel.runs_ahead and op.learned_how in _ON_DEVICE:
                enqueued.append(op)
            elif op.waited_for:
                self._block_waiting(op, "wait")
            elif not op.returned_ns:
                self._block(op, "issue", op.issue_thread, op.entered_ns or op.announced_ns)
            elif _may_be_pending(view, op):
                unwaited.append(op)
        if enqueued:
            self._find_head(enqueued)
        elif not view.blocks and not unwaited:
            self._assume_wait_for_last()
        for op in failed:
            if self._was_blocked(op):
                self._block_waiting(op, "failed")
        if unwaited and _main_may_wait_in_cpp(view, unwaited[0]):
            self._block(unwaited[0], "assumed", view.main_thread, unwaited[0].announced_ns)

    def _was_blocked(self, failed: Collective) -> bool:
        """Return whether a thread was blocked in an op until it failed, and did nothing since. A
        rank that lives on after a refusal has caught it, and waits no more.
        """
        refused = is_refusal(failed.error) and self.view.exit.kind not in ("clean", "alive")
        return (
            (is_peer_error(failed.error) or refused)
            and failed.issue_thread not in self.view.blocks
            and _is_last_of_thread(self.view, failed)
        )

    def _find_head(self, enqueued: list[Collective]) -> None:
        """Find the op that the rank's device waits in: the first one in flight. What is enqueued
        behind it has not started.

        The block is the main thread's if that thread waits for the device, else the device's own:
        then the host is free to run ahead.
        """
        view, head = self.view, enqueued[0]
        view.running = {op.index for op in enqueued if op.learned_how is LearnedHow.STARTED}
        view.timed = any(op.learned_how is not LearnedHow.NATIVE_RECORDER for op in enqueued)
        same_channel = (
            op.done_ns
            for op in view.history
            if op.channel.key == head.channel.key and op.index < head.index
        )
        since = max(head.announced_ns, *same_channel, 0)
        thread = view.main_thread if _main_waits_for_device(view, head) else DEVICE
        self._block(head, "enqueued", thread, since)
        view.head = view.blocks[thread]
        first_of: dict[object, Collective] = {}
        for op in enqueued:
            first_of.setdefault(
                (op.channel.key, op.peer, op.op) if op.is_point_to_point else op.channel.key, op
            )
        view.heads = [
            op
            for op in first_of.values()
            if all(part is not op for part in view.head.parts) and op is not head
        ]

    def _assume_wait_for_last(self) -> None:
        """Assume that the main thread waits for the last op on a device, if it is unknown whether
        that has completed.
        """
        view, last = self.view, self.view.last_op
        if (
            last is None
            or not last.channel.runs_ahead
            or last.captured
            or last.state is not State.UNKNOWN
        ):
            return
        if view.now_ns - last.announced_ns < _ASKED_WITHIN_NS and not view.exit.ended:
            return  # torch's recorder has not been asked yet
        if _main_waits_for_device(view, last):
            if last.is_point_to_point or not last.sequence_number:
                view.unknown_message = last
            else:
                self._block(last, "unknown", view.main_thread, last.announced_ns)

    def _block_waiting(self, op: Collective, how: How) -> None:
        """Add the block of the thread that waits for an op, or did so until it failed."""
        thread = op.wait_thread or op.issue_thread
        self._block(op, how, thread, op.wait_began_ns or op.announced_ns)

    def _block(self, op: Collective, how: How, thread: int, since: int) -> None:
        """Add the block of a thread, unless it is blocked in a newer wait."""
        view = self.view
        known = view.blocks.get(thread)
        if known is not None and (how == "failed" or known.since_ns >= since):
            return
        parts = [op]
        if op.coalescing_id and not op.sequence_number:
            parts = self._groups.get(op.coalescing_id) or [op]
        age = max(0, view.now_ns - since)
        # A rank that died, or that the launcher ended, was blocked until its end, however short its
        # wait.
        stuck = (
            age >= self._stalled_after_ns
            or how == "failed"
            or view.exit.failed
            or (view.exit.ended and how != "assumed")
        )
        view.blocks[thread] = BlockedThread(op, parts, thread, since, how, stuck, age)


def _note_lost_store(newest: Collective, exception: str) -> None:
    """Add to a call that made a group, and failed, that the store's process had ended."""
    if newest.state is State.FAILED and "DistNetworkError" in exception:
        newest.error = exception


def _main_waits_for_device(view: RankView, head: Collective) -> bool:
    """Return whether the main thread seems to wait for the device, as in ``.item()``, ``.cpu()`` or
    ``synchronize``.
    """
    if view.main_thread in view.blocks or view.exit.kind == "clean":
        return False
    stack = _main_stack_since(view, head)
    if stack is None:
        return True
    if activity.waits_for_device(stack.frames):
        return True
    doing, seen = activity.classify_frames(view.log, stack.frames), view.log.observation
    if doing.by_name:  # load_batch may copy its batch to the device, which waits, too
        return activity.spins(seen)
    return doing.why is None and activity.may_wait_for_device(seen)


def _main_stack_since(view: RankView, op: Collective) -> ThreadStack | None:
    """Return the main thread's stack, if it was taken after an op was issued."""
    stack = view.log.main_stack
    if stack is None or not stack.frames or 0 < stack.taken_ns < op.announced_ns:
        return None
    return stack


def _may_be_pending(view: RankView, op: Collective) -> bool:
    """Return whether an op that returned, and for which no thread is known to wait, may block its
    rank.
    """
    key = op.channel.key
    if op.is_point_to_point:
        ops = view.pairs.get((key, -1 if op.peer is None else op.peer, op.op), [])
        return not any(
            other.state is State.COMPLETED and other.index > op.index
            for other in reversed(ops[-64:])
        )
    track = view.tracks.get(key)
    return track is None or op.sequence_number in track.open or not op.sequence_number


def _main_may_wait_in_cpp(view: RankView, oldest: Collective) -> bool:
    """Return whether the main thread may wait in C++, which is not recorded: DDP's reducer and
    functional collectives do.
    """
    sees_waits = any(block.how in ("wait", "issue") for block in view.blocks.values())
    if sees_waits or view.main_thread in view.blocks or view.exit.kind == "clean":
        return False
    stack = _main_stack_since(view, oldest)
    return stack is None or (
        activity.classify_frames(view.log, stack.frames).why is None
        and activity.torch_is_innermost(stack.frames)
    )


def _is_last_of_thread(view: RankView, failed: Collective) -> bool:
    """Return whether a failed op is the last one of its thread, but for others that failed."""
    later = takewhile(lambda op: op is not failed, reversed(view.log.collectives))
    return all(op.state is State.FAILED for op in later if op.issue_thread == failed.issue_thread)
