"""Decide whether a whole job stands still, from several looks at all of its ranks, and how long the
ranks that others wait for have stayed away.

One look shows that nothing moves now. Only several looks show that every thread stays where it is,
which tells a job that cannot go on from one that pauses between two steps of its work. So a watcher
that finds a fault looks three times, over 2 s or more: if each thread of each rank is at the same
line, with the same collectives in flight, it need not wait for the stall timeout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from commlens.diagnosis.index import activity
from commlens.model.cause import Mismatch, Missing, Why
from commlens.model.collective import FrameKind, LearnedHow, Stack
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict

LOOKS: Final = 3
STILL_S: Final = 2.0
STILL_ON_DEVICE_S: Final = 5.0
"""The same while collectives are in flight on a device, whose end is seen late."""
_WAITS: Final = 1
_ON_DEVICE: Final = 2
PoseKeys = Mapping[bytes, int]
"""Ranks by the key of their pose, as bit masks."""
NO_POSES: Final[PoseKeys] = MappingProxyType({})
_DOUBTS_OF_BLAME: Final = frozenset({None, "undecided", "routine-may-change"})
"""Doubts about who is to blame for a mismatch, not about whether there is one."""


class Pose(NamedTuple):
    """Where a rank stands; the same in two looks if nothing of it moved."""

    ended: bool
    issued: int = 0
    in_flight: tuple[tuple[int, LearnedHow], ...] = ()
    threads: tuple[tuple[int, Stack], ...] = ()  # by thread
    on_device: bool = False  # a collective is in flight there


def is_at_rest(log: RankLog) -> bool:
    """Return whether a rank was watched and does not work. One that is stopped or in a block marked
    as slow may go on at any moment.
    """
    _, works, watched = activity.movement(log)
    return (
        watched
        and not works
        and log.expecting is None
        and log.observation.proc_state not in ("T", "t")
    )


def pose_of(log: RankLog) -> Pose | None:
    """Return where a rank stands; None if it moves, may go on by itself, or was not seen well
    enough.
    """
    seen = log.observation
    if seen.has_ended:
        return Pose(ended=True)
    if (
        not is_at_rest(log)
        or seen.stack_moved is not False
        or seen.suspended is not None
        or seen.proc_state == "D"
        or activity.is_short_of_memory(seen)
        or not log.stacks
        or log.lost_newest
    ):
        return None
    by_thread = sorted(log.stacks, key=lambda stack: stack.thread)
    return Pose(
        ended=False,
        issued=log.issued,
        in_flight=tuple((op.index, op.learned_how) for op in log.collectives if op.in_flight),
        threads=tuple((each.thread, each.frames) for each in by_thread),
        on_device=activity.device_is_busy(log),
    )


def pose_key(log: RankLog) -> bytes | None:
    """Return a key that ranks share if they stand in the same place, whatever their threads'
    numbers; None if :func:`pose_of` knows no pose. It also tells whether a rank waits for others or
    has ended, and whether a collective is in flight on its device.
    """
    pose = pose_of(log)
    if pose is None:
        return None
    places = sorted(
        [[frame.file, frame.line, frame.function] for frame in frames] for _, frames in pose.threads
    )
    content = [pose.ended, pose.issued, [[at, how.value] for at, how in pose.in_flight], places]
    waits = _WAITS * (pose.ended or _waits_for_ranks(log))
    digest = hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=8).digest()
    return bytes([waits | _ON_DEVICE * pose.on_device]) + digest


class Standstill:
    """Several looks at a job that may stand still. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._poses: dict[int, Pose] = {}
        self._others: PoseKeys = NO_POSES
        self._since_s = 0.0
        self._until_s = 0.0
        self._looks = 0

    def look(self, logs: Sequence[RankLog], now_s: float, others: PoseKeys = NO_POSES) -> None:
        """Add a look at all ranks.

        Args:
            logs: of all ranks, or of some.
            now_s: when they were read.
            others: the poses of the ranks without a log.
        """
        size = max((log.world_size for log in logs), default=0)
        found = {log.rank: pose_of(log) for log in logs}
        poses = {rank: pose for rank, pose in found.items() if pose is not None}
        seen = _mask(poses)
        for mask in others.values():
            seen |= mask
        unnumbered = min(poses, default=0) < 0
        if seen != (1 << size) - 1 or len(poses) < len(found) or unnumbered:
            poses = {}
        if not poses or (poses, others) != (self._poses, self._others):
            self._poses, self._since_s, self._looks = poses, now_s, 0
            self._others = others
        self._until_s = now_s
        self._looks += 1

    @property
    def has_begun(self) -> bool:
        """Whether nothing moved in the last look, and further ones may prove it."""
        return bool(self._poses)

    @property
    def is_proven(self) -> bool:
        """Whether no thread of any rank has moved in several looks, for long enough."""
        on_device = any(pose.on_device for pose in self._poses.values()) or any(
            key[0] & _ON_DEVICE for key in self._others
        )
        still_s = STILL_ON_DEVICE_S if on_device else STILL_S
        return (
            bool(self._poses) and self._looks >= LOOKS and self._until_s - self._since_s >= still_s
        )


