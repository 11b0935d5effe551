"""What the live comparison found, told once: a verdict for each distinct disagreement, and at the end how often it happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from commlens.diagnosis import live
from commlens.model.ranklog import RankLog
from commlens.model.verdict import CollectiveRef, Finding, GroupRef, Verdict
from commlens.text import count, group_phrase, ranks_phrase
from commlens.watch.agreement import ChannelKey, Found
from commlens.watch.comparing import SHIFT_LOOKS_AFTER_S, SHIFT_LOOKS_APART_S, SHIFT_REST_S, SHIFTS_LOOKED_FOR, Comparing, Suspicion
from commlens.watch.roster import Roster
from commlens.watch.snapshot import read_logs

TOLD_AT_MOST: Final = 8  # distinct disagreements of one job: a program gone astray must not fill the terminal
LOOKED_INTO_AT_MOST: Final = 64
ENOUGH: Final = 400  # newest records of each rank, as a rule: reading all takes longer than a report may
SHIFT_MATCHES: Final = 8  # collectives that must fit before a rank is said to be out of step

Key = tuple[str, tuple[int, ...], str, tuple[int, ...]]


class Mismatches:
    """Tells what disagrees.

    Args:
        comparing: finds it.
        roster: whose boxes are read to put it in words.
        read: gives the logs, with all records or only the newest so many; by default the roster's boxes as of now.
    """

    def __init__(self, comparing: Comparing, roster: Roster, *, read: Callable[[int | None], Sequence[RankLog]] | None = None) -> None:
        self.comparing = comparing
        self._roster = roster
        self._read = read or (lambda newest: read_logs(roster.current(), {}, newest=newest)[0])
        self._due = 0.0
        self._told: dict[Key, tuple[str, Found]] = {}
        self._looked_into = 0
        self._shift_due = 0.0
        self._shift_looks = 0  # in all
        self._shift_tries = 0  # of the suspicion at hand, which the first one begins; 0: there is none
        self._shift_seen: set[Key] = set()
        self._counted: set[tuple[ChannelKey, str]] = set()

    def pause_s(self, now: float) -> float:
        """How long until the next look."""
        return max(0.0, self._due - now)

    def look(self, now: float) -> list[tuple[Verdict, bool]]:
        """Compare what is new, where it is time (CLOCK_MONOTONIC, seconds).

        Returns:
            Verdicts that are new, each with whether it may end the job: a rank out of step is only warned of.
        """
        if now < self._due:
            return []
        comparing = self.comparing
        comparing.look(now)
        self._due = now + comparing.interval_s
        if not comparing.suspicions:
            return []
        ended = any(not member.alive for member in self._roster.current())
        said: list[tuple[Verdict, bool]] = []
        shifts = [one for one in comparing.suspicions if one.found.answer is None and one.found.passed >= SHIFT_MATCHES + 2]
        ripe = [one for one in comparing.suspicions if one.found.answer is not None and one.is_ripe(now, someone_ended=ended)]
        if ripe:
            comparing.suspicions = [one for one in comparing.suspicions if one not in ripe]
            said += [(verdict, True) for verdict in self._look_into(ripe)]
        if shifts and not self._shift_tries:  # what comes next must show whether it fits
            self._shift_tries, self._shift_due = 1, max(self._shift_due, now + SHIFT_LOOKS_AFTER_S[0])
        elif shifts and now >= self._shift_due:
            said += [(verdict, False) for verdict in self._look_for_shifts(shifts, now)]
        return said

    def give_up(self) -> None:
        """Look at nothing any more."""
        self._due = float("inf")

    def has_told(self, verdict: Verdict) -> bool:
        """Whether this has been said already."""
        return bool(verdict.findings) and self._is_told(_key(verdict.findings[0]))

    def _is_told(self, key: Key) -> bool:
        """Whether it is known. Where nobody can tell any more who is the odd one, more are named than the first time."""
        kind, culprits, *where = key
        return any(kind == told[0] and where == [*told[2:]] and set(told[1]) <= set(culprits) for told in self._told)

    def last_words(self) -> list[str]:
        """What is to be said when the job has ended: how often it happened, and what was not compared."""
        lines = []
        for (kind, culprits, _, _), (where, found) in self._told.items():
            key = (found.channel.key, found.aspect)
            times = self.comparing.again(found)
            if times > 1 and key not in self._counted:
                self._counted.add(key)
                who = f"{ranks_phrase(culprits)} disagreed" if culprits else "ranks disagreed"
                lines.append(f"{who} ({kind}, first in {where}) {count(times, 'time')} in all.")
        coverage = self.comparing.coverage
        return [*lines, f"the comparison is not complete: {coverage}."] if coverage and self._told else lines

    def _verdict(self, finding: Finding, logs: Sequence[RankLog]) -> Verdict:
        about = f"{count(len(logs), 'rank')}, {count(sum(log.issued for log in logs), 'record')} so far, while the job runs"
        coverage = self.comparing.coverage
        missing = [f"The comparison is not complete: {coverage}."] if coverage else []
        return Verdict.from_findings([finding], looked_at=about, missing_evidence=missing)

    # --- disagreements

    def _look_into(self, ripe: list[Suspicion]) -> list[Verdict]:
        if self._looked_into >= LOOKED_INTO_AT_MOST or len(self._told) >= TOLD_AT_MOST:
            return []
        self._looked_into += 1
        logs = self._read(ENOUGH)
        findings = live.disagreements(logs)
        if not findings or any(finding.confidence != "high" for finding in findings):
            logs = self._read(None)  # a longer history may tell who is the odd one
            findings = live.disagreements(logs)
        said: list[Verdict] = []
        for finding in findings:
            found = next((one.found for one in ripe if _is_of(finding, one.found)), None)
            if found is not None and self._is_new(finding, found):
                said.append(self._verdict(finding, logs))
        if not findings:
            for one in ripe:
                if _is_overwritten(logs, one.found):  # what was seen must do
                    finding = _in_short(one.found)
                    if self._is_new(finding, one.found):
                        said.append(self._verdict(finding, logs))
        return said[: max(0, TOLD_AT_MOST - len(self._told) + len(said))]

    def _is_new(self, finding: Finding, found: Found) -> bool:
        key = _key(finding)
        if self._is_told(key):
            return False
        op = finding.collective
        self._told[key] = (f"{op.op} #{op.sequence_number}" if op is not None else "a collective", found)
        return True

    # --- ranks out of step

    def _look_for_shifts(self, shifts: list[Suspicion], now: float) -> list[Verdict]:
        """Lines or steps met that never had before: is a rank out of step? It must be seen twice, and fit many collectives."""
        self._shift_looks += 1
        logs = self._read(None)
        findings = live.out_of_step(logs, at_least=SHIFT_MATCHES)
        fresh = [finding for finding in findings if _key(finding) not in self._told]
        confirmed = [finding for finding in fresh if _key(finding) in self._shift_seen]
        self._shift_seen = {_key(finding) for finding in fresh}
        if not confirmed and fresh:
            self._shift_due = now + SHIFT_LOOKS_APART_S
        elif not confirmed and self._shift_tries < len(SHIFT_LOOKS_AFTER_S):
            self._shift_due = now + SHIFT_LOOKS_AFTER_S[self._shift_tries]
            self._shift_tries += 1
        else:
            for one in shifts:
                self.comparing.rest(one.found)
            self.comparing.suspicions = [one for one in self.comparing.suspicions if one.found.answer is not None]
            rest = SHIFT_REST_S[min(self._shift_looks, len(SHIFT_REST_S)) - 1]
            self._shift_tries = 0
            self._shift_due = now + rest if self._shift_looks < SHIFTS_LOOKED_FOR else float("inf")
        said = []
        for finding in confirmed:
            if self._is_new(finding, shifts[0].found):
                finding.confidence = "medium"
                finding.evidence.append("Ops and shapes agree: this is told by the lines and the optimizer steps alone. It is a warning.")
                said.append(self._verdict(finding, logs))
        return said


def _key(finding: Finding) -> Key:
    group = finding.group
    return (finding.kind, tuple(finding.culprits), group.name if group else "", tuple(group.ranks) if group else ())


def _is_of(finding: Finding, found: Found) -> bool:
    """Whether a finding is about the channel on which something was found."""
    group = finding.group
    return group is not None and (group.name, tuple(group.ranks)) == (found.channel.group.name, found.channel.group.ranks)


def _is_overwritten(logs: Sequence[RankLog], found: Found) -> bool:
    """Whether what was found is no longer in a box whose ring has gone round. An op that was never issued is in none, either."""
    key = found.channel.key
    for log in logs:
        numbers = [op.sequence_number for op in log.collectives if op.channel.key == key and op.sequence_number]
        if (
            log.issued > len(log.collectives)
            and log.rank in found.channel.group.ranks
            and min(numbers, default=found.number + 1) > found.number
        ):
            return True
    return False


def _in_short(found: Found) -> Finding:
    """A finding from the comparison alone, for records that are gone."""
    answer, group = found.answer, found.channel.group
    assert answer is not None
    culprits = list(answer.minority) or sorted(rank for party in answer.parties for rank in party.ranks)
    ranks = sorted(rank for party in answer.parties for rank in party.ranks)
    where = f"message #{found.number}" if found.pair is not None else f"collective #{found.number}"
    return Finding(
        kind=f"mismatch/{answer.aspect}",  # type: ignore[arg-type]
        why="in-collective",
        root_cause=True,
        culprits=culprits,
        victims=[rank for rank in ranks if rank not in culprits],
        confidence="medium",
        summary=f"ranks disagree in {where} of {group_phrase(group)}: {answer.detail}",
        explanation="The records have been overwritten since: only what was asked for is known.",
        next_step="make box_entries larger, so that the lines that issued it are still known when it is looked at",
        group=GroupRef(group.name, group.label, list(group.ranks)),
        collective=CollectiveRef("collective", found.number),
    )
