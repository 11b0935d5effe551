"""The built wheel in an empty environment: what is in it, what works there without torch, and what
says which line to type.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from flight_recorder_dumps import dump, entry

from conftest import MARK, REPOSITORY

pytestmark = pytest.mark.long

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Call a program of an environment that holds commlens, its dependencies and nothing else."""
    place = tmp_path_factory.mktemp("fresh")
    venv = place / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=60)
    pip = [
        str(venv / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--retries",
        "1",
    ]
    # A copy: building must leave nothing in the working tree.
    source = place / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (source / name).write_bytes((REPOSITORY / name).read_bytes())
    subprocess.run(["cp", "-r", str(REPOSITORY / "src"), str(source)], check=True)
    subprocess.run(["rm", "-rf", *map(str, source.rglob("*.egg-info"))], check=True)
    build = [*pip[:3], "wheel", *pip[4:], "--no-deps", "--wheel-dir", str(place), "."]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True, timeout=100)
    if done.returncode == 0:
        install = [*pip, str(next(place.glob("*.whl"))), "-c", str(REPOSITORY / "constraints.txt")]
        done = subprocess.run(install, cwd=place, capture_output=True, text=True, timeout=100)
    if done.returncode != 0 and "No matching distribution" in done.stderr:
        pytest.skip(f"offline: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(venv / "bin" / program), *arguments]
        environ = {"HOME": str(place), "PATH": "/usr/bin:/bin", MARK: os.environ[MARK]}
        return subprocess.run(
            command, cwd=place, capture_output=True, text=True, timeout=60, env=environ
        )

    return run


def test_it_is_small(installed: Run):
    names = {
        line.split("==")[0].lower()
        for line in installed("python", "-m", "pip", "freeze").stdout.splitlines()
    }
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
    done = installed(
        "python",
        "-c",
        "from commlens.formats.flight_recorder.reader import AVAILABLE; print(AVAILABLE)",
    )
    possible = shutil.which("gcc") and Path(sysconfig.get_path("include"), "Python.h").exists()
    assert done.stdout.strip() in (["True"] if possible else ["True", "False"]), done.stderr


def test_the_wheel_serves_all_pythons_and_holds_only_the_package(installed: Run):
    listing = installed(
        "python", "-c", "import pathlib, sys; print(next(pathlib.Path('.').glob('*.whl')))"
    ).stdout.strip()
    assert re.fullmatch(r"commlens-[\d.]+-(cp310-abi3-linux_\w+|py3-none-any)\.whl", listing)
    names = installed("python", "-m", "zipfile", "-l", listing).stdout.split()
    files = [name for name in names if "/" in name or name.endswith(".py")]
    assert not [
        name
        for name in files
        if not name.startswith(("commlens/", "commlens_autoload.py", "commlens-"))
    ]
    assert not [
        name
        for name in files
        if name.endswith((".pyc", ".so"))
        and not re.search(r"/(_entries|_senders|_nccl_profiler)\.", name)
    ]
    for needed in (
        "commlens/py.typed",
        "commlens/native/recorder.hpp",
        "commlens/reports/page/assets/verdict.js",
        "licenses/LICENSE",
        "man1/commlens.1",
    ):
        assert [name for name in files if name.endswith(needed)], needed
    points = (
        "import importlib.metadata as m; print(sorted({e.group for e in"
        " m.distribution('commlens').entry_points}))"
    )
    assert (
        installed("python", "-c", points).stdout.strip()
        == "['console_scripts', 'pytest11', 'torch.backends']"
    )


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


def test_diagnose_gives_a_verdict_on_dumps_from_elsewhere(installed: Run, tmp_path: Path):
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    waiting = entry(1, state="scheduled", time_discovered_completed_ns=None, retired=False)
    for rank, entries in enumerate([[entry(0), waiting], [entry(0)]]):
        content = pickle.dumps(dump(entries, pg_config=groups, pg_status={}), protocol=2)
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(content)
    done = installed("commlens", "diagnose", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("VERDICT  rank 1 never reached "), done.stdout


@pytest.mark.parametrize(
    "verb", [["launch", "train.py"], ["run", "train.py"], ["demo"]], ids=lambda verb: verb[0]
)
def test_what_needs_torch_says_the_line(installed: Run, verb: list[str]):
    done = installed("commlens", *verb)
    assert done.returncode == 2
    assert (
        done.stderr.startswith("commlens: ")
        and "torch" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert "pip install torch" in done.stderr


def test_enable_says_it_too(installed: Run):
    done = installed("python", "-c", "import commlens; commlens.enable()")
    assert "MissingDependency" in done.stderr and "pip install torch" in done.stderr
