"""Collects the evidence of a job, diagnoses it, prints the verdict and saves dumps."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from commlens.blackbox import job_dirs
from commlens.config import Settings
from commlens.diagnosis.fold.alike import NONE_ALIKE, counts_for_all
from commlens.diagnosis.standstill import NO_POSES
from commlens.dumps import save
from commlens.dumps.clocks import correct_clocks
from commlens.dumps.garbage import collector_paused
from commlens.errors import CommlensError
from commlens.model.cause import LostNode
from commlens.model.health import NodeHealth
from commlens.model.ranklog import STOP_SIGNALS, Observation, RankLog, UsualWait
from commlens.model.verdict import NOTHING_FOUND, Verdict
from commlens.model.wrapping import fill
from commlens.processes.observer import Observer
from commlens.text import capital, ranks_phrase, sentence
from commlens.watch.alerts.alerts import Alerts
from commlens.watch.alerts.otlp import OtlpExporter
from commlens.watch.few_ranks import few_ranks
from commlens.watch.helper_stacks import HelperStacks
from commlens.watch.meeting_worlds import MeetingWorlds
from commlens.watch.node_health import HealthOfNode
from commlens.watch.nodes import remote_evidence
from commlens.watch.nodes.beat import Beat
from commlens.watch.nodes.exchange import Nodes
from commlens.watch.nodes.known_nodes import Lost
from commlens.watch.nodes.lost import as_evidence, find_vanished, logs_of_vanished
from commlens.watch.nodes.remote_evidence import (
    first_records_of_each,
    more_records_of_each,
    records_of_each,
)
from commlens.watch.nodes.states import States, states_of
from commlens.watch.nodes.states_tree import TREE_ABOVE
from commlens.watch.other_worlds import reading_of, with_other_worlds
from commlens.watch.roster import Member, Roster
from commlens.watch.snapshot import have_joined, one_run, read_logs
from commlens.watch.stall_verdicts import explains, leaves_standing

if TYPE_CHECKING:
    from commlens.diagnosis.action import Attempt

log = logging.getLogger("commlens")

Say = Callable[[str | Verdict], None]
Diagnose = Callable[..., Verdict]

NOTICE_INDENT = " " * len("commlens: ")
"""Begins the further lines of a notice."""

MANY_NODES = 16  # from more than these, only the newest records of each rank are asked for at first
WAITERS_ASKED = 8
_PY_SPY_WAIT_S = 0.8
_DIVERGED_MAX: Final = 50  # findings in one verdict
# a node that has been silent for this long while it was asked for evidence is not just slow
_NODE_SILENT_S: Final = 2.0
_HANDED_OVER: Final = f"{job_dirs.NUMBERS_VERDICT}*"
ALERTS_END_S = 8.0
"""How long the end of the job may wait for commands that got verdicts."""


def say_to_stderr(message: str | Verdict) -> None:
    """Print a notice, beginning with ``commlens:``, or a verdict. It is a single write: ranks and
    torchrun share the terminal.
    """
    columns = os.environ.get("COLUMNS", "")
    width = max(40, min(120, int(columns))) if columns.isdecimal() else 80
    colour = "FORCE_COLOR" in os.environ and "NO_COLOR" not in os.environ
    with contextlib.suppress(OSError, ValueError):
        width = min(120, os.get_terminal_size(sys.stderr.fileno()).columns)
        colour = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    if isinstance(message, str):
        text = fill(f"commlens: {message}", width, indent=NOTICE_INDENT)
    else:
        from commlens.reports.terminal import render

        text = render(message, width, colour=colour).rstrip("\n")
    with contextlib.suppress(OSError):  # the terminal may be gone
        sys.stderr.write("".join(f"{line.rstrip()}\n" for line in text.split("\n")))
        sys.stderr.flush()


def _as_notice(verdict: Verdict) -> str:
    sentences = [
        verdict.summary,
        verdict.explanation,
        verdict.next_step if verdict.kind == "straggler" else "",
    ]
    return " ".join(f"{capital(each).rstrip('.')}." for each in sentences if each)


class Evidence:
    """The ranks' logs and what was observed of their processes, as of now.

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
        self._roster = roster
        self._observer = observer
        self._helpers = HelperStacks()
        self._consequences = STOP_SIGNALS | {"SIGKILL"} if launched else STOP_SIGNALS
        self.frozen: dict[int, Observation] = {}  # by pid
        # returns how long waits usually are where the rank with this pid waits
        self.usual: Callable[[int], UsualWait | None] = lambda _: None
        # the last evidence of other nodes, by host
        self.remote: dict[str, remote_evidence.NodeEvidence] = {}
        self.lost: list[Lost] = []  # nodes that are silent, as of the last diagnosis
        self.vanished: list[Lost] = []  # those of them that have ended without a word
        # only the newest records of the other nodes' ranks were asked for
        self.lacks_records = False
        # of the last diagnosis: the ranks that were not examined
        self.alike = NONE_ALIKE
        self.poses = NO_POSES  # of the ranks of all nodes, if these were not all examined
        self.first = 0  # the number of the job's rank 0 among all worlds
        self._elsewhere: list[list[RankLog]] = []  # the other worlds' last evidence
        # by slot: what the other nodes sent for the last diagnosis
        self._newest: dict[int, remote_evidence.NodeEvidence] = {}

    def forget(self) -> None:
        """Forget what was observed of former workers."""
        self.frozen, self.remote, self._newest, self._elsewhere = {}, {}, {}, []
        self.alike = NONE_ALIKE
        self.worlds.note_joined([])

    def freeze(self) -> None:
        """Keep the observations of the living ranks as of now: how the launcher ends them later
        says nothing about the fault.
        """
        self.frozen = {
            member.pid: self._observer.observe(member.pid)
            for member in self._roster.current()
            if member.alive and member.here
        }

    def logs(self, about: Verdict | None = None) -> tuple[list[RankLog], list[str]]:
        """Return the ranks' logs, each with its observation, and what could not be read, in
        sentences.

        If this node reports for the job, the logs of the other nodes' ranks are among them. Of many
        nodes, first only the newest records are asked for.

        Args:
            about: the verdict that was made of these. The nodes that it is about are asked for more
                records, or all nodes are, if it names none.
        """
        self.alike, self.poses = NONE_ALIKE, NO_POSES
        remote, more = self.remote_logs(about)
        here, problems = self._logs_here()
        return self._joined([*here, *remote], [*problems, *more])

    def _joined(self, logs: list[RankLog], problems: list[str]) -> tuple[list[RankLog], list[str]]:
        self.lost = self.nodes.lost(_NODE_SILENT_S)
        self.vanished = find_vanished(self.lost, logs)
        clocks = correct_clocks(logs)
        self._elsewhere, more = self.worlds.gather() if self.nodes.reporter is None else ([], [])
        joined = self._with_worlds(one_run(logs))
        self.worlds.note_joined(joined)
        clocks += correct_clocks(joined) if self._elsewhere else []
        return joined, [*problems, *clocks, *more]

    def _with_worlds(self, logs: list[RankLog]) -> list[RankLog]:
        joined = with_other_worlds(logs, self._roster.folders, self._elsewhere)
        self.first = 0
        if logs and joined[0].worlds.are_several:
            numbers = {reading_of(log): log.rank for log in joined}
            self.first = numbers[reading_of(logs[0])] - logs[0].rank
        away = self.worlds.out_of_sight
        return [log for log in joined if reading_of(log) not in away] if away else joined

    def states(self) -> States:
        """Return the states of this node's ranks."""
        members = self._roster.current()
        observed = {member.pid: self._observed(member) for member in members if member.here}
        return states_of(members, observed, self.health.report(members))

    def logs_of_few(self) -> tuple[list[RankLog], list[str]] | None:
        """Return the logs of a few ranks in each state, and what could not be read, in sentences;
        :attr:`alike` are the other ranks.

        None if this node does not report, there are few nodes, or a few ranks are not enough.
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
        self.alike, self.poses, self._newest = few.alike, few.poses, few.nodes
        self.remote |= {node.host: node for node in few.nodes.values()}
        problems += [problem for node in few.nodes.values() for problem in node.problems]
        problems += [*map(_unanswered, few.silent), *self.nodes.unknown]
        return self._joined(few.logs, problems)

    def logs_with_last_evidence(self) -> list[RankLog]:
        """Return the logs as :meth:`logs` does, with the other nodes' last evidence, without asking
        them.
        """
        logs = self._logs_here()[0]
        logs = one_run([*logs, *(log for node in self.remote.values() for log in node.logs)])
        return self._with_worlds(logs)

    def _logs_here(self) -> tuple[list[RankLog], list[str]]:
        members = self._roster.current()
        logs, problems = read_logs(members, self._by_pid())
        if logs:
            logs[0].health = self.health.report(members)
        return logs, problems

    def records(self, newest: int | None) -> list[RankLog]:
        """Return the logs of all ranks without observations; of those of this node only the
        ``newest`` records, if that is given.
        """
        return one_run(
            [*read_logs(self._roster.current(), {}, newest=newest)[0], *self.remote_logs()[0]]
        )

    def remote_logs(self, about: Verdict | None = None) -> tuple[list[RankLog], list[str]]:
        """Return the logs of the other nodes' ranks, and what is missing, if this node reports for
        the job; otherwise nothing.
        """
        if self.nodes.reporter is not None:
            return [], self.nodes.unknown
        others = self.nodes.others
        self.lacks_records = about is None and len(others) > MANY_NODES
        concerned = set(nodes_to_ask(about, others, self.first)) if about is not None else set()
        share = first_records_of_each if self.lacks_records else records_of_each
        asked = others
        if concerned:
            share = more_records_of_each
            asked = [beat for beat in others if beat.slot in concerned]
        found, silent = self.nodes.gather(
            lambda slot, content: remote_evidence.unpack(content, self.nodes.host(slot)),
            of=sorted(concerned),
            records=share(sum(len(beat.ranks) for beat in asked)),
        )
        if not concerned:
            self._newest = {}
        self._newest |= found
        self.remote |= {node.host: node for node in found.values()}
        logs = [log for node in self._newest.values() for log in node.logs]
        problems = [problem for node in self._newest.values() for problem in node.problems]
        return logs, [*problems, *map(_unanswered, silent), *self.nodes.unknown]

    def packed(self, records: int = 0) -> bytes:
        """Return this node's evidence for the node that reports, with each rank's newest records,
        or all (0).
        """
        members = self._roster.current()
        health = self.health.report(members)
        return remote_evidence.pack(members, self._by_pid(), records, health)

    def packed_world(self) -> bytes:
        """Return the evidence of all nodes of this world for the world that reports."""
        others, _ = self.nodes.gather(lambda slot, content: (self.nodes.host(slot), content))
        return remote_evidence.pack_world([(os.uname().nodename, self.packed()), *others.values()])

    def _by_pid(self) -> dict[int, Observation]:
        members = self._roster.current()
        return self._seen(members, _PY_SPY_WAIT_S if any(each.alive for each in members) else 0.0)

    def _seen(self, members: Sequence[Member], wait_s: float = 0.0) -> dict[int, Observation]:
        seen = {member.pid: self._observed(member, wait_s) for member in members if member.here}
        self._helpers.add(members, seen)
        return seen

    def health_here(self) -> NodeHealth | None:
        """Return this node's facts about its hardware."""
        return self.health.report(self._roster.current())

    def observations(self) -> dict[int, Observation]:
        """Return the observations by rank."""
        members = self._roster.current()
        seen = self._seen(members)
        return {member.rank: seen[member.pid] for member in members if member.here}

    def _observed(self, member: Member, wait_s: float = 0.0) -> Observation:
        frozen = self.frozen.get(member.pid)
        if (
            frozen is not None
            and member.ending is not None
            and member.ending.signal in self._consequences
        ):
            return frozen
        seen = self._observer.observe(member.pid, wait_s=wait_s)
        seen.usual_wait = self.usual(member.pid)
        return seen


