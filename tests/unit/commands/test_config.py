"""commlens config."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlens.config import NAMES
from conftest import RunCommlens


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.launches
def test_config_show(run_commlens: RunCommlens, tmp_path):
    path = yaml_file(tmp_path, "abort_on: stall\n")
    done = run_commlens(
        "config",
        "show",
        "--config-file",
        str(path),
        environ={"COMMLENS_STALL_TIMEOUT": "5", "TORCH_FR_BUFFER_SIZE": "0"},
    )
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert tuple(rows) == NAMES
    assert rows["abort_on"] == ["stall", str(path)]
    assert rows["stall_timeout"] == ["5", "COMMLENS_STALL_TIMEOUT"]
    assert rows["keep_dumps"] == ["10", "default"]
    assert "TORCH_FR_BUFFER_SIZE=0" in done.stderr


@pytest.mark.launches
def test_config_show_refuses_in_one_line(run_commlens: RunCommlens):
    done = run_commlens("config", "show", environ={"COMMLENS_ABORT_ON": "explode"})
    assert done.returncode == 2
    assert (
        done.stderr
        == "commlens: COMMLENS_ABORT_ON is 'explode', which is not accepted: it takes nothing, all,"
        " or some of stall, mismatch, diverged with commas between them.\n"
    )
