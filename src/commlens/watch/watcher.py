"""The watcher of one job on this node: notices a stall, a death and the end, and reports what is
wrong.

Two to six times a second, and at once when a process ends, a *tick* reads the header of each rank's
black box (4 KiB) and looks, in this order, for ranks that ended, news of other nodes, tensors that
differ, a death that is due, and a stall. Between ticks, new records are compared
(:mod:`commlens.watch.mismatches.deferred_verification`). Samples of ``/proc``, whole boxes and the
diagnosis are only needed while a collective has been in flight for suspiciously long, a rank has
ended, or ranks disagree.

For example, rank 3 of 8 waits in the debugger, and the others in an all_reduce::

    31 s    _look_for_stall: the oldest wait is older than the stall timeout, so a Stall begins
            _check: diagnose; the verdict is new, so print it, save a dump, send an alert
    47 s    the wait ends: _tell_end_of_wait prints that, and how long it has lasted
    or      rank 3 is killed: _add_ended, then, once it is due, _report_death: the death explains
            what follows, so nothing more is reported

If torchelastic restarts the workers, a new *generation* begins: what is left to report of the
former workers is reported, and all that was learned of them is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from commlens.config import Settings
from commlens.diagnosis.words.long_wait import long_wait
from commlens.dumps import save
from commlens.model.sender import Sender
from commlens.model.verdict import Verdict
from commlens.processes import process
from commlens.processes.early_handles import EarlyHandles
from commlens.processes.observer import WINDOW_S, Observer
from commlens.processes.ranks import RankProcess
from commlens.processes.senders import take_sender
from commlens.text import ranks_phrase, signal_name, verb
from commlens.watch.alerts.metrics import Metrics
from commlens.watch.death import REPORTER_S, DeathDetector, dead_ranks
from commlens.watch.diagnoser import Diagnose, Diagnoser
from commlens.watch.evidence import Evidence
from commlens.watch.job_abort import JobAbort
from commlens.watch.jobs import discard_forgotten, is_over
from commlens.watch.meeting_worlds import MeetingWorlds
from commlens.watch.mismatches.deferred_verification import DeferredVerification
from commlens.watch.mismatches.report import MismatchReporter
from commlens.watch.node_health import HealthOfNode
from commlens.watch.nodes.beat import LAST, News
from commlens.watch.nodes.exchange import Nodes
from commlens.watch.nodes.lost import LostStoreReport
from commlens.watch.nodes.remote_evidence import pack_snapshot
from commlens.watch.nodes.states import states_snapshot
from commlens.watch.nodes.states_tree import TREE_ABOVE
from commlens.watch.open_waits import OpenWait, waits, waits_recorded
from commlens.watch.other_nodes import pack_world_snapshot
from commlens.watch.reporting import (
    Reporter,
    Say,
    lines_at_end,
    report_death,
    take_handed_over,
    together,
)
from commlens.watch.roster import Member, Roster, Workers
from commlens.watch.slowness import Slowness
from commlens.watch.snapshot import add_new_members, read_logs, sample
from commlens.watch.stall import Check, Stall, StallDetector
from commlens.watch.stall_limit import StallLimit
from commlens.watch.stall_verdicts import end_of_wait
from commlens.watch.strangers import Strangers

log = logging.getLogger("commlens")

POLL_S: Final = 0.16  # between two ticks
# The same with a long stall timeout, once all ranks are known and so many seconds have passed. The
# end of a process is noticed at once anyway.
CALM_POLL_S: Final = 0.5
CALM_AFTER_S: Final = 10.0
PAUSED_S: Final = 3.0  # no wait for the next tick takes that long, unless this process was stopped
ENDING_MAX_S: Final = 30.0  # a process that takes longer to end is stuck there
NEVER_SEEN_S: Final = 60.0  # without any rank, a watcher that no launcher started ends
DUMPS_PER_STALL: Final = 3
# how long to wait for the dump of the node that reports: in a shared folder, it has all ranks
REPORTERS_DUMP_S: Final = 2.0
LOOK_EARLY_NODES: Final = 2048
"""With more other nodes, a wait is not looked at before the stall timeout."""
LOOKED_AT_PER_S: Final = 320.0
"""Nodes that are asked for their states before the stall timeout: each look costs the store 17
requests of each node.
"""
_NEWEST: Final = 16  # records that show how a wait ended
# a job that is stopped after ranks have waited this long gets a verdict
STOPPED_REPORT_S: Final = 5.0
STOP_NUMBERS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


class Watcher:
    """Watches a job's ranks on this node until they have ended.

    Args:
        folders: where the black boxes are or will be; several if the ranks may have to choose.
        settings: stall_timeout, abort_on, dump_dir and so on.
        say: prints a line or a verdict; by default to stderr.
        workers: the ranks that the launcher started, with or without a box.
        early: handles on the ranks, opened before this module was imported.
        end_job: ends the job as the launcher does (``abort_on``), given the verdict in
            words. Ranks that are still alive 5 s later are killed.
        diagnose: makes a verdict of logs; by default
            :func:`commlens.diagnosis.examine.diagnose_logs`.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        settings: Settings,
        *,
        say: Say | None = None,
        workers: Workers | None = None,
        early: EarlyHandles | None = None,
        end_job: Callable[[str], None] | None = None,
        diagnose: Diagnose | None = None,
    ) -> None:
        self.folders = list(folders)
        self.settings = settings
        self._end_job = end_job
        self._launched = workers is not None
        self._roster = Roster(self.folders, workers, early)
        self._observer = Observer(min(WINDOW_S, max(1.0, settings.stall_ceiling_s)))
        host = os.uname().nodename
        self._nodes = Nodes(
            host,
            self._wake,
            Path(settings.dump_dir),
            lambda records: pack_snapshot(self.folders, records),
            lambda: states_snapshot(self.folders),
        )
        self._worlds = MeetingWorlds(
            host,
            self._wake,
            settings.meet,
            self.folders,
            lambda records: pack_world_snapshot(self.folders, records),
        )
        self._health = HealthOfNode(settings)
        evidence = Evidence(
            self._roster,
            self._observer,
            self._nodes,
            self._worlds,
            self._health,
            launched=self._launched,
        )
        self._diagnoser = Diagnoser(evidence, settings, diagnose)
        self.reporter = Reporter(self.folders, settings, self._diagnoser, say=say)
        self._stop = threading.Event()
        self._failures: Mapping[int, tuple[int, int]] = {}
        self._metrics = Metrics(settings, settings.job or self.folders[0].name, self.reporter)
        self._begin_generation()
        self._started = time.monotonic()

    def _begin_generation(self) -> None:
        """Know nothing yet of the present workers."""
        self._generation = self._roster.generation
        self._stalls = StallDetector(self.settings)
        self._limit = StallLimit(self.settings)
        self.reporter.evidence.usual = self._limit.usual
        self._deaths = DeathDetector()
        self._mismatches = MismatchReporter(
            DeferredVerification(self._roster), self._roster, read=self.reporter.evidence.records
        )
        self.reporter.forget()
        self._slowness = Slowness(self._health)
        self._strangers = Strangers(self._roster, self._observer)
        self._job_abort = JobAbort(
            self._roster, self._nodes, self.reporter, self._end_job, launched=self._launched
        )
        self._lost_store = LostStoreReport()
        # time.monotonic() at which to save this node's dump, after another node has reported
        self._own_dump_due: float | None = None
        # the job's fault was reported, or the job was stopped: what follows is a consequence, and
        # is not reported
        self._is_explained = False

    # --- from other threads

    @property
    def wake_fileno(self) -> int:
        """For ``signal.set_wakeup_fd``: the watcher then sees the signals that the launcher
        receives.
        """
        return self._roster.wake_fileno

    def stop(self, failures: Mapping[int, tuple[int, int]] | None = None) -> None:
        """Make :meth:`run` report what is left to report, clean up and return: the launcher has
        nothing more to run.

        Args:
            failures: rank to (pid, exit code as in subprocess) of the workers that failed, from
                torchrun's agent.
        """
        self._failures = failures or {}
        self._stop.set()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._roster.wake_fileno, b"\0")

    # --- the loop

    def run(self) -> None:
        """Watch until all ranks have ended or, in a launcher, until :meth:`stop`. Its own errors
        are logged, never raised.
        """
        try:
            if self._roster.early is None:
                self._tick()  # first of all: a process may end at any moment
            self.reporter.preload()
            discard_forgotten(self.folders)
            due = 0.0
            while not self._finished():
                began = time.monotonic()
                self._on_signals(
                    self._roster.wait(max(0.0, min(due - began, self._mismatches.pause_s(began))))
                )
                now = time.monotonic()
                # this process was stopped, and so were the ranks: their waits do not count
                if now - began > PAUSED_S:
                    self._stalls.add_pause(time.monotonic_ns())
                    self._observer.forget_samples()
                if now >= due or self._roster.was_woken:
                    self._tick()
                    due = time.monotonic() + self._pause_s()
                if not self._is_explained:
                    self._look_for_mismatches()
            self._finish()
        except Exception as error:
            log.warning(
                "commlens: the watcher failed and stops; the job goes on without it: %s: %s",
                type(error).__name__,
                error,
            )
            log.debug("the watcher's error", exc_info=True)
        finally:
            self._worlds.leave()  # after an error; else it has left
            self._nodes.leave()
            self._metrics.close()
            self.reporter.close()
            self._health.close()
            self._roster.close()

    def _finished(self) -> bool:
        """Return whether there is nothing more to watch."""
        if self._launched:
            return self._stop.is_set()
        members = [member for member in self._roster.current() if member.here]
        if not members:
            return time.monotonic() - self._started > NEVER_SEEN_S
        return (
            not any(member.alive and member.box is not None for member in members)
            and not self._deaths.is_pending
        )

    def _pause_s(self) -> float:
        """Return how long to wait until the next tick."""
        if self._stalls.stall is not None:
            return self._stalls.sample_every_s(time.monotonic_ns())
        calm = (
            all(member.box is not None for member in self._roster.current())
            and time.monotonic() - self._started > CALM_AFTER_S
        )
        return min(CALM_POLL_S, max(POLL_S, self.settings.stall_ceiling_s / 12)) if calm else POLL_S

    def _tick(self) -> None:
        """Look at the headers of all boxes, and at the other nodes, for what the module's docstring
        lists.
        """
        new = add_new_members(self._roster, self._observer)
        self._health.add(new)
        if self._roster.generation > self._generation:
            self._begin_generation_anew()
        self._roster.read_headers()
        self._add_ended()
        self._meet_nodes()
        self._meet_worlds()
        self._report_diverged()
        missed = self._mismatches.verification.missed
        self._metrics.update(
            self._roster.current(),
            self._stalls.stall,
            self._slowness,
            missed,
            self._health.faults,
            self._health.values,
        )
        if self._deaths.take_due(
            time.monotonic(),
            self._roster.current(),
            ending=self._is_one_ending,
        ):
            self._report_death()
        if not self._is_explained and not self._deaths.is_pending:
            self.reporter.say_all(self._strangers.lines_at_start(time.monotonic()))
            self._look_for_stall()
        self._job_abort.kill_late_ranks()

    # --- a restart of the workers

    def _begin_generation_anew(self) -> None:
        """Start anew: torchelastic has replaced the workers. Report what is left to report of the
        former ones, and remove their boxes.
        """
        former = [
            member for member in self._roster.members if member.generation < self._roster.generation
        ]
        with self._roster.former_generation():
            signals = self._roster.wait(0)
            self._roster.read_headers()
            self._add_ended()
            self._close_generation()
        verdict, dump = self.reporter.verdict, self.reporter.dump
        if verdict is not None or dump is not None:
            kept = f"; the former ones' dump stays in {dump}" if dump is not None else ""
            self.reporter.say(f"the workers were restarted{kept}.")
        self._roster.forget(former, remove_boxes=True)
        self._begin_generation()
        self._on_signals(signals)  # a launcher that had one before would not have restarted them

    def _close_generation(self) -> None:
        """Report what is left to report of ranks that have ended, and leave the other nodes."""
        self._report_diverged()
        until = time.monotonic() + 2 * REPORTER_S
        while (
            (self._deaths.first or self._nodes.dead_elsewhere)
            and not self._is_explained
            and time.monotonic() < until
        ):
            self._meet_nodes()  # another one may report it
            self._meet_worlds()
            self._report_death()
            time.sleep(0 if self._is_explained else POLL_S)
        if self._own_dump_due is not None:
            self.reporter.save_own_dump()
        with self._comparing():
            self._mismatches.read_rest()
        self.reporter.say_all(self._mismatches.final_lines())
        self._worlds.leave(self.reporter.evidence.packed_world)
        self._nodes.leave(self.reporter.evidence.packed)

    # --- signals that stop the job

    def _on_signals(self, numbers: bytes) -> None:
        """Explain a stop of the job by signals that the launcher has received: report a hang that
        it ends, and say who sent them.
        """
        stops = STOP_NUMBERS.intersection(numbers)
        if stops and not self._is_explained and self._deaths.first is None:
            self._is_explained = True
            # before the diagnosis, which takes a while, in which the sender may end
            senders = [(number, take_sender(number)) for number in sorted(stops)]
            self._report_before_stop()
            self._say_stop(senders)

    def _report_before_stop(self) -> None:
        """Report a hang when the job is stopped: it cannot be found out later."""
        oldest_ns = min(
            (wait.since_ns for wait in waits(self._roster.current()) if wait.kind == "collective"),
            default=0,
        )
        was_reported = self._stalls.stall is not None and self._stalls.stall.verdict is not None
        waited_s = (time.monotonic_ns() - oldest_ns) / 1e9 if oldest_ns else 0.0
        if was_reported or waited_s < STOPPED_REPORT_S:
            return
        self.reporter.evidence.freeze()
        verdict = self._diagnoser.diagnose()
        if verdict.is_fault:
            self.reporter.report(verdict)
            self.reporter.save_dump()

    def _say_stop(self, senders: Sequence[tuple[int, Sender | None]]) -> None:
        """Print which signals stop the job, and who sent them, if that is known."""
        from commlens.diagnosis.causes.dead import find_stop
        from commlens.diagnosis.words.dead import stopped_line

        # a rank may have sent it sooner than a tick found the rank
        self._health.add(add_new_members(self._roster, self._observer))
        ranks = {member.pid: member.rank for member in self._roster.current()}
        for number, sender in senders:
            known = replace(sender, rank=ranks.get(sender.pid)) if sender is not None else None
            if stop := find_stop(signal_name(number), known, parent=os.getppid()):
                self.reporter.say(stopped_line(stop))

    # --- other nodes

    def _meet_nodes(self) -> None:
        """Tell the job's other nodes about this one, answer the node that reports, and print what
        it reported.
        """
        nodes = self._nodes
        if not nodes.meet(self._roster.current(), self._mismatches.verification.comparison.digests):
            return
        line = self._lost_store.take_line(nodes, self._roster.current())
        if line and not self._is_explained:
            self.reporter.say(line)
        if (request := nodes.take_request()) is not None:
            evidence = self.reporter.evidence
            nodes.answer(
                request,
                evidence.packed(request.records) if request.tree is None else evidence.states(),
            )
        self._take_news()
        if self._own_dump_due is not None and (nodes.dump or time.monotonic() > self._own_dump_due):
            self._own_dump_due = None
            self.reporter.save_own_dump()
        if nodes.dead_elsewhere and nodes.reporter is None and not self._is_explained:
            self._deaths.add_elsewhere(time.monotonic())

    def _take_news(self) -> None:
        """Print what other nodes say. After a verdict of the reporter, drop what this node would
        have reported itself, and end the ranks if it says so.
        """
        for host, news in self._nodes.take_news():
            self.reporter.say(_line_of(host, news))
            if news.kind:
                self._mismatches.held.clear()
                self._is_explained = self._is_explained or self._deaths.first is not None
                self._own_dump_due = time.monotonic() + REPORTERS_DUMP_S
            if news.abort and not self._job_abort.has_begun:
                self._is_explained = True
                self._job_abort.begin()

    # --- other worlds

    def _meet_worlds(self) -> None:
        """If this node reports for its world, describe the world to those on other nodes that share
        a group with it, answer the one that reports, and print what it reported.
        """
        worlds, members = self._worlds, self._roster.current()
        groups = worlds.groups(members)
        self._nodes.update(by_hand=groups)
        if self._nodes.reporter is not None:
            worlds.leave_exchanges()
            return
        seen = [*groups, *(each for beat in self._nodes.others for each in beat.by_hand)]
        waiting = waits(members) + self._nodes.waits(time.monotonic_ns())
        worlds.meet(members, waiting, seen)
        self._observer.store_ports = frozenset({self._nodes.port, *worlds.ports} - {0})
        worlds.answer(self.reporter.evidence.packed_world)
        for host, news in worlds.take_news():
            self.reporter.say_on_all_nodes(_line_of(host, news))
            worlds.reported_by = host
            self._is_explained = self._is_explained or self._deaths.first is not None
            self.reporter.save_dump()

    # --- deaths

    def _add_ended(self) -> bool:
        """Find the ranks that have ended. Returns whether there are any of the current generation
        whose end is not explained.
        """
        new = self._roster.take_ended()
        if not new:
            return False
        for member in new:
            self._observer.ended(
                member.pid,
                member.ending or process.ProcessEnding(),
                clean=member.said_goodbye,
                at_ns=member.ended_ns,
            )
        members, now = self._roster.current(), time.monotonic()
        ended = [member for member in new if member in members and not self._is_explained]
        # A rank that has finished holds up those that wait for it. Not one that has ended before
        # init_process_group: it may only have prepared the program that is the rank.
        if any(
            member.ended_well is not False and (member.status is None or member.status.initialised)
            for member in ended
        ):
            self._stalls.add_finished_rank(now)
        if self._deaths.add(
            ended,
            members,
            now,
            alone=self._is_alone,
            by_torchrun=lambda: (
                self._launched or any(map(process.is_under_torchrun, self._living()))
            ),
        ):
            self.reporter.evidence.freeze()
            self._health.look_now()
        return bool(ended)

    def _living(self) -> list[int]:
        """Return the pids of this node's ranks that have not ended."""
        return [member.pid for member in self._roster.current() if member.alive and member.here]

    def _is_one_ending(self) -> bool:
        """Return whether a rank is being ended, which takes seconds with much memory."""
        return any(map(process.is_ending, self._living()))

    def _is_alone(self) -> bool:
        """Return whether no other rank is being ended, and torchrun, which would end all of them at
        once, is not busy doing so.
        """
        pids = self._living()
        if self._launched and pids:
            return not self._is_one_ending()
        return process.are_running_under_torchrun(pids)

    def _report_death(self) -> None:
        """Report why ranks have died, unless the job was stopped, or another node or world reports
        it.
        """
        members = self._roster.current()
        dead = dead_ranks(members)
        if self._is_explained or not (dead or self._nodes.dead_elsewhere):
            return
        earlier = self._stalls.stall.verdict if self._stalls.stall is not None else None
        hung = earlier is not None and earlier.is_fault
        if self._deaths.was_job_stopped(members, hung=hung) and not self._nodes.dead_elsewhere:
            self._is_explained = True
            return
        first = self._deaths.first
        if first is not None and first.ending is not None:
            self._observer.ended(first.pid, first.ending).ended_alone = self._deaths.alone
        if self._leave_death_to_others(dead):
            return
        self._is_explained = True
        report_death(
            self.reporter,
            dead,
            self._nodes.dead_elsewhere,
            earlier=earlier,
            has_reported=self._mismatches.has_reported,
        )
        self.reporter.save_dump()

    def _leave_death_to_others(self, dead: Sequence[Member]) -> bool:
        """Return whether another node or world reports why ranks have died."""
        self._nodes.update(dead=[member.rank for member in dead])
        if self._nodes.reporter is None:
            return self._leave_death_to_worlds(dead)
        if not self._deaths.waits_for_reporter:
            self._nodes.answer(LAST, self.reporter.evidence.packed())
        return self._deaths.wait_for_reporter(time.monotonic())

    def _leave_death_to_worlds(self, dead: Sequence[Member]) -> bool:
        """Return whether another world reports why ranks here have died, or has done so. Ranks that
        end by themselves after a hang that it reported only gave up waiting.
        """
        worlds = self._worlds
        worlds.add_dead([member.rank for member in dead])
        were_killed = any(member.ending is not None and member.ending.signal for member in dead)
        if worlds.reported_by and dead and not were_killed:
            self._is_explained = True
            ranks = ranks_phrase(member.rank for member in dead)
            self.reporter.say_for_job(
                f"{ranks} of this world ended while the job hung; the verdict above stands."
            )
            self.reporter.save_dump()
            return True
        if not worlds.reporter_has_deaths:
            return False
        if not self._deaths.waits_for_reporter:
            worlds.answer(self.reporter.evidence.packed_world, is_last=True)
        return self._deaths.wait_for_reporter(time.monotonic())

    # --- mismatches

    def _look_for_mismatches(self) -> None:
        """Compare new records and report ranks that disagree, whether or not it hangs the job: its
        results may be wrong.
        """
        verdicts = []
        with self._comparing():
            verdicts = self._mismatches.poll_job(time.monotonic(), self._nodes)
        for verdict, may_abort in verdicts:
            self.reporter.report(verdict)
            self.reporter.save_dump()
            if may_abort and self._abort("mismatch", verdict):
                return

    @contextlib.contextmanager
    def _comparing(self) -> Iterator[None]:
        """Compare nothing any more after an error; stalls and deaths are still reported."""
        try:
            yield
        except Exception as error:
            self._mismatches.disable()
            log.warning(
                "commlens: deferred verification failed and stops; the job is still watched:"
                " %s: %s",
                type(error).__name__,
                error,
            )
            log.debug("the comparison's error", exc_info=True)

    def _report_diverged(self) -> None:
        """Report tensors that ranks must have alike and do not, which rank 0 has found."""
        verdict = take_handed_over(self.folders) if not self._is_explained else None
        if verdict is None:
            return
        former = self.reporter.verdict
        self.reporter.report(verdict)
        self.reporter.verdict = together(former, verdict)
        self.reporter.save_dump()
        self._abort("diverged", verdict)

    # --- stalls

    def _look_for_stall(self) -> None:
        """Follow the oldest wait of all nodes and worlds, and check it when that is due."""
        now_ns = time.monotonic_ns()
        members = self._roster.current()
        self._limit.follow(members, now_ns, resumed_ns=self._stalls.resumed_ns)
        waiting = self._limit.applied(waits(members)) + self._nodes.waits(now_ns)
        waiting += self._worlds.waits(now_ns)
        before = self._stalls.stall
        self._tell_end_of_wait(members, waiting, now_ns)
        # each check before the stall timeout asks all nodes for the states of their ranks
        looks_early = len(self._nodes.others) <= LOOK_EARLY_NODES
        check = self._stalls.update(members, waiting, now_ns, looks_early=looks_early)
        stall = self._stalls.stall
        if before is not None and stall is not before:
            self._observer.forget_samples()
        if stall is not None and stall is not before:
            self._health.look_now(ask_ras=self._nodes.reporter is None)
        self._look_for_slow_ranks(members)
        if stall is None:
            self._worlds.end_stall()
            return
        sample(members, self._observer)
        seen = [member for member in members if member.alive and member.here]
        # a single rank that is stopped is a finding; all of them are a user at work
        if len(seen) > 1 and all(self._observer.is_stopped(member.pid) for member in seen):
            if self._stalls.add_pause(now_ns):
                self.reporter.say(
                    "all ranks here are stopped (by SIGSTOP or a debugger); their waits count from"
                    " when they go on."
                )
            return
        if check is not None and self._is_mine(check):
            self._check(stall, check)

    def _is_mine(self, check: Check) -> bool:
        """Return whether no other node or world makes a check. One before the process group's own
        timeout (``timeout_s``) is not left to another world: this one may end right afterwards.
        """
        return self._nodes.reporter is None and (
            check.timeout_s > 0 or not self._worlds.defer(is_early=check.is_early)
        )

    def _tell_end_of_wait(
        self, members: Sequence[Member], waiting: Sequence[OpenWait], now_ns: int
    ) -> None:
        """Print how a reported wait ended, unless the ranks may be ending."""
        ended = self._stalls.take_ended(waiting, now_ns)
        if ended is None:
            return
        line = ""
        if any(member.alive for member in members) and not dead_ranks(members):
            logs, *_ = read_logs(list(members), {}, newest=_NEWEST)
            line = end_of_wait(ended.verdict, ended.since_ns, logs, now_ns)
        if line:
            self.reporter.say_for_job(line)
            self.reporter.verdict_stands = False
        else:
            self._stalls.stall = ended

    def _check(self, stall: Stall, check: Check) -> None:
        """Diagnose a stall and report a verdict that is new."""
        if check.age_s < ENDING_MAX_S + check.patience_s and self._is_one_ending():
            return  # its death explains more than the wait does
        if self._strangers.find(time.monotonic()):
            stall.next_check = check.now + 1.0  # observe them first
            return
        diagnoser, others = self._diagnoser, len(self._nodes.others)
        few = check.is_early and others > TREE_ABOVE  # then with the evidence of a few nodes only
        verdict = diagnoser.diagnose_few() if few else diagnoser.diagnose(stands_still=True)
        # meanwhile, the job may have been stopped or a rank have died, which explains the wait
        self._on_signals(self._roster.wait(0))
        if self._add_ended() or self._is_explained:
            return
        logs, poses = diagnoser.examined.logs, diagnoser.examined.poses
        if check.timeout_s and not waits_recorded(logs, check.timeout_s):
            return
        is_new = (
            self._stalls.add_early(check, verdict, logs, poses, rest_s=others / LOOKED_AT_PER_S)
            if check.is_early
            else verdict is not None and self._stalls.add_verdict(check, verdict)
        )
        if verdict is not None:
            self._report_stall(stall, check, verdict, is_new=is_new)

    def _report_stall(self, stall: Stall, check: Check, verdict: Verdict, *, is_new: bool) -> None:
        """Report what a check found: a verdict if it is new, a notice of a wait, a dump."""
        reporter, logs = self.reporter, self._diagnoser.examined.logs
        is_mismatch = self._mismatches.has_reported(verdict)
        if is_new:
            if is_mismatch:
                held = verdict.victims or verdict.culprits
                reporter.report_again(
                    verdict,
                    f"{ranks_phrase(held)} {verb(held, 'is', 'are')} held up by the mismatch; the"
                    " verdict above stands.",
                )
            else:
                reporter.report(verdict)
            if verdict.is_fault:
                if stall.dumps < DUMPS_PER_STALL and not check.timeout_s:
                    stall.dumps += 1
                    reporter.save_dump()
                reporter.send_alert()
                self._abort("stall", verdict)
        elif check.is_early and not is_mismatch and self._stalls.add_notice(check, verdict, logs):
            reporter.say_for_job(long_wait(verdict, logs))
        if check.timeout_s:
            reporter.save_dump(
                f"the process group's timeout of {check.timeout_s:.0f} s is about to expire"
            )

    # --- slow ranks

    def _look_for_slow_ranks(self, members: Sequence[Member]) -> None:
        """Report slow ranks, and let the stall timeout learn from the records that were read."""
        sampled = self._slowness.logs
        news_of_ranks = self._slowness.poll(members, self._nodes, time.monotonic())
        if self._slowness.logs is not sampled:
            self._limit.add_records(self._slowness.logs)
        for news in news_of_ranks:
            if isinstance(news, Verdict):
                self.reporter.report_slow(news)
            elif news.of_this_node:
                self.reporter.say_on_all_nodes(news.text)
            else:
                self.reporter.say(news.text)

    # --- the end

    def _abort(self, fault: str, verdict: Verdict) -> bool:
        """End the job, if the settings ask for it, it is not being ended and the evidence is
        complete. Returns whether it is being ended.
        """
        if not (self.settings.aborts_on(fault) and self._job_abort.begin_for(fault, verdict)):
            return False
        self._is_explained = True
        return True

    def _finish(self) -> None:
        """All ranks have ended: report what is left, and remove the boxes from shared memory."""
        add_new_members(self._roster, self._observer)
        self._on_signals(self._roster.wait(0))  # before its ranks' ends: the signal explains them
        self._roster.read_headers()
        self._add_ended()
        self._add_unseen_failures()
        members = self._roster.current()
        self._close_generation()
        if any(member.alive and member.here and member.box is not None for member in members):
            return  # a rank that outlives its launcher keeps its box
        if members and not self._is_explained:
            self._diagnose_after_end(members)
            self.reporter.say_all(lines_at_end(members))
        # Also those that have been damaged since, which are not recognised any more.
        self._roster.forget([member for member in members if member.here], remove_boxes=True)
        for folder in self.folders:
            with contextlib.suppress(OSError):
                if is_over(folder):  # else ranks in another container use it
                    save.discard_job(folder)

    def _add_unseen_failures(self) -> None:
        """Add workers that ended before the watcher saw them; torchrun's agent has their exit
        codes.
        """
        restart = max((member.restart for member in self._roster.current()), default=0)
        for rank, (pid, exit_code) in sorted(self._failures.items()):
            ending = (
                process.ProcessEnding(exit_code=exit_code)
                if exit_code >= 0
                else process.ProcessEnding(signal=signal_name(-exit_code))
            )
            member = self._roster.find(pid, 0)
            if member is None:
                member = self._roster.add_ended_worker(
                    RankProcess(rank, pid, 0, restart=restart), ending
                )
                self._observer.add(pid, 0)
                self._observer.ended(pid, ending)
                self._deaths.first = self._deaths.first or member
            elif member.ending == process.ProcessEnding():
                member.ending = ending

    def _diagnose_after_end(self, members: list[Member]) -> None:
        """Diagnose a job after its end.

        Ranks may have disagreed without any effect but wrong results (another reduce op), and
        nobody may have seen how a rank ended.
        """
        verdict = self._diagnoser.diagnose()
        is_mismatch = verdict.kind.startswith("mismatch")
        is_unseen_death = verdict.kind == "dead" and any(
            member.ended_well is None for member in members
        )
        if is_unseen_death or (is_mismatch and not self._mismatches.has_reported(verdict)):
            self.reporter.report(verdict)
            self.reporter.save_dump()


def _line_of(host: str, news: News) -> str:
    """Return a line of another node, with the place of the whole verdict if it is of one."""
    return f"{news.text} (the whole verdict was printed on {host})" if news.kind else news.text
