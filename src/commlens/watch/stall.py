"""Notices stalls, and decides when to diagnose one and when its verdict is new.

A wait begins with the oldest operation that a rank has not finished. What happens as it gets older:

* ``limit``, learned from the job or 10 s: the check is *early*. Only what is proven is reported.
* ``NOTICE_S``: if an early check proves nothing, an unusual wait gets a notice.
* ``patience``, the stall timeout: a verdict that two checks have reached is reported.
* shortly before the timeout of the process group: the verdict is reported and a dump saved at once.

A rank that has finished while others wait brings the check at ``patience`` forward.

The next check comes after

* an early one that proves nothing: 2, 4, 8 s and so on, in time for the notice and for
  ``patience``; 1 s while the job seems to stand still
* a verdict that awaits its confirmation: 0.25 s
* a verdict that is not new: 1 s, then twice as long each time, up to 20 s
* a report: 1 s
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from commlens.config import AUTO, Settings
from commlens.diagnosis.standstill import (
    NO_POSES,
    PoseKeys,
    Standstill,
    cannot_go_on,
    late_ranks,
    may_go_on,
    stayed_ns,
)
from commlens.model.cause import Missing, Working
from commlens.model.ranklog import RankLog
from commlens.model.verdict import NOTHING_FOUND, Verdict
from commlens.processes.observer import WINDOW_S
from commlens.watch.open_waits import OpenWait, timeout_lead_s
from commlens.watch.roster import Member
from commlens.watch.stall_verdicts import identity_of, waited_for

SAMPLE_S: Final = 0.1  # between samples of the processes while a stall is suspected
SLOW_SAMPLE_S: Final = 0.5  # once it has lasted for long
OBSERVED_S: Final = 0.5
"""How long the processes are sampled before a diagnosis: shorter observations do not show whether a
rank works.

The first diagnosis waits for this even where a wait is long when it is first seen: torch's recorder
is asked about a device seconds after the last collective, and on a busy machine the watcher itself
may get no core for seconds.
"""
# a verdict on a stall must be reached twice, this far apart, because boxes are not read at the same
# moment
CONFIRM_S: Final = 0.25
# a check so long before the stall timeout is no early one: its verdict is confirmed at the timeout
_FIRST_OF_TWO_S: Final = CONFIRM_S + SAMPLE_S
_SAMPLED_S: Final = WINDOW_S + 2  # sampling begins so long before a wait is looked at
NOTICE_S: Final = 14.0
"""A shorter wait gets no notice: many healthy jobs pause for some seconds.

