"""Samples how fast a running job is, and reports ranks that make it slow, once.

A sample reads the newest records of each rank on this node. It takes about 1% of a second for 8
ranks and is taken so seldom that it stays below 0.5% of one core.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from statistics import median
from typing import Final, NamedTuple

from commlens.model.collective import FrameKind
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict
from commlens.processes import process
from commlens.processes.observer import Observer
from commlens.processes.pyspy import PROFILE_S, InBackground, Profile, take_profile
from commlens.speed.pace import (
    MIN_COST_ON_DEVICE,
    Judgement,
    Pace,
    PaceMeter,
    Sample,
    SlowRanks,
    condensed,
    find_periodic_waits,
    find_slow_ranks,
    judge,
    recent,
    with_cpu,
    with_since,
)
from commlens.text import count, duration, group_phrase, ranks_and_verb, utc
from commlens.watch.node_health import HealthOfNode
from commlens.watch.nodes.exchange import Nodes
from commlens.watch.roster import Member
from commlens.watch.snapshot import read_logs, sample

log = logging.getLogger("commlens")

INTERVAL_S: Final = 5.0
CPU_SHARE: Final = 0.0035  # as the thread counts it; all of it stays below 0.5%
NEWEST: Final = 300  # records per rank
# the same where a device tells durations: for many seconds at once, and late
NEWEST_ON_DEVICE: Final = 2000
RANKS_MAX: Final = 1024  # of a job whose nodes are compared
_KEPT: Final = 120  # samples
# samples to wait for a judgement on all nodes, before this node judges its own ranks
_AWAITED: Final = 12
_SLOWER: Final = 1.3
_BASE: Final = 24  # samples that say how long a step took at first
_SKIPPED: Final = 2  # the first steps compile
_RECENT: Final = 12
_LONGEST_PROFILE_S: Final = 20
_FRESH_S: Final = 3.0  # a reading of durations, of which the records are still there
_NO_READING_S: Final = 60.0  # after which a sample is taken without new durations


class Line(NamedTuple):
    """A line to print."""

    text: str
    of_this_node: bool  # the other nodes do not find it by themselves


class _Sampler:
    """Reads the newest records of this node's ranks now and then, and measures their pace since the
    last time.
    """

    def __init__(self) -> None:
        self.newest = NEWEST  # records that are read of each rank
        self.meter = PaceMeter(time.time_ns())
        # CLOCK_MONOTONIC ns: until when all ranks had read durations on devices, at the last sample
        self._timed_ns = 0
        # False: the last sample waited in vain for them to read, so the next one does not wait
        self._awaits_reading = True
        self._sampled_ns = time.monotonic_ns()  # of the last sample
        self._steps = 0  # completed by all ranks by then
        self._no_cpu: dict[int, int] = {}  # pid: ns

    def is_time(self, ranks: Sequence[Member], now: float, due: float) -> bool:
        """Return whether to take a sample that is due since then, and note by which readings. Busy
        ranks read durations on devices seldom, and soon overwrite those records: the sample waits
        until all ranks have just read them, for a minute at most.
        """
        timed = [member.status.timed_mono_ns for member in ranks if member.status is not None]
        newest = min(timed, default=0)
        is_new = newest > self._timed_ns
        is_fresh = is_new and now - newest * 1e-9 <= _FRESH_S
        may_wait = (is_new or self._awaits_reading) and now < due + _NO_READING_S
        if newest and not is_fresh and may_wait:
            return False
        self._timed_ns, self._awaits_reading = newest, is_fresh
        return True

    def measure(self, ranks: Sequence[Member], least: int) -> tuple[list[RankLog], list[Pace]]:
        """Read the ranks' newest records. Return them, and the pace since the last sample, oldest
        first; nothing if it is unknown.

        Args:
            ranks: of this node.
            least: how many of them there must be.
        """
        steps = _progress(ranks)
        if not self._steps:  # a sample does not span the start of the job
            self._sampled_ns = time.monotonic_ns()
        if not self._steps or steps <= self._steps:  # at least one step
            self._steps = steps
            return [], []
        logs, problems = read_logs(list(ranks), {}, newest=self.newest, with_nccl=False)
        paces = self.meter.measure(logs, least, INTERVAL_S) if not problems else []
        if any(op.channel.runs_ahead for each in logs for op in each.collectives[-1:]):
            self.newest = NEWEST_ON_DEVICE
        no_cpu, elapsed_ns = self._without_cpu(ranks), time.monotonic_ns() - self._sampled_ns
        done, self._steps, self._sampled_ns = steps - self._steps, steps, time.monotonic_ns()
        if len(paces) == 1 and not paces[0].by_rounds:
            paces = [paces[0]._replace(steps=done, step_s=elapsed_ns * 1e-9 / done)]
        return logs, [
            pace._replace(
                no_cpu_s={rank: pace.window_s * ns / elapsed_ns for rank, ns in no_cpu.items()}
            )
            for pace in paces
        ]

    def _without_cpu(self, ranks: Sequence[Member]) -> dict[int, int]:
        """Return for how long each rank was ready to run and had no CPU since the last sample, in
        ns.
        """
        found = {}
        for member in ranks:
            total = process.cpu_wait_ns(member.pid)
            before = self._no_cpu.get(member.pid)
            if total is not None:
                self._no_cpu[member.pid] = total
                if before is not None:
                    found[member.rank] = total - before
        return found


class _CloserLook:
    """Profiles of a slow rank and of another one, and what is observed of all ranks meanwhile. The
    watcher's own observer must not see the job before it stalls: it looks for work.
    """

    def __init__(self, ranks: Sequence[Member], slow: SlowRanks) -> None:
        box = ranks[0].box
        classify = box.classifier() if box is not None else lambda _: FrameKind.USER
        pids = {member.rank: member.pid for member in ranks}
        others = [rank for rank in pids if rank not in slow.ranks]
        self._profiles = {
            rank: InBackground(
                partial(take_profile, pids[rank], classify, duration_s=profile_seconds(slow.cost)),
                lambda _: Counter(),  # the verdict comes without it
            )
            for rank in (slow.ranks[0], *others[:1])
        }
        self.observer = Observer(use_py_spy=False)
        for member in ranks:
            self.observer.add(member.pid, member.start_ticks)
        sample(ranks, self.observer)

    def profiles(self) -> dict[int, Profile] | None:
        """Return the profiles by rank; None until all are taken."""
        profiles = {rank: each.wait() for rank, each in self._profiles.items()}
        taken = {rank: profile for rank, profile in profiles.items() if profile is not None}
        return taken if len(taken) == len(profiles) else None


class Slowness:
    """The pace of the job's ranks on this node.

    Args:
        health: of this node's hardware, which may tell why a rank is slow.
    """

    def __init__(self, health: HealthOfNode | None = None) -> None:
        self._health = health
        self._sampler = _Sampler()
        self._due = 0.0  # of the next sample
        self._meet_at = 0.0  # of the next comparison with the other nodes' samples
        self.logs: list[RankLog] = []  # of the newest sample
        self.paces: list[Pace] = []  # of the newest samples, in order
        self._condensed: list[Sample] = []  # of the paces, for the other nodes
        self._step_times: list[float] = []  # seconds per step, of the first and the newest samples
        self._has_other_nodes = False
        # on the ranks of all nodes; None: this node judges its own
        self._judgement: Judgement | None = None
        # samples since this node has sent the others enough, and no node has judged
        self._awaited = 0
        self._slow: SlowRanks | None = None  # the ranks that this node explained or explains now
        self._look: _CloserLook | None = None  # at these, while they are to be explained
        self.verdict: Verdict | None = None  # on the ranks that make the job slow now
        self._reported: set[str] = set()  # which of "steps", "transfers" and "period" have a line

    def poll(self, members: Sequence[Member], nodes: Nodes, now: float) -> list[Verdict | Line]:
        """Take a sample if it is time, and compare it with the other nodes'. Returns the news: a
        verdict, or a line.
        """
        news: list[Verdict | Line] = []
        try:
            if now >= self._meet_at:
                self._meet_at = now + self._rest_s(lambda: self._meet(nodes))
            ranks = [
                member
                for member in members
                if member.alive and member.here and member.box is not None and member.rank >= 0
            ]
            look = self._look
            if look is not None:
                # what that cost is rested before the next sample
                self._due += (
                    self._rest_s(lambda: news.extend(self._explain(ranks, look))) - INTERVAL_S
                )
            if now >= self._due and self._sampler.is_time(ranks, now, self._due):
                self._due = now + self._rest_s(lambda: news.extend(self._sample(members, ranks)))
        except Exception as error:  # stalls and deaths are still reported
            self._due = self._meet_at = math.inf
            self._look = None
            log.warning(
                "commlens: slow ranks are no longer looked for: %s: %s", type(error).__name__, error
            )
            log.debug("the error", exc_info=True)
        return news

    def _rest_s(self, work: Callable[[], None]) -> float:
        """Do some work, and return the seconds to rest afterwards, so that watching costs
        little.
        """
        began = time.thread_time()
        work()
        return max(INTERVAL_S, (time.thread_time() - began) / CPU_SHARE)

    def _meet(self, nodes: Nodes) -> None:
        """Publish the newest samples, and judge all nodes' ranks if this node reports; otherwise
        take the reporter's judgement.
        """
        others = nodes.others
        self._has_other_nodes = bool(others)
        if not others or max(beat.world_size for beat in others) > RANKS_MAX:
            self._judgement = None
            return
        reporter, own = nodes.reporter, self._condensed
        here = (
            judge([own, *(beat.pace for beat in others)], self._judgement)
            if reporter is None
            else None
        )
        nodes.update(pace=own, judgement=here)
        self._judgement = here if reporter is None else reporter.judgement

    def _sample(self, members: Sequence[Member], ranks: Sequence[Member]) -> list[Verdict | Line]:
        """Measure the pace since the last sample, and return what it shows."""
        least = 1 if self._has_other_nodes else 2
        if len(ranks) < max(least, sum(member.here for member in members)):
            return []
        logs, paces = self._sampler.measure(ranks, least)
        if not paces:
            return []
        self.logs = logs
        if self.paces and self.paces[-1].waited_s.keys() != paces[-1].waited_s.keys():
            self.paces.clear()
        self.paces = [*self.paces, *paces][-_KEPT:]
        self._condensed = condensed(self.paces)
        return [
            *self._judge_ranks(ranks),
            *(line for pace in paces for line in self._judge_steps(pace)),
            *self._judge_transfers(ranks),
        ]

    def _judge_ranks(self, ranks: Sequence[Member]) -> list[Verdict | Line]:
        slow = self._slow = self._slow_ranks({member.rank for member in ranks})
        before = self.verdict
        if slow is None:
            self._look = self.verdict = None
            if before is None:
                return []
            them = ranks_and_verb(before.culprits, "no longer makes", "no longer make")
            return [Line(f"{them} the job slow.", of_this_node=True)]
        if self._look is not None or (before is not None and before.culprits == slow.ranks):
            return []
        return self._look_closer(ranks, slow)

    def _explain(self, ranks: Sequence[Member], look: _CloserLook) -> list[Verdict]:
        """Return the verdict on the slow ranks as soon as they are profiled, unless the comparison
        of all nodes no longer finds these.
        """
        profiles = look.profiles()
        if profiles is None:
            return []
        self._look = None
        slow, logs, judged = self._slow, self.logs, self._judgement
        pids = {member.rank: member.pid for member in ranks}
        if slow is None or pids.keys() != {each.rank for each in logs}:
            return []
        if judged is not None and (judged.slow is None or judged.slow.ranks != slow.ranks):
            return []
        sample(ranks, look.observer)
        for each in logs:
            each.observation = look.observer.observe(pids[each.rank])
        logs[0].health = self._health.report(ranks) if self._health is not None else None
        from commlens.diagnosis.examine import straggler_verdict  # not loaded at rest

        compared = judged.ranks if judged is not None else ()
        slow = with_since(slow, self.paces)
        self.verdict = straggler_verdict(slow, logs, profiles, compared=compared)
        return [self.verdict]

    def _look_closer(self, ranks: Sequence[Member], slow: SlowRanks) -> list[Verdict | Line]:
        """Tell, once, that ranks make the others wait periodically; if they do not, begin to
        profile one.
        """
        whole = self.logs
        if self._sampler.newest < NEWEST_ON_DEVICE:
            whole, _ = read_logs(list(ranks), {}, newest=NEWEST_ON_DEVICE)
        pause = find_periodic_waits(slow, whole)
        if pause is None:
            self._look = _CloserLook(ranks, slow)
            return []
        if "period" in self._reported:
            return []
        self._reported.add("period")
        from commlens.reports.step_table import period_words  # not loaded at rest

        return [Line(period_words(pause, slow.ranks), of_this_node=True)]

    def _slow_ranks(self, here: Collection[int]) -> SlowRanks | None:
        """Return the slow ranks that this node explains, if any.

        Args:
            here: the ranks of this node, which explains slow ranks if the first of them is its own.
        """
        newest = recent(self.paces)
        if self._judgement is None:
            self._awaited += bool(self._condensed) and self._has_other_nodes
            if 0 < self._awaited <= _AWAITED:
                return self._slow  # nobody has judged yet
            if self._has_other_nodes and newest and newest[0].by_rounds:
                return None  # the other nodes do not publish the pace of their rounds
            return find_slow_ranks(newest, self._slow)
        self._awaited = 0
        slow = self._judgement.slow
        return with_cpu(slow, newest) if slow is not None and slow.ranks[0] in here else None

    def _judge_steps(self, pace: Pace) -> list[Line]:
        self._step_times.append(pace.step_s)
        first, last = self._step_times[_SKIPPED:_BASE], self._step_times[-_RECENT:]
        del self._step_times[_BASE + _RECENT : -_RECENT]
        if "steps" in self._reported or len(self._step_times) < _BASE + _RECENT:
            return []
        usual, now = median(first), median(last)
        if now < _SLOWER * usual or min(last) < max(
            usual, sorted(first)[-max(1, len(first) // 10)]
        ):
            return []
        self._reported.add("steps")
        times = f"{duration(now * 1e9)} against {duration(usual * 1e9)}"
        return [
            Line(
                f"a step takes {now / usual:.1f} times as long as in the job's first minutes:"
                f" {times}.",
                of_this_node=False,
            )
        ]

    def _judge_transfers(self, ranks: Sequence[Member]) -> list[Line]:
        """Compare how long transfers on devices take with what this job reached before."""
        found = self._sampler.meter.transfers.slower()
        if "transfers" in self._reported or found is None or found.share < MIN_COST_ON_DEVICE:
            return []
        self._reported.add("transfers")
        from commlens.reports.step_table import rate_words  # not loaded at rest
        from commlens.speed.bandwidth import reached_rate

        health = self._health.report(ranks) if self._health is not None else None
        reached = reached_rate(found.kind, found.group, found.now_ns, [health] if health else [])
        compared = f" {rate_words(reached)}" if reached is not None else ""
        times = f"{duration(found.now_ns)} against {duration(found.best_ns)}"
        alone = "; in the groups that do the same elsewhere it does not" if found.is_alone else ""
        return [
            Line(
                f"since {utc(found.since_ns)}, {found.kind.op} in {group_phrase(found.group)} takes"
                f" {found.now_ns / found.best_ns:.1f} times as long as at its best in this job:"
                f" {times} for {count(found.kind.numel, 'element')}, when waits for late ranks are"
                f" taken off{alone}. This costs {found.share:.0%} of the time.{compared} Look at"
                " the links of these ranks.",
                of_this_node=True,
            )
        ]


def _progress(ranks: Sequence[Member]) -> int:
    """Return how many steps all ranks have completed, at least; if no rank counts steps, how many
    collectives: perhaps they show rounds. 0 if it is unknown.
    """
    seen = [member.status for member in ranks if member.status is not None]
    counts = [status.steps for status in seen]
    if not any(counts):
        counts = [status.issued for status in seen]
    return min(counts) if len(counts) == len(ranks) else 0


def profile_seconds(cost: float) -> int:
    """Return for how long to sample stacks, so that ranks who differ by a share of the time are
    told from those who differ by chance: the smaller the share, the more samples.
    """
    return min(_LONGEST_PROFILE_S, max(PROFILE_S, round(0.1 / cost**2)))
