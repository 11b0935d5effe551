"""Decides when to report that ranks died, and tells a death from a stop of the whole job.

After the first death (an exit status, an exception, a signal) the report waits for the ranks that
die with it, so that it names them all:

* 0.05 s, as a rule
* 0.3 s after a SIGKILL under torchrun, and again after each further one: the launcher may be
  killing the ranks one by one
* 0.3 s after a SIGTERM of one rank alone, whose launcher would have ended all at once
* 1.5 s after another SIGTERM or SIGINT: if all ranks end like that, the job was stopped, and
  nothing is reported
* up to 4 s more while another node reports for the job
* up to 5 s more if a rank was stopped that belongs to ranks the watcher has never seen
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from commlens.model.ranklog import LATE_KILL_NS, STOP_SIGNALS
from commlens.watch.roster import Member

SETTLE_S: Final = 0.05  # after the first death, for the ranks that die with it
STOP_SETTLE_S: Final = 1.5  # after an end by SIGTERM or SIGINT: one rank, or the whole job?
# for the launcher's own signal, if a user ends all processes, and for torchrun's next SIGKILL
ALONE_SETTLE_S: Final = 0.3
KILLS_S: Final = 60.0  # how long torchrun may take to kill all ranks, one after the other
REPORTER_S: Final = 4.0  # how long another node may take to report a death of this one
UNSEEN_S: Final = 5.0  # for the launcher to report how ranks ended that were never seen
_TERMINATED_CODE: Final = 128 + 15
_INTERRUPTED_CODE: Final = 128 + 2
_STOP_EXIT_CODES: Final = (_TERMINATED_CODE, _INTERRUPTED_CODE)


def ended_by_stop_signal(member: Member) -> bool:
    """Return whether a rank was ended by the signals that stop a job."""
    return member.ending is not None and member.ending.signal in STOP_SIGNALS


def was_stopped(member: Member) -> bool:
    """Return whether a rank ended as a stopped process does: by SIGTERM or Ctrl-C, or with their
    exit codes, and without an exception.
    """
    if member.raised_before_its_end:
        return False
    return ended_by_stop_signal(member) or (
        member.ending is not None and member.ending.exit_code in _STOP_EXIT_CODES
    )


def was_interrupted(member: Member) -> bool:
    """Return whether a rank ended as Ctrl-C, or a KeyboardInterrupt of its own, ends a process."""
    return member.ending is not None and (
        member.ending.signal == "SIGINT" or member.ending.exit_code == _INTERRUPTED_CODE
    )


def _was_killed(member: Member) -> bool:
    return member.ending is not None and member.ending.signal == "SIGKILL"


def dead_ranks(members: Sequence[Member]) -> list[Member]:
    """Return the members that ended with a failure. One that ended in an unknown way is dead only
    if others wait for it.
    """
    return [member for member in members if member.ended_well is False]


def job_was_stopped(members: Sequence[Member], *, hung: bool = False) -> bool:
    """Return whether the ranks were stopped from outside: by the scheduler or by Ctrl-C.

    Args:
        members: all ranks.
        hung: whether a fault was printed before. Then a user or a timeout probably ends the job:
            ranks that a stop signal does not end because they wait in C++ may still live, or be
            killed at last by the launcher.
    """
    dead = dead_ranks(members)
    if len(members) < 2 or not dead:
        return False
    if not hung:
        return len(dead) == len(members) and all(was_stopped(member) for member in dead)
    killed = [member for member in dead if _was_killed(member)]
    first_ns = min(member.ended_ns for member in dead)
    at_last = len(killed) == len(members) or all(
        member.ended_ns > first_ns + LATE_KILL_NS for member in killed
    )
    return at_last and all(was_stopped(member) or member in killed for member in dead)


class DeathDetector:
    """Decides when to report a death: once the ranks that die with the first one have ended,
    too.
    """

    def __init__(self) -> None:
        self.first: Member | None = None  # the first rank that died
        # it alone was stopped, though its launcher would stop all ranks at once: whoever stopped it
        # meant this rank
        self.alone = False
        self._first_at = 0.0
        self._due: float | None = None  # of the report; None: there is none to make
        self._elsewhere = False  # a rank of another node died
        self._reporter_until = 0.0  # until then, another node may report; 0: none was waited for
        # All that died were killed, and torchrun may be killing one rank after the other: it waits
        # for the end of each.
        self._kills_in_turn = False

    @property
    def is_pending(self) -> bool:
        """Whether a death is still to be reported."""
        return self._due is not None

    def add(
        self,
        ended: Sequence[Member],
        members: Sequence[Member],
        now: float,
        *,
        alone: Callable[[], bool] = bool,
        by_torchrun: Callable[[], bool] = bool,
    ) -> bool:
        """Add ranks that have ended.

        Args:
            ended: those that are new.
            members: all ranks.
            now: ``time.monotonic()``, as everywhere here.
            alone: whether no other rank is being ended, and their launcher would end all at once.
            by_torchrun: whether torchrun started the ranks.

        Returns:
            Whether the first death of the job is among them.
        """
        known = self.first
        dead = [member for member in ended if member.ended_well is False]
        for member in sorted(dead, key=lambda one: one.ended_ns):
            if self.first is None:
                # Ctrl-C ends the ranks one by one, and not those that are in C++.
                was_alone = member.handle.ended_alone or (len(ended) == 1 and alone())
                self._kills_in_turn = _was_killed(member) and by_torchrun()
                self._add_first(member, now, was_alone=was_alone)
            else:
                self._add_later(self.first, member, now)
        if self._due is not None and not self.alone and not any(member.alive for member in members):
            self._due = now
        return known is None and self.first is not None

    def _add_first(self, member: Member, now: float, *, was_alone: bool) -> None:
        self.first, self._first_at = member, now
        self.alone = ended_by_stop_signal(member) and not was_interrupted(member) and was_alone
        settle_s = SETTLE_S
        if self.alone or self._kills_in_turn:
            settle_s = ALONE_SETTLE_S
        elif was_stopped(member) and not self._elsewhere:
            settle_s = STOP_SETTLE_S
        self._due = now + settle_s

    def _add_later(self, first: Member, member: Member, now: float) -> None:
        if was_stopped(first) and not was_stopped(member):
            # the job was not stopped as a whole: this rank died because the first one was stopped
            self._due = now + SETTLE_S
        elif self._kills_in_turn and self._due is not None:
            self._kills_in_turn = _was_killed(member)
            self._due = now + (ALONE_SETTLE_S if self._kills_in_turn else SETTLE_S)

    def was_job_stopped(self, members: Sequence[Member], *, hung: bool = False) -> bool:
        """Return whether the ranks were stopped from outside, and not because one of them was;
        ``hung``: after a fault was printed.
        """
        if self.first is not None and was_interrupted(self.first) and not self.alone:
            # Ctrl-C reaches all ranks, of which those in C++ end later. Where one rank alone was
            # interrupted, its launcher ends the others.
            ended = [member for member in members if member is not self.first and not member.alive]
            endings = [member.ending for member in ended if member.ending is not None]
            self.alone = any(
                each.signal == "SIGTERM" or each.exit_code == _TERMINATED_CODE for each in endings
            ) and not any(map(was_interrupted, ended))
            return not self.alone
        return not self.alone and job_was_stopped(members, hung=hung)

    def add_elsewhere(self, now: float) -> None:
        """Note that a rank of another node died. Further calls change nothing."""
        if not self._elsewhere and self._due is None:
            self._due = now + SETTLE_S
        self._elsewhere = True

    @property
    def waits_for_reporter(self) -> bool:
        """Whether the report has been postponed because another node makes it."""
        return bool(self._reporter_until)

    def wait_for_reporter(self, now: float) -> bool:
        """Postpone the report because another node makes it. Returns False once that has taken too
        long.
        """
        self._reporter_until = self._reporter_until or now + REPORTER_S
        if now >= self._reporter_until:
            return False
        self._due = now + SETTLE_S
        return True

    def take_due(
        self,
        now: float,
        members: Sequence[Member] = (),
        *,
        ending: Callable[[], bool] = bool,
    ) -> bool:
        """Return whether to report the death now; True only once. ``ending``: whether another rank
        is being ended.

        Ranks that a launcher has just started may die before they are seen. It ends the others
        then, and reports how they ended.
        """
        if self._due is None or now < self._due:
            return False
        size = max((member.local_size for member in members), default=0)
        are_some_unseen = (
            self.first is not None
            and was_stopped(self.first)
            and len(members) < size
            and now < self._first_at + UNSEEN_S
        )
        if are_some_unseen or (self._kills_in_turn and now < self._first_at + KILLS_S and ending()):
            self._due = now + SETTLE_S
            return False
        self._due = None
        return True
