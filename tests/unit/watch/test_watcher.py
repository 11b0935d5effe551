"""The watcher on small real processes with real black boxes; a diagnosis of a few lines decides
what is wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from boxes import MONO, Box
from watch_ranks import Rank, eventually

from commlens.blackbox import job_dirs
from commlens.blackbox import layout as L
from commlens.config import Settings
from commlens.diagnosis.index.activity import movement
from commlens.model.ranklog import End, RankLog
from commlens.model.sender import Sender
from commlens.model.verdict import CollectiveRef, Confidence, Verdict
from commlens.processes.ranks import RankProcess
from commlens.watch.reporting import Reporter
from commlens.watch.roster import Roster
from commlens.watch.watcher import Watcher

pytestmark = pytest.mark.launches

BAD = (End.FAILED, End.KILLED, End.GONE)


def diagnose(logs: Sequence[RankLog], **_: object) -> Verdict:
    dead = [log for log in logs if log.observation.end in BAD]
    if dead:
        first = min(dead, key=lambda log: log.observation.ended_ns)
        return Verdict(kind="dead", culprits=[first.rank], summary=f"rank {first.rank} died")
    waiting = [log.rank for log in logs if any(each.in_flight for each in log.collectives)]
    absent = [log for log in logs if log.rank not in waiting]
    if not waiting or not absent:
        return Verdict()
    works = any(movement(log)[1] for log in absent)
    newest = max(log.collectives[-1].sequence_number for log in logs if log.rank in waiting)
    return Verdict(
        kind="waiting" if works else "missing",
        culprits=[log.rank for log in absent],
        victims=waiting,
        summary=f"rank {absent[0].rank} is missing",
        collective=CollectiveRef("all_reduce", newest),
    )


class Job:
    """A job of some ranks, and the watcher of it in a thread."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "boxes" / "job-1"
        self.dumps = tmp_path / "dumps"
        self.ranks: list[Rank] = []
        self.said: list[str] = []
        self.times: list[float] = []
        self.watcher: Watcher | None = None
        self.thread: threading.Thread | None = None

    def start(self, world_size: int = 2, **options: object) -> None:
        self.ranks = [Rank(self.folder, rank, world_size, **options) for rank in range(world_size)]

    def say(self, what: str | Verdict) -> None:
        self.said.append(what if isinstance(what, str) else f"{what.kind} {what.culprits}")
        self.times.append(time.monotonic())

    def watch(
        self,
        workers: Callable[[], list[RankProcess]] | None = None,
        end_job: Callable[[str], None] | None = None,
        **changed: object,
    ) -> None:
        settings = Settings(**({"stall_timeout": 0.6, "dump_dir": str(self.dumps)} | changed))  # type: ignore[arg-type]
        self.watcher = Watcher(
            [self.folder],
            settings,
            say=self.say,
            diagnose=diagnose,
            workers=workers,
            end_job=end_job,
        )
        self.thread = threading.Thread(target=self.watcher.run, daemon=True)
        self.thread.start()

    def ended(self) -> bool:
        return self.thread is not None and not self.thread.is_alive()

    def heard(self, text: str) -> bool:
        return any(text in said for said in self.said)

    @property
    def saved(self) -> list[str]:
        return sorted(path.name.split(".")[0] for path in self.dumps.glob("*/rank*.box"))

    def close(self) -> None:
        for rank in self.ranks:
            rank.end()
        if self.thread is not None:
            self.thread.join(10)
            assert not self.thread.is_alive(), "the watcher outlived its job"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def test_a_stall_is_reported_once_with_a_dump_and_its_end(job: Job) -> None:
    job.start()
    job.watch()
    job.ranks[0].tell("announce")
    began = time.monotonic()
    eventually(lambda: job.heard("missing [1]"))
    assert job.times[0] - began >= 0.55
    eventually(lambda: job.heard("dump saved in"))
    assert job.saved == ["rank0", "rank1"]
    [page], [verdict] = job.dumps.glob("*/index.html"), job.dumps.glob("*/verdict.json")
    assert job.heard(f"open {page}") and b"commlens" in page.read_bytes()
    assert msgspec.json.decode(verdict.read_bytes(), type=Verdict).culprits == [1]
    time.sleep(1.0)
    assert len(job.said) == 2, f"said again: {job.said}"
    job.ranks[1].tell("announce")
    for rank in job.ranks:
        rank.tell("done")
    eventually(lambda: job.heard("rank 1 arrived after"))
    assert job.said[-1].endswith("the job goes on.")
    # Another stall is another verdict.
    job.ranks[1].tell("announce")
    eventually(lambda: job.heard("missing [0]"))


