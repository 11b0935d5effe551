"""commlens doctor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from native_builds import put

from conftest import RunCommlens

pytestmark = pytest.mark.launches


def test_doctor_says_which_engine_and_recorder_and_why(
    native_cache: Path, run_commlens: RunCommlens
):
    without = run_commlens("doctor")
    assert without.returncode == 0, without.stderr
    assert "\nengine           python, because the native engine was not built" in without.stdout
    [line] = [line for line in without.stdout.splitlines() if line.startswith("recorder ")]
    assert "2000 entries, as commlens sets it; read through _dump_" in line
    built = run_commlens("doctor", environ={"COMMLENS_NATIVE_DIR": str(native_cache)})
    assert (
        "\nengine           native, because it was built for this torch and Python" in built.stdout
    )
    environ = {
        "COMMLENS_NATIVE_DIR": str(native_cache),
        "COMMLENS_ENGINE": "python",
        "TORCH_FR_BUFFER_SIZE": "0",
    }
    chosen = run_commlens("doctor", environ=environ).stdout
    assert (
        "\nengine           python, because the setting engine is python (COMMLENS_ENGINE)"
        in chosen
    )
    assert "\nrecorder         torch's own: off by TORCH_FR_BUFFER_SIZE" in chosen
    assert "nothing tells which are complete" in chosen.split("What would not work here:")[1]


def test_doctor_says_what_would_not_work(run_commlens: RunCommlens, tmp_path: Path):
    (tmp_path / "damaged").mkdir()
    put(tmp_path / "damaged", sha256="0" * 64)
    done = run_commlens(
        "doctor",
        environ={
            "COMMLENS_NATIVE_DIR": str(tmp_path / "damaged"),
            "COMMLENS_BOX_DIR": str(tmp_path / "nowhere"),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "COMMLENS_STALL_TIMEOUT": "soon",
        },
    )
    assert done.returncode == 0, done.stderr
    problems = done.stdout.split("What would not work here:")[1]
    for words in (
        "checksum differs",
        "no folder in memory has room",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        "COMMLENS_STALL_TIMEOUT is 'soon'",
    ):
        assert words in problems, words
    assert os.pathsep not in done.stderr
