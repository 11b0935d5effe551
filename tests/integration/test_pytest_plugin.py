"""``pytest --commlens`` on a suite of somebody else, and ``run_on_ranks``."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from chosen import long

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from launching import installed
from zygote_client import Zygote

from commlens.blackbox import job_dirs
from commlens.errors import CommandError, RanksFailed
from commlens.testing import assert_collectives, run_on_ranks
from conftest import SOURCE

SUITE = """
import os, signal, time
import pytest, torch, torch.distributed as dist
import torch.multiprocessing as mp

def load_batch(file):
    open(file + "-hangs", "w").close()
    signal.pause()

def rank_main(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        load_batch(file)
    dist.all_reduce(torch.ones(4))

@pytest.fixture
def ranks(tmp_path):
    ranks = mp.spawn(rank_main, (str(tmp_path / "meeting"),), nprocs=2, join=False)
    while not (tmp_path / "meeting-hangs").exists():
        time.sleep(0.1)
    return ranks

@pytest.mark.timeout(5, func_only=True)
def test_hangs(ranks):
    ranks.join()

def test_fails_while_those_ranks_still_hang():
    assert "RANK" in os.environ
"""

SUITE_OF_FUNCTIONS = """
import os, signal, threading, time
import pytest, torch, torch.distributed as dist

def load_batch():
    # as the clock of pytest-timeout does; from another thread, so that this one stands still
    threading.Timer(4, os.kill, (os.getppid(), signal.SIGALRM)).start()
    signal.pause()

def train(how):
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("bad batch")
        load_batch()
    dist.all_reduce(torch.ones(4))

@pytest.mark.timeout(60)
def test_hangs(run_on_ranks):
    run_on_ranks(train, "hang")

def test_raises(run_on_ranks):
    run_on_ranks(train, "raise")
"""


def suite(
    folder: Path, *options: str, source: str = SUITE, zygote: Zygote | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest on the suite, with the plugin and torch's entry point as an installation has them:
    in a Python of its own, or in a fork of the zygote.
    """
    (folder / "test_suite.py").write_text(source)
    points = importlib.metadata.entry_points(group="pytest11")
    plugin = (
        []
        if any(point.value == "commlens.testing.plugin" for point in points)
        else ["-p", "commlens.testing.plugin"]
    )
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(installed(folder))]),
        "COLUMNS": "200",
        "CI": "1",
        "OMP_NUM_THREADS": "1",
    }
    for name in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
        environ.pop(name, None)
    command = [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", *options]
    if zygote is not None:
        return zygote.call(command, cwd=folder, env=environ, timeout_s=100)
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100
    )