def test_a_wait_that_times_out_is_not_an_arrival(job: Job) -> None:
    job.start()
    job.watch()
    job.ranks[0].tell("announce")
    eventually(lambda: job.heard("missing [1]") and job.heard("dump saved in"))
    job.ranks[0].tell("fail")
    time.sleep(1.0)
    assert not job.heard("goes on"), "it may be ending"
    job.ranks[0].tell("announce")  # the program has caught the error
    eventually(lambda: job.heard("rank 0 gave up waiting after"))
    assert not job.heard("arrived")


def test_a_clean_end_leaves_nothing(job: Job) -> None:
    job.start()
    job.watch()
    for rank in job.ranks:
        rank.tell("announce")
        rank.tell("done")
        rank.tell("phase 2")
        rank.tell("exit 0", answers=False)
    eventually(job.ended)
    assert job.said == []
    assert not job.folder.exists()
    assert job.saved == []


def test_ranks_in_another_container_do_not_keep_the_watcher_and_keep_their_boxes(job: Job) -> None:
    job.start(1)
    other = Box(1, 2, pid=job.ranks[0].pid, job=job.folder.name, host=os.uname().nodename)
    other.heartbeat(MONO, time.time_ns())
    other.write(job.folder)
    job.watch(stall_timeout=60.0)
    job.ranks[0].tell("exit 0", answers=False)
    eventually(job.ended)
    assert [job_dirs.box_rank(box) for box in job_dirs.boxes(job.folder)] == [1]


def test_a_rank_that_is_working_is_no_fault(job: Job) -> None:
    job.start()
    job.watch(stall_timeout=1.5)
    job.ranks[1].tell("spin 4", answers=False)
    job.ranks[0].tell("announce")
    eventually(lambda: job.said != [])
    assert job.said == ["Rank 1 is missing."], "a notice, no verdict"
    assert job.saved == []


@pytest.mark.parametrize(("how", "words"), [("exit 3", "dead [1]"), ("kill", "dead [1]")])
def test_a_death_is_reported_at_once(job: Job, how: str, words: str) -> None:
    job.start(3)
    job.watch(stall_timeout=60.0)
    job.ranks[0].tell("announce")
    time.sleep(0.3)
    if how == "kill":
        os.kill(job.ranks[1].pid, signal.SIGKILL)
    else:
        job.ranks[1].tell(how, answers=False)
    began = time.monotonic()
    eventually(lambda: job.heard(words))
    assert time.monotonic() - began < 15, "the stall timeout is 60 s"
    # What falls after it is not told again.
    os.kill(job.ranks[0].pid, signal.SIGKILL)
    os.kill(job.ranks[2].pid, signal.SIGTERM)
    eventually(job.ended)
    assert len([said for said in job.said if said.startswith("dead")]) == 1
    assert job.saved == ["rank0", "rank1", "rank2"]
    assert not job.folder.exists(), "kept in the dump, gone from memory"


def test_a_job_that_was_stopped_did_not_die(job: Job) -> None:
    job.start()
    job.watch(stall_timeout=60.0)
    for rank in job.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    eventually(job.ended)
    assert job.said == []
    assert not job.folder.exists()


def test_a_single_rank_that_gets_a_sigterm_died(job: Job) -> None:
    job.start()
    job.watch(stall_timeout=60.0)
    eventually(lambda: job.watcher is not None)
    time.sleep(0.3)
    os.kill(job.ranks[1].pid, signal.SIGTERM)
    eventually(lambda: job.heard("dead [1]"))


def test_a_rank_that_gets_a_sigterm_under_a_launcher_died(job: Job) -> None:
    """The launcher then ends the others in the same way. If it got a signal itself, it stops the
    job.
    """
    job.start(3)
    workers = [RankProcess(rank.rank, rank.pid, 0, 3) for rank in job.ranks]
    job.watch(workers=lambda: workers, stall_timeout=60.0)
    time.sleep(0.5)
    os.kill(job.ranks[1].pid, signal.SIGTERM)
    job.ranks[1].process.wait(10)
    time.sleep(0.1)
    for rank in (job.ranks[0], job.ranks[2]):
        os.kill(rank.pid, signal.SIGTERM)
    eventually(lambda: job.heard("dead [1]"))
    assert job.watcher is not None
    job.watcher.stop()
    eventually(job.ended)
    assert job.saved == ["rank0", "rank1", "rank2"]
    observed = msgspec.json.decode(next(job.dumps.glob("*/observed-*.json")).read_bytes())
    assert [observed["ranks"][rank].get("ended_alone") for rank in "012"] == [None, True, None]


