"""Turns the discrepancies that deferred verification finds into verdicts: one for each
disagreement, and at the end of the job a line on how often it happened.

A discrepancy only says under which sequence number two ranks differ. The verdict needs the ranks'
records, with their source lines, and waits until these are final: until all ranks of this node have
reached the number, the collective has ended, and its reduce op is recorded, a second at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from commlens.diagnosis import live
from commlens.model.cause import CollectiveRef, GroupRef
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Finding, Verdict
from commlens.text import count, group_phrase, ranks_phrase
from commlens.watch.death import REPORTER_S
from commlens.watch.mismatches.channel_progress import Discrepancy
from commlens.watch.mismatches.comparison import ChannelKey
from commlens.watch.mismatches.deferred_verification import DeferredVerification
from commlens.watch.nodes.exchange import Nodes
from commlens.watch.roster import Roster
from commlens.watch.snapshot import read_logs

# distinct disagreements of one job: a broken program must not fill the terminal
REPORTS_MAX: Final = 8
EXAMINED_MAX: Final = 64
NEWEST_RECORDS: Final = 400  # of each rank; reading all of them takes longer than a report may
# the group's other ranks may still come, and show which rank is the odd one
OTHER_RANKS_WITHIN_S: Final = 1.0
# the collective may still end, and the ranks' watchdogs decode its reduce op
SETTLES_WITHIN_S: Final = 1.0
SHIFT_MATCHES: Final = 8  # collectives that must match before a rank is reported out of step
# after the first suspicion, and after each check that showed nothing
SHIFT_CHECKS_AFTER_S: Final = (0.5, 1.0, 2.0, 4.0)
SHIFT_CHECKS_APART_S: Final = 1.0  # a rank must be out of step in two checks
SHIFT_REST_S: Final = (4.0, 8.0, 16.0, 32.0, 64.0)  # after a suspicion that was wrong
SHIFT_CHECKS_MAX: Final = 40

Key = tuple[str, tuple[int, ...], str, tuple[int, ...]]
"""Kind, culprits, and the group's name and ranks: what makes a disagreement distinct."""


class OutOfStepCheck:
    """When to check for ranks out of step, and which findings count.

    A suspicion is checked after 0.5, 1, 2 and 4 s, until a check finds a rank; a second check must
    then find it again. After the last check, no suspicion counts for a while.
    """

    def __init__(self) -> None:
        self._due = 0.0  # CLOCK_MONOTONIC, seconds
        self._checks = 0  # of the whole job
        self._tries = 0  # checks of the current suspicion, counting the next one; 0: there is none
        self._seen: set[Key] = set()  # findings of the last check

    def is_due(self, now: float) -> bool:
        """Return whether to check now. The first suspicion only sets the time: later records must
        show whether it holds.
        """
        if not self._tries:
            self._tries, self._due = 1, max(self._due, now + SHIFT_CHECKS_AFTER_S[0])
            return False
        return now >= self._due

    def confirm(self, findings: Sequence[Finding], now: float) -> list[Finding] | None:
        """Return the findings that the previous check had, too; None if another check must
        decide.
        """
        self._checks += 1
        confirmed = [finding for finding in findings if _key(finding) in self._seen]
        self._seen = {_key(finding) for finding in findings}
        if findings and not confirmed:
            self._due = now + SHIFT_CHECKS_APART_S
            return None
        if not confirmed and self._tries < len(SHIFT_CHECKS_AFTER_S):
            self._due = now + SHIFT_CHECKS_AFTER_S[self._tries]
            self._tries += 1
            return None
        rest_s = SHIFT_REST_S[min(self._checks, len(SHIFT_REST_S)) - 1]
        self._tries = 0
        self._due = now + rest_s if self._checks < SHIFT_CHECKS_MAX else float("inf")
        return confirmed


class HeldVerdict(NamedTuple):
    """A verdict that the node that reports for the job decides on first."""

    until: float  # CLOCK_MONOTONIC, seconds
    verdict: Verdict
    may_abort: bool


