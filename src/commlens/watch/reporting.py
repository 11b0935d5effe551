"""Print verdicts on a running job, save dumps, and pass both on to other nodes and systems.

After the diagnosis of a stall, for example, the watcher calls::

    report(verdict)    print it here; its first line on the other nodes and worlds
    save_dump()        save the black boxes, the verdict and its page in ``dump_dir``
    send_alert()       pass the verdict and the dump's folder on to other systems

A verdict on a fault that was reported before is not printed again: ``report_again`` prints a line
that refers to it.
"""

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
from commlens.diagnosis.fold.alike import NONE_ALIKE
from commlens.dumps import save
from commlens.errors import CommlensError
from commlens.model.verdict import NOTHING_FOUND, Verdict
from commlens.model.wrapping import fill
from commlens.text import capital, ranks_phrase, sentence
from commlens.watch.alerts.alerts import Alerts
from commlens.watch.alerts.otlp import OtlpExporter
from commlens.watch.diagnoser import Diagnoser
from commlens.watch.roster import Member
from commlens.watch.snapshot import have_joined
from commlens.watch.stall_verdicts import explains, leaves_standing

if TYPE_CHECKING:
    from commlens.diagnosis.action import Attempt

log = logging.getLogger("commlens")

Say = Callable[[str | Verdict], None]

NOTICE_INDENT = " " * len("commlens: ")
"""Begins the further lines of a notice."""

_DIVERGED_MAX: Final = 50  # findings in one verdict
_FORMER_MAX: Final = 8  # attempts of former workers that are kept
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
    """Return a verdict that claims no fault as one paragraph."""
    sentences = [
        verdict.summary,
        verdict.explanation,
        verdict.next_step if verdict.kind == "straggler" else "",
    ]
    return " ".join(f"{capital(each).rstrip('.')}." for each in sentences if each)


class FormerAttempts:
    """The attempts at a job that ended before the present one: those of its former workers, which
    torchelastic has replaced, and those of which there are dumps. A fault that one of them had
    too gets another action than a new one.

    Args:
        folders: of the job's black boxes.
        dump_dir: where the dumps of earlier jobs are; empty: there are none.
    """

    def __init__(self, folders: Sequence[Path], dump_dir: str) -> None:
        self._folders = folders
        self._dump_dir = dump_dir
        self._job_began_ns = self._began_ns = time.time_ns()  # the job's, and its workers'
        self._former: list[Attempt] = []  # of former workers, the last one first

    def begin_next(self, fault: Verdict | None) -> None:
        """Note that the workers are new, and the fault that ended the former ones, if any."""
        if fault is not None:
            from commlens.diagnosis.action import SHORT_NS, attempt_of

            is_short = time.time_ns() - self._began_ns < SHORT_NS
            self._former.insert(0, attempt_of(fault, is_short=is_short))
            del self._former[_FORMER_MAX:]
        self._began_ns = time.time_ns()

    def decide_action(self, verdict: Verdict) -> None:
        """Add to a verdict the action to take on the job. Called after the verdict is printed: the
        file server with the dumps of earlier attempts may not answer.
        """
        try:
            from commlens.diagnosis.action import SHORT_NS, Attempt, action_of, with_attempts

            before = list(self._former)
            if self._dump_dir and verdict.is_fault:
                for content, lasted_ns in save.earlier_verdicts(
                    Path(self._dump_dir), self._folders, self._job_began_ns
                ):
                    with contextlib.suppress(Exception):  # another version's, or damaged
                        attempt = msgspec.json.decode(content, type=Attempt)
                        attempt.is_short = lasted_ns < SHORT_NS
                        before.append(attempt)
            if time.time_ns() - self._began_ns >= SHORT_NS:
                before = [msgspec.structs.replace(each, is_short=False) for each in before]
            verdict.action = verdict.action or action_of(verdict)
            verdict.action = with_attempts(verdict, before)
        except Exception as error:  # the verdict was printed
            log.debug("commlens: no action was decided: %s: %s", type(error).__name__, error)