def test_nobody_is_blamed_while_all_ranks_are_stopped(job: Job) -> None:
    job.start()
    job.watch(stall_timeout=1.0)
    job.ranks[0].tell("announce")
    for rank in job.ranks:
        os.kill(rank.pid, signal.SIGSTOP)
    time.sleep(2.5)
    for rank in job.ranks:
        os.kill(rank.pid, signal.SIGCONT)
    for rank in job.ranks[::-1]:
        rank.tell("announce")
        rank.tell("done")
    time.sleep(0.5)
    assert [said for said in job.said if "all ranks here are stopped" not in said] == []
    job.ranks[0].tell("announce")
    eventually(lambda: job.heard("missing [1]"))


def test_a_wait_is_not_reported_while_a_rank_is_ending(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a killed process may take seconds to end."""
    monkeypatch.setattr(
        "commlens.watch.watcher.process.is_ending", lambda pid: pid == job.ranks[1].pid
    )
    job.start()
    job.watch()
    job.ranks[0].tell("announce")
    time.sleep(1.5)
    assert job.said == []
    os.kill(job.ranks[1].pid, signal.SIGKILL)
    eventually(lambda: job.heard("dead [1]"))
    assert job.said[0] == "dead [1]"


def test_a_death_replaces_the_verdict_that_it_explains(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commlens.watch.reporting.explains", lambda death, earlier: True)
    job.start()
    job.watch()
    job.ranks[0].tell("announce")
    eventually(lambda: job.heard("missing [1]"))
    os.kill(job.ranks[1].pid, signal.SIGKILL)
    eventually(lambda: job.heard("the earlier verdict on rank 1 no longer holds"))


def test_damaged_words_are_not_believed_and_damaged_boxes_not_left(job: Job) -> None:
    job.start(2, timeout_s=1800)
    job.watch(stall_timeout=2.0)
    for rank in job.ranks:
        rank.tell("announce")
        rank.tell("done")
    boxes = job_dirs.boxes(job.folder)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        with boxes[0].open("r+b") as file:
            for at, word in (
                (L.OLDEST_INDEX, 1),
                (L.OLDEST_SINCE, 1),
                (L.TIMEOUT_MS, 1),
                (L.MAIN_STACK_SINCE, 1),
            ):
                file.seek(at)
                file.write(L.LIVE_WORD.pack(word))
        time.sleep(0.05)
    with boxes[1].open("r+b") as file:
        file.write(bytes(64))
    for rank in job.ranks:
        rank.tell("exit 0", answers=False)
    eventually(job.ended)
    assert job.said == []
    assert not job.folder.exists()


def test_abort_ends_the_ranks(job: Job) -> None:
    job.start()
    job.watch(abort_on="stall")
    job.ranks[0].tell("announce")
    eventually(job.ended)
    assert job.said[0] == "missing [1]"
    assert [rank.process.wait(5) for rank in job.ranks] == [-signal.SIGTERM, -signal.SIGTERM]
    assert job.saved == ["rank0", "rank1"]
    assert not job.heard("dead")


def test_a_disagreement_ends_the_job_even_if_it_is_not_known_which_rank_is_wrong(job: Job) -> None:
    job.start()
    job.watch(abort_on="stall")
    assert job.watcher is not None
    verdict = Verdict(
        kind="mismatch/shape", culprits=[], victims=[0, 1], confidence="low", certain=True
    )
    job.watcher._diagnoser._make_verdict = lambda logs, **_: verdict
    job.ranks[0].tell("announce")
    eventually(job.ended)


@pytest.mark.parametrize(
    ("seen", "confidence", "doubt"),
    [(2, "low", "confidence is low"), (1, "high", "no record of rank 1 here")],
)
def test_abort_needs_complete_evidence(
    job: Job, seen: int, confidence: Confidence, doubt: str
) -> None:
    job.ranks = [Rank(job.folder, rank, 2) for rank in range(seen)]
    job.watch(abort_on="stall")
    assert job.watcher is not None
    verdict = Verdict(kind="missing", culprits=[1], victims=[0], confidence=confidence)
    job.watcher._diagnoser._make_verdict = lambda logs, **_: verdict
    job.ranks[0].tell("announce")
    eventually(lambda: job.heard("the job goes on, although abort_on includes stall"))
    assert job.heard(doubt)
    assert all(rank.process.poll() is None for rank in job.ranks)


def test_abort_kills_ranks_that_ignore_sigterm(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlens.watch.job_abort.KILL_AFTER_S", 0.5)
    job.start()
    os.kill(job.ranks[1].pid, signal.SIGSTOP)
    job.watch(abort_on="stall")
    job.ranks[0].tell("announce")
    eventually(job.ended)
    assert job.ranks[1].process.wait(5) == -signal.SIGKILL


def test_a_dump_is_saved_before_the_groups_timeout_expires(job: Job) -> None:
    job.start(2, timeout_s=2.0)
    job.watch(stall_timeout=60.0)
    job.ranks[0].tell("announce")
    began = time.monotonic()
    eventually(lambda: job.heard("timeout of 2 s is about to expire"))
    assert 1.5 < time.monotonic() - began < 15, (
        "it comes with the group's timeout of 2 s, not with the stall timeout of 60 s"
    )
    assert job.saved == ["rank0", "rank1"]
    assert job.heard("missing [1]"), (
        "the timeout will end the job: this is the last chance to say why"
    )


def test_no_heartbeat_and_no_dump_folder(job: Job, tmp_path: Path) -> None:
    """The verdict is printed even if no dump can be saved."""
    (tmp_path / "file").write_text("")
    job.start()
    job.watch(dump_dir=str(tmp_path / "file" / "below"))
    job.ranks[1].tell("silence")
    job.ranks[0].tell("announce")
    eventually(lambda: job.heard("missing [1]"))
    eventually(lambda: job.heard("no dump could be saved"))


def test_the_ranks_of_a_launcher(job: Job) -> None:
    """A worker without a box is watched, and ranks that the launcher ends after the first death are
    not reported.
    """
    job.start(2)
    quiet = Rank(job.folder.with_name("elsewhere"), 2, 3)
    job.ranks.append(quiet)
    workers = [RankProcess(rank.rank, rank.pid, 0, 3) for rank in job.ranks]
    job.watch(workers=lambda: workers, stall_timeout=60.0)
    time.sleep(0.5)
    quiet.tell("exit 1", answers=False)
    eventually(lambda: job.heard("dead [2]"))
    for rank in job.ranks[:2]:
        os.kill(rank.pid, signal.SIGTERM)
    assert job.watcher is not None
    time.sleep(0.3)
    assert not job.ended(), "a launcher may start its workers anew"
    job.watcher.stop()
    eventually(job.ended)
    assert [said for said in job.said if said.startswith("dead")] == ["dead [2]"]
    assert not job.folder.exists()


def test_failures_that_only_the_agent_saw(job: Job) -> None:
    job.watch(workers=list, stall_timeout=60.0)
    assert job.watcher is not None
    job.watcher.stop({1: (2**22 + 5, -11), 0: (2**22 + 6, 1)})
    eventually(job.ended)
    assert any(said.startswith("dead") for said in job.said)


def test_a_restart_starts_a_new_generation(job: Job) -> None:
    job.start(2)
    job.watch(workers=list, stall_timeout=60.0)
    time.sleep(0.4)
    job.ranks[1].tell("exit 3", answers=False)
    eventually(lambda: job.heard("dead [1]"))
    job.ranks[0].end()
    again = [Rank(job.folder, rank, 2, restart=1) for rank in range(2)]
    job.ranks += again
    eventually(lambda: len(list(job.folder.glob("*.box"))) == 2)
    again[0].tell("exit 4", answers=False)
    eventually(lambda: job.heard("dead [0]"))
    assert job.watcher is not None
    again[1].end()
    job.watcher.stop()
    eventually(job.ended)


def test_an_error_of_the_watcher_is_logged_and_the_job_goes_on(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.start()
    job.watch()
    assert job.watcher is not None

    def broken(*_: object, **__: object) -> Verdict:
        raise RuntimeError("no idea")

    job.watcher._diagnoser._make_verdict = broken
    job.ranks[0].tell("announce")
    eventually(job.ended)
    assert "the watcher failed and stops; the job goes on" in caplog.text
    assert job.ranks[0].process.poll() is None


def test_an_error_of_the_comparison_leaves_the_rest_of_the_watcher(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.start()
    job.watch()
    assert job.watcher is not None

    def broken(now: float) -> None:
        raise RuntimeError("no idea")

    job.watcher._mismatches.verification.poll = broken  # type: ignore[method-assign]
    job.ranks[0].tell("announce")
    eventually(lambda: job.heard("missing [1]"))
    assert "deferred verification failed and stops" in caplog.text


def test_a_rank_without_a_box_does_not_keep_those_of_the_others(job: Job) -> None:
    """It was found by its environment, and lives on after the recorded ranks have ended."""
    job.ranks = [Rank(job.folder, 0, 2)]
    job.watch(stall_timeout=30)
    assert job.watcher is not None
    eventually(lambda: job.watcher is not None and len(job.watcher._roster.current()) == 1)
    job.watcher._roster.add_worker(RankProcess(1, os.getpid(), 0, 2))
    job.watcher._observer.add(os.getpid(), 0)
    job.ranks[0].end()
    eventually(job.ended)
    assert not list(job.folder.glob("*.box"))


def test_it_starts_without_the_diagnosis() -> None:
    """The ranks may end at any moment, and what a diagnosis needs takes as long to import as all
    the rest.
    """
    for module, late in (
        ("commlens.watch.watcher", "commlens.diagnosis.examine"),
        ("commlens.watch.__main__", "commlens.watch.watcher"),
    ):
        program = f"import sys, {module}; sys.exit({late!r} in sys.modules)"
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class Unready:
    """Keeps a watcher from its work until its launcher has nothing more to run."""

    def __init__(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        self._job = job
        self._prepares, self._may_go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(Reporter, "preload", lambda _: self._prepare())

    def _prepare(self) -> None:
        self._prepares.set()
        self._may_go_on.wait(30)

    def watch(self) -> Watcher:
        self._job.watch(workers=list, stall_timeout=60.0)
        assert self._job.watcher is not None
        assert self._prepares.wait(30)
        return self._job.watcher

    def go_on(self) -> None:
        self._may_go_on.set()

    def stop(self) -> None:
        assert self._job.watcher is not None
        self._job.watcher.stop()
        self.go_on()
        eventually(self._job.ended)


def test_ranks_that_are_first_seen_after_their_end(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    unready = Unready(job, monkeypatch)
    unready.watch()
    job.start()
    for rank in job.ranks:
        rank.tell("exit 1", answers=False)
        rank.process.wait(30)
    unready.stop()
    assert job.heard("dead [0]")
    assert not job.folder.exists()


def test_a_signal_that_is_first_seen_after_the_end(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    unready = Unready(job, monkeypatch)
    watcher = unready.watch()
    job.start()
    os.write(watcher.wake_fileno, bytes([signal.SIGHUP]))
    for rank in job.ranks:
        os.kill(rank.pid, signal.SIGTERM)
        rank.process.wait(30)
    unready.stop()
    (line,) = job.said
    assert line.startswith("the launcher received SIGHUP and ends the job.")
    assert not job.folder.exists()


def test_a_rank_that_ends_the_job_before_it_is_seen(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    unready = Unready(job, monkeypatch)
    watcher = unready.watch()
    job.start(2)
    sender = Sender(pid=job.ranks[1].pid, is_own_user=True, name="python")
    monkeypatch.setattr("commlens.watch.watcher.take_sender", lambda _: sender)
    os.write(watcher.wake_fileno, bytes([signal.SIGTERM]))
    unready.go_on()
    eventually(lambda: job.said)
    assert job.said[0].startswith(f"the launcher received SIGTERM from rank 1 (pid {sender.pid})")
    for rank in job.ranks:
        rank.end()
    watcher.stop()
    eventually(job.ended)


def test_a_signal_while_the_workers_are_replaced(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    former_generation = Roster.former_generation

    @contextlib.contextmanager
    def signalled(roster: Roster) -> Iterator[None]:
        os.write(roster.wake_fileno, bytes([signal.SIGHUP]))
        with former_generation(roster):
            yield

    monkeypatch.setattr(Roster, "former_generation", signalled)
    job.start(2)
    job.watch(workers=list, stall_timeout=60.0)
    time.sleep(0.4)
    job.ranks[1].tell("exit 3", answers=False)
    eventually(lambda: job.heard("dead [1]"))
    job.ranks[0].end()
    job.ranks += [Rank(job.folder, rank, 2, restart=1) for rank in range(2)]
    eventually(lambda: job.heard("the launcher received SIGHUP and ends the job."))
    for rank in job.ranks[2:]:
        os.kill(rank.pid, signal.SIGTERM)
        rank.process.wait(30)
    assert job.watcher is not None
    job.watcher.stop()
    eventually(job.ended)
    assert [said for said in job.said if said.startswith("dead")] == ["dead [1]"]
