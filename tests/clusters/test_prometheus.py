"""A job's metrics in a real Prometheus: the alert rules, the dashboard, and Alertmanager.

``make clusters`` runs these on a machine with Debian's prometheus, prometheus-alertmanager and
prometheus-node-exporter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusters.daemons import PATIENCE_S, Daemons, free_ports, wait_until, why_not
from clusters.programs import DIES, STALLS
from conftest import REPOSITORY

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")
_WHY_NOT = why_not(
    ("prometheus", "promtool", "prometheus-alertmanager", "prometheus-node-exporter"),
    "prometheus prometheus-alertmanager prometheus-node-exporter",
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(480),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]

RULES = REPOSITORY / "packaging" / "prometheus" / "commlens.rules.yml"
DASHBOARD = REPOSITORY / "packaging" / "grafana" / "commlens.json"
ALERTS_PAGE = REPOSITORY / "docs" / "alerts.md"

# goes on, stalls and ends as files of its folder say
_SCRAPE = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["127.0.0.1:{alertmanager}"]}}]}}]}}
scrape_configs:
  - job_name: node
    static_configs: [{{targets: ["127.0.0.1:{exporter}"]}}]
"""
_ROUTE = """
route: {{receiver: pager, group_by: [alertname, job_name], group_wait: 1s, group_interval: 1s}}
receivers:
  - name: pager
    webhook_configs: [{{url: "http://127.0.0.1:{pager}/", send_resolved: true}}]
"""


