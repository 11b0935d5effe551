"""``commlens top``."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import select
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from commlens.commands.naming_jobs import add_recorded_job, find_recorded_jobs
from commlens.errors import CommandError

if TYPE_CHECKING:
    from commlens.diagnosis.views.status import JobStatus
    from commlens.model.ranklog import RankLog
    from commlens.reports.top_screen import Screen, View
    from commlens.watch.other_nodes import OtherNodes

log = logging.getLogger("commlens")

_NEWEST: Final = 256  # records of each rank that are read for a frame
_OBSERVED_S: Final = 4.0  # of each process: what it did for so long shows whether it moves
_STALE_S: Final = 30.0  # the other nodes' last answer is shown for so long
# the pause before the next look at the other nodes, as a multiple of the time that the last look
# took
_PAUSE: Final = 2
_KEY: Final = re.compile(rb"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])?|.", re.DOTALL)
_KEY_NAMES: Final = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "pageup",
    b"\x1b[6~": "pagedown",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "escape",
}


class TopCommand:
    """Show live what every rank of a job is doing: sort, fold, pick a rank and see its stack.

    It reads the black boxes from outside, like commlens status, once a second. Keys: up and down
    choose a row, enter shows its stack, f folds equal ranks, s sorts by rank, time or state, n
    shows the next job, q quits.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_recorded_job(parser)
        parser.add_argument(
            "--interval",
            type=float,
            default=1.0,
            metavar="S",
            help="refresh every S seconds (default: 1)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from commlens.config import load_settings

        if not 0.1 <= arguments.interval <= 3600:
            raise CommandError(f"--interval takes 0.1 to 3600 seconds, not {arguments.interval:g}.")
        settings = load_settings().settings
        jobs = find_recorded_jobs(arguments.job, settings.box_dir)
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise CommandError(
                "commlens top needs a terminal. `commlens status` prints the same once."
            )
        with contextlib.suppress(KeyboardInterrupt):
            _show([_Job(folder, settings.meet) for folder in jobs], arguments.interval)
        return 0


class _Elsewhere:
    """Asks a job's other nodes and the worlds on other nodes again and again, in a thread: an
    answer takes a second or more, and keys must not wait for it.
    """

    def __init__(self, folder: Path, meet: str) -> None:
        self._folder, self._meet = folder, meet
        self._thread: threading.Thread | None = None
        self._answer: OtherNodes | None = None
        self._due = 0.0

    def take_answer_and_ask_again(
        self, runs: Mapping[Path, Sequence[RankLog]]
    ) -> OtherNodes | None:
        """Return an answer that was not returned before, else None. Ask again, in a thread, if
        the pause is over.

        Args:
            runs: the logs of the job and of other worlds here, by folder.
        """
        if self._thread is not None and self._thread.is_alive():
            return None
        answer, self._answer = self._answer, None
        if time.monotonic() >= self._due:
            self._thread = threading.Thread(
                target=self._ask, args=(runs,), name="commlens-top", daemon=True
            )
            self._thread.start()
        return answer

    def _ask(self, runs: Mapping[Path, Sequence[RankLog]]) -> None:
        from commlens.watch.asked_worlds import ask_worlds
        from commlens.watch.other_nodes import OtherNodes, has_other_nodes, look_at_other_nodes

        began, logs = time.monotonic(), runs[self._folder]
        try:
            nodes = look_at_other_nodes(self._folder) if has_other_nodes(logs) else OtherNodes()
            known = {**runs, self._folder: [*logs, *nodes.logs]}
            self._answer = ask_worlds(nodes, known, self._meet)
        except Exception as error:  # its traceback would cover the screen
            log.debug(
                "commlens: the other nodes could not be asked: %s: %s", type(error).__name__, error
            )
        finally:
            now = time.monotonic()
            self._due = now + _PAUSE * (now - began)  # an answer costs the other nodes time


class _Job:
    """A job that is read again and again."""

    def __init__(self, folder: Path, meet: str) -> None:
        from commlens.processes.observer import Observer
        from commlens.watch.other_worlds import OtherWorlds
        from commlens.watch.roster import Roster

        self.folder = folder
        self.roster = Roster([folder])
        self.observer = Observer(_OBSERVED_S)
        self.elsewhere = _Elsewhere(folder, meet)
        self.other_worlds = OtherWorlds(newest=_NEWEST)
        self.status_of_all_nodes: JobStatus | None = None
        self._answered_at = 0.0  # time.monotonic()

    def read(self) -> JobStatus:
        """Return the job's status: of all nodes as of their last answer, or of this node alone
        until another one has answered.
        """
        from commlens.model.store_identity import identities
        from commlens.watch.other_nodes import OtherNodes, has_other_nodes
        from commlens.watch.snapshot import observe, read_logs

        seen = observe(self.roster, self.observer, window_s=0.0, wait_s=0.0)
        logs = read_logs(self.roster.current(), seen, newest=_NEWEST)[0]
        others = self.other_worlds.logs(logs, [self.folder])
        if has_other_nodes(logs) or identities(logs):
            answer = self.elsewhere.take_answer_and_ask_again({self.folder: logs, **others})
            if answer is not None:
                # An empty answer: no other node is there any more, so this node is shown alone.
                is_empty = not (answer.logs or answer.lines or answer.worlds)
                found = None if is_empty else self._status(answer.join(logs), others, answer)
                self.status_of_all_nodes, self._answered_at = found, time.monotonic()
            is_fresh = time.monotonic() < self._answered_at + _STALE_S
            if self.status_of_all_nodes is not None and is_fresh:
                return self.status_of_all_nodes
        return self._status(logs, others, OtherNodes())

    def _status(
        self,
        logs: Sequence[RankLog],
        others: Mapping[Path, Sequence[RankLog]],
        elsewhere: OtherNodes,
    ) -> JobStatus:
        """Return the status of the ranks in ``logs``: of this node, or of all nodes.

        Args:
            logs: of these ranks.
            others: logs of other worlds on this node.
            elsewhere: what other nodes have answered. Its logs are ignored, the rest is added.
        """
        from commlens.diagnosis.views.status import status_of
        from commlens.dumps.save import dump_name
        from commlens.watch.asked_worlds import join_everywhere

        return status_of(
            dump_name([self.folder]),
            join_everywhere(logs, others.values(), elsewhere),
            elsewhere.lines,
            alike=elsewhere.alike,
            hosts=elsewhere.hosts,
        )


def _show(jobs: list[_Job], interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from commlens.reports.top_screen import NARROW, View, draw
    from commlens.text import naming_worlds

    view = View(jobs=len(jobs))
    console = Console(highlight=False, markup=False, emoji=False)
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        status = jobs[0].read()
        read_at = time.monotonic()
        # the first frame knows no movement yet: the next one follows soon
        pause = min(0.5, interval_s)
        while not view.quit:
            with naming_worlds(status.verdict.worlds):
                screen = _screen(status, view, narrow=console.width < NARROW)
                live.update(draw(screen, view, console.width, console.height), refresh=True)
            keys = _next_keys(max(0.0, read_at + pause - time.monotonic()))
            before = view.job
            for key in keys:
                view.press(key, len(screen.rows))
            if not keys or view.job != before:
                status, read_at, pause = jobs[view.job].read(), time.monotonic(), interval_s


def _screen(status: JobStatus, view: View, *, narrow: bool) -> Screen:
    from commlens.diagnosis.views.status import HEADINGS, add_hosts, arrange, cells, fold
    from commlens.reports.stacks_terminal import class_lines, merge_stacks
    from commlens.reports.top_screen import Screen

    rows = arrange(fold(status.rows) if view.folded else status.rows, view.order)
    view.chosen = max(0, min(view.chosen, len(rows) - 1))
    stack: list[str] = []
    if view.stack and rows:
        chosen = set(rows[view.chosen].ranks)
        logs = [each for each in status.logs if each.rank in chosen]
        for each in merge_stacks(logs):
            stack += class_lines(each)
    headings, lines = add_hosts(status, rows, HEADINGS, [cells(row, narrow=narrow) for row in rows])
    return Screen(status, rows, lines, tuple(headings), stack)


def _next_keys(seconds: float) -> list[str]:
    """Return the keys that were pressed meanwhile; none after so many seconds without a key."""
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return []
    pressed = os.read(sys.stdin.fileno(), 1024)
    if not pressed:
        return ["q"]  # the terminal is gone
    return [_KEY_NAMES.get(key) or key.decode("ascii", "replace") for key in _KEY.findall(pressed)]


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Switch the terminal to single keys without echo, and back."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
