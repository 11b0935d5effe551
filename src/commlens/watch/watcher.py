"""Watches one job on this node: notices a stall, a death, an end, and says what is wrong.

Polling costs one read of 4 KiB per rank, two to six times a second; the end of a process wakes the watcher at once. New records
are compared as they appear (:mod:`commlens.watch.comparing`). All else (samples of ``/proc``, whole boxes, the diagnosis) happens
only while something has been waited for suspiciously long, has ended, or disagrees.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commlens.blackbox import job_dirs
from commlens.blackbox.layout import PHASE_CREATED
from commlens.config import Settings
from commlens.dumps import save
from commlens.errors import CommlensError
from commlens.model.ranklog import Observation, RankLog
from commlens.model.verdict import Verdict
from commlens.text import capital, ranks_phrase, verb
from commlens.watch import process
from commlens.watch.comparing import Comparing
from commlens.watch.jobs import discard_forgotten
from commlens.watch.mismatches import Mismatches
from commlens.watch.observer import WINDOW_S, Observer
from commlens.watch.roster import Member, Roster, Worker, Workers
from commlens.watch.snapshot import pulse_of, read_logs

log = logging.getLogger("commlens")

Say = Callable[[str | Verdict], None]
Judge = Callable[..., Verdict]

POLL_S: Final = 0.16
CALM_POLL_S: Final = 0.5  # with a long timeout, once all ranks are known; ends are noticed at once anyway
LOOK_S: Final = 0.1  # between samples while something is suspicious
SLOW_LOOK_S: Final = 0.5  # the same when it has been for long
CONFIRM_S: Final = 0.25  # a verdict of a stall must be reached twice, this far apart: boxes are read one after the other
RECHECK_MAX_S: Final = 20.0
SETTLE_S: Final = 0.05  # after the first death, for those that fall with it
CLEAN_SETTLE_S: Final = 1.0  # after a clean end of one rank, for the others' own
STOP_SETTLE_S: Final = 1.5  # after an end by SIGTERM or SIGINT: is it one rank, or the whole job?
STOPPED_WORTH_A_WORD_S: Final = 5.0
LITERAL_BELOW_S: Final = 30.0
FIRST_STEP_FACTOR: Final = 3.0
TIMEOUT_LEAD_MAX_S: Final = 15.0
KILL_AFTER_S: Final = 5.0
NEVER_SEEN_S: Final = 60.0
_STOP_SIGNALS: Final = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})


def patience_s(stall_timeout: float, steps: int) -> float:
    """How long a collective may be waited for.

    First steps load, compile and build indices, so before the first optimizer step has completed it is three times as long. A
    timeout below 30 s was chosen by somebody who wants it so: it is taken literally.
    """
    if steps == 0 and stall_timeout >= LITERAL_BELOW_S:
        return FIRST_STEP_FACTOR * stall_timeout
    return stall_timeout


def timeout_lead_s(timeout_s: float) -> float:
    """How long before a process group's timeout strikes its dump is made: 10%, at most 15 s."""
    return min(TIMEOUT_LEAD_MAX_S, 0.1 * timeout_s)


def say_to_stderr(what: str | Verdict) -> None:
    """The default voice: lines begin with ``commlens:``, a verdict is printed as reports do.

    All of it is one write, since the ranks and torchrun write to the same terminal.
    """
    sys.stderr.write(f"commlens: {what}\n" if isinstance(what, str) else _rendered(what))
    sys.stderr.flush()


def _rendered(verdict: Verdict) -> str:
    from commlens.reports.terminal import print_verdict

    width, colour = 80, False
    with contextlib.suppress(OSError, ValueError):
        width = min(120, os.get_terminal_size(sys.stderr.fileno()).columns)
        colour = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    text = io.StringIO()
    print_verdict(verdict, file=text, width=width, colour=colour)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


@dataclass(frozen=True)
class _Suspect:
    """Something of one rank that has lasted for long."""

    since_ns: int  # CLOCK_MONOTONIC
    pid: int
    what: str  # "op", "init", "stack"
    number: int  # the op's index, or the moment since when


@dataclass
class _Episode:
    """One stall, from the moment it becomes suspicious to its end."""

    since_ns: int
    said: list[tuple[object, ...]] = field(default_factory=list)  # keys of the verdicts that were printed
    verdict: Verdict | None = None  # the last one printed
    pending: tuple[object, ...] | None = None  # reached once, to be confirmed
    next_check: float = 0.0
    interval_s: float = 1.0
    dumped: int = 0