class Monitoring:
    """Prometheus, the node exporter, Alertmanager, and a pager that keeps what it was sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.textfiles = folder / "textfiles"
        self.textfiles.mkdir()
        self.pages: list[dict[str, Any]] = []
        pages = self.pages

        class Pager(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                pages.extend(body["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._pager = ThreadingHTTPServer(("127.0.0.1", 0), Pager)
        threading.Thread(target=self._pager.serve_forever, daemon=True).start()
        self._daemons = Daemons(folder)
        exporter, prometheus, alertmanager = free_ports(3)
        self.prometheus = f"http://127.0.0.1:{prometheus}"
        self.alertmanager = f"http://127.0.0.1:{alertmanager}"
        (folder / "alertmanager.yml").write_text(_ROUTE.format(pager=self._pager.server_port))
        (folder / "prometheus.yml").write_text(
            _SCRAPE.format(rules=RULES, alertmanager=alertmanager, exporter=exporter)
        )
        self._daemons.start(
            "prometheus-node-exporter", "--collector.disable-defaults", "--collector.textfile",
            f"--collector.textfile.directory={self.textfiles}",
            f"--web.listen-address=127.0.0.1:{exporter}",
        )  # fmt: skip
        self._daemons.start(
            "prometheus-alertmanager", f"--config.file={folder}/alertmanager.yml",
            f"--storage.path={folder}/alerts", f"--web.listen-address=127.0.0.1:{alertmanager}",
            "--cluster.listen-address=",
        )  # fmt: skip
        self._daemons.start(
            "prometheus", f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{prometheus}",
        )  # fmt: skip

    def query(self, query: str) -> list[dict[str, Any]]:
        """Return the series of an instant query; fails if Prometheus refuses it."""
        address = f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result

    def is_up(self) -> bool:
        """Return whether Prometheus scrapes, and Alertmanager answers."""
        try:
            urllib.request.urlopen(f"{self.alertmanager}/-/ready", timeout=10).close()
            return [each["value"][1] for each in self.query("up")] == ["1"]
        except OSError:
            return False

    def paged(self, alert: str, status: str = "firing") -> dict[str, Any]:
        """Return what the pager was last sent about an alert; empty if nothing."""
        sent = (each for each in reversed(self.pages) if each["labels"]["alertname"] == alert)
        return next((each for each in sent if each["status"] == status), {})

    def close(self) -> None:
        """End all of it."""
        self._daemons.close()
        self._pager.shutdown()
        self._pager.server_close()


@pytest.fixture(scope="module")
def monitoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitoring]:
    running = Monitoring(tmp_path_factory.mktemp("monitoring"))
    try:
        wait_until(running.is_up, "Prometheus")
        yield running
    finally:
        running.close()


def launch(folder: Path, program: str, *options: str, **environ: str) -> subprocess.Popen[bytes]:
    """Start a job of two ranks with recording on."""
    (folder / "train.py").write_text(program)
    with (folder / "output").open("wb") as out:
        return subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "commlens",
                    "launch",
                    "--standalone",
                    "--nproc-per-node",
                    "2",
                ),
                *options,
                "train.py",
            ],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            stdout=out,
            stderr=out,
        )


def test_promtool_accepts_the_rules_and_each_names_a_metric_of_the_docs():
    done = subprocess.run(
        ["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    documented = set(re.findall(r"`(commlens_\w+)", ALERTS_PAGE.read_text()))
    for path in (RULES, DASHBOARD):
        assert set(re.findall(r"\b(commlens_\w+)", path.read_text())) <= documented


def test_a_job_that_runs_stalls_goes_on_and_ends(monitoring: Monitoring, tmp_path: Path):
    ask = monitoring.query
    job = launch(
        tmp_path, STALLS,
        "--metrics-file", str(monitoring.textfiles), "--stall-timeout", "8",
        COMMLENS_JOB="run-7",
    )  # fmt: skip
    try:
        wait_until(
            lambda: job.poll() is not None or len(ask("commlens_steps_total > 0")) == 2, "steps"
        )
        assert job.poll() is None, (tmp_path / "output").read_text()
        [alive] = ask("commlens_watcher_alive_timestamp_seconds")
        assert (alive["metric"]["job"], alive["metric"]["job_name"]) == ("node", "run-7")
        wait_until(
            lambda: titles_without_data(monitoring) <= NEED_FAULTS | NEED_GPUS,
            "all panels' data",
        )
        assert titles_without_data(monitoring) >= {"Stuck", "Verdicts"}
        assert monitoring.pages == []
        (tmp_path / "stall").touch()
        wait_until(lambda: bool(monitoring.paged("TrainingStuck")), "the page")
        page = monitoring.paged("TrainingStuck")
        assert (page["labels"]["job_name"], page["labels"]["kind"]) == ("run-7", "missing")
        assert page["annotations"]["summary"] == "run-7 is stuck: missing; what to do: unknown"
        assert float(ask("commlens_oldest_wait_seconds")[0]["value"][1]) > 8
        assert ask('commlens_verdicts_total{kind="missing"}')[0]["value"][1] == "1"
        assert not {"Stuck", "Verdicts"} & titles_without_data(monitoring)
        (tmp_path / "stall").unlink()
        wait_until(lambda: bool(monitoring.paged("TrainingStuck", "resolved")), "its end")
        assert ask("commlens_stuck") == []
        assert {each["labels"]["alertname"] for each in monitoring.pages} == {"TrainingStuck"}
        (tmp_path / "end").touch()
        assert job.wait(PATIENCE_S) == 0, (tmp_path / "output").read_text()
    finally:
        job.terminate()
        job.wait()
    wait_until(lambda: not ask("commlens_steps_total"), "the end of the job's metrics")
    assert not list(monitoring.textfiles.iterdir())


NEED_FAULTS = {"Stuck", "Verdicts", "Slow ranks", "Changes of the hardware"}
NEED_GPUS = {"Temperature of GPUs", "Lowered clocks of GPUs"}


def titles_without_data(monitoring: Monitoring) -> set[str]:
    """Run every query of the dashboard. Returns the panels without data."""
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {"$job_name": "run-.*", "$__rate_interval": "10s"}
    empty = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in variables.items():
                query = query.replace(name, value)
            assert "$" not in query
            series = monitoring.query(query)
            if not series:
                empty.add(panel["title"])
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert all(label in each["metric"] for each in series), (panel["title"], label)
    return empty


def test_each_rule_fires_on_its_fault_and_on_nothing_else(tmp_path: Path):
    """By Prometheus' own engine, on made series, for twenty minutes."""

    def series(values: str, name: str = "", **labels: str) -> dict[str, str]:
        text = ",".join(f'{key}="{value}"' for key, value in {"job_name": "a", **labels}.items())
        return {"series": f"commlens_{name}{{{text}}}", "values": values}

    healthy = [
        series("0x40", "oldest_wait_seconds"),
        series("0x40", "slow_rank", rank="0"),
        series("0x40", "gpu_throttled", gpu="g", instance="n"),
        series("1x40", "link_up", port="mlx5_0", instance="n"),
        series("0x40", "link_up", port="docker0", instance="n"),
        series("0+30x40", "watcher_alive_timestamp_seconds", instance="n"),
    ]
    faults = {
        "TrainingStuck": series("1x40", "stuck", kind="missing", action="stop"),
        "TrainingWaits": series("0+30x40", "oldest_wait_seconds"),
        "SlowRank": series("1x40", "slow_rank", rank="0"),
        "GpuThrottled": series("1x40", "gpu_throttled", gpu="g", instance="n"),
        "InfinibandPortDown": series("0x40", "link_up", port="mlx5_0", instance="n"),
        "WatcherSilent": series("0x40", "watcher_alive_timestamp_seconds", instance="n"),
    }
    alerts = [rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]]
    assert sorted(faults) == sorted(alerts)
    tests = []
    for fault in ("", *faults):
        broken = [faults[fault]] if fault else []
        kept = [s for s in healthy if s["series"] not in [each["series"] for each in broken]]
        fires = 'count by (alertname) (ALERTS{alertstate="firing"})'
        expected = [{"labels": f'{{alertname="{fault}"}}', "value": 1}] if fault else []
        tests.append(
            {
                "interval": "30s",
                "name": fault or "healthy",
                "input_series": kept + broken,
                "promql_expr_test": [{"expr": fires, "eval_time": "19m", "exp_samples": expected}],
            }
        )
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": tests}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_script_of_the_docs_sends_the_verdict_on_a_death_to_alertmanager(
    monitoring: Monitoring, tmp_path: Path
):
    section = ALERTS_PAGE.read_text().split("## Alertmanager\n")[1]
    script = tmp_path / "alertmanager.sh"
    script.write_text(section.split("```sh\n")[1].split("```")[0])
    script.chmod(0o755)
    job = launch(
        tmp_path, DIES, "--on-verdict", "./alertmanager.sh",
        COMMLENS_JOB="run-8", ALERTMANAGER=monitoring.alertmanager,
    )  # fmt: skip
    assert job.wait(PATIENCE_S) != 0
    wait_until(lambda: bool(monitoring.paged("TrainingVerdict")), "the page")
    page = monitoring.paged("TrainingVerdict")
    assert page["labels"]["job_name"].endswith("-run-8")
    assert (page["labels"]["kind"], page["labels"]["action"]) == ("dead", "retry")
    assert "rank 1 died of SIGKILL" in page["annotations"]["summary"]
    assert "on_verdict" not in (tmp_path / "output").read_text()
