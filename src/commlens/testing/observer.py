"""The process that watches the jobs of a test suite: ``python -m commlens.testing.observer
BOX_DIR``.

It is a process of its own so that the pytest process has no additional thread (tests fork) and
loads nothing heavy, and so that it survives a pytest that pytest-timeout ends with ``os._exit``.
Each job in the folder gets a watcher, as under ``commlens launch``. Requests arrive as lines of
JSON on standard input, and each ``ask`` is answered by one line on standard output. It ends with
the pytest process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from commlens import config
from commlens.blackbox import job_dirs
from commlens.errors import CommlensError, FormatError
from commlens.text import count

if TYPE_CHECKING:
    from commlens.diagnosis.examine import ExaminedJob
    from commlens.model.verdict import Verdict
    from commlens.watch.watcher import Watcher

POLL_S: Final = 0.2
STALL_S: Final = 5.0
"""The stall timeout if the user sets none. It is shorter than in a job, because only failed tests
show a verdict.
"""
SHOW_AFTER_S: Final = 5.0
"""A verdict on a test that still runs so long afterwards is printed at once: no person may be there
to end the test.
"""
_LOOK_BEFORE_S: Final = 4.0  # before pytest-timeout ends a test
_LOOK_EVERY_S: Final = 1.0  # from then on: a wait may just have begun
_FINISH_S: Final = 3.0
_END_S: Final = 2.0


@dataclass
class Test:
    """The test that runs."""

    name: str = ""
    began: float = 0.0  # monotonic
    look_at: float = float("inf")  # shortly before pytest-timeout ends it
    ends_at: float = float("inf")  # pytest-timeout ends it
    limit_s: float = 0.0
    ends_pytest: bool = False  # pytest-timeout's method "thread": there is no report


@dataclass
class Job:
    """One job of the suite."""

    folder: Path
    watcher: Watcher
    thread: threading.Thread
    began: float  # monotonic
    said: list[tuple[float, Verdict]] = field(default_factory=list)
    issued: int = 0  # collectives of all ranks so far
    issued_before: int = 0  # the same when the test began
    ended: float = float("inf")  # monotonic
    is_shown: bool = False
    own_dump: Path | None = None  # that the observer saved, whose watcher had not said anything

    def dump(self) -> Path | None:
        """Return the dump of the job with its page, which the watcher may be writing; None if there
        is none.
        """
        until = time.monotonic() + _FINISH_S
        reporter = self.watcher.reporter
        is_awaited = self.own_dump is None and bool(self.said)
        while (
            is_awaited
            and self.thread.is_alive()
            and (reporter.dump is None or reporter.is_saving)
            and time.monotonic() < until
        ):
            time.sleep(0.05)
        return self.own_dump or reporter.dump

    def verdicts(self, test: Test) -> list[Verdict]:
        """Return the verdicts since the test began, each once; the leading one first.

        A rank's death that follows a hang, or the test's time limit, is how the test ended it.
        """
        found = list(
            {
                verdict.summary: verdict
                for at, verdict in list(self.said)
                if at >= test.began and (verdict.kind != "dead" or at < test.ends_at)
            }.values()
        )
        leading = [verdict for verdict in found if verdict.kind != "dead"] or found
        return (
            [leading[-1], *(verdict for verdict in found if verdict is not leading[-1])]
            if found
            else []
        )


class SuiteObserver:
    """Watches the jobs whose folders appear in ``box_dir``."""

    def __init__(self, box_dir: Path) -> None:
        self._folder = job_dirs.user_folder(box_dir)
        self._resolved = config.load_settings(strict=False)
        self._dumps = Path(tempfile.mkdtemp(prefix="commlens-pytest-"))
        self._test = Test()
        self._jobs: list[Job] = []

    def run(self) -> None:
        """Serve the pytest process until it ends."""
        parent, received = os.getppid(), b""
        try:
            while os.getppid() == parent:
                if select.select([sys.stdin.fileno()], [], [], POLL_S)[0]:
                    got = os.read(sys.stdin.fileno(), 65536)
                    if not got:
                        return
                    *lines, received = (received + got).split(b"\n")
                    for line in lines:
                        self._receive(json.loads(line))
                self._find_jobs()
                self._look_in_time()
                self._show()
        finally:
            self._end_ranks(parent)
            for job in self._jobs:
                job.watcher.stop()
            shutil.rmtree(self._dumps, ignore_errors=True)
            # a pytest that was killed cannot do it
            shutil.rmtree(self._folder.parent, ignore_errors=True)

    def _receive(self, message: dict[str, Any]) -> None:
        if "begin" in message:
            self._jobs = [job for job in self._jobs if job.thread.is_alive()]
            self._test = Test(message["begin"], time.monotonic())
            for job in self._jobs:
                job.issued_before = job.issued
        elif "end" in message:
            self._test = Test()
        elif "limit" in message:
            seconds = float(message["seconds"])
            if seconds > 0:
                self._test.limit_s, self._test.ends_at = seconds, time.monotonic() + seconds
                self._test.look_at = self._test.ends_at - min(_LOOK_BEFORE_S, seconds / 2)
                self._test.ends_pytest = message["method"] == "thread"
        elif "ask" in message:
            summary, text = self._answer()
            print(json.dumps({"of": message["ask"], "summary": summary, "text": text}), flush=True)
        elif "look" in message:
            self._find_jobs()
            for job in self._jobs_of_test():
                self._look(job)
            self._test.ends_at = time.monotonic()
            has_verdict = any(job.verdicts(self._test) for job in self._jobs_of_test())
            print(json.dumps({"of": message["look"], "has_verdict": has_verdict}), flush=True)

    # --- jobs

    def _find_jobs(self) -> None:
        now = time.monotonic()
        watched = set()
        for job in self._jobs:
            if not job.thread.is_alive():
                job.ended = min(job.ended, now)
            else:
                watched.add(job.folder)
                # of ranks that have ended, the boxes are removed
                job.issued = max(job.issued, issued(job.folder))
        try:
            folders = [
                path
                for path in self._folder.iterdir()
                if path not in watched and job_dirs.boxes(path)
            ]
        except OSError:
            return
        for folder in folders:
            if not any(job.folder == folder and now - job.ended < POLL_S for job in self._jobs):
                self._watch(folder)

    def _watch(self, folder: Path) -> None:
        from commlens.model.verdict import Verdict
        from commlens.watch.watcher import Watcher

        settings = dataclasses.replace(self._resolved.settings, dump_dir=str(self._dumps), job=None)
        if self._resolved.origins["stall_timeout"] == config.DEFAULT:
            stall_s = min(STALL_S, self._test.limit_s / 3 or STALL_S)
            settings = dataclasses.replace(settings, stall_timeout=stall_s)
        said: list[tuple[float, Verdict]] = []

        def say(message: str | Verdict) -> None:
            if isinstance(message, Verdict) and message.is_fault:
                said.append((time.monotonic(), message))

        watcher = Watcher([folder], settings, say=say)
        thread = threading.Thread(target=watcher.run, name=f"watch {folder.name}", daemon=True)
        self._jobs.append(Job(folder, watcher, thread, time.monotonic(), said))
        thread.start()

    def _jobs_of_test(self) -> list[Job]:
        """Return the jobs that the test started or used. Others hang since an earlier test."""
        return [
            job
            for job in self._jobs
            if job.began >= self._test.began or job.issued > job.issued_before
        ]

    def _look(self, job: Job) -> None:
        """Diagnose a job whose watcher has not yet said anything."""
        from commlens.diagnosis.examine import examine_logs
        from commlens.watch.snapshot import snapshot

        if job.verdicts(self._test) or not is_running(job.folder):
            return
        examined = examine_logs(snapshot(job.folder))
        if not examined.verdict.is_fault or job.verdicts(self._test):
            return
        with contextlib.suppress(CommlensError):
            job.own_dump = self._save(job.folder, examined)
        job.said.append((time.monotonic(), examined.verdict))

    def _save(self, folder: Path, examined: ExaminedJob) -> Path:
        """Save a dump with its verdict and page. Returns its folder."""
        from commlens.dumps import save
        from commlens.reports.verdict_page import verdict_html
        from commlens.watch import snapshot

        settings = self._resolved.settings
        mode = int(settings.dump_mode, 8)
        dump = snapshot.dump(self._dumps, folder, window_s=0.0, keep=settings.keep_dumps, mode=mode)
        save.save_reports(
            dump,
            host=os.uname().nodename,
            page=verdict_html(examined),
            verdict=examined.verdict.to_json(),
            mode=mode,
        )
        return dump

    def _end_ranks(self, parent: int) -> None:
        """End the ranks that hang and outlive the tests: Python waits for child processes before it
        exits, so pytest would hang.
        """
        hung = [job_dirs.boxes(job.folder) for job in self._jobs if job.said]
        # Under torchrun -m pytest, pytest itself is a rank, and the others may still write their
        # reports.
        boxes = [box for job in hung if parent not in map(job_dirs.box_pid, job) for box in job]
        left = _running(boxes)
        _end(left)
        if left:
            pids = ", ".join(str(job_dirs.box_pid(box)) for box in left)
            _write(
                f"\ncommlens: ended {count(len(left), 'rank')} that hung in a test and outlived it"
                f" (pid {pids}).\n"
            )

    # --- words

    def _look_in_time(self) -> None:
        """Look at the jobs before pytest-timeout ends the test: afterwards, its ranks may be
        gone.
        """
        test, now = self._test, time.monotonic()
        if now < test.look_at or now > test.ends_at:
            return
        test.look_at = now + _LOOK_EVERY_S
        for job in self._jobs_of_test():
            self._look(job)
            if test.ends_pytest:
                self._print(job)

    def _show(self) -> None:
        """Print the verdict of a test that hangs."""
        if not self._test.name:
            return
        since = time.monotonic() - SHOW_AFTER_S
        for job in self._jobs_of_test():
            found = [at for at, _ in list(job.said) if at >= self._test.began]
            if found and found[0] < since and is_running(job.folder):
                self._print(job)

    def _print(self, job: Job) -> None:
        verdicts = job.verdicts(self._test)
        if job.is_shown or not verdicts:
            return
        job.is_shown = True
        seconds = time.monotonic() - self._test.began
        _write(
            f"\ncommlens: {self._test.name} has been running for {seconds:.0f}"
            f" s:\n{_render(verdicts[0])}\n"
        )

    def _answer(self) -> tuple[str, str]:
        """Return the verdict on the test that has just failed, in one sentence and in full."""
        self._find_jobs()
        summary, texts = "", []
        for job in self._jobs_of_test():
            if not is_running(job.folder):
                # the last verdict of a job comes when all its ranks have ended
                job.thread.join(_FINISH_S)
            self._look(job)
            verdicts = job.verdicts(self._test)
            if not verdicts:
                continue
            summary = summary or " ".join(verdicts[0].summary.split())
            texts.append(
                "\n\n".join([*(_render(verdict) for verdict in verdicts), *self._keep_dump(job)])
            )
        return summary, "\n\n".join(texts)

    def _keep_dump(self, job: Job) -> list[str]:
        """Move the dump of a failed test to where dumps are kept."""
        dump = job.dump()
        if dump is None or not dump.exists():
            return []
        kept = Path(self._resolved.settings.dump_dir) / dump.name
        try:
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.move(dump, kept)
        except OSError as error:
            return [f"The dump could not be saved in {kept}: {error.strerror}."]
        return [f"The dump is in {kept}: open {kept / 'index.html'}"]


def is_running(folder: Path) -> bool:
    """Return whether a rank of the job runs."""
    return any(job_dirs.has_ended(box) is False for box in job_dirs.boxes(folder))


def _running(boxes: Iterable[Path]) -> list[Path]:
    return [box for box in boxes if job_dirs.has_ended(box) is False]


def _end(boxes: list[Path]) -> None:
    """Terminate the ranks of some boxes, and kill those that go on."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for box in boxes:
            with contextlib.suppress(OSError):
                os.kill(job_dirs.box_pid(box), number)
        until = time.monotonic() + _END_S
        while (boxes := _running(boxes)) and time.monotonic() < until:
            time.sleep(0.05)


def issued(folder: Path) -> int:
    """Return how many collectives the ranks of the job have issued."""
    from commlens.blackbox.reader import OpenBox

    total = 0
    for box in job_dirs.boxes(folder):
        with contextlib.suppress(FormatError, OSError), OpenBox(box) as opened:
            total += opened.status().issued
    return total


def _render(verdict: Verdict) -> str:
    from commlens.reports.terminal import render

    return "\n".join(line.rstrip() for line in render(verdict, 100).rstrip().split("\n"))


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def main(argv: list[str]) -> int:
    """Observe the jobs whose folder of boxes is the only argument."""
    if len(argv) != 1:
        print("usage: python -m commlens.testing.observer BOX_DIR", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    SuiteObserver(Path(argv[0])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
