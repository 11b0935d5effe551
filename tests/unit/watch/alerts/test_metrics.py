"""Metrics for Prometheus: the endpoint, and what goes wrong with it."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from commlens.config import Settings, load_settings
from commlens.errors import ConfigError
from commlens.model.health import Values
from commlens.watch.alerts.metrics import Metrics
from commlens.watch.reporting import Evidence, Reporter
from commlens.watch.slowness import Slowness

pytest.importorskip("prometheus_client")


def metrics(tmp_path: Path, said: list[str], **settings: Any) -> Metrics:
    evidence = Evidence(None, None, None, None, launched=True)  # type: ignore[arg-type]  # not asked
    reporter = Reporter([tmp_path], Settings(**settings), evidence, say=said.append)  # type: ignore[arg-type]
    reporter.counts["straggler"] = 2
    return Metrics(Settings(**settings), "train-1", reporter)


def test_the_endpoint(tmp_path: Path) -> None:
    said: list[str] = []
    port = free_port()
    served = metrics(tmp_path, said, metrics_port=str(port))
    hardware: dict[str, Values] = {
        "network": {"eth0": {"state": "down"}},
        "infiniband": {"mlx5_0": {"state": "ACTIVE"}},
        "gpu": {"a": {"temperature_c": 41.0, "throttle_reasons": 64.0}, "b": {}},
    }
    served.update([], None, Slowness(), 7, {"network-down": 2}, hardware)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'commlens_verdicts_total{job="train-1",kind="straggler"} 2.0' in text
    assert 'commlens_records_not_compared_total{job="train-1"} 7.0' in text
    assert 'commlens_hardware_changes_total{fault="network-down",job="train-1"} 2.0' in text
    assert 'commlens_link_up{job="train-1",port="eth0"} 0.0' in text
    assert 'commlens_link_up{job="train-1",port="mlx5_0"} 1.0' in text
    assert 'commlens_gpu_temperature_celsius{gpu="a",job="train-1"} 41.0' in text
    assert 'commlens_gpu_throttled{gpu="a",job="train-1"} 1.0' in text
    taken = metrics(tmp_path, said, metrics_port=str(port))
    assert said == [f"no metrics on port {port}: Address already in use."]
    taken.update([], None, Slowness(), 0)
    taken.close()
    served.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


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


@pytest.mark.parametrize("bad", ["0", "x", "70000", "a b:9", True])
def test_bad_ports(bad: Any) -> None:
    with pytest.raises(ConfigError, match="a port, or HOST:PORT"):
        load_settings(environ={}, overrides={"metrics_port": bad})
    assert (
        load_settings(environ={}, overrides={"metrics_port": 9400}).settings.metrics_port == "9400"
    )
    assert (
        load_settings(environ={}, overrides={"metrics_port": "0.0.0.0:9400"}).settings.metrics_port
        == "0.0.0.0:9400"
    )