def _mask(ranks: Iterable[int]) -> int:
    """Return ranks as a bit mask. A process that does not know its rank yet has a rank below 0."""
    return sum(1 << rank for rank in set(ranks) if rank >= 0)


def cannot_go_on(verdict: Verdict, logs: Sequence[RankLog], others: PoseKeys = NO_POSES) -> bool:
    """Return whether it is certain that something blocks the ranks for good, whoever is to blame,
    and every rank waits for others. A rank that sleeps or waits for something else may go on and
    end their waits.

    Args:
        verdict: made of the logs. A mismatch counts only if it blocks ranks. Ranks that are known
            never to arrive may be anywhere.
        logs: of all ranks, or of some.
        others: the poses of the ranks without a log.
    """
    cause = verdict.cause
    if not verdict.is_fault or not verdict.certain:
        return False
    if isinstance(cause, Mismatch) and (
        cause.silent or not cause.held_up or cause.doubt not in _DOUBTS_OF_BLAME
    ):
        return False
    anywhere = cause.ranks if isinstance(cause, Missing) else []
    examined = _mask(log.rank for log in logs)
    if any(mask & ~examined and not key[0] & _WAITS for key, mask in others.items()):
        return False
    return all(
        log.rank in anywhere or log.observation.has_ended or _waits_for_ranks(log) for log in logs
    )


def _threads_inside(log: RankLog, main: int) -> set[int]:
    """Return the threads that are inside a recorded call or wait. A record that names no thread
    counts for the main one.
    """
    calls = [*log.collectives, *log.setups, *([log.store_wait] if log.store_wait else [])]
    return {
        op.wait_thread or op.issue_thread or main
        for op in calls
        if op.in_flight and (op.waited_for or not op.returned_ns)
    }


def _waits_for_ranks(log: RankLog) -> bool:
    """Return whether a rank's main thread was seen in a wait for others: by a record, in torch's
    code, or at a line that waits for the device.
    """
    main, seen = log.main_stack, log.observation
    if main is None or not main.frames:
        return False
    inside = _threads_inside(log, main.thread)
    issuing = {op.issue_thread for op in log.collectives} - {main.thread}
    if any(stack.thread in issuing - inside for stack in log.stacks):
        return False  # another thread may issue what others wait for
    if main.thread in inside:
        return True
    if activity.lasting_wait(seen) or activity.classify_frames(log, main.frames).why is not None:
        return False
    if activity.torch_is_innermost(main.frames):
        return True
    innermost = next(
        (frame for frame in main.frames if frame.kind is not FrameKind.NATIVE), main.frames[0]
    )
    return (
        innermost.kind is FrameKind.USER
        and activity.device_is_busy(log)
        and activity.may_wait_for_device(seen)
    )


_HELD_FROM_OUTSIDE: Final[frozenset[Why]] = frozenset({"stopped", "uninterruptible-io"})
_PIPES_OF_PROCESSES: Final = "multiprocessing/connection.py"
"""On the stack while a process waits for those that it has started: a data loader's workers."""
_INNERMOST: Final = 3  # frames; below its own there are those of selectors.py


def late_ranks(verdict: Verdict, logs: Sequence[RankLog]) -> list[RankLog]:
    """Return the logs of the ranks that are to blame for not coming; none if the verdict blames
    no rank for that.
    """
    cause, by_rank = verdict.cause, {log.rank: log for log in logs}
    if not isinstance(cause, Missing) or cause.blames_waiting:
        return []
    return [by_rank[rank] for rank in verdict.culprits if rank in by_rank]


def stayed_ns(late: Sequence[RankLog]) -> int:
    """Return how long the first of the late ranks has been where it is; 0 if unknown."""
    return max((activity.quiet_ns(log) for log in late), default=0)


def may_go_on(verdict: Verdict, logs: Sequence[RankLog]) -> bool:
    """Return whether the ranks to blame wait for something outside of the job, so that they may go
    on at any moment: they are stopped, they sleep, or they wait for a disk, a server, or a process
    that is no rank.

    Args:
        verdict: what a diagnosis found.
        logs: from which it was made.
    """
    if verdict.why in _HELD_FROM_OUTSIDE:
        return True
    late, ranks = late_ranks(verdict, logs), {(log.host, log.pid) for log in logs}
    return bool(late) and all(_waits_outside(log, ranks) for log in late)


def _waits_outside(log: RankLog, ranks: Set[tuple[str, int]]) -> bool:
    """Return whether a rank's main thread is seen to wait for something outside of the job.

    Args:
        log: of the rank.
        ranks: the hosts and pids of all ranks.
    """
    seen, stack = log.observation, log.main_stack
    if seen.holds_gil:
        return False  # its own other threads cannot run
    if activity.lasting_wait(seen):
        return (log.host, seen.waits_for_pid) not in ranks
    # the kernel does not show a wait for several files at once
    frames = (
        [frame for frame in stack.frames if frame.kind is not FrameKind.NATIVE] if stack else []
    )
    return any(frame.file.endswith(_PIPES_OF_PROCESSES) for frame in frames[:_INNERMOST])
