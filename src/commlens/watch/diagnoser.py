"""Diagnoses a running job from the evidence of all its nodes.

The evidence is asked for in rounds, because that of all ranks is much: while the job stands still,
first of a few ranks in each state; else the newest records of all ranks, and more of them where
these do not reach back far enough. Nodes that have fallen silent are evidence, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commlens.config import Settings
from commlens.diagnosis.fold.alike import counts_for_all
from commlens.dumps.garbage import collector_paused
from commlens.model.cause import LostNode
from commlens.model.verdict import NOTHING_FOUND, Verdict
from commlens.watch.evidence import Collected, Evidence
from commlens.watch.nodes.lost import as_evidence, logs_of_vanished
from commlens.watch.snapshot import one_run

Diagnose = Callable[..., Verdict]


class Diagnoser:
    """Collects the evidence of a job and diagnoses it.

    Args:
        evidence: of the job.
        settings: ``stall_ceiling_s``.
        diagnose: makes a verdict of logs; None: :func:`commlens.diagnosis.examine.diagnose_logs`.
    """

    def __init__(
        self, evidence: Evidence, settings: Settings, diagnose: Diagnose | None = None
    ) -> None:
        self.evidence = evidence
        self.examined = Collected()  # the evidence of the last diagnosis
        self.verdict: Verdict | None = None  # of the last diagnosis
        # a collective that is in flight for less does not count as stalled; less than the stall
        # timeout, so that some do when it is over
        self.stalled_after_s = min(1.0, settings.stall_ceiling_s / 2)
        self._make_verdict = diagnose

    def forget(self) -> None:
        """Forget the evidence of former workers, and the verdict on it."""
        self.examined, self.verdict = Collected(), None
        self.evidence.forget()

    def diagnose(self, *, stands_still: bool = False) -> Verdict:
        """Collect the evidence and diagnose it.

        Args:
            stands_still: the job waits, so there is time to find out which ranks matter; else all
                nodes are asked at once, before they end.
        """
        # collecting garbage among the records of many nodes would take as long as the diagnosis
        with collector_paused():
            if stands_still and (few := self.diagnose_few()) is not None:
                return few
            self.examined = self.evidence.collect()
            verdict = self._judge()
            if self.examined.lacks_records and verdict.kind not in NOTHING_FOUND:
                self.examined = self.evidence.collect_more(self.examined, verdict)
                verdict = self._judge()
            self.verdict = self._judge_with_lost_nodes(verdict)
            return self.verdict

    def diagnose_few(self) -> Verdict | None:
        """Diagnose a few ranks in each state, if the job is large: to ask all of them costs too
        much before the stall timeout. None if that shows nothing that holds for all, or if nodes
        have ended.
        """
        self.verdict = None
        with collector_paused():
            few = self.evidence.collect_few()
            if few is not None and not few.vanished:
                self.examined = few
                verdict = self._judge_with_lost_nodes(self._judge())
                self.verdict = verdict if counts_for_all(verdict, few.alike) else None
        return self.verdict

    def _judge_with_lost_nodes(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the nodes that have fallen silent. The ranks of those that have
        ended count as gone, unless the logs alone name a culprit.
        """
        found = self.examined
        if not found.lost:
            return verdict
        if found.vanished and not verdict.culprits:
            gone = logs_of_vanished(found.vanished, found.logs, found.first_rank)
            found.logs = one_run([*found.logs, *gone])
        return self._judge(as_evidence(found.lost, found.vanished, found.first_rank))

    def _judge(self, lost_nodes: Sequence[LostNode] = ()) -> Verdict:
        """Return the verdict on the evidence in ``examined``."""
        from commlens.diagnosis.examine import diagnose_logs  # not loaded at rest

        make_verdict = self._make_verdict or diagnose_logs
        return make_verdict(
            self.examined.logs,
            problems=self.examined.problems,
            stalled_after_s=self.stalled_after_s,
            lost_nodes=lost_nodes,
            alike=self.examined.alike,
        )
