"""When something is sent by OTLP, and what of a verdict. tests/clusters/test_otlp.py sends it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from commlens.model.cause import GroupRef
from commlens.model.verdict import Action, Verdict
from commlens.watch.alerts.otlp import Metric, OtlpExporter, signals_wanted

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("environ", "signals"),
    [
        ({}, []),
        ({ENDPOINT: ""}, []),
        ({ENDPOINT: URL}, ["METRICS", "LOGS"]),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": URL}, ["LOGS"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}, []),
        ({ENDPOINT: URL, "OTEL_SDK_DISABLED": "True"}, []),
        ({ENDPOINT: URL, "OTEL_LOGS_EXPORTER": "none"}, ["METRICS"]),
        ({ENDPOINT: URL, "OTEL_METRICS_EXPORTER": "console,otlp"}, ["METRICS", "LOGS"]),
        ({ENDPOINT: URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, []),
        (
            {
                ENDPOINT: URL,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/protobuf",
            },
            ["LOGS"],
        ),
    ],
)
def test_opentelemetrys_own_variables_decide(environ: dict[str, str], signals: list[str]):
    assert signals_wanted(environ) == signals


@pytest.mark.parametrize(
    ("labels", "values", "points"),
    [
        ("", {"": 7}, [({}, 7)]),
        ("rank", {0: 1.0, 1: 0.0}, [({"rank": "0"}, 1.0), ({"rank": "1"}, 0.0)]),
        ("kind action", {("dead", "stop"): 1.0}, [({"kind": "dead", "action": "stop"}, 1.0)]),
    ],
)
def test_each_value_has_its_labels(labels: str, values: Any, points: Any):
    assert list(Metric("gauge", "x", "", labels, values).points()) == points


def exporter(monkeypatch: pytest.MonkeyPatch, said: list[str], endpoint: str = URL) -> OtlpExporter:
    monkeypatch.setenv(ENDPOINT, endpoint)
    return OtlpExporter("train-1", "n1", said.append)


def test_without_an_endpoint_no_thread_is_started(monkeypatch: pytest.MonkeyPatch):
    made = exporter(monkeypatch, [], endpoint="")
    made.send(Verdict(kind="dead", summary="rank 1 died"), None)
    assert made.signals == []
    assert made._thread is None
    made.end()
    made.wait()


def test_without_the_packages_nothing_is_sent_and_nothing_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    said: list[str] = []
    made = exporter(monkeypatch, said)
    made.update([])
    assert made._thread is not None
    made._thread.join(20)
    assert not made._thread.is_alive()
    assert said == []


def test_the_log_record_of_a_verdict(monkeypatch: pytest.MonkeyPatch):
    made = exporter(monkeypatch, [])
    monkeypatch.setattr(made, "_start", lambda: None)
    verdict = Verdict(
        kind="missing",
        summary="rank 1 never reached all_reduce #6",
        culprits=[1],
        source="train.py:7",
        group=GroupRef("0", "default_pg", [0, 1]),
        action=Action("stop", "program", "high"),
    )
    made.send(verdict, Path("/dumps/train-1"))
    record = made._records.get(block=False)
    assert record is not None
    assert record["timestamp"] > 0
    assert (record["body"], record["severity_text"]) == (verdict.summary, "ERROR")
    assert record["attributes"] == {
        "job_name": "train-1",
        "host": "n1",
        "kind": "missing",
        "action": "stop",
        "culprits": [1],
        "source": "train.py:7",
        "group": "default group",
        "dump": "/dumps/train-1",
    }
    made.send(Verdict(kind="straggler", summary="rank 1 is slow"), None)
    slow = made._records.get(block=False)
    assert slow is not None
    assert slow["severity_text"] == "WARN"
    assert slow["attributes"] == {"job_name": "train-1", "host": "n1", "kind": "straggler"}