After a network was down for 7 to 10 s, a TCP connection goes on 13.4 s after it was lost, when
Linux sends the data again.
"""
STAYED_S: Final = NOTICE_S / 2
"""A late rank that has been where it is for less than this gets no notice: the job is only
slow.
"""
UNKNOWN_S: Final = 10.0
"""A longer wait is looked at where nothing was learned: in the first step, and in new places."""
STANDSTILL_EVERY_S: Final = 1.0  # between looks that may prove that the job stands still
_CERTAIN_EVERY_S: Final = 4.0  # at most, while it is certain that ranks cannot go on
RECHECK_MAX_S: Final = 20.0
FINISHED_SETTLE_S: Final = 1.0  # time for the others to finish after one rank has
# the second look and later ones are for devices, about which ranks ask seconds after they have
# fallen quiet
FINISHED_LOOKS: Final = 4
_NEW_PAUSE_NS: Final = 2_000_000_000  # so long after the last one, a pause is another one
LITERAL_BELOW_S: Final = 30.0  # a shorter stall timeout is never extended
FIRST_STEP_FACTOR: Final = 3.0


def patience_s(stall_timeout: float, steps: int) -> float:
    """Return how long a collective may be in flight, whatever the job does.

    First steps load, compile and build indices: until the first optimizer step has completed, it is
    three times the stall timeout. A stall timeout below 30 s was chosen on purpose and is never
    extended.
    """
    if steps == 0 and stall_timeout >= LITERAL_BELOW_S:
        return FIRST_STEP_FACTOR * stall_timeout
    return stall_timeout


@dataclass
class Stall:
    """One stall, from the first suspicion to its end."""

    since_ns: int  # CLOCK_MONOTONIC
    # keys of the verdicts that were printed
    reported: list[tuple[object, ...]] = field(default_factory=list)
    verdict: Verdict | None = None  # the last one printed
    # key of a verdict that was reached once and awaits confirmation
    pending: tuple[object, ...] | None = None
    next_check: float = 0.0  # seconds, CLOCK_MONOTONIC
    interval_s: float = 1.0  # until the next check that finds nothing new
    dumps: int = 0  # that the watcher has saved
    early_looks: int = 0  # before the stall timeout
    is_mentioned: bool = False  # in a notice before the stall timeout
    standstill: Standstill = field(default_factory=Standstill)


class _Limit(NamedTuple):
    """How long a wait lasts, and after how long it is looked at."""

    waited_s: float
    limit_s: float
    is_learned: bool


def _is_suspect(age_s: float, patience_s: float, limits: Sequence[_Limit]) -> bool:
    """Return whether a wait is so long that the processes are sampled: what they do fills the
    observer's window by the time the wait is looked at. But most waits end soon, so the first
    quarter of the stall timeout is never sampled, nor the first half of a limit.
    """
    return age_s >= max(patience_s / 4, patience_s - _SAMPLED_S) or any(
        each.waited_s >= max(each.limit_s / 2, each.limit_s - _SAMPLED_S) for each in limits
    )


class Check(NamedTuple):
    """A diagnosis that is due."""

    now: float
    age_s: float  # of the oldest wait
    patience_s: float
    # of a process group that is about to time out, so there is no time to confirm; else 0
    timeout_s: float
    rank_finished: bool  # a rank has finished and others still wait: patience would not help
    # no wait is as long as the stall timeout, but one is longer than its limit: only what is proven
    # is reported
    is_early: bool
    notice_due: bool  # such a wait is unusual, and long enough to be mentioned

    @property
    def may_still_end(self) -> bool:
        """Whether the oldest wait is shorter than the stall timeout."""
        return self.age_s < self.patience_s

    @property
    def is_too_soon(self) -> bool:
        """Whether a verdict is not reported yet, but at the stall timeout."""
        return self.may_still_end and not self.rank_finished


def _check_of(
    now: float,
    age_s: float,
    patience_s: float,
    limits: Sequence[_Limit],
    timeout_s: float,
    *,
    finished: bool,
) -> Check | None:
    """Return the check that is due: a process group times out, a rank has finished, or a wait is
    longer than its limit. ``limits``: of the waits; the other arguments are fields of
    :class:`Check`.
    """
    over = [each for each in limits if each.waited_s >= each.limit_s]
    finished = finished and not timeout_s
    is_early = age_s < patience_s - _FIRST_OF_TWO_S and not finished and not timeout_s
    if is_early and not over:
        return None
    notice_due = any(each.is_learned and each.waited_s >= NOTICE_S for each in over)
    return Check(now, age_s, patience_s, timeout_s, finished, is_early, notice_due)


def _shortened(check: Check, verdict: Verdict) -> Check:
    """Return a check with the age of the waits that its verdict is about. The oldest wait may be
    another one: a thread may wait for a command for hours while its job goes on.
    """
    cause = verdict.cause
    held_up_s = cause.held_up_s if isinstance(cause, (Missing, Working)) else None
    return check if held_up_s is None else check._replace(age_s=held_up_s)


def _may_only_be_late(check: Check, verdict: Verdict) -> bool:
    """Return whether the check was only made because a rank has finished, and the missing rank
    still runs: it may arrive before the stall timeout.
    """
    cause = verdict.cause
    is_absent = isinstance(cause, Missing) and cause.blamed_by == "absence" and not cause.certain
    return is_absent and check.rank_finished and check.may_still_end


def _oldest_ns(waiting: Sequence[OpenWait], now_ns: int) -> int:
    return min((wait.since_ns for wait in waiting), default=now_ns)


class StallDetector:
    """Follows the ranks' waits. It does no I/O: the caller passes times and members."""

    def __init__(self, settings: Settings) -> None:
        self.stall: Stall | None = None  # the present suspicion
        self._settings = settings
        # seconds, CLOCK_MONOTONIC, at which to look because a rank has finished
        self._finished_due = math.inf
        self._finished_looks = 0
        # how long the longest wait was that has a notice, by why and for which ranks
        self._notices: dict[tuple[str, frozenset[int]], float] = {}
        self.resumed_ns = 0
        """When the job last went on after it was paused as a whole, CLOCK_MONOTONIC."""
        # (pid, index) of collectives whose timeout has already caused a dump
        self._expiring: set[tuple[int, int]] = set()

    def add_finished_rank(self, now: float) -> None:
        """Note that a rank has finished: ranks that still wait may wait for it in vain."""
        self._finished_due = now + FINISHED_SETTLE_S
        self._finished_looks = 0

    def add_pause(self, now_ns: int) -> bool:
        """Note that the whole job has been paused until now: no rank waited for another one in that
        time. Returns whether the pause is new.
        """
        known, self.resumed_ns = self.resumed_ns, now_ns
        return now_ns - known > _NEW_PAUSE_NS

    def sample_every_s(self, now_ns: int) -> float:
        """Return the time between samples of the processes, in seconds."""
        long_s = max(60.0, 3 * self._settings.stall_ceiling_s)
        is_new = self.stall is not None and (now_ns - self.stall.since_ns) / 1e9 < long_s
        return SAMPLE_S if is_new else SLOW_SAMPLE_S

    def take_ended(self, waiting: Sequence[OpenWait], now_ns: int) -> Stall | None:
        """Return a reported stall whose wait has ended; only once."""
        stall = self.stall
        if stall is None or stall.verdict is None or _oldest_ns(waiting, now_ns) <= stall.since_ns:
            return None
        self.stall = None
        return stall

    def update(
        self,
        members: Sequence[Member],
        waiting: Sequence[OpenWait],
        now_ns: int,
        *,
        looks_early: bool = True,
    ) -> Check | None:
        """Start, keep or drop the suspicion of a stall; return the check that is due, if any.

        Args:
            members: of this node.
            waiting: what ranks of all nodes wait in.
            now_ns: CLOCK_MONOTONIC.
            looks_early: whether a wait may be looked at before the stall timeout.
        """
        now = now_ns / 1e9
        steps = max((member.status.steps for member in members if member.status), default=0)
        patience = patience_s(self._settings.stall_ceiling_s, steps)
        oldest_ns = max(_oldest_ns(waiting, now_ns), self.resumed_ns)
        age = (now_ns - oldest_ns) / 1e9
        timeout_s = self._expiring_timeout_s(waiting, now_ns)
        limits = self._limits(waiting, now_ns, patience, is_first=steps == 0) if looks_early else []
        must_look = timeout_s > 0 or self._finished_due < math.inf
        if not must_look and not _is_suspect(age, patience, limits):
            # One that was reported is kept until take_ended(): its wait may be suspect again, and
            # is not now because the job was paused.
            if self.stall is not None and self.stall.verdict is None:
                self.stall = None
            return None
        stall = self.stall = self.stall or Stall(oldest_ns, next_check=now + OBSERVED_S)
        if stall.verdict is None:
            stall.since_ns = max(stall.since_ns, oldest_ns)
        if now < stall.next_check and not timeout_s:
            return None
        # the others had time to finish, too
        finished = now >= self._finished_due and any(member.alive for member in members)
        return _check_of(now, age, patience, limits, timeout_s, finished=finished)

    def _limits(
        self, waiting: Sequence[OpenWait], now_ns: int, patience: float, *, is_first: bool
    ) -> list[_Limit]:
        """Return how long waits last and may last before they are looked at, as far as that is
        sooner than the stall timeout.

        Args:
            waiting: what the ranks wait in.
            now_ns: CLOCK_MONOTONIC.
            patience: the stall timeout, in seconds.
            is_first: in the first step nothing is learned.
        """
        if self._settings.stall_timeout != AUTO:
            return []
        found = []
        # ranks of other nodes most likely wait in the same collective
        elsewhere_s = UNKNOWN_S if is_first else max([UNKNOWN_S, *(w.limit_s for w in waiting)])
        for wait in waiting:
            if wait.kind == "stack":  # it may be no wait
                continue
            is_learned = wait.limit_s > 0 and not is_first
            unknown_s = elsewhere_s if wait.pid < 0 else UNKNOWN_S
            limit_s = wait.limit_s if is_learned else unknown_s
            waited_s = (now_ns - max(wait.since_ns, self.resumed_ns)) / 1e9
            if limit_s < patience:
                found.append(_Limit(waited_s, limit_s, is_learned))
        return found

    def _expiring_timeout_s(self, waiting: Sequence[OpenWait], now_ns: int) -> float:
        """Return a process group's timeout that is about to expire, once for each collective;
        otherwise 0.
        """
        if not self._settings.dump_on_timeout:
            return 0.0
        for wait in waiting:
            if (
                wait.kind != "collective"
                or wait.timeout_s <= 0
                or (wait.pid, wait.number) in self._expiring
            ):
                continue
            if (wait.expires_ns - now_ns) / 1e9 <= timeout_lead_s(wait.timeout_s):
                # one dump is enough for all that expire together
                self._expiring.update(
                    (each.pid, each.number) for each in waiting if each.kind == "collective"
                )
                return wait.timeout_s
        return 0.0

    def add_early(
        self,
        check: Check,
        verdict: Verdict | None,
        logs: Sequence[RankLog],
        poses: PoseKeys = NO_POSES,
        *,
        rest_s: float = 0.0,
    ) -> bool:
        """Add the verdict of a check before the stall timeout. Returns whether to report it: what
        blocks the ranks is certain, the whole job stands still, and it was not reported before.

        Args:
            check: that was made.
            verdict: of the check; None if it found nothing that holds for all ranks.
            logs: of all ranks, or of a few of many, from which it was made.
            poses: of the ranks without a log.
            rest_s: until the next check at least.
        """
        stall = self.stall
        assert stall is not None
        stall.early_looks += 1
        stall.standstill.look(logs if verdict is not None else [], check.now, poses)
        is_certain = verdict is not None and cannot_go_on(verdict, logs, poses)
        is_proven = is_certain and stall.standstill.is_proven
        if verdict is not None and is_proven and identity_of(verdict) not in stall.reported:
            self._note_reported(stall, check, verdict)
            return True
        # else look again
        longest_s = _CERTAIN_EVERY_S if is_certain else RECHECK_MAX_S
        next_s = min(2.0 ** min(stall.early_looks, 8), longest_s)  # 2 ** 8 is above any longest
        if is_certain and stall.standstill.has_begun:
            next_s = STANDSTILL_EVERY_S
        elif not check.notice_due:
            next_s = min(next_s, max(STANDSTILL_EVERY_S, NOTICE_S - check.age_s))
        # the check at the stall timeout comes in time
        left_s = check.patience_s - _FIRST_OF_TWO_S - check.age_s
        stall.next_check = check.now + min(max(next_s, rest_s), max(0.0, left_s))
        return False

    def add_notice(self, check: Check, verdict: Verdict, logs: Sequence[RankLog]) -> bool:
        """Return whether to mention a wait that is longer than usual, and not known to be a fault:
        once for each wait, and for the same ranks only if it is twice as long as before.

        Ranks that wait for something outside of the job are not mentioned: they may go on before
        anybody has read the line. The stall timeout decides about them.

        Args:
            check: that was made.
            verdict: of the check.
            logs: of all ranks, from which it was made.
        """
        stall = self.stall
        assert stall is not None
        if (
            not check.notice_due
            or stall.is_mentioned
            or stall.verdict is not None
            or verdict.kind in (*NOTHING_FOUND, "waiting")
            or self._is_known_wait(check, verdict)
        ):
            return False
        late = late_ranks(verdict, logs)
        if may_go_on(verdict, logs) or (late and stayed_ns(late) < STAYED_S * 1e9):
            return False
        stall.is_mentioned = True
        self._notices[(verdict.why, frozenset(waited_for(verdict)))] = check.age_s
        return True

    def add_verdict(self, check: Check, verdict: Verdict) -> bool:
        """Add the verdict of a check. Returns whether to report it: it is a fault or a long wait,
        is confirmed, and was not reported before.
        """
        stall = self.stall
        assert stall is not None
        key, oldest_s = identity_of(verdict), check.age_s
        check = _shortened(check, verdict)
        left_s = max(0.02, check.patience_s - check.age_s)  # until the stall timeout
        is_bearable_wait = verdict.kind == "waiting" and (
            check.may_still_end or self._is_known_wait(check, verdict)
        )
        is_late = _may_only_be_late(check, verdict)
        if verdict.kind in NOTHING_FOUND or key in stall.reported or is_bearable_wait or is_late:
            self._add_nothing(stall, check, key)
            if is_late:
                stall.next_check = min(stall.next_check, check.now + left_s)
            return False
        is_confirmed = key == stall.pending and not check.is_too_soon
        if is_confirmed or check.timeout_s:
            if verdict.kind == "waiting":
                self._notices[(verdict.why, frozenset(waited_for(verdict)))] = check.age_s
            self._note_reported(stall, check, verdict)
            return True
        stall.pending = key
        pause_s = CONFIRM_S
        if check.is_too_soon:
            # on a younger wait than the oldest, the stall timeout may be far away
            pause_s = min(CONFIRM_S, left_s) if check.age_s >= oldest_s else max(CONFIRM_S, left_s)
        stall.next_check = check.now + pause_s
        return False

    def _add_nothing(self, stall: Stall, check: Check, key: tuple[object, ...]) -> None:
        """Note a check whose verdict is not reported, and when to look again."""
        if not check.rank_finished and key == stall.pending:
            stall.pending = None
        stall.next_check = check.now + stall.interval_s
        stall.interval_s = min(
            stall.interval_s * 2, RECHECK_MAX_S, max(1.0, self._settings.stall_ceiling_s / 2)
        )
        if check.rank_finished:
            self._finished_looks += 1
            looks_again = self._finished_looks < FINISHED_LOOKS
            self._finished_due = check.now + FINISHED_SETTLE_S if looks_again else math.inf

    def _note_reported(self, stall: Stall, check: Check, verdict: Verdict) -> None:
        stall.reported.append(identity_of(verdict))
        stall.verdict = verdict
        stall.next_check, stall.interval_s = check.now + 1.0, 2.0
        self._finished_due = math.inf

    def _is_known_wait(self, check: Check, verdict: Verdict) -> bool:
        """Return whether a wait for these ranks, for the same reason, already has a notice that
        names at least half its present length.
        """
        ranks = set(waited_for(verdict))
        return any(
            why == verdict.why and ranks <= mentioned and check.age_s < 2 * age_s
            for (why, mentioned), age_s in self._notices.items()
        )