def nodes_to_ask(verdict: Verdict, others: Sequence[Beat], first: int = 0) -> list[int]:
    """Return the slots of the nodes whose older records may matter: the culprits', and those of
    some that wait for them; empty: all.

    Args:
        verdict: on some records of all ranks.
        others: the job's other nodes.
        first: the number of the job's rank 0 in the verdict.
    """
    if (
        verdict.kind not in ("missing", "dead")
        or not verdict.culprits
        or verdict.confidence == "low"
    ):
        return []
    ranks = {number - first for number in (*verdict.culprits, *verdict.victims[:WAITERS_ASKED])}
    asked = [beat.slot for beat in others if ranks & set(beat.ranks)]
    return asked or [others[0].slot]


def _unanswered(beat: Beat) -> str:
    own = (
        f" Its own dump is saved in {beat.dump_dir} there: pass both folders to `commlens"
        " diagnose`."
        if beat.dump_dir
        else ""
    )
    return f"Node {beat.host} ({ranks_phrase(beat.ranks)}) did not answer in time.{own}"


class Reporter:
    """Diagnoses a job, prints what is wrong and saves it.

    Args:
        folders: of the job's black boxes.
        settings: dump_dir, dump_mode, keep_dumps and stall_timeout.
        evidence: of the job.
        say: prints a line or a verdict; None: to stderr.
        diagnose: makes a verdict of logs; None: :func:`commlens.diagnosis.examine.diagnose_logs`.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        settings: Settings,
        evidence: Evidence,
        *,
        say: Say | None = None,
        diagnose: Diagnose | None = None,
    ) -> None:
        self.say = say or say_to_stderr
        self.evidence = evidence
        self.verdict: Verdict | None = None  # the last one printed
        self.stands = False  # the last verdict: the job has not gone on since
        self._job_began_ns = self._began_ns = time.time_ns()  # the job's, and its workers'
        self._former: list[Attempt] = []  # of former workers, the last one first
        self.before_restart = ""  # the last fault of the former workers, as its verdict puts it
        self.dump: Path | None = None  # the last one saved
        self.is_saving = False  # its page may be missing
        self.logs: list[RankLog] = []  # of the last diagnosis
        self._diagnosed: Verdict | None = None  # the last diagnosis
        self._folders = folders
        self._settings = settings
        self._diagnose = diagnose
        self._host = os.uname().nodename
        self._stalled_after_s = min(1.0, settings.stall_ceiling_s / 2)
        self._alerts = Alerts(settings, self._host, self.say)
        self.otlp = OtlpExporter(settings.job or folders[0].name, self._host, self.say)
        self._to_send: Verdict | None = None
        self.counts: Counter[str] = Counter()  # verdicts printed, by kind

    def forget(self) -> None:
        """Forget the verdict and the evidence of former workers."""
        if self.verdict is not None and self.verdict.is_fault and self.stands:
            from commlens.diagnosis.action import SHORT_NS, attempt_of

            is_short = time.time_ns() - self._began_ns < SHORT_NS
            self._former = [attempt_of(self.verdict, is_short=is_short), *self._former[:7]]
        self._began_ns, self.stands = time.time_ns(), False
        self.verdict = self.dump = self._diagnosed = None
        self.logs = []
        self.evidence.forget()

    def preload(self) -> None:
        """Import what a diagnosis needs: once something is wrong, every tenth of a second
        counts.
        """
        if self._diagnose is None:
            from commlens.diagnosis.examine import diagnose_logs

            self._diagnose = diagnose_logs
        if self.say is say_to_stderr:
            import commlens.reports.terminal  # noqa: F401

    def diagnose(self, *, stands_still: bool = False) -> Verdict:
        """Read the evidence and diagnose it.

        Args:
            stands_still: the job waits, so there is time to find out which ranks matter; else all
                nodes are asked at once, before they end.
        """
        self.preload()
        # with records of many nodes, it would take as long as the diagnosis
        with collector_paused():
            few = self._judge_few() if stands_still else None
            self._diagnosed = verdict = few or self._judge_all()
            return verdict

    def diagnose_few(self) -> Verdict | None:
        """Diagnose a few ranks in each state of a job on many nodes. None if that does not tell
        what is wrong with all: it costs too much to ask all before the stall timeout.
        """
        self.preload()
        with collector_paused():
            self._diagnosed = verdict = self._judge_few()
        return verdict

    def _judge_few(self) -> Verdict | None:
        """Diagnose a few ranks in each state. None if that does not tell what is wrong with all."""
        few = self.evidence.logs_of_few()
        if few is None or self.evidence.vanished:
            return None
        self.logs, problems = few
        verdict = self._with_lost_nodes(self._judge(problems), problems)
        return verdict if counts_for_all(verdict, self.evidence.alike) else None

    def _judge_all(self) -> Verdict:
        self.logs, problems = self.evidence.logs()
        verdict = self._judge(problems)
        if self.evidence.lacks_records and verdict.kind not in NOTHING_FOUND:
            self.logs, problems = self.evidence.logs(about=verdict)
            verdict = self._judge(problems)
        return self._with_lost_nodes(verdict, problems)

    def _with_lost_nodes(self, verdict: Verdict, problems: list[str]) -> Verdict:
        """Diagnose again, if nodes have fallen silent, with what is known of them."""
        vanished, lost = self.evidence.vanished, self.evidence.lost
        if vanished and not verdict.culprits:
            gone = logs_of_vanished(vanished, self.logs, self.evidence.first)
            self.logs = one_run([*self.logs, *gone])
        nodes = as_evidence(lost, vanished, self.evidence.first)
        return self._judge(problems, nodes) if lost else verdict

    def _judge(self, problems: list[str], lost_nodes: Sequence[LostNode] = ()) -> Verdict:
        assert self._diagnose is not None
        return self._diagnose(
            self.logs,
            problems=problems,
            stalled_after_s=self._stalled_after_s,
            lost_nodes=lost_nodes,
            alike=self.evidence.alike,
        )

    def report(self, verdict: Verdict, line: str = "") -> None:
        """Print a verdict, or the ``line`` in its place. A verdict of kind waiting claims no fault,
        so it is only a notice.
        """
        self.verdict = verdict
        self.stands = True
        if self.before_restart and verdict.is_fault and verdict.findings:
            said = sentence(f"Before the workers were restarted: {self.before_restart}")
            verdict.findings[0].evidence.append(said)
        if line:
            self.tell(line)
        elif verdict.kind == "waiting":
            self.tell(_as_notice(verdict))
        else:
            self.say(verdict)
            self.counts[verdict.kind] += 1
            self._to_send = verdict
            line = f"{capital(verdict.summary).rstrip('.')}."
            self._announce(line, kind=verdict.kind)
            # One that names no world, though several were examined, is about this world alone.
            examined_several = bool(self.logs) and self.logs[0].worlds.are_several
            if verdict.worlds.are_several or not examined_several:
                unknown = any(each.size for each in verdict.worlds.outsiders)
                self.evidence.worlds.announce(line, verdict.kind, is_complete=not unknown)
        try:
            self._decide_action(verdict)
        except Exception as error:  # the verdict was printed
            log.debug("commlens: no action was decided: %s: %s", type(error).__name__, error)

    def _decide_action(self, verdict: Verdict) -> None:
        """Add what to do with the job, by what is wrong and by the faults that ended earlier
        attempts. Only after the verdict is printed: the file server with these may not answer.
        """
        from commlens.diagnosis.action import SHORT_NS, Attempt, action_of, with_attempts

        before = list(self._former)
        if self._settings.dump_dir and verdict.is_fault:
            root, began_ns = Path(self._settings.dump_dir), self._job_began_ns
            for content, lasted_ns in save.earlier_verdicts(root, self._folders, began_ns):
                with contextlib.suppress(Exception):  # another version's, or damaged
                    attempt = msgspec.json.decode(content, type=Attempt)
                    attempt.is_short = lasted_ns < SHORT_NS
                    before.append(attempt)
        if time.time_ns() - self._began_ns >= SHORT_NS:
            before = [msgspec.structs.replace(each, is_short=False) for each in before]
        verdict.action = verdict.action or action_of(verdict)
        verdict.action = with_attempts(verdict, before)

    def report_slow(self, verdict: Verdict) -> None:
        """Print, as a notice, a verdict on ranks of this node that make the job slow, also on the
        other nodes, and pass it on.
        """
        self.say(_as_notice(verdict))
        self.evidence.nodes.announce(f"{_as_notice(verdict)} (found on {self._host})")
        self.counts[verdict.kind] += 1
        self._pass_on(verdict, None)

    def say_all(self, lines: Iterable[str]) -> None:
        """Print several lines."""
        for line in lines:
            self.say(line)

    def tell(self, line: str, *, abort: bool = False) -> None:
        """Print a line here, and on the other nodes if this one reports for the job."""
        self.say(line)
        self._announce(line, abort=abort)

    def tell_all_nodes(self, line: str) -> None:
        """Print a line here and on the other nodes, whether or not this one reports for the job."""
        self.say(line)
        self.evidence.nodes.announce(line)

    def _announce(self, line: str, *, kind: str = "", abort: bool = False) -> None:
        if self.evidence.nodes.reporter is None:
            self.evidence.nodes.announce(line, kind=kind, abort=abort)

    def save_dump(self, reason: str = "") -> None:
        """Save the evidence and the last verdict in ``dump_dir``, and print where. An error is
        printed, too.

        Args:
            reason: why the dump is saved, if no verdict says so.
        """
        self.is_saving = True
        try:
            self._save_dump(reason)
        finally:
            self.is_saving = False
        self.send_alert()
        if self.dump is not None:
            self.evidence.nodes.update(dump=str(self.dump))

    def save_own_dump(self) -> None:
        """Save this node's ranks, unless the dump of the node that reports is in a folder that both
        nodes share, with all their records.
        """
        folder = self.evidence.nodes.dump
        if folder and save.holds(
            Path(folder), [box.name for each in self._folders for box in job_dirs.boxes(each)]
        ):
            self.dump = Path(folder)
            self.say(f"the dump of all nodes is in {folder}")
        else:
            self.save_dump()

    def send_alert(self) -> None:
        """Pass on the verdict that was printed last, once. The dump, if one is saved, comes first:
        the alert names it.
        """
        verdict, self._to_send = self._to_send, None
        if verdict is not None:
            self._pass_on(verdict, self.dump)

    def _pass_on(self, verdict: Verdict, dump: Path | None) -> None:
        self._alerts.send(
            verdict, job=dump.name if dump is not None else save.dump_name(self._folders), dump=dump
        )
        self.otlp.send(verdict, dump)

    def close(self) -> None:
        """Wait a few seconds for the commands that got verdicts, and for OTLP."""
        self.otlp.end()
        self._alerts.close(ALERTS_END_S)
        self.otlp.wait()

    def _save_dump(self, reason: str) -> None:
        settings = self._settings
        observations = self.evidence.observations()
        health = self.evidence.health_here()
        saved: Path | None = None
        folders = [folder for folder in self._folders if job_dirs.boxes(folder)]
        for folder in folders:
            try:
                saved = save.save_dump(
                    folder,
                    Path(settings.dump_dir),
                    observations,
                    host=self._host,
                    keep=settings.keep_dumps,
                    mode=int(settings.dump_mode, 8),
                    folders=folders,
                    health=health,
                )
            except CommlensError as error:
                self.say(f"no dump could be saved in {settings.dump_dir}: {error}")
        if saved is None:
            return
        job, restart = next(
            ((log.job, log.restart) for log in self.logs if log.job and not log.worlds.are_several),
            (folders[0].name, 0),
        )
        for node in self.evidence.remote.values():
            try:
                save.add_node(
                    saved,
                    node.ranks,
                    host=node.host,
                    job=job,
                    restart=restart,
                    mode=int(settings.dump_mode, 8),
                    health=node.health,
                )
            except CommlensError as error:
                self.say(str(error))
        is_new = saved != self.dump
        self.dump = saved
        page = self._save_page(saved)
        how = f"open {page}" if page is not None else f"read it with `commlens diagnose {saved}`"
        if reason:
            self.say(f"{reason}; dump saved in {saved}; {how}")
        elif is_new:
            self.say(f"dump saved in {saved}; {how}")

    def _save_page(self, folder: Path) -> Path | None:
        """Save the last verdict as JSON and as a page, beside the dump that it was made of."""
        if self.verdict is None:
            return None
        try:
            from commlens.diagnosis.examine import examine_logs
            from commlens.reports.verdict_page import verdict_html

            logs, alike = self.logs, self.evidence.alike
            if self._diagnosed is not self.verdict:
                # some of them may be of ranks that were not examined before
                logs, alike = self.evidence.logs_with_last_evidence(), NONE_ALIKE
            examined = examine_logs(logs, stalled_after_s=self._stalled_after_s, alike=alike)
            page = verdict_html(examined._replace(verdict=self.verdict))
            return save.save_reports(
                folder,
                host=self._host,
                page=page,
                verdict=self.verdict.to_json(),
                for_all_nodes=bool(self.evidence.remote),
                mode=int(self._settings.dump_mode, 8),
            )
        except Exception as error:  # the dump is saved, and the verdict was printed
            log.warning(
                "commlens: the verdict's page could not be written: %s: %s",
                type(error).__name__,
                error,
            )
            log.debug("the page's error", exc_info=True)
            return None


# --- ranks that died


def lines_at_end(members: Sequence[Member]) -> list[str]:
    """Name the ranks without a record if all ranks of this node ended, not normally, before any of
    them had left init_process_group.
    """
    seen = [member for member in members if member.here and member.box is not None]
    size = max((member.world_size for member in seen), default=0)
    unrecorded = sorted(set(range(size)) - {member.rank for member in members})
    ended_early = not any(member.alive or member.ended_well for member in seen)
    if not unrecorded or not ended_early or have_joined(seen):
        return []
    them = "it" if len(unrecorded) == 1 else "they"
    return [
        f"{ranks_phrase(member.rank for member in seen)} ended before init_process_group had"
        f" returned. There is no record of {ranks_phrase(unrecorded)}: {them} may have been killed"
        " before recording began, or run on another node."
    ]


def report_death(
    reporter: Reporter,
    dead: Sequence[Member],
    elsewhere: Sequence[int],
    *,
    earlier: Verdict | None,
    has_reported: Callable[[Verdict], bool],
) -> None:
    """Diagnose the death of ranks and report it.

    Args:
        reporter: of the job.
        dead: the ranks of this node that died.
        elsewhere: those of other nodes.
        earlier: the verdict on the current stall, if there is one.
        has_reported: returns whether a verdict is on a mismatch that was reported before.
    """
    verdict = reporter.diagnose()
    ranks = ranks_phrase([*(member.rank for member in dead), *elsewhere])
    end = _end_of_hang(reporter, dead, verdict, earlier) if dead and earlier is not None else ""
    if end:
        reporter.tell(f"{ranks} {end}; the verdict above stands.")
    elif has_reported(verdict):
        reporter.report(
            verdict, f"{ranks} ended because of the mismatch; the verdict above stands."
        )
    elif verdict.kind not in NOTHING_FOUND:
        reporter.report(verdict)
        if earlier is not None and explains(verdict, earlier):
            late = ranks_phrase(earlier.culprits or earlier.victims)
            reporter.say(
                f"the earlier verdict on {late} no longer holds: the wait was for {ranks}."
            )


def _end_of_hang(
    reporter: Reporter, dead: Sequence[Member], verdict: Verdict, earlier: Verdict
) -> str:
    """Return how ranks ended that an earlier verdict explains; empty if it does not."""
    if _are_victims(dead, earlier):
        errors = [each.exception for each in reporter.logs if each.rank == dead[0].rank]
        error = next((f" ({each})" for each in errors if each), "")
        return f"gave up waiting{error}"
    return "ended while the job hung" if leaves_standing(verdict, earlier) else ""


def _are_victims(dead: Sequence[Member], earlier: Verdict) -> bool:
    """Return whether ranks that ended by themselves were held up, by an earlier verdict."""
    waiting = {*earlier.victims, *(earlier.culprits if earlier.kind == "cycle" else ())}
    were_killed = any(member.ending is not None and member.ending.signal for member in dead)
    return earlier.is_fault and not were_killed and waiting.issuperset(one.rank for one in dead)


# --- tensors that differ between ranks


def take_handed_over(folders: Iterable[Path]) -> Verdict | None:
    """Return a verdict that a rank handed over as a file in the job's folder, and remove the file;
    None if there is none. The rank logs a verdict that no watcher collected.
    """
    for path in (path for folder in folders for path in folder.glob(_HANDED_OVER)):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            content = path.read_bytes()
            path.unlink()  # of two that read it, one reports it
            return msgspec.json.decode(content.removeprefix(job_dirs.NUMBERS_HEAD), type=Verdict)
    return None


def together(former: Verdict | None, verdict: Verdict) -> Verdict:
    """Return a verdict on all tensors that were found to differ so far: the first ones may be why
    the others do.
    """
    if former is None or former.kind != "diverged":
        return verdict
    findings = [*former.findings, *verdict.findings][:_DIVERGED_MAX]
    return Verdict.from_findings(findings, looked_at=former.looked_at, action=verdict.action)