class MismatchReporter:
    """Turns discrepancies into verdicts.

    Args:
        verification: finds the discrepancies.
        roster: the ranks whose boxes are read to explain them.
        read: returns the logs, with all records or only the newest so many; by default from the
            roster's boxes, as of now.
    """

    def __init__(
        self,
        verification: DeferredVerification,
        roster: Roster,
        *,
        read: Callable[[int | None], Sequence[RankLog]] | None = None,
    ) -> None:
        self.verification = verification
        self._roster = roster
        self._read = read or (lambda newest: read_logs(roster.current(), {}, newest=newest)[0])
        self.held: list[HeldVerdict] = []
        self._found_here = 0  # disagreements that this node has reported to the others
        self._due = 0.0  # of the next poll, CLOCK_MONOTONIC, seconds
        # the disagreements that have a verdict, each with the collective where it was first seen
        self._reported: dict[Key, tuple[str, Discrepancy | None]] = {}
        self._examined = 0  # how often the records were read because of discrepancies of this node
        # when disagreements between nodes were first seen whose records are not final
        self._unsettled_since: dict[Key, float] = {}
        self._out_of_step = OutOfStepCheck()

    def pause_s(self, now: float) -> float:
        """Return how long until the next poll."""
        return max(0.0, self._due - now)

    def poll(self, now: float) -> list[tuple[Verdict, bool]]:
        """Compare the new records if it is time (``now`` is CLOCK_MONOTONIC, seconds).

        Returns:
            New verdicts, each with whether it may end the job: a rank out of step is only a
                warning.
        """
        if now < self._due:
            return []
        self.verification.poll(now)
        self._due = now + self.verification.budget.interval_s
        if not self.verification.discrepancies:
            return []
        ended = [member for member in self._roster.current() if not member.alive]
        # once a rank has ended, the others may never come
        complete = self._take_complete(now if ended else now - OTHER_RANKS_WITHIN_S)
        verdicts: list[Verdict] = []
        if complete:
            died = any(member.ended_well is not True for member in ended)
            # after a death, no record becomes final any more
            verdicts = self._examine(complete, math.inf if died else now)
        return [
            *((verdict, True) for verdict in verdicts),
            *((verdict, False) for verdict in self._examine_shifts(now)),
        ]

    def _take_complete(self, seen_until: float) -> list[Discrepancy]:
        """Take the disagreements that all ranks here have reached, or that were first seen before
        ``seen_until``.
        """
        waiting = self.verification.discrepancies
        complete = [
            each
            for each in waiting
            if each.answer is not None and (each.passed >= 0 or each.seen_at <= seen_until)
        ]
        self.verification.discrepancies = [each for each in waiting if each not in complete]
        return complete

    def poll_job(self, now: float, nodes: Nodes) -> list[tuple[Verdict, bool]]:
        """Compare the new records here, and what the nodes issued. Returns verdicts as :meth:`poll`
        does.

        If another node reports for the job, it decides first: what was found here is returned only
        if that takes too long.
        """
        verdicts = self.poll(now)
        if nodes.reporter is not None:
            if verdicts:
                nodes.update(disagreements=self._found_here + len(verdicts))
                self._found_here += len(verdicts)
                self.held += [HeldVerdict(now + REPORTER_S, *each) for each in verdicts]
            verdicts = []
        elif nodes.others and (nodes.take_disagreement(now) or self._unsettled_since):
            verdicts += [(verdict, True) for verdict in self._examine_all_nodes(now)]
        verdicts += [(each.verdict, each.may_abort) for each in self.held if now >= each.until]
        self.held = [each for each in self.held if now < each.until]
        return verdicts

    def disable(self) -> None:
        """Compare nothing any more."""
        self._due = float("inf")

    def read_rest(self) -> None:
        """Compare the records since the last poll, after the ranks' end."""
        if self._due < float("inf"):
            self.verification.poll(self._due)

    def has_reported(self, verdict: Verdict) -> bool:
        """Return whether this disagreement was reported before."""
        return bool(verdict.findings) and self._is_reported(_key(verdict.findings[0]))

    def _is_reported(self, key: Key) -> bool:
        """Return whether a disagreement was reported. Later, when the odd rank can no longer be
        singled out, a finding on the same one names more culprits, or none.
        """
        kind, culprits, *group = key
        return any(
            kind == known_kind
            and group == known_group
            and (not culprits or set(known_culprits) <= set(culprits))
            for known_kind, known_culprits, *known_group in self._reported
        )

    def final_lines(self) -> list[str]:
        """Return the lines for the end of the job: how often ranks disagreed, and what was not
        compared.
        """
        lines = []
        counted: set[tuple[ChannelKey, str]] = set()
        for (kind, culprits, _, _), (where, discrepancy) in self._reported.items():
            if discrepancy is None:
                continue
            key = (discrepancy.channel.key, discrepancy.aspect)
            times = self.verification.times(discrepancy)
            if times > 1 and key not in counted:
                counted.add(key)
                ranks = ranks_phrase(culprits) if culprits else "ranks"
                lines.append(
                    f"{ranks} disagreed ({kind}, first in {where}) {count(times, 'time')} in all."
                )
        gaps = self.verification.gaps
        return (
            [*lines, f"the comparison is not complete: {gaps}."]
            if gaps and self._reported
            else lines
        )

    # --- disagreements

    def _examine(self, complete: list[Discrepancy], now: float) -> list[Verdict]:
        """Return a verdict for each new disagreement in the ranks' records that is one of these
        discrepancies. If its records are not final, the next poll examines all these
        discrepancies again.
        """
        if len(self._reported) >= REPORTS_MAX or self._examined >= EXAMINED_MAX:
            return []
        self._examined += 1
        logs = self._read(NEWEST_RECORDS)
        found = live.find_disagreements(logs)
        if not found or any(finding.confidence != "high" for finding, _ in found):
            logs = self._read(None)  # a longer history may show which rank is the odd one
            found = live.find_disagreements(logs)
        verdicts: list[Verdict] = []
        for finding, is_settled in found:
            discrepancy = next((each for each in complete if _is_about(finding, each)), None)
            if discrepancy is None or self._is_reported(_key(finding)):
                continue
            if not is_settled and now - discrepancy.seen_at < SETTLES_WITHIN_S:
                self._examined -= 1
                self.verification.discrepancies += complete
                break  # the later ones may follow from it
            verdicts += self._add(finding, discrepancy, logs)
        for lost in () if found else filter(partial(_is_overwritten, logs), complete):
            verdicts += self._add(_finding_without_records(lost), lost, logs)
        return verdicts

    def _examine_all_nodes(self, now: float) -> list[Verdict]:
        """Return a verdict for each new disagreement in the records of all nodes' ranks. One whose
        records are not final is looked at again in the next poll.
        """
        former, self._unsettled_since = self._unsettled_since, {}
        if len(self._reported) >= REPORTS_MAX:
            return []
        logs = self._read(None)
        verdicts: list[Verdict] = []
        for finding, is_settled in live.find_disagreements(logs):
            key = _key(finding)
            since = former.get(key, now)
            if not is_settled and now - since < SETTLES_WITHIN_S and not self._is_reported(key):
                self._unsettled_since[key] = since
                break  # the later ones may follow from it
            verdicts += self._add(finding, None, logs)
        return verdicts

    def _add(
        self, finding: Finding, discrepancy: Discrepancy | None, logs: Sequence[RankLog]
    ) -> list[Verdict]:
        """Remember a finding, and return a verdict on it if it is new and not one too many."""
        key = _key(finding)
        if self._is_reported(key) or len(self._reported) >= REPORTS_MAX:
            return []
        op = finding.collective
        self._reported[key] = (
            f"{op.op} #{op.sequence_number}" if op is not None else "a collective",
            discrepancy,
        )
        about = (
            f"{count(len(logs), 'rank')}, {count(sum(log.issued for log in logs), 'record')} so"
            " far, while the job runs"
        )
        gaps = self.verification.gaps
        missing = [f"The comparison is not complete: {gaps}."] if gaps else []
        return [Verdict.from_findings([finding], looked_at=about, missing_evidence=missing)]

    # --- ranks out of step

    def _examine_shifts(self, now: float) -> list[Verdict]:
        """Check whether source lines or steps met that had never met before because a rank is out
        of step.
        """
        shifts = [
            each
            for each in self.verification.discrepancies
            if each.answer is None and each.passed >= SHIFT_MATCHES + 2
        ]
        if not shifts or not self._out_of_step.is_due(now):
            return []
        logs = self._read(None)
        findings = [
            each
            for each in live.find_out_of_step(logs, at_least=SHIFT_MATCHES)
            if _key(each) not in self._reported
        ]
        confirmed = self._out_of_step.confirm(findings, now)
        if confirmed is None:
            return []
        for shift in shifts:
            shift.progress.order_suspected = False
        self.verification.discrepancies = [
            each for each in self.verification.discrepancies if each.answer is not None
        ]
        verdicts = []
        for finding in confirmed:
            finding.confidence = "medium"
            finding.would_raise_confidence = (
                "Only the source lines and the optimizer steps show it."
            )
            finding.evidence.append(
                "Ops and shapes agree: only the source lines and the optimizer steps show it."
                " It is a warning."
            )
            verdicts += self._add(finding, shifts[0], logs)
        return verdicts


