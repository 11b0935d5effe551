"""Gauges and counters of a running job: a file for Prometheus' node exporter, and OTLP.

prometheus_client (``pip install prometheus-client``) formats the file; it is imported only if a
setting asks for one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from commlens.config import Settings
from commlens.health.changes import WORKING
from commlens.model.health import THERMAL_REASONS, Values
from commlens.speed.pace import Pace
from commlens.speed.step_times import measure_traffic
from commlens.watch.alerts.otlp import Metric
from commlens.watch.reporting import Reporter
from commlens.watch.roster import Member
from commlens.watch.slowness import Slowness
from commlens.watch.stall import Stall

WRITE_EVERY_S: Final = 15.0


class Metrics:
    """Writes the metrics if the settings ask for them, and passes them on to OTLP.

    Args:
        settings: ``metrics_file``.
        job: the job's name: a label of all metrics. Not named "job", which Prometheus sets itself.
        reporter: of the job. Each failure is printed once; the job is watched all the same.
    """

    def __init__(self, settings: Settings, job: str, reporter: Reporter) -> None:
        self._reporter = reporter
        self._job = job
        self._file: Path | None = None
        self._due = 0.0
        self._families: list[Any] = []
        self._registry: Any = None
        if settings.metrics_file is None:
            return
        try:
            import prometheus_client
        except ImportError:
            reporter.say(
                "no metrics: prometheus_client is not installed (`pip install prometheus-client`)."
            )
            return
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        path = Path(settings.metrics_file)
        self._file = path / f"commlens-{job}.prom" if path.is_dir() else path

    def update(
        self,
        members: Sequence[Member],
        stall: Stall | None,
        slowness: Slowness,
        not_compared: int,
        hardware: Mapping[str, int] = MappingProxyType({}),
        hardware_now: Mapping[str, Values] = MappingProxyType({}),
    ) -> None:
        """If metrics are wanted and due, take new readings, and write the file.

        Args:
            members: the ranks.
            stall: the suspicious wait, if there is one.
            slowness: the ranks' pace.
            not_compared: records that deferred verification left out.
            hardware: number of changes of the node's hardware seen so far, by fault.
            hardware_now: the newest values of the hardware, by source.
        """
        now = time.monotonic()
        otlp = self._reporter.otlp
        if now < self._due or (self._file is None and "METRICS" not in otlp.signals):
            return
        self._due = now + WRITE_EVERY_S
        table = self._table(members, stall, slowness, not_compared, hardware, hardware_now)
        if "METRICS" in otlp.signals:
            otlp.update(table)
        if self._file is None:
            return
        import prometheus_client

        self._families = [self._family(metric) for metric in table]
        try:
            prometheus_client.write_to_textfile(str(self._file), self._registry)
        except OSError as error:
            self._reporter.say(f"no metrics in {self._file}: {error.strerror or error}.")
            self._file = None

    def _table(
        self,
        members: Sequence[Member],
        stall: Stall | None,
        slowness: Slowness,
        not_compared: int,
        hardware: Mapping[str, int],
        hardware_now: Mapping[str, Values],
    ) -> tuple[Metric, ...]:
        """Return each metric with its values."""
        pace = slowness.paces[-1] if slowness.paces else None
        slow = slowness.verdict.culprits if slowness.verdict is not None else []
        status = {
            member.rank: member.status
            for member in members
            if member.here and member.status is not None
        }
        traffic = measure_traffic(slowness.logs)
        return (
            Metric(
                "counter",
                "collectives",
                "Collectives that a rank has issued.",
                "rank",
                {r: each.issued for r, each in status.items()},
            ),
            Metric(
                "counter",
                "steps",
                "Optimizer steps that a rank has completed.",
                "rank",
                {r: each.steps for r, each in status.items()},
            ),
            Metric(
                "counter",
                "verdicts",
                "Verdicts that the watcher has printed.",
                "kind",
                self._reporter.counts,
            ),
            Metric(
                "counter",
                "records_not_compared",
                "Records that came too fast to be compared.",
                "",
                {"": not_compared},
            ),
            Metric(
                "counter",
                "hardware_changes",
                "Changes of the node's hardware that may stop or slow a job.",
                "fault",
                hardware,
            ),
            Metric(
                "gauge", "link_up", "1 for a network port that works.", "port", _links(hardware_now)
            ),
            Metric(
                "gauge",
                "gpu_temperature_celsius",
                "Of a GPU, by its PCI address.",
                "gpu",
                _gpus(hardware_now, "temperature_c"),
            ),
            Metric(
                "gauge",
                "gpu_throttled",
                "1 for a GPU whose clock is lowered because of heat or power.",
                "gpu",
                _throttled(hardware_now),
            ),
            Metric(
                "gauge",
                "oldest_wait_seconds",
                "Age of the oldest suspicious wait.",
                "",
                {"": (time.monotonic_ns() - stall.since_ns) / 1e9 if stall is not None else 0.0},
            ),
            Metric(
                "gauge",
                "stuck",
                "1 while ranks wait of which a verdict says that they are stuck.",
                "kind action",
                _stuck(stall),
            ),
            Metric(
                "gauge",
                "step_seconds",
                "Time of an optimizer step.",
                "",
                {"": pace.step_s} if pace is not None else {},
            ),
            Metric(
                "gauge", "waiting_ratio", "Share of the time in collectives.", "rank", _shares(pace)
            ),
            Metric(
                "gauge",
                "sending_ratio",
                "Share of the time in transfers between accelerators.",
                "rank",
                _shares_sent(pace),
            ),
            Metric(
                "gauge",
                "slow_rank",
                "1 for a rank that makes the job slow.",
                "rank",
                {r: float(r in slow) for r in status},
            ),
            Metric(
                "gauge",
                "group_collectives_per_second",
                "Of a rank, as sampled.",
                "group",
                {t.group: t.calls for t in traffic},
            ),
            Metric(
                "gauge",
                "group_bytes_per_second",
                "A rank's payload, as sampled.",
                "group",
                {t.group: t.payload_bytes for t in traffic},
            ),
            Metric(
                "gauge",
                "group_waiting_ratio",
                "Share of the time in its collectives.",
                "group",
                {t.group: t.waited_ns * 1e-9 for t in traffic},
            ),
            Metric(
                "gauge",
                "watcher_alive_timestamp_seconds",
                "When the watcher last looked.",
                "",
                {"": time.time()},
            ),
        )

    def close(self) -> None:
        """Remove the file: metrics of a job that is over would look alive."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
        self._file = None

    def collect(self) -> list[Any]:
        """Return the metrics; prometheus_client calls it at each writing."""
        return self._families

    def _family(self, metric: Metric) -> Any:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(
            f"commlens_{metric.name}", metric.text, labels=("job_name", *metric.labels.split())
        )
        for labels, value in metric.points():
            family.add_metric([self._job, *labels.values()], value)
        return family


