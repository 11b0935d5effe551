"""Metrics and verdicts by OpenTelemetry's protocol, OTLP, if its own variables name an endpoint.

Everything happens in one thread of the watcher, so that neither the job nor the watcher waits for
it. OpenTelemetry's packages (``pip install 'commlens[otlp]'``) are imported only there; without
them nothing is sent.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from commlens.model.verdict import Verdict
from commlens.text import DEFAULT_LABELS

END_S: Final = 3.0
"""How long the end of the job may wait until the last metrics and verdicts are sent."""


class Metric(NamedTuple):
    """A metric of the job, with its values."""

    kind: Literal["counter", "gauge"]
    name: str  # as in Prometheus, which adds _total to that of a counter
    text: str
    labels: str  # their names, separated by a space
    values: Mapping[Any, float]  # by the label's value, or by a tuple of them

    def points(self) -> Iterator[tuple[dict[str, str], float]]:
        """Yield each value, with its labels."""
        for key, value in list(self.values.items()):  # the watcher's thread may add one
            each = key if isinstance(key, tuple) else (str(key),)
            yield dict(zip(self.labels.split(), each, strict=False)), value


class OtlpExporter:
    """Sends metrics and verdicts to the endpoint that OpenTelemetry's variables name.

    Args:
        job: the job's name: an attribute of all that is sent.
        host: the name of this node.
        say: prints a line. The first failure is printed; the job is watched all the same.
    """

    def __init__(self, job: str, host: str, say: Callable[[str], Any]) -> None:
        self.signals = signals_wanted(os.environ)
        self._job, self._host, self._say = job, host, say
        self._table: Sequence[Metric] = ()
        # of each verdict the fields of its log record; None: the job is over
        self._records: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end_by = 0.0
        self._has_failed = False

    def update(self, table: Sequence[Metric]) -> None:
        """Take new readings, which are sent when they are due."""
        self._table = table
        self._start()

    def send(self, verdict: Verdict, dump: Path | None) -> None:
        """Send a verdict as a log record. Returns at once."""
        if "LOGS" not in self.signals:
            return
        group = verdict.group.description or verdict.group.name if verdict.group else None
        attributes = {
            "job_name": self._job,
            "host": self._host,
            "kind": verdict.kind,
            "action": verdict.action.do if verdict.action is not None else None,
            "culprits": list(verdict.culprits),
            "source": verdict.source,
            "group": "default group" if group in DEFAULT_LABELS else group,  # as in the metrics
            "dump": str(dump.absolute()) if dump is not None else None,
        }
        self._records.put(
            {
                "timestamp": time.time_ns(),
                "body": verdict.summary,
                "severity_text": "WARN" if verdict.kind == "straggler" else "ERROR",
                "event_name": "commlens.verdict",
                "attributes": {name: value for name, value in attributes.items() if value},
            }
        )
        self._start()

    def end(self) -> None:
        """Let the thread send what is left."""
        self._end_by = time.monotonic() + END_S
        self._records.put(None)

    def wait(self) -> None:
        """Wait for it, until :data:`END_S` after :meth:`end`."""
        if self._thread is not None:
            self._thread.join(max(0.0, self._end_by - time.monotonic()))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="commlens-otlp", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._export()
        except ModuleNotFoundError:
            return  # without the packages, the variables are there for other programs
        except Exception as error:
            self._say(f"nothing more is sent by OTLP: {type(error).__name__}: {error}")

    def _export(self) -> None:
        """Send metrics when they are due and verdicts at once, until the job is over."""
        from opentelemetry._logs import LogRecord, SeverityNumber
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        handler = logging.Handler(logging.WARNING)
        handler.emit = self._print_failure  # type: ignore[method-assign]
        logging.getLogger("opentelemetry").addHandler(handler)
        logging.getLogger("opentelemetry").propagate = False
        # the instance tells the nodes of a job apart
        own = dict.fromkeys(("service.instance.id", "host.name"), self._host)
        own.update({"service.name": "commlens", **OTELResourceDetector().detect().attributes})
        resource = Resource.create(own)
        logs = LoggerProvider(resource, shutdown_on_exit=False)
        logs.add_log_record_processor(SimpleLogRecordProcessor(OTLPLogExporter()))
        # without an interval, no thread of its own, which each fork of a launcher would start again
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(), math.inf)
        meter = MeterProvider([reader], resource, shutdown_on_exit=False).get_meter("commlens")
        for index, (kind, name, text, *_) in enumerate(self._table):
            create = getattr(meter, f"create_observable_{kind}")
            full = f"commlens_{name}_total" if kind == "counter" else f"commlens_{name}"
            create(full, [functools.partial(self._observe, index)], description=text)
        every_s = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or 60_000) / 1e3
        due = time.monotonic()
        while True:
            record: dict[str, Any] | None = {}
            with contextlib.suppress(queue.Empty):
                record = self._records.get(timeout=max(0.0, due - time.monotonic()))
            if record:
                record["severity_number"] = SeverityNumber[record["severity_text"]]
                logs.get_logger("commlens").emit(LogRecord(**record))
                continue
            reader.collect()  # sends nothing if there are no metrics
            if record is None:
                return
            due = time.monotonic() + max(1.0, every_s)

    def _observe(self, index: int, _: object) -> list[Any]:
        """Return the newest values of a metric, as OpenTelemetry asks for them."""
        from opentelemetry.metrics import Observation

        return [
            Observation(value, {**labels, "job_name": self._job})
            for labels, value in self._table[index].points()
        ]

    def _print_failure(self, record: logging.LogRecord) -> None:
        """Print the first warning of OpenTelemetry's packages, and no other."""
        if not self._has_failed:
            self._has_failed = True
            cause = f": {record.exc_info[1]}" if record.exc_info else ""
            self._say(
                f"OTLP: {record.getMessage().rstrip('.')}{cause}; further errors are not printed."
            )


def signals_wanted(environ: Mapping[str, str]) -> list[str]:
    """Return the signals that OpenTelemetry's variables ask for: METRICS, LOGS."""

    def of_signal(signal: str, name: str) -> str:
        both = environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")
        return environ.get(f"OTEL_EXPORTER_OTLP_{signal}_{name}") or both

    return [
        signal
        for signal in ("METRICS", "LOGS")
        if of_signal(signal, "ENDPOINT")
        and of_signal(signal, "PROTOCOL") in ("", "http/protobuf")
        and "otlp" in environ.get(f"OTEL_{signal}_EXPORTER", "otlp")
        and environ.get("OTEL_SDK_DISABLED", "").lower() != "true"
    ]
