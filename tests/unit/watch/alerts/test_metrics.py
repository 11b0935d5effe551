"""Metrics for Prometheus: the file, and what goes wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commlens.config import Settings
from commlens.model.health import Values
from commlens.model.verdict import Action, Verdict
from commlens.watch.alerts.metrics import Metrics
from commlens.watch.diagnoser import Diagnoser
from commlens.watch.evidence import Evidence
from commlens.watch.reporting import Reporter
from commlens.watch.slowness import Slowness
from commlens.watch.stall import Stall

pytest.importorskip("prometheus_client")


def metrics(tmp_path: Path, said: list[str], **settings: Any) -> Metrics:
    evidence = Evidence(None, None, None, None, None, launched=True)  # type: ignore[arg-type]  # not asked
    diagnoser = Diagnoser(evidence, Settings())
    reporter = Reporter([tmp_path], Settings(**settings), diagnoser, say=said.append)
    reporter.counts["straggler"] = 2
    return Metrics(Settings(**settings), "train-1", reporter)


def test_what_is_written(tmp_path: Path) -> None:
    written = metrics(tmp_path, [], metrics_file=str(tmp_path / "commlens.prom"))
    hardware: dict[str, Values] = {
        "network": {"eth0": {"state": "down"}},
        "infiniband": {"mlx5_0": {"state": "ACTIVE"}},
        "gpu": {"a": {"temperature_c": 41.0, "throttle_reasons": 64.0}, "b": {}},
    }
    written.update([], None, Slowness(), 7, {"network-down": 2}, hardware)
    text = (tmp_path / "commlens.prom").read_text()
    assert 'commlens_verdicts_total{job_name="train-1",kind="straggler"} 2.0' in text
    assert 'commlens_records_not_compared_total{job_name="train-1"} 7.0' in text
    assert 'commlens_hardware_changes_total{fault="network-down",job_name="train-1"} 2.0' in text
    assert 'commlens_link_up{job_name="train-1",port="eth0"} 0.0' in text
    assert 'commlens_link_up{job_name="train-1",port="mlx5_0"} 1.0' in text
    assert 'commlens_gpu_temperature_celsius{gpu="a",job_name="train-1"} 41.0' in text
    assert 'commlens_gpu_throttled{gpu="a",job_name="train-1"} 1.0' in text
    written.close()
    assert not (tmp_path / "commlens.prom").exists()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    said: list[str] = []
    lost = metrics(tmp_path, said, metrics_file=str(tmp_path / "absent" / "commlens.prom"))
    lost.update([], None, Slowness(), 0)
    lost.close()
    assert said == [f"no metrics in {tmp_path}/absent/commlens.prom: No such file or directory."]


def test_a_folder_holds_a_file_for_each_job(tmp_path: Path) -> None:
    written = metrics(tmp_path, [], metrics_file=str(tmp_path))
    written.update([], None, Slowness(), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["commlens-train-1.prom"]
    written.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("verdict", "stuck"),
    [
        (None, []),
        (Verdict(kind="waiting"), []),  # rank 1 works
        (
            Verdict(kind="missing", action=Action("stop", "program", "high")),
            ['commlens_stuck{action="stop",job_name="train-1",kind="missing"} 1.0'],
        ),
    ],
)
def test_a_job_is_stuck_while_ranks_wait_and_a_verdict_says_so(
    tmp_path: Path, verdict: Verdict | None, stuck: list[str]
) -> None:
    written = metrics(tmp_path, [], metrics_file=str(tmp_path / "commlens.prom"))
    written.update([], Stall(0, verdict=verdict), Slowness(), 0)
    lines = (tmp_path / "commlens.prom").read_text().splitlines()
    assert [line for line in lines if line.startswith("commlens_stuck")] == stuck
