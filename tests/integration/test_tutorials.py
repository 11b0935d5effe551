"""Every program and every command of the tutorials runs, in the order of the page, and prints what
the page shows.

A ``python`` block is a file, named in its first line. A ``console`` block holds commands after
``$`` and their output. ``...`` in the output stands for any text. Line breaks are not compared, nor
are figures that differ between runs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY, SOURCE

TUTORIALS = ("hang", "wrong-numbers", "sharding-cost", "ci")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
DIFFERENT = (
    (r"host [\w.-]+", "host H"),
    (r"pid \d+", "pid N"),
    (r"\d{8}-\d{6}-\d+", "TIME"),
    (r"\b\d+(\.\d+)? ?(s|ms|us)\b", "T s"),
    # a collective's number: how many DDP issues at its start depends on torch's version
    (r"#\d+", "#N"),
    (r"\d+ records", "N records"),
)


def flowing(text: str) -> str:
    for pattern, name in DIFFERENT:
        text = re.sub(pattern, name, " ".join(text.split()))
    return text


def assert_prints(expected: str, found: str) -> None:
    parts = [
        re.escape(flowing(part)) for part in re.split(r"^\.\.\.$", expected, flags=re.MULTILINE)
    ]
    if not re.fullmatch(r"\s*.*?\s*".join(parts), flowing(found)):
        raise AssertionError(f"The page shows:\n{expected}\nThe command printed:\n{found}")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("commlens", "pytest"):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {name} "$@"\n')
        (programs / name).chmod(0o755)
    paths = os.pathsep.join([str(programs), os.environ["PATH"]])
    return {
        **os.environ,
        "PATH": paths,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
        "PYTHONWARNINGS": "ignore",
    }


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=80)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(
                f"{command}\nprinted, until it was killed:\n{process.communicate()[0]}"
            ) from None


@pytest.mark.timeout(200)
@pytest.mark.long
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_is_true(name: str, tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / name
    folder.mkdir()
    for language, text in BLOCK.findall((REPOSITORY / "docs" / f"{name}.md").read_text()):
        if language == "python":
            (folder / text.split("\n")[0].removeprefix("# ")).write_text(text)
            continue
        assert language == "console", "a block that this test does not run"
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            found = run(command, folder, environment)
            print(f"$ {command}\n{found}")
            assert_prints(expected, found)
