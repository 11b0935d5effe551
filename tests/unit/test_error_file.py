"""The file by which torchrun learns of a worker's error."""

from __future__ import annotations

import json
import time
from pathlib import Path

from commlens import error_file


def test_what_the_program_wrote_stays(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    environ = {"TORCHELASTIC_ERROR_FILE": str(path)}
    error_file.write(environ, "first")
    error_file.write(environ, "second")
    written = json.loads(path.read_text())["message"]
    assert written["message"] == written["extraInfo"]["py_callstack"] == "first"
    error_file.write(environ, "third", overwrite=True)
    assert json.loads(path.read_text())["message"]["message"] == "third"


def test_the_earliest_error_is_torchruns_root_cause(tmp_path: Path) -> None:
    stamps = []
    for earliest in (True, False):
        path = tmp_path / str(earliest)
        error_file.write({"TORCHELASTIC_ERROR_FILE": str(path)}, "text", earliest=earliest)
        stamps.append(int(json.loads(path.read_text())["message"]["extraInfo"]["timestamp"]))
    assert stamps[0] < stamps[1] <= time.time()


def test_without_a_file_and_without_a_folder_nothing_happens(tmp_path: Path) -> None:
    error_file.write({}, "text")
    error_file.write({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "gone" / "x")}, "text")
    assert list(tmp_path.iterdir()) == []
