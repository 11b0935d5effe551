"""The evidence that a diagnosis of a running job is made of: the logs of all ranks, with what was
observed of their processes, from this node, the job's other nodes and other worlds.

Only the node that reports for the job asks the other nodes. With many nodes, it does so in two
rounds: :meth:`Evidence.collect` reads only the newest records of each rank, and
:meth:`Evidence.collect_more` those of the nodes that the verdict on these is about. While the job
stands still, :meth:`Evidence.collect_few` reads a few ranks in each state in place of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from commlens.diagnosis.fold.alike import NONE_ALIKE, AlikeRanks
from commlens.diagnosis.standstill import NO_POSES, PoseKeys
from commlens.dumps.clocks import correct_clocks
from commlens.model.health import NodeHealth
from commlens.model.ranklog import STOP_SIGNALS, Observation, RankLog, UsualWait
from commlens.model.verdict import Verdict
from commlens.processes.observer import Observer
from commlens.text import ranks_phrase
from commlens.watch.few_ranks import few_ranks
from commlens.watch.helper_stacks import HelperStacks
from commlens.watch.meeting_worlds import MeetingWorlds
from commlens.watch.node_health import HealthOfNode
from commlens.watch.nodes import remote_evidence
from commlens.watch.nodes.beat import Beat
from commlens.watch.nodes.exchange import Nodes
from commlens.watch.nodes.known_nodes import Lost
from commlens.watch.nodes.lost import find_vanished
from commlens.watch.nodes.states import States, states_of
from commlens.watch.nodes.states_tree import TREE_ABOVE
from commlens.watch.other_worlds import reading_of, with_other_worlds
from commlens.watch.roster import Member, Roster
from commlens.watch.snapshot import one_run, read_logs

MANY_NODES: Final = 16
"""From more nodes than these, only the newest records of each rank are asked for at first."""
WAITERS_ASKED: Final = 8
_PY_SPY_WAIT_S: Final = 0.8
# a node that has been silent for this long while it was asked for evidence is not just slow
_NODE_SILENT_S: Final = 2.0


@dataclass
class Collected:
    """The evidence of one diagnosis."""

    logs: list[RankLog] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # what could not be read, in sentences
    # what other nodes sent, by slot
    nodes: dict[int, remote_evidence.NodeEvidence] = field(default_factory=dict)
    lacks_records: bool = False  # only the newest records of these nodes' ranks were asked for
    alike: AlikeRanks = NONE_ALIKE  # ranks without a log that share a state with ranks with one
    # of all ranks, if some have no log
    poses: PoseKeys = field(default_factory=lambda: NO_POSES)
    first_rank: int = 0  # number of the job's rank 0 in the logs, which may be of several worlds
    lost: list[Lost] = field(default_factory=list)  # nodes that are silent
    vanished: list[Lost] = field(default_factory=list)  # those of them that have surely ended


class Evidence:
    """Collects the evidence as of now.

    Args:
        roster: the ranks of this node.
        observer: of their processes.
        nodes: the job's other nodes.
        worlds: on other nodes, that share a group with the job.
        health: of this node's hardware.
        launched: a launcher watches its own workers: after the first death it ends the others with
            SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        roster: Roster,
        observer: Observer,
        nodes: Nodes,
        worlds: MeetingWorlds,
        health: HealthOfNode,
        *,
        launched: bool,
    ) -> None:
        self.nodes = nodes
        self.worlds = worlds
        self.health = health
        # returns how long waits usually are where the rank with this pid waits
        self.usual: Callable[[int], UsualWait | None] = lambda _: None
        # the last evidence of other nodes, by host
        self.remote: dict[str, remote_evidence.NodeEvidence] = {}
        self._elsewhere: list[list[RankLog]] = []  # the last evidence of other worlds
        self._roster = roster
        self._observer = observer
        self._helpers = HelperStacks()
        self._frozen: dict[int, Observation] = {}  # by pid
        self._signals_of_launcher = STOP_SIGNALS | {"SIGKILL"} if launched else STOP_SIGNALS

    def forget(self) -> None:
        """Forget what was observed of former workers."""
        self._frozen, self.remote, self._elsewhere = {}, {}, []
        self.worlds.note_joined([])

    def freeze(self) -> None:
        """Keep the observations of the living ranks as of now: how the launcher ends them later
        says nothing about the fault.
        """
        self._frozen = {
            member.pid: self._observer.observe(member.pid)
            for member in self._roster.current()
            if member.alive and member.here
        }

    # --- for a diagnosis

    def collect(self) -> Collected:
        """Return the evidence of all ranks."""
        return self._with_logs_here(self._ask_all_nodes())

    def collect_more(self, before: Collected, verdict: Verdict) -> Collected:
        """Return evidence with more records of the nodes that the verdict on it is about; of all
        nodes, if it names none.
        """
        slots = nodes_to_ask(verdict, self.nodes.others, before.first_rank)
        if slots:
            return self._with_logs_here(
                self._ask_nodes(remote_evidence.more_records_of_each, slots, before.nodes)
            )
        return self._with_logs_here(self._ask_nodes(remote_evidence.records_of_each))

    def collect_few(self) -> Collected | None:
        """Return the evidence of a few ranks in each state. None if this node does not report,
        there are few nodes, or a few ranks are not enough.
        """
        if self.nodes.reporter is not None or len(self.nodes.others) <= TREE_ABOVE:
            return None
        problems: list[str] = []

        def read_here() -> list[RankLog]:
            here, unreadable = self._logs_here()
            problems.extend(unreadable)
            return here

        few = few_ranks(self.nodes, self.states(), read_here)
        if few is None:
            return None
        self.remote |= {node.host: node for node in few.nodes.values()}
        problems += [problem for node in few.nodes.values() for problem in node.problems]
        problems += map(_unanswered, few.silent)
        return self._complete(
            Collected(few.logs, problems, few.nodes, alike=few.alike, poses=few.poses)
        )

    def _ask_all_nodes(self) -> Collected:
        are_many = self.nodes.reporter is None and len(self.nodes.others) > MANY_NODES
        found = self._ask_nodes(
            remote_evidence.first_records_of_each if are_many else remote_evidence.records_of_each
        )
        found.lacks_records = are_many
        return found

    def _ask_nodes(
        self,
        records_of: Callable[[int], int],
        slots: Sequence[int] = (),
        known: Mapping[int, remote_evidence.NodeEvidence] = MappingProxyType({}),
    ) -> Collected:
        """Return the logs of the other nodes' ranks if this node reports for the job; otherwise
        nothing.

        Args:
            records_of: returns how many of its newest records each of so many ranks sends.
            slots: of the nodes to ask; empty: all.
            known: the evidence of nodes that were asked before, by slot.
        """
        if self.nodes.reporter is not None:
            return Collected()
        asked = [beat for beat in self.nodes.others if not slots or beat.slot in slots]
        answers, silent = self.nodes.gather(
            lambda slot, content: remote_evidence.unpack(content, self.nodes.host(slot)),
            of=slots,
            records=records_of(sum(len(beat.ranks) for beat in asked)),
        )
        self.remote |= {node.host: node for node in answers.values()}
        nodes = {**known, **answers}
        problems = [problem for node in nodes.values() for problem in node.problems]
        problems += map(_unanswered, silent)
        return Collected([log for node in nodes.values() for log in node.logs], problems, nodes)

    def _with_logs_here(self, found: Collected) -> Collected:
        here, problems = self._logs_here()
        found.logs, found.problems = [*here, *found.logs], [*problems, *found.problems]
        return self._complete(found)

    def _complete(self, found: Collected) -> Collected:
        """Add the logs of other worlds and what is known of lost nodes, and give all clocks one
        time.
        """
        found.problems += self.nodes.sentences_on_lost()
        found.lost = self.nodes.lost(_NODE_SILENT_S)
        found.vanished = find_vanished(found.lost, found.logs)
        found.problems += correct_clocks(found.logs)
        self._elsewhere, problems = (
            self.worlds.gather() if self.nodes.reporter is None else ([], [])
        )
        found.logs, found.first_rank = self._with_worlds(one_run(found.logs))
        self.worlds.note_joined(found.logs)
        found.problems += correct_clocks(found.logs) if self._elsewhere else []
        found.problems += problems
        return found

    def _with_worlds(self, logs: list[RankLog]) -> tuple[list[RankLog], int]:
        """Return a job's logs with those of other worlds, and the number of its rank 0 in these."""
        joined = with_other_worlds(logs, self._roster.folders, self._elsewhere)
        first_rank = 0
        if logs and joined[0].worlds.are_several:
            numbers = {reading_of(log): log.rank for log in joined}
            first_rank = numbers[reading_of(logs[0])] - logs[0].rank
        away = self.worlds.out_of_sight
        return [log for log in joined if reading_of(log) not in away], first_rank

    def _logs_here(self) -> tuple[list[RankLog], list[str]]:
        """Return the logs of this node's ranks, and what could not be read, in sentences."""
        logs, problems = read_logs(self._roster.current(), self._observations_by_pid())
        if logs:
            logs[0].health = self.health_here()
        return logs, problems

    def logs_with_last_evidence(self) -> list[RankLog]:
        """Return the logs of all ranks, with the other nodes' last evidence, without asking
        them.
        """
        remote = [log for node in self.remote.values() for log in node.logs]
        return self._with_worlds(one_run([*self._logs_here()[0], *remote]))[0]

    def records(self, newest: int | None) -> list[RankLog]:
        """Return the logs of all ranks without observations; of those of this node only the
        ``newest`` records, if that is given.
        """
        here, _ = read_logs(self._roster.current(), {}, newest=newest)
        return one_run([*here, *self._ask_all_nodes().logs])

    # --- for other nodes and worlds

    def states(self) -> States:
        """Return the states of this node's ranks."""
        members = self._roster.current()
        observed = {member.pid: self._observed(member) for member in members if member.here}
        return states_of(members, observed, self.health_here())

    def packed(self, records: int = 0) -> bytes:
        """Return this node's evidence for the node that reports, with each rank's newest records,
        or all (0).
        """
        observed = self._observations_by_pid()
        return remote_evidence.pack(self._roster.current(), observed, records, self.health_here())

    def packed_world(self) -> bytes:
        """Return the evidence of all nodes of this world for the world that reports."""
        others, _ = self.nodes.gather(lambda slot, content: (self.nodes.host(slot), content))
        return remote_evidence.pack_world([(os.uname().nodename, self.packed()), *others.values()])

    # --- this node's processes and hardware

    def health_here(self) -> NodeHealth | None:
        """Return this node's facts about its hardware."""
        return self.health.report(self._roster.current())

    def observations(self) -> dict[int, Observation]:
        """Return the observations by rank."""
        seen = self._observations_by_pid(wait_s=0.0)
        return {each.rank: seen[each.pid] for each in self._roster.current() if each.here}

    def _observations_by_pid(self, wait_s: float = _PY_SPY_WAIT_S) -> dict[int, Observation]:
        """Return the observations of the ranks, with helper processes that they started; while a
        rank lives, wait for py-spy at most so long.
        """
        members = self._roster.current()
        wait_s = wait_s if any(member.alive for member in members) else 0.0
        seen = {member.pid: self._observed(member, wait_s) for member in members if member.here}
        self._helpers.add(members, seen)
        return seen

    def _observed(self, member: Member, wait_s: float = 0.0) -> Observation:
        """Return the observation of a rank; of one that the launcher ended, that of before."""
        frozen = self._frozen.get(member.pid)
        signal = member.ending.signal if member.ending is not None else None
        if frozen is not None and signal in self._signals_of_launcher:
            return frozen
        seen = self._observer.observe(member.pid, wait_s=wait_s)
        seen.usual_wait = self.usual(member.pid)
        return seen


def nodes_to_ask(verdict: Verdict, others: Sequence[Beat], first_rank: int = 0) -> list[int]:
    """Return the slots of the nodes whose older records may matter: the culprits', and those of
    some that wait for them; empty: all.

    Args:
        verdict: on some records of all ranks.
        others: the job's other nodes.
        first_rank: the number of the job's rank 0 in the verdict.
    """
    names_one = verdict.kind in ("missing", "dead") and bool(verdict.culprits)
    if not names_one or verdict.confidence == "low":
        return []
    numbers = (*verdict.culprits, *verdict.victims[:WAITERS_ASKED])
    ranks = {number - first_rank for number in numbers}
    asked = [beat.slot for beat in others if ranks & set(beat.ranks)]
    return asked or [beat.slot for beat in others[:1]]  # all of these ranks are on this node


def _unanswered(beat: Beat) -> str:
    own = (
        f" Its own dump is saved in {beat.dump_dir} there: pass both folders to `commlens"
        " diagnose`."
        if beat.dump_dir
        else ""
    )
    return f"Node {beat.host} ({ranks_phrase(beat.ranks)}) did not answer in time.{own}"
