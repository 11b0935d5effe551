"""``pip install .`` into an empty environment: what works there without torch, and what says which line to type."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import MARK, REPOSITORY

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Call a program of an environment that holds commlens, its dependencies and nothing else."""
    place = tmp_path_factory.mktemp("fresh")
    venv = place / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=60)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    # A copy: building must leave nothing in the working tree.
    source = place / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((REPOSITORY / name).read_bytes())
    subprocess.run(["cp", "-r", str(REPOSITORY / "src"), str(source)], check=True)
    subprocess.run(["rm", "-rf", *map(str, source.rglob("*.egg-info"))], check=True)
    done = subprocess.run([*pip, ".", "-c", str(REPOSITORY / "constraints.txt")], cwd=source, capture_output=True, text=True, timeout=100)
    if done.returncode != 0 and ("No matching distribution" in done.stderr or "onnection" in done.stderr):
        pytest.skip(f"offline: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(venv / "bin" / program), *arguments]
        environ = {"HOME": str(place), "PATH": "/usr/bin:/bin", MARK: os.environ[MARK]}
        return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, env=environ)

    return run


def test_it_is_small(installed: Run):
    names = {line.split("==")[0].lower() for line in installed("python", "-m", "pip", "freeze").stdout.splitlines()}
    assert {name.split(" @ ")[0] for name in names} == {
        "commlens",
        "msgspec",
        "rich",
        "pyyaml",
        "markdown-it-py",
        "mdurl",
        "pygments",
        "numpy",
    }


def test_the_reader_in_c_is_built_where_it_can_be(installed: Run):
    done = installed("python", "-c", "from commlens.formats.flight_recorder.native_entries import AVAILABLE; print(AVAILABLE)")
    possible = shutil.which("gcc") and Path(sysconfig.get_path("include"), "Python.h").exists()
    assert done.stdout.strip() in (["True"] if possible else ["True", "False"]), done.stderr


def test_the_help_and_the_settings_work(installed: Run):
    assert "commlens demo" in installed("commlens", "--help").stdout
    assert "stall_timeout" in installed("commlens", "config", "show").stdout
    done = installed("python", "-c", "import commlens; print(commlens.__version__)")
    assert done.returncode == 0, done.stderr


def test_diagnose_needs_no_torch(installed: Run, tmp_path: Path):
    done = installed("commlens", "diagnose", str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("commlens: ") and "Traceback" not in done.stderr
    assert installed("commlens", "diagnose", str(tmp_path / "nothing")).returncode == 2


@pytest.mark.parametrize("verb", [["launch", "train.py"], ["run", "train.py"], ["demo"]], ids=lambda verb: verb[0])
def test_what_needs_torch_says_the_line(installed: Run, verb: list[str]):
    done = installed("commlens", *verb)
    assert done.returncode == 2
    assert done.stderr.startswith("commlens: ") and "torch" in done.stderr and "Traceback" not in done.stderr
    assert "pip install 'commlens[torch]'" in done.stderr


def test_enable_says_it_too(installed: Run):
    done = installed("python", "-c", "import commlens; commlens.enable()")
    assert "MissingDependency" in done.stderr and "pip install 'commlens[torch]'" in done.stderr
