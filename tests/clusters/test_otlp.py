"""A job's metrics and verdict by OTLP, in a receiver that parses them, and receivers that fail.

``make clusters`` installs OpenTelemetry's packages; no collector is to be had as a package.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from clusters.daemons import PATIENCE_S, free_ports, wait_until
from clusters.programs import DIES, STALLS
from conftest import REPOSITORY

pytest.importorskip("torch")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
pytestmark = [pytest.mark.long, pytest.mark.timeout(480)]

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (  # noqa: E402
    ExportLogsServiceRequest,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (  # noqa: E402
    ExportMetricsServiceRequest,
)

# stalls and ends as files of its folder say
TRAIN = STALLS.replace("import os, time", "import os, sys, time").replace(
    "dist.destroy_process_group()",
    'print("in the rank:", [name for name in sys.modules if "opentelemetry" in name], flush=True)\n'
    "dist.destroy_process_group()",
)


# name to labels to value
Metrics = defaultdict[str, dict[tuple[tuple[str, Any], ...], float]]


class Collector:
    """Receives both signals, and keeps the newest metrics, and all records.

    Args:
        status: of its answers.
        pause_s: before each.
    """

    def __init__(self, status: int = 200, pause_s: float = 0.0) -> None:
        self.metrics = Metrics(dict)
        self.counters: set[str] = set()
        self.records: list[dict[str, Any]] = []
        self.resource: dict[str, Any] = {}
        keep = self._keep
        self._over = threading.Event()
        over = self._over

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                over.wait(pause_s)
                keep(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the job ended
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _keep(self, path: str, body: bytes) -> None:
        if path == "/v1/logs":
            for resource in ExportLogsServiceRequest.FromString(body).resource_logs:
                self.resource = attributes(resource.resource)
                for scope in resource.scope_logs:
                    self.records += [
                        {
                            "body": each.body.string_value,
                            "severity": each.severity_text,
                            "number": each.severity_number,
                            **attributes(each),
                        }
                        for each in scope.log_records
                    ]
            return
        assert path == "/v1/metrics"
        metrics = Metrics(dict)
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    kind = metric.WhichOneof("data")
                    data = getattr(metric, kind)
                    if kind == "sum":
                        assert data.is_monotonic
                        self.counters.add(metric.name)
                    metrics[metric.name] = {
                        tuple(sorted(attributes(point).items())): (
                            point.as_double
                            if point.WhichOneof("value") == "as_double"
                            else point.as_int
                        )
                        for point in data.data_points
                    }
        self.metrics = metrics  # all at once: the test reads them in another thread

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()


def attributes(holder: Any) -> dict[str, Any]:
    """Return OTLP's attributes as a dict."""

    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(each) for each in found.values] if kind == "array_value" else found

    return {each.key: value(each.value) for each in holder.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def launch(folder: Path, program: str, *options: str, **environ: str) -> subprocess.Popen[bytes]:
    """Start a job of two ranks with recording on."""
    (folder / "train.py").write_text(program)
    command = [sys.executable, "-m", "commlens", "launch", "--standalone", "--nproc-per-node", "2"]
    with (folder / "output").open("wb") as out:
        return subprocess.Popen(
            [*command, *options, "train.py"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            stdout=out,
            stderr=out,
        )


def documented() -> set[str]:
    """Return the metrics of docs/alerts.md."""
    page = (REPOSITORY / "docs" / "alerts.md").read_text()
    return {name for name in re.findall(r"`(commlens_\w+)[{`]", page) if name[-1] != "_"}


def test_the_metrics_and_the_verdict_of_a_job_that_stalls(tmp_path: Path, collector: Collector):

    def values(name: str) -> dict[tuple[tuple[str, Any], ...], float]:
        return dict(collector.metrics[name])

    job = launch(
        tmp_path, TRAIN, "--stall-timeout", "8",
        COMMLENS_JOB="run-7", OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint,
        OTEL_METRIC_EXPORT_INTERVAL="1000", OTEL_RESOURCE_ATTRIBUTES="service.name=trainings",
    )  # fmt: skip
    try:
        wait_until(lambda: any(values("commlens_steps_total").values()), "steps")
        of_job = ("job_name", "run-7")
        assert set(values("commlens_steps_total")) == {(of_job, ("rank", r)) for r in ("0", "1")}
        assert not values("commlens_stuck")
        (tmp_path / "stall").touch()
        wait_until(lambda: bool(collector.records), "the verdict")
        [record] = collector.records
        assert "rank 1 never reached all_reduce" in record["body"]
        assert (record["severity"], record["number"]) == ("ERROR", 17)
        assert (record["job_name"], record["host"]) == ("run-7", os.uname().nodename)
        assert (record["kind"], record["action"]) == ("missing", "unknown")
        assert (record["culprits"], record["source"]) == ([1], "train.py:9")
        assert record["group"] == "default group"
        assert Path(record["dump"]).is_dir()
        assert collector.resource["service.name"] == "trainings"
        assert collector.resource["host.name"] == os.uname().nodename
        wait_until(lambda: bool(values("commlens_stuck")), "the metric of the stall")
        stuck = (("action", "unknown"), of_job, ("kind", "missing"))
        assert values("commlens_stuck") == {tuple(sorted(stuck)): 1.0}
        assert values("commlens_verdicts_total") == {
            tuple(sorted((of_job, ("kind", "missing")))): 1
        }
        assert values("commlens_oldest_wait_seconds")[(of_job,)] > 8
        assert {name for name, points in collector.metrics.items() if points} <= documented()
        assert collector.counters == {name for name in collector.metrics if name.endswith("_total")}
        (tmp_path / "stall").unlink()
        (tmp_path / "end").touch()
        assert job.wait(PATIENCE_S) == 0, said(tmp_path)
    finally:
        job.terminate()
        job.wait()
    assert said(tmp_path).count("in the rank: []") == 2
    assert "OTLP" not in said(tmp_path)


def said(folder: Path) -> str:
    return (folder / "output").read_text()


def test_the_verdict_on_a_death_is_sent_before_the_job_ends(tmp_path: Path, collector: Collector):
    job = launch(
        tmp_path, DIES, OTEL_EXPORTER_OTLP_LOGS_ENDPOINT=f"{collector.endpoint}/v1/logs"
    )  # fmt: skip
    assert job.wait(PATIENCE_S) != 0
    [record] = collector.records
    assert "rank 1 died of SIGKILL" in record["body"]
    assert (record["kind"], record["action"], record["culprits"]) == ("dead", "retry", [1])
    assert collector.metrics == {}
    assert "OTLP" not in said(tmp_path)


@pytest.mark.parametrize("fault", ["refused", "status 503", "no answer"])
def test_an_endpoint_that_fails_harms_nothing(tmp_path: Path, fault: str):
    failing = Collector(503, 60.0 if fault == "no answer" else 0.0)
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}" if fault == "refused" else failing.endpoint
    began = time.monotonic()
    job = launch(
        tmp_path, DIES, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_METRIC_EXPORT_INTERVAL="1000"
    )  # fmt: skip
    try:
        assert job.wait(PATIENCE_S) != 0
        print(f"{fault}: {time.monotonic() - began:.1f} s")
    finally:
        failing.close()
    assert "VERDICT rank 1 died of SIGKILL" in " ".join(said(tmp_path).split())
    # without an answer, the exporter gives up after ten seconds, which a busy machine takes to end
    failed = said(tmp_path).count("commlens: OTLP: ")
    assert failed <= 1 if fault == "no answer" else failed == 1