class Reporter:
    """Prints what is wrong with a job, saves it, and passes it on.

    Args:
        folders: of the job's black boxes.
        settings: ``job``, those of dumps, and those of alerts.
        diagnoser: makes the verdicts.
        say: prints a line or a verdict; None: to stderr.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        settings: Settings,
        diagnoser: Diagnoser,
        *,
        say: Say | None = None,
    ) -> None:
        self.say = say or say_to_stderr
        self.diagnoser = diagnoser
        self.evidence = diagnoser.evidence
        self.verdict: Verdict | None = None  # the last one printed
        # the job has not gone on since that one; the watcher unsets it when the wait has ended
        self.verdict_stands = False
        self._before_restart = ""  # the last fault of former workers, as its verdict puts it
        self._attempts = FormerAttempts(folders, settings.dump_dir)
        self.dump: Path | None = None  # the last one saved
        self.is_saving = False  # its page may be missing
        self._folders = folders
        self._settings = settings
        self._host = os.uname().nodename
        self._alerts = Alerts(settings, self._host, self.say)
        self.otlp = OtlpExporter(settings.job or folders[0].name, self._host, self.say)
        self._to_send: Verdict | None = None  # to other systems, once its dump is saved
        self.counts: Counter[str] = Counter()  # verdicts printed, by kind

    def forget(self) -> None:
        """Forget the verdict and the evidence of former workers, but for their last fault."""
        fault = self.verdict if self.verdict is not None and self.verdict.is_fault else None
        if fault is not None:
            self._before_restart = fault.summary
        self._attempts.begin_next(fault if self.verdict_stands else None)
        self.verdict = self.dump = None
        self.verdict_stands = False
        self.diagnoser.forget()

    def preload(self) -> None:
        """Import what a diagnosis and its output need: once something is wrong, every tenth of a
        second counts.
        """
        import commlens.diagnosis.examine

        if self.say is say_to_stderr:
            import commlens.reports.terminal  # noqa: F401

    # --- verdicts and lines, here and on other nodes

    def report(self, verdict: Verdict) -> None:
        """Print a verdict here, and its first line on the other nodes and in other worlds; count
        it, and pass it on when :meth:`send_alert` is called. A verdict of kind waiting claims no
        fault, so it is only a notice.
        """
        self._keep(verdict)
        if verdict.kind == "waiting":
            self.say_for_job(_as_notice(verdict))
        else:
            self.say(verdict)
            self.counts[verdict.kind] += 1
            self._to_send = verdict
            line = f"{capital(verdict.summary).rstrip('.')}."
            self._announce(line, kind=verdict.kind)
            # One that names no world, though several were examined, is about this world alone.
            logs = self.diagnoser.examined.logs
            examined_several = bool(logs) and logs[0].worlds.are_several
            if verdict.worlds.are_several or not examined_several:
                # members that have not come, as far as is known here: another world may know them
                lacks_members = any(each.size for each in verdict.worlds.outsiders)
                self.evidence.worlds.announce(line, verdict.kind, is_complete=not lacks_members)
        self._attempts.decide_action(verdict)

    def report_again(self, verdict: Verdict, line: str) -> None:
        """Print a line in place of a verdict on a fault that was reported before. So this one is
        the last verdict, but it is neither counted nor passed on.
        """
        self._keep(verdict)
        self.say_for_job(line)
        self._attempts.decide_action(verdict)

    def _keep(self, verdict: Verdict) -> None:
        """Note the verdict that is printed now."""
        self.verdict = verdict
        self.verdict_stands = True
        if self._before_restart and verdict.is_fault and verdict.findings:
            verdict.findings[0].evidence.append(
                sentence(f"Before the workers were restarted: {self._before_restart}")
            )

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

    def say_for_job(self, line: str, *, abort: bool = False) -> None:
        """Print a line here, and on the other nodes if this one reports for the job."""
        self.say(line)
        self._announce(line, abort=abort)

    def say_on_all_nodes(self, line: str) -> None:
        """Print a line here and on the other nodes, whether or not this one reports for the job."""
        self.say(line)
        self.evidence.nodes.announce(line)

    def _announce(self, line: str, *, kind: str = "", abort: bool = False) -> None:
        """Let the other nodes print a line, if this one reports for the job."""
        if self.evidence.nodes.reporter is None:
            self.evidence.nodes.announce(line, kind=kind, abort=abort)

    # --- dumps

    def save_dump(self, reason: str = "") -> None:
        """Save the evidence and the last verdict in ``dump_dir``. Print where, if the dump is a new
        one or there is a ``reason``. An error is printed, too.

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

    def _save_dump(self, reason: str) -> None:
        """Save the ranks here, those of other nodes that sent their evidence, and the page."""
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
        # logs of several worlds do not tell: they are joined under a name of their own
        job, restart = next(
            (
                (log.job, log.restart)
                for log in self.diagnoser.examined.logs
                if log.job and not log.worlds.are_several
            ),
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
        if reason or is_new:
            why = f"{reason}; " if reason else ""
            self.say(f"{why}dump saved in {saved}; {how}")

    def _save_page(self, folder: Path) -> Path | None:
        """Save the last verdict as JSON and as a page, beside the dump that it was made of."""
        if self.verdict is None:
            return None
        try:
            from commlens.diagnosis.examine import examine_logs
            from commlens.reports.verdict_page import verdict_html

            diagnoser = self.diagnoser
            logs, alike = diagnoser.examined.logs, diagnoser.examined.alike
            if diagnoser.verdict is not self.verdict:
                # some of them may be of ranks that were not examined before
                logs, alike = self.evidence.logs_with_last_evidence(), NONE_ALIKE
            examined = examine_logs(logs, stalled_after_s=diagnoser.stalled_after_s, alike=alike)
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

    # --- other systems

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
    verdict = reporter.diagnoser.diagnose()
    ranks = ranks_phrase([*(member.rank for member in dead), *elsewhere])
    end = _end_of_hang(reporter, dead, verdict, earlier) if dead and earlier is not None else ""
    if end:
        reporter.say_for_job(f"{ranks} {end}; the verdict above stands.")
    elif has_reported(verdict):
        reporter.report_again(
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
    waited = {*earlier.victims, *(earlier.culprits if earlier.kind == "cycle" else ())}
    were_killed = any(member.ending is not None and member.ending.signal for member in dead)
    if earlier.is_fault and not were_killed and waited.issuperset(each.rank for each in dead):
        logs = reporter.diagnoser.examined.logs
        errors = [each.exception for each in logs if each.rank == dead[0].rank]
        error = next((f" ({each})" for each in errors if each), "")
        return f"gave up waiting{error}"
    return "ended while the job hung" if leaves_standing(verdict, earlier) else ""


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