def _key(finding: Finding) -> Key:
    group = finding.group
    return (
        finding.kind,
        tuple(finding.culprits),
        group.name if group else "",
        tuple(group.ranks) if group else (),
    )


def _is_about(finding: Finding, discrepancy: Discrepancy) -> bool:
    """Return whether a finding is about the group of a discrepancy."""
    found, group = finding.group, discrepancy.channel.group
    return found is not None and (found.name, tuple(found.ranks)) == (group.name, group.ranks)


def _is_overwritten(logs: Sequence[RankLog], discrepancy: Discrepancy) -> bool:
    """Return whether a rank's ring buffer has overwritten the record. A collective that was never
    issued is in no ring buffer, either.
    """
    key, progress = discrepancy.channel.key, discrepancy.progress
    number = discrepancy.message_number or discrepancy.sequence_number
    for log in logs:
        numbers = [
            op.sequence_number
            for op in log.collectives
            if op.channel.key == key
            and op.sequence_number
            and op.is_point_to_point == progress.is_of_messages
            and op.peer in (None, *progress.local_ranks)
        ]
        if (
            log.issued > len(log.collectives)
            and log.rank in progress.local_ranks
            and min(numbers, default=number + 1) > number
        ):
            return True
    return False


def _finding_without_records(discrepancy: Discrepancy) -> Finding:
    """Return a finding made from the comparison alone, for records that were overwritten."""
    answer, group = discrepancy.answer, discrepancy.channel.group
    number = discrepancy.message_number or discrepancy.sequence_number
    assert answer is not None
    ranks = sorted(rank for party in answer.parties for rank in party.ranks)
    culprits = list(answer.minority)
    where = f"message #{number}" if discrepancy.aspect == "p2p" else f"collective #{number}"
    return Finding(
        kind=f"mismatch/{answer.aspect}",  # type: ignore[arg-type]
        why="in-collective",
        root_cause=True,
        culprits=culprits,
        victims=[rank for rank in ranks if rank not in culprits],
        confidence="medium",
        certain=True,
        summary=f"ranks disagree in {where} of {group_phrase(group)}: {answer.detail}",
        explanation="The records have been overwritten since: only their signatures are known.",
        would_raise_confidence="Only signatures are left of the records, without lines.",
        next_step=(
            "increase box_entries, so that the source lines are still recorded when the watcher"
            " reads them"
        ),
        group=GroupRef(group.name, group.label, list(group.ranks)),
        collective=CollectiveRef("collective", number),
    )