def test_the_verdict_is_in_the_report_of_the_test_that_hangs_and_of_no_other(
    tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    monkeypatch.setenv("COMMLENS_BOX_DIR", str(boxes))
    done = suite(tmp_path, "--commlens", "--junitxml=report.xml", zygote=zygote)
    assert done.returncode == 1, done.stdout + done.stderr
    verdict = "rank 1 never reached all_reduce #2 of the default group [0-1]; rank 0 waits for it"
    assert (
        f"FAILED test_suite.py::test_hangs - commlens: {verdict} (Failed: Timeout (>5.0s)"
        in done.stdout
    ), done.stdout
    assert (
        "FAILED test_suite.py::test_fails_while_those_ranks_still_hang - AssertionError"
        in done.stdout
    ), done.stdout
    assert done.stdout.count("VERDICT") == 1, done.stdout
    assert "NEXT     look at load_batch (test_suite.py:8) on rank 1" in done.stdout, done.stdout
    hangs, fails = xml.parse(tmp_path / "report.xml").getroot().iter("testcase")
    assert verdict in hangs.find("failure").attrib["message"]  # type: ignore[union-attr]
    assert [(each.attrib["name"], each.attrib["value"]) for each in hangs.iter("property")] == [
        ("commlens", verdict)
    ]
    assert not list(fails.iter("property"))
    (dump,) = (tmp_path / "commlens-dumps").iterdir()
    assert (dump / "index.html").exists()
    assert "commlens: ended 2 ranks that hung in a test and outlived it" in done.stderr, done.stderr
    assert not list(boxes.iterdir())


def test_run_on_ranks_has_a_verdict_with_its_page_however_it_ends(
    tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    monkeypatch.setenv("COMMLENS_BOX_DIR", str(boxes))
    done = suite(tmp_path, "--commlens", source=SUITE_OF_FUNCTIONS, zygote=zygote)
    for name, verdict, error in (
        ("hangs", "rank 1 never reached all_reduce #2", "Failed: Timeout (>60.0s)"),
        ("raises", "rank 1 raised ValueError: bad batch", "commlens.errors.RanksFailed: Rank 1"),
    ):
        (line,) = (line for line in done.stdout.splitlines() if f"::test_{name} - " in line)
        assert f"- commlens: {verdict}" in line and f" ({error}" in line, done.stdout
    dumps = list((tmp_path / "commlens-dumps").iterdir())
    assert [(dump / "index.html").exists() for dump in dumps] == [True, True], done.stdout
    assert not list(boxes.iterdir())


def test_without_the_option_nothing_is_loaded_or_set(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import os, sys\ndef pytest_sessionfinish():\n    heavy = {'torch', 'numpy', 'msgspec',"
        " 'rich', 'yaml', 'commlens.config', 'commlens.testing.observation'}\n    print('LOADED',"
        " sorted(heavy & set(sys.modules)), [name for name in os.environ if name == 'COMMLENS'])\n"
    )
    done = suite(tmp_path, "-s", "--collect-only", "--ignore=test_suite.py")
    assert "LOADED [] []" in done.stdout, done.stdout + done.stderr


def test_a_setting_that_is_wrong_is_said_before_any_test_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMLENS_STALL_TIMEOUT", "soon")
    done = suite(tmp_path, "--commlens")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert (
        "--commlens cannot record: " in done.stderr and "COMMLENS_STALL_TIMEOUT" in done.stderr
    ), done.stderr
    assert "Traceback" not in done.stderr


# --- run_on_ranks


def load_batch() -> None:
    signal.pause()


def train(how: str) -> tuple[int, float]:
    ones = torch.ones(4)
    dist.all_reduce(ones)
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("bad batch")
        if how == "exit":
            os._exit(0)
        if how == "hang":
            load_batch()
        if how == "leave":
            return -1, 0.0
    dist.all_reduce(ones)
    print("trained")
    return dist.get_rank(), float(ones[0])


def test_each_rank_returns_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_on_ranks(train, "") == [(0, 4.0), (1, 4.0)]
    assert capsys.readouterr().out.splitlines() == ["[rank 0] trained", "[rank 1] trained"]


def children() -> set[int]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return {pid for pid in pids if job_dirs.parent_of(pid) == os.getpid()}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "raise",
            [
                "Rank 1 failed first: ValueError: bad batch",
                "in train\n",
                'raise ValueError("bad batch")',
            ],
        ),
        long(
            "exit",
            ["Rank 1 failed first: its process exited with status 0 before the function returned"],
        ),
        long(
            "leave",
            [
                "Rank 0 failed first: RuntimeError: ",
                "rank 1 finished without all_reduce #2",
                "Neither a majority nor",
            ],
        ),
        long(
            "hang", ["still running after 20 s", "rank 1 never reached all_reduce #2", "load_batch"]
        ),
    ],
)
def test_a_failure_names_the_rank_and_leaves_nothing(how: str, words: list[str]) -> None:
    before = children()
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(train, how, timeout_s=20 if how == "hang" else 60)
    assert caught.value.rank == (1 if how != "leave" else None)
    text = " ".join(str(caught.value).split())
    for each in words:
        assert " ".join(each.split()) in text, str(caught.value)
    assert not children() - before


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_the_test(after_s: float) -> None:
    """Do what the clock of pytest-timeout does, from another thread: this one stands still."""
    threading.Timer(after_s, os.kill, (os.getppid(), signal.SIGALRM)).start()


def wait_or_work(how: str) -> None:
    if dist.get_rank() == 1:
        end_the_test(3)
        if how == "waits":
            load_batch()
        while True:
            sum(range(1000))
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("waits", "VERDICT rank 1 never reached barrier #1"),
        long("works", "for rank 1, which is working"),
    ],
)
def test_the_verdict_is_printed_when_pytest_timeout_ends_the_call(
    how: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(pytest.fail.Exception, match="Timeout"):
        run_on_ranks(wait_or_work, how)
    printed = capsys.readouterr().out
    assert words in " ".join(printed.split()), printed


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(
        RanksFailed,
        match=(
            r"^Rank 0 failed first: its process was killed by SIGKILL before the function"
            r" returned\.$"
        ),
    ):
        run_on_ranks(killed, world_size=1)


def traced() -> object:
    import commlens

    with commlens.trace() as trace:
        dist.all_reduce(torch.ones(4))
    return trace.data


def test_the_fake_backend_takes_one_process() -> None:
    (data,) = run_on_ranks(traced, world_size=8, backend="fake")
    assert_collectives(data, {"all_reduce": 1}, bytes_at_most=100)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"backend": "nccl"}, "run_on_ranks has no backend 'nccl': it takes gloo or fake."),
        ({"world_size": 0}, "run_on_ranks takes a world_size of at least 1, not 0."),
        ({"timeout_s": 0}, "run_on_ranks takes a timeout_s of more than 0 seconds, not 0."),
        (
            {},
            (
                "lambda> to the ranks: define it at the top level of its module, and pass what it"
                " needs as arguments."
            ),
        ),
    ],
)
def test_bad_use_is_one_sentence(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(CommandError) as caught:
        run_on_ranks(lambda: 1, **wrong)  # type: ignore[arg-type]
    assert words in str(caught.value)
