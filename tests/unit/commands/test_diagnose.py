"""``commlens diagnose``: exit statuses, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from boxes import busy_box
from builders import Job, Stay, at, training
from node_files import NodeFiles

from commlens import commands
from commlens.dumps.read import JobLogs
from commlens.model.ranklog import RankLog


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[RankLog], list[str]], None]:
    """The reader finds these logs. What it does with files is tested in test_dumps."""

    def set_logs(logs: list[RankLog], problems: list[str]) -> None:
        evidence = JobLogs(logs=logs, problems=problems)
        found = SimpleNamespace(own=[None] if logs else [], kinds={}, problems=problems, reports=[])
        monkeypatch.setattr("commlens.diagnosis.api.discover", lambda paths, prefix="": found)
        monkeypatch.setattr(
            "commlens.diagnosis.api.read_own_files", lambda files, problems: evidence
        )

    return set_logs


@pytest.mark.parametrize(
    ("stay", "after_s", "status"),
    [(None, 30.0, 0), (Stay(57, "load_batch"), 30.0, 1), (Stay(57, "load_batch"), 0.2, 0)],
)
def test_exit_status(
    reads: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    stay: Stay | None,
    after_s: float,
    status: int,
) -> None:
    fault = at(2, 5, stay) if stay is not None else lambda *_: None
    reads(Job(4).run(training(fault)).logs(after_s=after_s), ["rank9.box is empty."])
    assert commands.main(["diagnose", "dumps"]) == status
    text = capsys.readouterr().out
    assert text.startswith("VERDICT  ")
    assert "rank9.box is empty." in text


def test_stalled_after_makes_a_short_wait_a_fault(reads: Callable[..., None]) -> None:
    reads(Job(4).run(training(at(2, 5, Stay(57, "load_batch")))).logs(after_s=0.9), [])
    assert commands.main(["diagnose", "dumps"]) == 0
    assert commands.main(["diagnose", "--stalled-after", "0.5", "dumps"]) == 1


def test_json(reads: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    reads(Job(4).run(training(at(2, 5, Stay(57, "load_batch")))).logs(), [])
    assert commands.main(["diagnose", "--json", "dumps"]) == 1
    assert json.loads(capsys.readouterr().out)["culprits"] == [2]


def test_html(
    reads: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reads(Job(4).run(training(at(2, 5, Stay(57, "load_batch")))).logs(), [])
    assert (
        commands.main(["diagnose", "--html", str(tmp_path / "new" / "verdict.html"), "dumps"]) == 1
    )
    said = capsys.readouterr()
    assert (
        said.out.startswith("VERDICT  ")
        and said.err == f"commlens: Wrote {tmp_path}/new/verdict.html: open it in a browser.\n"
    )
    page = (tmp_path / "new" / "verdict.html").read_text()
    assert page.startswith("<!doctype html>") and "VERDICT  rank 2 never reached" in page
    assert commands.main(["diagnose", "--html", str(tmp_path), "dumps"]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_nothing_readable_is_status_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0.1.box").write_bytes(b"COMMLENS" + bytes(100))
    assert commands.main(["diagnose", str(tmp_path)]) == 3
    error = capsys.readouterr().err
    assert "no readable black box" in error
    assert "rank0.1.box" in error


def test_an_unreadable_black_box_of_a_rank_without_another_is_status_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        box = busy_box(rank)
        box.complete(10)
        box.write(tmp_path)
    assert commands.main(["diagnose", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("rank3.*")
    path.write_bytes(path.read_bytes()[:100])
    assert commands.main(["diagnose", str(tmp_path)]) == 3
    assert "no fault shows in what ranks 0-2 recorded, but 1 file could not be read" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty", None, "There is nothing to diagnose in {}: no readable black box or dump.\n"),
        (
            "program.py",
            b"print(1)\n",
            "There is nothing to diagnose in {}: no readable black box or dump.\n",
        ),
        (
            "x.json",
            b'{"schema": "commlens.trace/1"}',
            "  - {} is a trace, which commlens view {} shows, and is left out.\n",
        ),
    ],
)
def test_the_path_is_named_that_holds_no_dump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, said: str
) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    assert commands.main(["diagnose", str(path)]) == 3
    assert capsys.readouterr().err.endswith(said.format(path, path))


@pytest.mark.parametrize(
    "arguments",
    [["/no/such/folder"], ["--stalled-after", "-1", "."], ["--stalled-after", "soon", "."]],
)
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    try:
        status = commands.main(["diagnose", *arguments])
    except SystemExit as error:
        status = error.code  # type: ignore[assignment]
    assert status == 2


@pytest.mark.launches
def test_it_needs_no_torch() -> None:
    modules = "commlens.commands.diagnose, commlens.diagnosis.examine, commlens.reports.terminal"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class TestEntries:
    @pytest.fixture
    def boxes(self, tmp_path: Path) -> Path:
        for rank in range(4):
            busy_box(rank, records=9 if rank == 2 else 10).write(tmp_path / "boxes")
        return tmp_path / "boxes"

    def test_they_follow_the_verdict(self, boxes: Path, capsys: pytest.CaptureFixture[str]) -> None:
        commands.main(["diagnose", str(boxes), "--entries", "3", "--stacks"])
        text = capsys.readouterr().out
        assert text.startswith("VERDICT  ")
        assert "Entries of the default group [0-3], by number: 4 ranks in 2 columns" in text
        assert "    /home/me/train.py:81 step" in text

    def test_ranks_can_be_chosen(self, boxes: Path, capsys: pytest.CaptureFixture[str]) -> None:
        commands.main(
            ["diagnose", str(boxes), "--entries", "--ranks", "1-2", "--group", "default_pg"]
        )
        assert ": 2 ranks in 2 columns" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "options",
        [["--entries", "--json"], ["--stacks", "--json"], ["--ranks", "1"], ["--group", "dp"]],
    )
    def test_what_does_not_go_together(self, boxes: Path, options: list[str]) -> None:
        assert commands.main(["diagnose", str(boxes), *options]) == 2

    @pytest.mark.parametrize(
        "options", [["--entries", "0"], ["--entries", "x"], ["--ranks", "x"], ["--ranks", "5-1"]]
    )
    def test_bad_values(self, boxes: Path, options: list[str]) -> None:
        assert commands.main(["diagnose", str(boxes), *options]) == 2


def test_files_of_nodes_tell_what_the_hardware_did(
    reads: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logs = Job(4, host="n03").run(training(at(2, 5, Stay(57, "load_batch")))).logs()
    stopped_ns = min(log.collectives[-1].announced_ns for log in logs if log.rank != 2)
    NodeFiles(tmp_path / "n03").log("nfs: server a not responding, timed out", stopped_ns)
    reads(logs, [])
    assert commands.main(["diagnose", "dumps", "--health", str(tmp_path)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "On n03, the file server a did not respond at" in text
    assert "look at the storage that n03 uses" in text


def test_a_folder_without_files_of_nodes_is_refused(
    reads: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    reads([], [])
    assert commands.main(["diagnose", "dumps", "--health", str(tmp_path)]) == 2
    assert "holds no files of nodes" in capsys.readouterr().err
