"""The verdict on a job that is only seen from outside: which rank stands where no other rank
stands, in which call.

A pure function of the samples. Stacks hold no sequence numbers and no members of groups, so a
verdict says how sure it can be, and names no rank where the evidence does not decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from commlens.diagnosis.index.activity import Activity, State, activity_of
from commlens.diagnosis.index.process_exit import process_exit_of
from commlens.diagnosis.words.activities import activity_words, sign_words
from commlens.model.cause import Confidence
from commlens.model.ranklog import End
from commlens.model.verdict import Finding, Verdict
from commlens.outside.sample import HostSamples, RankSample
from commlens.outside.waits import Waits, compare_waits, needs_all, places, ranks_of, unmoved
from commlens.text import (
    capital,
    count,
    frame_phrase,
    joined,
    ranks_and_verb,
    ranks_phrase,
    sentence,
)

_MOST_PIDS: Final = 8
_WITHOUT_LINE: Final[Sequence[State]] = ("stopped", "debugged")
"""States whose words name no line."""


def judge(hosts: Sequence[HostSamples]) -> Verdict:
    """Return the verdict on one job.

    Args:
        hosts: the samples of each host, taken at about the same time.
    """
    samples = sorted(
        (sample for host in hosts for sample in host.samples), key=lambda one: one.rank
    )
    world = max(
        [host.world_size for host in hosts] + [sample.rank + 1 for sample in samples], default=0
    )
    absent = sorted(
        {rank for host in hosts for rank in host.expected} - {sample.rank for sample in samples}
    )
    return _Case(
        samples, world, absent, max((host.window_s for host in hosts), default=0.0)
    ).verdict(_missing_evidence(hosts, samples, world))


def _missing_evidence(
    hosts: Sequence[HostSamples], samples: Sequence[RankSample], world: int
) -> list[str]:
    notes = [note for host in hosts for note in host.notes]
    by_text: dict[str, list[int]] = defaultdict(list)
    for sample in samples:
        for text in sample.log.problems:
            by_text[text].append(sample.rank)
    notes += [
        sentence(f"{capital(ranks_phrase(ranks))}: {text}") for text, ranks in by_text.items()
    ]
    expected = {rank for host in hosts for rank in host.expected}
    unseen = sorted(set(range(world)) - {sample.rank for sample in samples} - expected)
    if unseen:
        where = joined([host.host for host in hosts])
        was = capital(ranks_and_verb(unseen, "was", "were"))
        notes.append(
            f"{was} not seen: no such process runs on {where}. `--hosts a,b` looks on other"
            " machines."
        )
    return notes


class _Case:
    """The ranks of one job, sorted by what they do."""

    def __init__(
        self, samples: Sequence[RankSample], world: int, absent: Sequence[int], window_s: float
    ) -> None:
        self.samples = samples
        self.world = world
        self.absent = list(absent)
        self.window_s = window_s
        self.doing = {one.rank: activity_of(one.log, process_exit_of(one.log)) for one in samples}
        gone = [one for one in samples if one.log.observation.end is End.GONE]
        self.absent += [one.rank for one in gone]
        # A stopped rank counts as outside whatever its stack is; a rank without a readable stack
        # may stand anywhere.
        suspended = [
            rank for rank, doing in self.doing.items() if doing.why in ("stopped", "holding-gil")
        ]
        self.unread = [
            one
            for one in samples
            if one not in gone and not one.stack and one.rank not in suspended
        ]
        living = [one for one in samples if one not in gone and one not in self.unread]
        self.outside = [one for one in living if one.call is None or one.rank in suspended]
        inside = [one for one in living if one not in self.outside]
        self.stuck = [one for one in inside if one.moved is False]
        self.moving = [one for one in inside if one.moved is not False]

    def verdict(self, missing: list[str]) -> Verdict:
        """Make the findings, the most important first."""
        findings = self._findings()
        looked = f"{self._job_words()} from outside, for {self.window_s:.1f} s"
        if self.absent and len(self.absent) == len(self.samples):
            return Verdict(
                summary="the job has ended while it was looked at",
                confidence="low",
                missing_evidence=missing,
                looked_at=looked,
            )
        if not findings:
            return self._healthy(missing, looked)
        return Verdict.from_findings(findings, missing_evidence=missing, looked_at=looked)

    def _findings(self) -> list[Finding]:
        if self.absent:
            return [self._dead()]
        if not self.stuck:
            return []
        if self.outside:
            return self._missing()
        if self.moving:
            return [self._partly()]
        if self.unread:
            return [self._unreadable()]
        waits = Waits(
            self.stuck,
            [one.rank for one in self.stuck if self.doing[one.rank].works],
            self.window_s,
        )
        return [compare_waits(waits)]

    # --- one finding each

    def _healthy(self, missing: list[str], looked: str) -> Verdict:
        moved = [one for one in self.samples if one.moved or self.doing[one.rank].works]
        everybody = len(moved) == len(self.samples) and bool(moved)
        if everybody and len(self.samples) == self.world:
            text = "nothing is wrong: the job moves"
        elif everybody:
            text = (
                "nothing is wrong in what was seen:"
                f" {ranks_and_verb([one.rank for one in moved], 'moves', 'move')}"
            )
        elif moved:
            text = "nothing is wrong: no rank waits for another, and " + ranks_and_verb(
                [one.rank for one in moved], "moves", "move"
            )
        else:
            text = f"no rank waits for another, and none moved within {self.window_s:.1f} s"
        if self.unread:
            text = (
                f"the stack of {ranks_phrase(ranks_of(self.unread))} could not be read; the other"
                " ranks do not wait"
            )
        steps = self._steps()
        finding = Finding(
            kind="healthy",
            why="unknown",
            root_cause=False,
            culprits=[],
            victims=[],
            summary=text + (f" ({steps})" if steps else ""),
            confidence="high" if everybody and len(self.samples) == self.world else "medium",
            next_step="" if moved else "look again with --window 30: a rank may be slow",
        )
        verdict = Verdict.from_findings([finding], missing_evidence=missing, looked_at=looked)
        verdict.findings = []
        return verdict

    def _dead(self) -> Finding:
        one = "process" if len(self.absent) == 1 else "processes"
        return Finding(
            kind="dead",
            why="unknown",
            root_cause=True,
            culprits=sorted(self.absent),
            victims=ranks_of(self.stuck),
            confidence="medium",
            summary=f"{ranks_and_verb(self.absent, 'has', 'have')} no {one} any more"
            + self._waiting_words("; "),
            explanation="Its launcher's environment says that it should run on this machine.",
            next_step=(
                f"look at the end of {ranks_phrase(self.absent)}'s output; dmesg shows whether the"
                " kernel ended it for its memory"
            ),
            evidence=self._stands(),
            would_raise_confidence="Nobody saw how it ended.",
        )

    def _missing(self) -> list[Finding]:
        """Name the ranks that stand in no call while others wait: one finding for each place where
        such ranks stand.
        """
        places: dict[object, list[RankSample]] = defaultdict(list)
        for one in self.outside:
            doing = self.doing[one.rank]
            places[(doing.why, doing.works, activity_words(doing))].append(one)
        most = len(self.outside) > len(self.stuck)
        known = any(needs_all(one.call) for one in self.stuck)
        seen = len(self.samples) - len(self.unread)
        sure: Confidence = (
            "low"
            if most or len(places) > 1
            else "high"
            if known and seen == self.world
            else "medium"
        )
        found = []
        for members in sorted(
            places.values(),
            key=lambda each: (self.doing[each[0].rank].works, len(each), each[0].rank),
        ):
            found.append(self._absence(members, sure))
        blamed = [finding for finding in found if finding.kind == "missing"]
        return blamed or found

    def _absence(self, members: Sequence[RankSample], sure: Confidence) -> Finding:
        doing, ranks = self.doing[members[0].rank], ranks_of(members)
        works = doing.works and doing.why not in ("stopped", "holding-gil")
        frame = doing.frame or members[0].line
        where = f" {frame_phrase(frame)}" if frame is not None else ""
        summary = f"{ranks_phrase(ranks)} {activity_words(doing, ranks)}{self._waiting_words('; ')}"
        if works:
            summary = (
                f"{ranks_and_verb(ranks, 'works', 'work')}"
                f" in{where or ' code without a Python frame'}{self._waiting_words('; ')}"
            )
        elif doing.frame is not None and doing.state in _WITHOUT_LINE:
            summary = (
                f"{ranks_phrase(ranks)} {activity_words(doing, ranks)}"
                f" at{where}{self._waiting_words('; ')}"
            )
        return Finding(
            kind="waiting" if works else "missing",
            why=doing.why,
            root_cause=not works,
            culprits=ranks,
            victims=ranks_of(self.stuck),
            confidence="low" if works and sure != "low" else sure,
            summary=summary,
            explanation=(
                f"{capital(ranks_and_verb(ranks, 'is', 'are'))} in no collective:"
                f" {joined(sign_words(doing.signs[:3]))}. "
            )
            + unmoved(self.stuck, self.window_s),
            next_step=self._absence_step(doing, members[0], works=works),
            source=frame.where if frame is not None else None,
            source_file=f"{frame.file}:{frame.line}" if frame is not None else None,
            function=frame.function if frame is not None else None,
            evidence=self._stands(),
            would_raise_confidence=(
                "Which ranks are in the group of that call cannot be seen from outside."
                if sure == "medium"
                else (
                    "More ranks stand outside of calls than wait, or at several places."
                    if sure == "low"
                    else "It works, so it may still arrive."
                    if works
                    else None
                )
            ),
        )

    def _absence_step(self, doing: Activity, one: RankSample, *, works: bool) -> str:
        if doing.why == "stopped":
            return f"find out who stopped it; `kill -CONT {one.log.pid}` lets it run"
        if works:
            return (
                "look again with --window 60: a rank that works for very long may be in an endless"
                " loop"
            )
        where = doing.frame.function if doing.frame is not None else "its stack"
        return (
            f"look at {where} on rank {one.rank} (pid {one.log.pid} on {one.log.host}); `commlens"
            f" stacks {one.log.pid}` shows all stacks"
        )

    def _unreadable(self) -> Finding:
        return Finding(
            kind="missing",
            why="unknown",
            root_cause=True,
            culprits=[],
            victims=ranks_of(self.stuck),
            confidence="low",
            summary=(
                f"the stack of {ranks_phrase(ranks_of(self.unread))} could not be"
                f" read{self._waiting_words('; ')}"
            ),
            explanation=(
                "Every rank that could be read waits, so the cause may be where none could be"
                " read. "
            )
            + unmoved(self.stuck, self.window_s),
            next_step="look again, or as root",
            evidence=self._stands(),
            would_raise_confidence="The stacks that could not be read would show it.",
        )

    def _partly(self) -> Finding:
        return Finding(
            kind="waiting",
            why="in-collective",
            root_cause=False,
            culprits=[],
            victims=ranks_of(self.stuck),
            confidence="low",
            summary=(
                f"{ranks_and_verb(ranks_of(self.moving), 'moves', 'move')}"
                f" on{self._waiting_words(', while ')}"
            ),
            next_step="look again with --window 30: if the same ranks still wait, they are stuck",
            evidence=self._stands(),
            would_raise_confidence=(
                "A longer look would show whether the ranks that wait move on, too."
            ),
        )

    # --- words

    def _job_words(self) -> str:
        """Return ``"4 ranks of 4 of train.py (pids 411, 412, 413 and 414 on n03)"``, so that the
        user sees which job it is.
        """
        script = next((one.log.script for one in self.samples if one.log.script), "")
        by_host: dict[str, list[str]] = defaultdict(list)
        for one in self.samples[:_MOST_PIDS]:
            by_host[one.log.host].append(str(one.log.pid))
        pids = [f"{joined(pids)} on {host}" for host, pids in by_host.items()]
        more = ", ..." if len(self.samples) > _MOST_PIDS else ""
        where = (
            f" ({'pid' if len(self.samples) == 1 else 'pids'} {'; '.join(pids)}{more})"
            if pids
            else ""
        )
        return (
            f"{count(len(self.samples), 'rank')} of"
            f" {self.world}{f' of {script}' if script else ''}{where}"
        )

    def _waiting_words(self, before: str) -> str:
        """Return where the waiting ranks wait: the call in which most of them are, and how many
        other calls there are.
        """
        calls: dict[tuple[str, str], list[int]] = defaultdict(list)
        for one in self.stuck:
            if one.call is not None:
                calls[(one.call.phrase, frame_phrase(one.line))].append(one.rank)
        if not calls:
            return ""
        (phrase, where), ranks = max(calls.items(), key=lambda item: len(item[1]))
        text = f"{before}{ranks_and_verb(ranks_of(self.stuck), 'waits', 'wait')} in {phrase}"
        if len(calls) > 1:
            return (
                f"{text} ({ranks_phrase(ranks)}, at {where}) and"
                f" {count(len(calls) - 1, 'other call')}"
            )
        return f"{text} at {where}" if where else text

    def _stands(self) -> list[str]:
        return places(
            self.samples, {rank: activity_words(doing) for rank, doing in self.doing.items()}
        )

    def _steps(self) -> str:
        counters = [
            {name: value for name, value in one.counters.items() if "step" in name}
            for one in self.samples
        ]
        values = {value for each in counters for value in list(each.values())[:1]}
        return (
            f"step {max(values)}"
            if len(values) == 1
            else f"steps {min(values)} to {max(values)}"
            if values
            else ""
        )
