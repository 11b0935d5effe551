"""What commlens writes for Perfetto is what Perfetto takes: by its rules, and by its own trace
processor where there is one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from builders import Job, Stay, at, mixed
from chrome_trace import violations
from traces import training

import commlens
from commlens.formats.rank_log_columns import columns_from_log
from commlens.reports.converted import perfetto
from commlens.reports.converted.perfetto_traces import trace_to_perfetto


def of_traces(late_waits: bool = False) -> bytes:
    """Eight ranks' traces."""
    traces = [training(rank) for rank in range(8)]
    for event in (event for data in traces for event in data.events if late_waits):
        # after the next ones were issued
        event.wait_ended_ns = event.started_ns + 250_000 + event.sequence
    return trace_to_perfetto(
        (data.rank, data.started_unix_ns, commlens.Trace(data).to_rows()) for data in traces
    )[0]


def of_dumps() -> bytes:
    """Four ranks' dumps, with collectives that never ended."""
    logs = Job(4).run(mixed(at(2, 3, Stay(57, "load_batch")))).logs()
    return b"".join(perfetto.to_perfetto(columns_from_log(log) for log in logs))


MADE = {
    "traces": of_traces,
    "traces whose waits overlap": lambda: of_traces(late_waits=True),
    "dumps": of_dumps,
}


@pytest.mark.parametrize("what", MADE)
def test_nothing_breaks_perfetto_s_rules(what: str):
    assert violations(MADE[what]()) == []


def test_the_rules_are_noticed_when_they_are_broken():
    slice_ = '{"ph": "X", "pid": 0, "tid": 0, "name": "x", "ts": %d, "dur": %d}'
    assert (
        len(violations(f'{{"traceEvents": [{slice_ % (0, 10)}, {slice_ % (5, 10)}]}}'.encode()))
        == 1
    )
    assert (
        len(
            violations(
                b'{"traceEvents": [{"ph": "s", "id": 1, "pid": 0, "tid": 0, "ts": 0, "name": "x"}]}'
            )
        )
        == 1
    )
    begin = (
        b'{"ph": "b", "cat": "c", "id2": {"local": "1"}, "pid": 0, "tid": 0, "ts": 0, "name": "x"}'
    )
    assert len(violations(b'{"traceEvents": [' + begin + b"]}")) == 1


@pytest.mark.parametrize("what", MADE)
def test_perfetto_s_own_trace_processor_takes_all_of_it(what: str, tmp_path: Path):
    program = shutil.which("trace_processor_shell")
    if not program:
        pytest.skip(
            "no trace_processor_shell on PATH (https://get.perfetto.dev/trace_processor); the rules"
            " are checked without it"
        )
    api = pytest.importorskip(
        "perfetto.trace_processor", reason="the perfetto package is not installed"
    )
    path = tmp_path / "trace.json"
    path.write_bytes(MADE[what]())
    processor = api.TraceProcessor(
        trace=str(path), config=api.TraceProcessorConfig(bin_path=program)
    )
    try:
        errors = processor.query(
            "select name, value from stats where severity = 'error' and value > 0"
        )
        assert [(row.name, row.value) for row in errors] == []
        assert next(iter(processor.query("select count(*) as number from slice"))).number > 0
        if what != "dumps":
            assert (
                next(iter(processor.query("select count(*) as number from flow"))).number == 8 * 32
            )
    finally:
        processor.close()