def _key(verdict: Verdict) -> tuple[object, ...]:
    """What makes a verdict another one, so that it is printed again."""
    collective = verdict.collective
    group = verdict.group
    return (
        verdict.kind,
        tuple(verdict.culprits or _waited_for(verdict)),
        (collective.op, collective.sequence_number) if collective else None,
        (group.name, tuple(group.ranks)) if group else None,
    )


def _waited_for(verdict: Verdict) -> list[int]:
    """The ranks that the others wait for; a verdict of kind waiting blames nobody, so it names them by leaving them out."""
    if verdict.kind == "missing":
        return verdict.culprits
    if verdict.kind == "waiting" and verdict.group is not None:
        return sorted(set(verdict.group.ranks) - set(verdict.victims))
    return []


class Watcher:
    """Watches a job's ranks on this node until they have ended.

    Args:
        folders: where their black boxes are or will be; more than one where the ranks may have to choose.
        settings: stall_timeout, on_stall, dump_dir and the like.
        say: gets every line and every verdict; by default they go to stderr.
        workers: the ranks that the launcher started, whether they have a box or not.
        end_job: ends the job in the launcher's own way (``on_stall: abort``); the ranks are killed if that takes too long.
        judge: makes a verdict of the logs; by default :func:`commlens.diagnosis.conclusion.diagnose_logs`.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        settings: Settings,
        *,
        say: Say | None = None,
        workers: Workers | None = None,
        end_job: Callable[[], None] | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.folders = list(folders)
        self.settings = settings
        self.verdict: Verdict | None = None  # the last one printed
        self.dump: Path | None = None  # the last one saved
        self._evidence: tuple[Verdict, list[RankLog]] | None = None  # the last verdict made here, and what it was made of
        self._say = say or say_to_stderr
        self._end_job = end_job
        self._judge = judge
        self._launched = workers is not None
        self._roster = Roster(self.folders, workers)
        self._observer = Observer(min(WINDOW_S, max(1.0, settings.stall_timeout)))
        self._stop = threading.Event()
        self._failures: Mapping[int, tuple[int, int]] = {}
        self._host = os.uname().nodename
        self._begin_generation()
        self._told_to_stop = False
        self._aborting_since: float | None = None
        self._started = time.monotonic()

    def _begin_generation(self) -> None:
        self._generation = -1
        self._episode: _Episode | None = None
        self._frozen: dict[int, Observation] = {}
        self._first_bad: Member | None = None
        self._death_due: float | None = None
        self._clean_due: float | None = None
        self._over = False  # its death has been told: what follows are consequences
        self._struck: set[tuple[int, int]] = set()  # (pid, index) of ops whose timeout has been dumped for
        self._mismatches = Mismatches(Comparing(self._roster), self._roster)

    # --- from other threads

    @property
    def wake_fileno(self) -> int:
        """For ``signal.set_wakeup_fd``: signals that the launcher gets are told to the watcher."""
        return self._roster.wake_fileno

    def stop(self, failures: Mapping[int, tuple[int, int]] | None = None) -> None:
        """The launcher has nothing more to run: say what is left to say, clean up, and let :meth:`run` return.

        Args:
            failures: rank to (pid, exit code as subprocess has it) of the workers that failed, as the agent knows them.
        """
        self._failures = failures or {}
        self._stop.set()
        with contextlib.suppress(OSError):
            os.write(self._roster.wake_fileno, b"\0")

    # --- the loop

    def run(self) -> None:
        """Watch until all ranks have ended (or, in a launcher, until :meth:`stop`). Its own errors are logged, never raised."""
        try:
            self._tick()  # first of all take hold of the processes: one may end any moment
            self._preload()
            discard_forgotten(self.folders)
            due = 0.0
            while not self._finished():
                now = time.monotonic()
                self._hear(self._roster.wait(max(0.0, min(due - now, self._mismatches.pause_s(now)))))
                now = time.monotonic()
                if now >= due or self._roster.was_woken:
                    self._tick()
                    due = time.monotonic() + self._pause_s()
                if not self._over:
                    self._compare()
            self._finish()
        except Exception as error:
            log.warning("commlens: the watcher steps aside, the job goes on without it: %s: %s", type(error).__name__, error)
            log.debug("the watcher's error", exc_info=True)
        finally:
            self._roster.close()

    def _preload(self) -> None:
        """What is needed when something is wrong: by then every tenth of a second counts."""
        if self._judge is None:
            from commlens.diagnosis.conclusion import diagnose_logs

            self._judge = diagnose_logs
        if self._say is say_to_stderr:
            import commlens.reports.terminal  # noqa: F401

    def _finished(self) -> bool:
        if self._launched:
            return self._stop.is_set()
        members = self._roster.current()
        if not members:
            return time.monotonic() - self._started > NEVER_SEEN_S
        if any(member.alive for member in members):
            return False
        return self._death_due is None

    def _pause_s(self) -> float:
        if self._episode is None:
            calm = all(member.box is not None for member in self._roster.current()) and time.monotonic() - self._started > 10
            return min(CALM_POLL_S, max(POLL_S, self.settings.stall_timeout / 12)) if calm else POLL_S
        long = max(60.0, 3 * self.settings.stall_timeout)
        return LOOK_S if (time.monotonic_ns() - self._episode.since_ns) / 1e9 < long else SLOW_LOOK_S

    def _hear(self, written: bytes) -> None:
        if any(number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT) for number in written):
            self._told_to_stop = True
            if not self._over and self._first_bad is None:
                self._over = True
                self._last_words()

    def _tick(self) -> None:
        for member in self._roster.refresh():
            if member.here:
                self._observer.add(member.pid, member.start_ticks, *([member.box.classifier()] if member.box is not None else []))
            if member.restart > self._generation:
                self._new_generation(member.restart)
        self._roster.poll()
        ended = self._roster.take_ended()
        if ended:
            self._on_ends(ended)
        now = time.monotonic()
        if self._death_due is not None and now >= self._death_due:
            self._death_due = None
            self._tell_death()
        if not self._over:
            self._look_for_stall()
        if self._aborting_since is not None and now - self._aborting_since > KILL_AFTER_S:
            self._aborting_since = None
            self._signal_ranks(signal.SIGKILL)

    def _new_generation(self, restart: int) -> None:
        """The workers were started anew by torchelastic: their former boxes go, which were dumped if anything was wrong."""
        if self._generation >= 0:
            for line in self._mismatches.last_words():
                self._say(line)
            self._roster.forget([m for m in self._roster.members.values() if m.restart < restart], remove_boxes=True)
            self._begin_generation()
        self._generation = restart

    # --- ends

    def _on_ends(self, ended: list[Member]) -> None:
        current = self._roster.current()
        for member in ended:
            self._observer.ended(member.pid, member.ending or process.Ending(), clean=member.said_goodbye, at_ns=member.ended_ns)
            if member not in current or self._over:
                continue
            if member.ended_well:
                self._clean_due = time.monotonic() + CLEAN_SETTLE_S
            elif self._first_bad is None:
                self._first_bad = member
                self._frozen = {m.pid: self._observer.observe(m.pid) for m in current if m.alive and m.here}
                by_signal = member.ending is not None and member.ending.signal in _STOP_SIGNALS
                self._death_due = time.monotonic() + (STOP_SETTLE_S if by_signal else SETTLE_S)
            elif self._first_bad.ending is not None and self._first_bad.ending.signal in _STOP_SIGNALS and not self._stopped(member):
                # Not the whole job was stopped: this one fell because of the other.
                self._death_due = time.monotonic() + SETTLE_S
        if self._death_due is not None and not any(member.alive for member in current):
            self._death_due = time.monotonic()

    def _stopped(self, member: Member) -> bool:
        """Whether it ended as processes do that are told to: by SIGTERM, by Ctrl-C."""
        ending = member.ending
        return ending is not None and (ending.signal in _STOP_SIGNALS or ending.exit_code in (128 + 15, 128 + 2))

    def _tell_death(self) -> None:
        members = self._roster.current()
        bad = [member for member in members if member.ending is not None and not member.ended_well]
        if self._over or not bad:
            return
        if len(members) > 1 and not any(m.alive for m in members) and all(self._stopped(m) for m in bad) and len(bad) == len(members):
            self._told_to_stop = self._over = True  # from outside: the scheduler, or Ctrl-C
            return
        logs, problems = self._collect()
        verdict = self._diagnose(logs, problems)
        self._over = True
        standing = self._episode.verdict if self._episode is not None else None
        if standing is not None and standing.is_fault and all(m.rank in standing.victims and not self._killed(m) for m in bad):
            who = ranks_phrase(m.rank for m in bad)
            what = next((f" ({log.exception})" for log in logs if log.rank == bad[0].rank and log.exception), "")
            self._say(f"{who} gave up waiting{what}; the verdict above stands.")
        elif self._mismatches.has_told(verdict):
            who = ranks_phrase(m.rank for m in bad)
            self._say(f"{who} ended because of it; the verdict above stands.")
            self.verdict = verdict
        elif verdict.kind != "healthy":
            self._announce(verdict)
        self._save_dump()

    @staticmethod
    def _killed(member: Member) -> bool:
        return member.ending is not None and member.ending.signal is not None

    # --- ranks that disagree

    def _compare(self) -> None:
        """Look at the new records, and tell what disagrees: it may hang nobody, and the job go on with wrong results."""
        try:
            found = self._mismatches.look(time.monotonic())
        except Exception as error:  # stalls and deaths are still to be told
            self._mismatches.give_up()
            log.warning("commlens: ranks are not compared any more while the job runs: %s: %s", type(error).__name__, error)
            log.debug("the comparison's error", exc_info=True)
            return
        for verdict, may_abort in found:
            self._announce(verdict)
            self._save_dump()
            if may_abort and self.settings.on_mismatch == "abort" and self._aborting_since is None:
                self._abort("on_mismatch")
                return

    # --- stalls

    def _suspects(self) -> list[_Suspect]:
        found: list[_Suspect] = []
        for member in self._roster.current():
            status = member.status
            if status is None or not member.alive or status.closed:
                continue
            if status.oldest_index and status.oldest_mono_ns:
                found.append(_Suspect(status.oldest_mono_ns, member.pid, "op", status.oldest_index))
            elif status.phase == PHASE_CREATED:
                found.append(_Suspect(status.created_mono_ns, member.pid, "init", 0))
            elif status.main_stack_since_mono_ns:
                # Perhaps in new_group, in a store's wait, in destroy_process_group: the diagnosis knows them by the stack.
                found.append(_Suspect(status.main_stack_since_mono_ns, member.pid, "stack", status.main_stack_since_mono_ns))
        return found

    def _look_for_stall(self) -> None:
        now_ns, now = time.monotonic_ns(), time.monotonic()
        members = self._roster.current()
        steps = max((m.status.steps for m in members if m.status is not None), default=0)
        patience = patience_s(self.settings.stall_timeout, steps)
        suspects = self._suspects()
        oldest_ns = min((suspect.since_ns for suspect in suspects), default=now_ns)
        age = (now_ns - oldest_ns) / 1e9
        striking = self._about_to_time_out(suspects, now_ns)
        clean_due = self._clean_due is not None and now >= self._clean_due and any(m.alive for m in members)
        if self._episode is not None and self._episode.verdict is not None and oldest_ns > self._episode.since_ns:
            self._wait_ended(self._episode)
            self._episode = None
        if age < max(patience / 4, patience - WINDOW_S - 2) and not striking and not clean_due and self._clean_due is None:
            if self._episode is not None:
                self._episode = None
                self._observer.forget_samples()
            return
        if self._episode is None:
            self._episode = _Episode(oldest_ns)
        episode = self._episode
        episode.since_ns = max(episode.since_ns, oldest_ns) if episode.verdict is None else episode.since_ns
        for member in members:
            if member.alive and member.here and member.pid is not None:
                self._observer.sample(member.pid, pulse_of(member))
        due = age >= patience - CONFIRM_S - LOOK_S and now >= episode.next_check
        if striking:
            self._check(episode, age, patience, at_once=True)
            self._save_dump(f"the process group's timeout is about to strike ({striking[0]:.0f} s)")
        elif due or (clean_due and now >= episode.next_check):
            self._check(episode, age, patience, at_once=False, enough=clean_due)

    def _about_to_time_out(self, suspects: list[_Suspect], now_ns: int) -> list[float]:
        """Timeouts of process groups that strike soon, once for each op."""
        if not self.settings.dump_on_timeout:
            return []
        found: list[float] = []
        for suspect in suspects:
            status = self._roster.members[suspect.pid].status
            if suspect.what != "op" or status is None or status.timeout_s <= 0 or (suspect.pid, suspect.number) in self._struck:
                continue
            if (now_ns - suspect.since_ns) / 1e9 >= status.timeout_s - timeout_lead_s(status.timeout_s):
                found.append(status.timeout_s)
        if found:  # the ranks' clocks strike together: one dump does for all that are near
            for suspect in suspects:
                self._struck.add((suspect.pid, suspect.number))
        return found

    def _check(self, episode: _Episode, age: float, patience: float, *, at_once: bool, enough: bool = False) -> None:
        """Diagnose, and print what is new.

        Args:
            episode: the stall.
            age: how long the oldest wait has lasted, seconds.
            patience: how long it may.
            at_once: without confirmation.
            enough: a rank has ended and others wait: there is no point in being patient.
        """
        now = time.monotonic()
        logs, problems = self._collect()
        verdict = self._diagnose(logs, problems)
        key = _key(verdict)
        if verdict.kind == "healthy" or key in episode.said or (verdict.kind == "waiting" and age < patience):
            if not enough and key == episode.pending:
                episode.pending = None
            episode.next_check = now + episode.interval_s
            episode.interval_s = min(episode.interval_s * 2, RECHECK_MAX_S)
            if enough:
                self._clean_due = None
            return
        if not at_once and (key != episode.pending or (age < patience and not enough)):
            episode.pending = key
            episode.next_check = now + (CONFIRM_S if age >= patience or enough else min(CONFIRM_S, max(0.02, patience - age)))
            return
        episode.said.append(key)
        episode.verdict = verdict
        episode.next_check, episode.interval_s = now + 1.0, 2.0
        self._clean_due = None
        if self._mismatches.has_told(verdict):
            self.verdict = verdict
            held = verdict.victims or verdict.culprits
            self._say(f"{ranks_phrase(held)} {verb(held, 'is', 'are')} held up by it; the verdict above stands.")
        else:
            self._announce(verdict)
        if verdict.is_fault:
            if episode.dumped < 3 and not at_once:
                episode.dumped += 1
                self._save_dump()
            if self.settings.on_stall == "abort" and self._aborting_since is None:
                self._abort("on_stall")

    def _wait_ended(self, episode: _Episode) -> None:
        verdict = episode.verdict
        if verdict is None or not any(member.alive for member in self._roster.current()):
            return
        waited = (time.monotonic_ns() - episode.since_ns) / 1e9
        late = _waited_for(verdict)
        if late:
            self._say(f"{ranks_phrase(late)} arrived after {waited:.0f} s; the job goes on.")
        else:
            self._say(f"the wait ended after {waited:.0f} s; the job goes on.")
        self._observer.forget_samples()

    # --- evidence

    def _collect(self) -> tuple[list[RankLog], list[str]]:
        members = self._roster.current()
        waited = 0.8 if any(m.alive for m in members) else 0.0
        observations = {member.pid: self._observed(member, waited) for member in members if member.here}
        return read_logs(members, observations)

    def _observed(self, member: Member, wait_s: float = 0.0) -> Observation:
        frozen = self._frozen.get(member.pid)
        if frozen is not None and self._is_consequence(member):
            # It was alive when the first one died; how the launcher then ended it says nothing.
            return frozen
        return self._observer.observe(member.pid, wait_s=wait_s)

    def _is_consequence(self, member: Member) -> bool:
        return member.ending is not None and member.ending.signal in (_STOP_SIGNALS | {"SIGKILL"} if self._launched else _STOP_SIGNALS)

    def _diagnose(self, logs: list[RankLog], problems: list[str]) -> Verdict:
        self._preload()
        assert self._judge is not None
        verdict = self._judge(logs, problems=problems, stalled_after_s=self._stalled_after_s)
        self._evidence = (verdict, logs)
        return verdict

    @property
    def _stalled_after_s(self) -> float:
        return min(1.0, self.settings.stall_timeout / 2)

    def _announce(self, verdict: Verdict) -> None:
        self.verdict = verdict
        if verdict.kind == "waiting":
            sentences = [verdict.summary, verdict.explanation]
            self._say(" ".join(f"{capital(each).rstrip('.')}." for each in sentences if each))
        else:
            self._say(verdict)

    def _save_dump(self, because: str = "") -> None:
        observations = {}
        for member in self._roster.current():
            if member.here:
                seen = self._observer.observe(member.pid)
                observations[member.rank] = (
                    self._frozen[member.pid] if member.pid in self._frozen and self._is_consequence(member) else seen
                )
        saved: Path | None = None
        for folder in self.folders:
            if not job_dirs.boxes(folder):
                continue
            try:
                saved = save.save_dump(folder, Path(self.settings.dump_dir), observations, host=self._host, keep=self.settings.keep_dumps)
            except CommlensError as error:
                self._say(f"no dump could be saved in {self.settings.dump_dir}: {error}")
        if saved is None:
            return
        again = saved == self.dump
        self.dump = saved
        page = self._save_reports(saved)
        where = f"{page} shows it" if page is not None else f"`commlens diagnose {saved}` reads it"
        if because:
            self._say(f"{because}: everything known is in {saved}; {where}")
        elif not again:
            self._say(f"everything known is in {saved}; {where}")

    def _save_reports(self, folder: Path) -> Path | None:
        """The last verdict as JSON and as a page, beside the dump that it was made of."""
        verdict = self.verdict
        if verdict is None:
            return None
        try:
            from commlens.reports.verdict_page import verdict_html

            logs = self._evidence[1] if self._evidence is not None and self._evidence[0] is verdict else self._collect()[0]
            page = verdict_html(verdict, logs, stalled_after_s=self._stalled_after_s)
            return save.save_reports(folder, host=self._host, page=page, verdict=verdict.to_json())
        except Exception as error:  # the dump is there, and the verdict has been told
            log.warning("commlens: the verdict's page could not be made: %s: %s", type(error).__name__, error)
            log.debug("the page's error", exc_info=True)
            return None

    # --- the end

    def _abort(self, setting: str) -> None:
        self._say(f"ending the job, as {setting}: abort asks for.")
        self._over = True
        self._aborting_since = time.monotonic()
        if self._end_job is not None:
            self._end_job()
        else:
            self._signal_ranks(signal.SIGTERM)

    def _signal_ranks(self, number: signal.Signals) -> None:
        for member in self._roster.current():
            if member.alive and member.here and process.runs(member.pid, member.start_ticks):
                with contextlib.suppress(OSError):
                    os.kill(member.pid, number)

    def _last_words(self) -> None:
        """The job is told to stop. If it hung, nobody will ever know why unless it is said now."""
        oldest = min((suspect.since_ns for suspect in self._suspects() if suspect.what == "op"), default=0)
        said = self._episode is not None and self._episode.verdict is not None
        if not oldest or said or (time.monotonic_ns() - oldest) / 1e9 < STOPPED_WORTH_A_WORD_S:
            return
        members = self._roster.current()
        self._frozen = {m.pid: self._observer.observe(m.pid) for m in members if m.alive and m.here}
        verdict = self._diagnose(*self._collect())
        if verdict.is_fault:
            self._announce(verdict)
            self._save_dump()

    def _finish(self) -> None:
        """All has ended: save what is worth it, take the boxes out of shared memory."""
        self._roster.refresh()
        self._roster.wait(0)
        self._roster.poll()
        ended = self._roster.take_ended()
        if ended:
            self._on_ends(ended)
        self._add_unseen_failures()
        if self._first_bad is not None and not self._over:
            self._tell_death()
        members = self._roster.current()
        for line in self._mismatches.last_words():
            self._say(line)
        if any(member.alive and member.here for member in members):
            return  # a rank that outlives its launcher keeps its box
        if members and not self._over and all(member.ended_well for member in members):
            self._look_back()
        for folder in self.folders:
            with contextlib.suppress(OSError):
                save.discard_job(folder)

    def _add_unseen_failures(self) -> None:
        """Workers that were dead before anybody looked; the agent has their exit codes."""
        for rank, (pid, exit_code) in sorted(self._failures.items()):
            ending = process.Ending(exit_code=exit_code) if exit_code >= 0 else process.Ending(signal=process.signal_name(-exit_code))
            member = self._roster.members.get(pid)
            if member is not None:
                if member.ending == process.Ending():
                    member.ending = ending
                continue
            worker = Worker(rank, pid, 0, restart=max(self._generation, 0))
            member = self._roster.adopt_ended(worker, ending)
            self._observer.add(pid, 0)
            self._observer.ended(pid, ending)
            if self._first_bad is None:
                self._first_bad = member

    def _look_back(self) -> None:
        """A clean end. Ranks may still have met for different things without anybody noticing (another reduce op)."""
        logs, problems = self._collect()
        if not any(log.collectives for log in logs):
            return
        verdict = self._diagnose(logs, problems)
        if verdict.kind.startswith("mismatch") and not self._mismatches.has_told(verdict):
            self._announce(verdict)
            self._save_dump()


__all__ = ["Say", "Watcher", "patience_s", "say_to_stderr", "timeout_lead_s"]
