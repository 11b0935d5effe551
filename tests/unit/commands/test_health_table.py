"""``commlens doctor --node``: the hardware of this node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from node_files import NodeFiles

from commlens import commands


def test_the_node_of_the_setting_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = NodeFiles(tmp_path, gpus=1)
    files.log("mlx5_core 0000:81:00.0 ibp129s0: Link down", 1_790_251_391 * 10**9)
    monkeypatch.setenv("COMMLENS_HEALTH", str(tmp_path))
    assert commands.main(["doctor", "--node"]) == 0
    text = capsys.readouterr().out
    assert "mlx5_0" in text and "active, 400 Gbit/s" in text
    assert "  - 2026-09-24 12:03:11 UTC: mlx5_1 went down" in text
    assert "cannot be read" not in text


def test_a_source_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMLENS_HEALTH", str(tmp_path))
    assert commands.main(["doctor", "--node"]) == 0
    assert "  - Kernel log: there is no kernel log in" in capsys.readouterr().out


def test_the_place_of_the_node_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    NodeFiles(tmp_path / "node", gpus=1)
    (tmp_path / "topology.yaml").write_text(
        "pattern: '(?P<rack>)'\nrails: [mlx5_1]\n"
        f"hosts: {{{os.uname().nodename.partition('.')[0]}: {{leaf: leaf-1, rack: r2}}}}\n"
    )
    monkeypatch.setenv("COMMLENS_HEALTH", str(tmp_path / "node"))
    monkeypatch.setenv("COMMLENS_TOPOLOGY", str(tmp_path / "topology.yaml"))
    assert commands.main(["doctor", "--node"]) == 0
    text = capsys.readouterr().out
    assert "(switch leaf-1, rack r2), with counts and times since boot:" in text
    assert "H100 80GB HBM3  near mlx5_1, 41" in text


@pytest.mark.parametrize("other", ["--json", "--step"])
def test_the_hardware_beside_another_form_of_the_status_is_refused(
    other: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMLENS_BOX_DIR", str(tmp_path))
    assert commands.main(["status", str(tmp_path), "--health", other]) == 2
    assert "--health prints a table of its own" in capsys.readouterr().err
