"""Verdicts passed on to a command and a function."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from commlens.config import Settings, load_settings
from commlens.errors import ConfigError
from commlens.model.verdict import Verdict
from commlens.watch.alerts import alerts
from commlens.watch.alerts.alerts import Alerts

VERDICT = Verdict(kind="missing", summary="rank 2 never reached all_reduce #7", culprits=[2])


def sent(tmp_path: Path, wait_s: float = 20.0, **settings: Any) -> list[str]:
    """Send the verdict. Returns the lines that were said."""
    said: list[str] = []
    sender = Alerts(Settings(**settings), "node-a", said.append)
    sender.send(VERDICT, job="train-1", dump=tmp_path / "dump")
    sender.close(wait_s)
    return said


def test_a_line_in_a_file(tmp_path: Path) -> None:
    log = tmp_path / "verdicts.jsonl"
    assert sent(tmp_path, on_verdict=f"cat >> {log}") == []
    assert sent(tmp_path, on_verdict=f"flock {log} -c 'cat >> {log}'") == []
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert first["job"] == "train-1"
    assert first["host"] == "node-a"
    assert first["dump"] == str(tmp_path / "dump")
    assert first["verdict"]["culprits"] == [2]
    assert second["schema"] == "commlens.alert/1"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (line,) = sent(tmp_path, on_verdict=f"cat >> {tmp_path}/absent/log")
    assert line.startswith("on_verdict exited with status ") and f"{tmp_path}/absent/log" in line


def test_a_command_gets_the_verdict(tmp_path: Path) -> None:
    assert (
        sent(tmp_path, on_verdict=f"cat > {tmp_path}/got && echo $COMMLENS >> {tmp_path}/got") == []
    )
    text = (tmp_path / "got").read_text()
    assert text.endswith("0\n"), "a command that imports torch is not recorded"
    assert json.loads(text[:-2])["verdict"]["summary"] == VERDICT.summary


def test_a_function_gets_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "class To:\n    @staticmethod\n    def page(alert):\n       "
        f" open({str(tmp_path / 'got')!r}, 'w').write(alert['job'])\n"
    )
    (tmp_path / "my_alerts.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert sent(tmp_path, on_verdict="my_alerts:To.page") == []
    assert (tmp_path / "got").read_text() == "train-1"
    (line,) = sent(tmp_path, on_verdict="my_alerts:absent")
    assert line.startswith("on_verdict exited with status 1: AttributeError"), (
        "the last line of what it printed"
    )


def test_a_command_that_fails(tmp_path: Path) -> None:
    assert sent(tmp_path, on_verdict="echo not reachable >&2; exit 7") == [
        "on_verdict exited with status 7: not reachable"
    ]
    assert sent(tmp_path, on_verdict="kill -9 $$") == ["on_verdict was killed by SIGKILL."]


def test_commands_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    assert sent(tmp_path, wait_s=0.3, on_verdict="sleep 60")[0].startswith(
        "on_verdict was ended: the job is over"
    )
    monkeypatch.setattr(alerts, "TIMEOUT_S", 0.3)
    assert sent(tmp_path, on_verdict="sleep 60") == [
        "on_verdict did not end within 0 s and was killed."
    ]
    assert time.monotonic() - began < 20
    assert sent(tmp_path, on_verdict="(sleep 60; echo late) 2>/dev/null & exit 0") == []


def test_settings() -> None:
    assert (
        load_settings(environ={}, overrides={"on_verdict": time.sleep}).settings.on_verdict
        == "time:sleep"
    )
    for bad in ("", lambda alert: None, 3):
        with pytest.raises(
            ConfigError, match="a command, or a function of an importable module as MODULE:FUNCTION"
        ):
            load_settings(environ={}, overrides={"on_verdict": bad})