def _stuck(stall: Stall | None) -> dict[tuple[str, str], float]:
    """Return 1 for the kind and the action of the verdict on ranks that still wait."""
    verdict = stall.verdict if stall is not None else None
    if verdict is None or not verdict.is_fault:
        return {}
    return {(verdict.kind, verdict.action.do if verdict.action is not None else "unknown"): 1.0}


def _links(hardware: Mapping[str, Values]) -> dict[str, float]:
    """Return 1 for each network port that works, and 0 for each other port."""
    return {
        part: float(values["state"] == good)
        for source, good in WORKING.items()
        for part, values in hardware.get(source, {}).items()
        if "state" in values
    }


def _gpus(hardware: Mapping[str, Values], name: str) -> dict[str, float]:
    """Return a value of each GPU that reports it."""
    return {
        gpu: float(value)
        for gpu, values in hardware.get("gpu", {}).items()
        if isinstance(value := values.get(name), (int, float))
    }


def _throttled(hardware: Mapping[str, Values]) -> dict[str, float]:
    """Return 1 for each GPU whose clock is lowered because of heat or power, and 0 for others."""
    return {
        gpu: float(bool(int(reasons) & THERMAL_REASONS))
        for gpu, reasons in _gpus(hardware, "throttle_reasons").items()
    }


def _shares(pace: Pace | None) -> dict[int, float]:
    return (
        {rank: waited / pace.window_s for rank, waited in pace.waited_s.items()}
        if pace is not None
        else {}
    )


def _shares_sent(pace: Pace | None) -> dict[int, float]:
    """Return the share of the time in transfers of each rank's device, where any is known."""
    sent = pace.sent_s.items() if pace is not None else ()
    return {rank: seconds / pace.window_s for rank, seconds in sent if pace and seconds}
