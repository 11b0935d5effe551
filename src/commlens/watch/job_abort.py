"""Ends a job because of a verdict, if the setting ``abort_on`` asks for it, on all of its nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Final

from commlens import error_file
from commlens.model.verdict import Verdict
from commlens.processes import process
from commlens.watch.nodes.exchange import Nodes
from commlens.watch.reporting import Reporter
from commlens.watch.roster import Roster
from commlens.watch.stall_verdicts import reason_to_go_on

KILL_AFTER_S: Final = 5.0


class JobAbort:
    """Ends this node's ranks, and lets the other nodes end theirs.

    Args:
        roster: the ranks of this node.
        nodes: the job's other nodes.
        reporter: prints why.
        end_job: ends the job as the launcher does, given the verdict in words; None: the ranks are
            sent SIGTERM.
        launched: a launcher started the ranks, with or without a black box.
    """

    def __init__(
        self,
        roster: Roster,
        nodes: Nodes,
        reporter: Reporter,
        end_job: Callable[[str], None] | None,
        *,
        launched: bool,
    ) -> None:
        self._roster = roster
        self._nodes = nodes
        self._reporter = reporter
        self._end_job = end_job
        self._launched = launched
        self._kill_at: float | None = None
        self.has_begun = False

    def begin_for(self, fault: str, verdict: Verdict) -> bool:
        """End the job, if it is not being ended and the evidence is complete. Returns whether it is
        being ended.
        """
        if self.has_begun:
            return True
        doubt = reason_to_go_on(verdict, self._roster.current(), self._nodes.ranks)
        if doubt:
            self._reporter.say(f"the job goes on, although abort_on includes {fault}: {doubt}.")
            return False
        self._reporter.say_for_job(
            f"ending the job, because abort_on includes {fault}.", abort=True
        )
        self.begin(verdict)
        return True

    def begin(self, verdict: Verdict | None = None) -> None:
        """End this node's ranks because of a verdict, which goes into their error files; None:
        another node has it.
        """
        self.has_begun = True
        self._kill_at = time.monotonic() + KILL_AFTER_S
        if self._end_job is not None:
            self._end_job("" if verdict is None else str(verdict))
        else:
            if verdict is not None:
                # torchrun's summary shows the verdict as the error of the culprits, or of all ranks
                # if this node has none of them
                members = [
                    member for member in self._roster.current() if member.alive and member.here
                ]
                culprits = verdict.culprits if not verdict.worlds.are_several else []
                for member in [member for member in members if member.rank in culprits] or members:
                    error_file.write(process.environment(member.pid), str(verdict))
            self._signal_ranks(signal.SIGTERM)

    def kill_late_ranks(self) -> None:
        """Kill the ranks that are still alive some seconds later."""
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._kill_at = None
            self._signal_ranks(signal.SIGKILL)

    def _signal_ranks(self, number: signal.Signals) -> None:
        for member in self._roster.current():
            is_rank = self._launched or member.box is not None or process.has_torch(member.pid)
            if (
                is_rank
                and member.alive
                and member.here
                and process.is_running(member.pid, member.start_ticks)
            ):
                with contextlib.suppress(OSError):
                    os.kill(member.pid, number)
