"""The check for a machine with a GPU, without one: its processes, limits and reports work, so that
no slip costs the GPU's minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import _gpu_checks
import _gpu_machine
import gpu_check
import run_all
from _gpu_checks import Bench, Check, NoResultError, SkippedError
from _gpu_machine import Ended, Processes

from conftest import REPOSITORY

pytestmark = pytest.mark.timeout(240)
SCRIPT = REPOSITORY / "benchmarks" / "gpu_check.py"
MACHINE = {
    "torch": "2.11.0+cu130",
    "gpu": "a card",
    "driver": "1",
    "cuda": "13.0",
    "nccl": "2.28",
    "python": "3.12",
    "cores": 16,
}


def run(*options: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(
        Processes({"PATH": "/usr/bin:/bin"}, tmp_path), tmp_path, "cpu", "gloo", quick=True
    )


def running(bench: Bench, path: Path | None = None) -> gpu_check.Run:
    return gpu_check.Run(bench, MACHINE, path)


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stderr
    assert "Nothing was measured on a GPU: this torch sees no GPU." in done.stdout
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["rows"] == [] and report["left_out"] == [
        "Nothing was measured on a GPU: this torch sees no GPU."
    ]


@pytest.mark.long
def test_a_dry_run_goes_through_the_ranks(tmp_path: Path) -> None:
    only = ["states, p", "CPU", "graph, p", "ring, p", "cost", "watcher", "driver", "fork"]
    done = run(
        "--device",
        "cpu",
        "--backend",
        "gloo",
        "--quick",
        "--json",
        str(tmp_path / "dry.json"),
        "--only",
        *only,
    )
    machine, *results = lines_of(tmp_path / "dry.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine["torch"].startswith("2.")
    assert {one["check"]: one["status"] for one in results} == {
        check.name: "dry run" for check in gpu_check.CHECKS if check.name.startswith(tuple(only))
    }
    assert all(one["finds"] and one["words"] for one in results)
    report = json.loads((tmp_path / "dry.json").read_text())
    assert [row["check"] for row in report["rows"]] == [one["check"] for one in results] and report[
        "goals"
    ] == []
    assert (tmp_path / "dry.md").read_text().startswith("# On a GPU")
    assert "| states, python |" in (tmp_path / "dry.md").read_text()


@pytest.mark.long
def test_a_dry_run_of_two_ranks_names_the_culprit(tmp_path: Path) -> None:
    path = tmp_path / "dry.json"
    done = run(
        "--device",
        "cpu",
        "--backend",
        "gloo",
        "--quick",
        "--json",
        str(path),
        "--only",
        "pair, healthy",
        "pair, skipped",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, healthy, skipped = lines_of(path.with_suffix(".jsonl"))
    assert _gpu_checks.judge_healthy(healthy["finds"])[0] is True
    assert _gpu_checks.judge_fault([1])(skipped["finds"])[0] is True


def test_a_check_that_hangs_is_ended_and_the_next_one_runs(bench: Bench, tmp_path: Path) -> None:
    def hang(bench: Bench) -> dict[str, Any]:
        child = (
            "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time;"
            " time.sleep(99)']); time.sleep(99)"
        )
        ended = bench.processes.run([sys.executable, "-c", child], 1.5)
        raise NoResultError(ended.reason, hung=ended.status is None)

    here = running(bench, tmp_path / "out.json")
    began = time.monotonic()
    assert (
        here.check(Check("hangs", "", 30, hang, lambda finds: (True, "")), 30, bench).status
        == "hung"
    )
    assert time.monotonic() - began < 15
    assert bench.processes.end_all() == 0
    assert (
        here.check(
            Check("runs", "", 30, lambda bench: {"a": 1}, lambda finds: (True, "well")), 30, bench
        ).status
        == "dry run"
    )
    assert [one["check"] for one in lines_of(tmp_path / "out.jsonl")] == ["hangs", "runs"]


def test_no_error_of_a_check_stops_the_others(bench: Bench) -> None:
    def skip(bench: Bench) -> dict[str, Any]:
        raise SkippedError("there is one rank only")

    here = running(bench)
    outcomes = [
        here.check(
            Check("measure", "", 9, lambda bench: {"a": 1 / 0}, lambda finds: (True, "")), 30, bench
        ),
        here.check(
            Check("judge", "", 9, lambda bench: {}, lambda finds: (True, finds["b"])), 30, bench
        ),
        here.check(Check("skip", "", 9, skip, lambda finds: (True, "")), 30, bench),
        here.check(Check("late", "", 9, skip, lambda finds: (True, "")), 3, bench),
    ]
    assert [one.status for one in outcomes] == ["failed", "failed", "skipped", "no time"]
    assert "ZeroDivisionError" in outcomes[0].words and "KeyError: 'b'" in outcomes[1].words


def test_why_a_process_gave_no_result_is_said() -> None:
    error = (
        "x\nncclInvalidUsage: NCCL WARN Duplicate GPU detected\ny\nz\nChildFailedError: a"
        " summary\n====\n"
    )
    assert (
        Ended(1, "", error, 3).reason
        == "ended with status 1: ncclInvalidUsage: NCCL WARN Duplicate GPU detected /"
        " ChildFailedError: a summary / ===="
    )
    assert (
        Ended(None, "no JSON", "", 60).reason == "was ended after 60 s"
        and Ended(0, "no JSON", "", 60).result is None
    )
    assert Ended(0, 'words\n{"a": 1}\n', "", 60).result == {"a": 1}


def test_missing_packages_are_unpacked(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, files in {
        "commlens-9.9-py3-none-any.whl": {
            "commlens/__init__.py": "",
            "commlens-9.9.dist-info/METADATA": "Name: commlens",
        },
        "numpy-9.9-cp312-cp312-any.whl": {"numpy/__init__.py": ""},
        "py_spy-9.9-py2.py3-none-any.whl": {"py_spy-9.9.data/scripts/py-spy": "#!/bin/sh\n"},
    }.items():
        with zipfile.ZipFile(wheels / name, "w") as wheel:
            for path, content in files.items():
                wheel.writestr(path, content)
    # numpy is installed here
    assert _gpu_machine.install(wheels, tmp_path / "target") == ["commlens", "py_spy"]
    assert (tmp_path / "target" / "commlens" / "__init__.py").exists()
    assert (tmp_path / "target" / "bin" / "py-spy").stat().st_mode & 0o100


def test_the_results_are_written_to_the_page_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    figures, page = tmp_path / "performance.json", tmp_path / "performance.md"
    figures.write_text(run_all.FIGURES.read_text())
    monkeypatch.setattr(run_all, "FIGURES", figures)
    monkeypatch.setattr(run_all, "PAGE", page)
    bench.device = "cuda"
    here = running(bench, tmp_path / "gpu.json")
    checks = [
        Check(
            "states",
            "States are true",
            9,
            lambda bench: {},
            lambda finds: (True, "issued | completed"),
        ),
        Check("share", "How busy", 9, lambda bench: {}, lambda finds: (None, "100%")),
    ]
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    for check in checks:
        here.check(check, 30, bench)
    assert gpu_check.write([tmp_path / "gpu.json"]) == 0
    section = page.read_text().split("## On a GPU")[1].split("\n## ")[0]
    assert "a card, driver 1, CUDA 13.0, NCCL 2.28, torch 2.11.0+cu130" in section
    assert (
        "| states | States are true | yes | issued / completed |" in section
        and "| share | How busy | seen | 100% |" in section
    )
    assert "| 1 of 1: [the table](#on-a-gpu) | met |" in page.read_text()
    kept = json.loads(figures.read_text())["gpu_check"]
    without_gpu = {
        "rows": [],
        "left_out": ["Nothing was measured on a GPU: this torch sees no GPU."],
    }
    assert (
        run_all.is_less(without_gpu, kept)
        and not run_all.is_less(kept, without_gpu)
        and run_all.is_less({"failed": "x"}, kept)
    )


def test_a_cell_holds_no_python_and_is_cut_between_its_parts() -> None:
    assert (
        gpu_check.plain(
            "a (b), culprits [1]; {'all_reduce': 6}; loaded ['x.so', 'y']; torch's [0-1]"
        )
        == "a (b), culprit 1; all_reduce: 6; loaded x.so, y; torch's [0-1]"
    )
    assert gpu_check.short("; ".join(["part"] * 400)).endswith("; part; ...")


JUDGES = {
    "during": [{"op": "all_reduce", "state": "issued", "how": "not-yet", "duration_us": None}],
    "after": [
        {"op": "all_reduce", "state": "completed", "how": "native-recorder", "duration_us": None}
    ],
}


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"during": JUDGES["after"]}, False),  # complete before it is
        ({"after": [{**JUDGES["after"][0], "how": "return"}]}, False),
        ({"after": JUDGES["during"]}, False),  # never learned
        ({"returned_s": 3.0}, False),
        ({"engine": "Recorder"}, False),
        ({"lost": 1}, False),
    ],
)
def test_states_are_judged(change: dict[str, Any], right: bool) -> None:
    finds = {"engine": "NativeRecorder", "lost": 0, "returned_s": 0.001, **JUDGES, **change}
    assert _gpu_checks.judge_states("native")(finds)[0] is right
