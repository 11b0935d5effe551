"""Events from differences of two looks."""

from __future__ import annotations

import pytest

from commlens.health.changes import Look, changes, clock_step, is_down
from commlens.model.health import Value

S = 1_000_000_000


def look(at_s: float, source: str, part: str, **values: Value) -> Look:
    return Look(int(at_s * S), {source: {part: values}})


def one(
    source: str, part: str, name: str, values: tuple[Value, Value, Value]
) -> list[tuple[str, str]]:
    """What happened in the last 10 s of 130, by the value at each of three looks."""
    first, before, after = (
        look(at_s, source, part, **{name: value})
        for at_s, value in zip((0.0, 120.0, 130.0), values, strict=True)
    )
    return [(event.what, event.fault) for event in changes(first, before, after)]


@pytest.mark.parametrize(
    ("source", "part", "name", "values", "expected"),
    [
        ("infiniband", "mlx5_0", "state", ("ACTIVE", "ACTIVE", "DOWN"), "link-down"),
        ("infiniband", "mlx5_0", "state", ("ACTIVE", "ACTIVE", "INIT"), "link-down"),
        ("infiniband", "mlx5_0", "state", ("DOWN", "DOWN", "DOWN"), ""),
        ("infiniband", "mlx5_0", "state", ("DOWN", "DOWN", "ACTIVE"), ""),
        ("infiniband", "mlx5_0", "link_downed", (3.0, 3.0, 4.0), "link-down"),
        ("infiniband", "mlx5_0", "rate_gbit", (400.0, 400.0, 200.0), "rate-fell"),
        ("infiniband", "mlx5_0", "symbol_error", (0.0, 0.0, 9.0), ""),
        ("infiniband", "mlx5_0", "symbol_error", (0.0, 0.0, 10.0), "errors-rose"),
        ("infiniband", "mlx5_0", "symbol_error", (0.0, 1200.0, 1400.0), ""),
        ("infiniband", "mlx5_0", "symbol_error", (0.0, 1200.0, 2200.0), "errors-rose"),
        ("infiniband", "mlx5_0", "symbol_error", (50.0, 50.0, 0.0), ""),
        ("infiniband", "mlx5_0", "port_xmit_wait", (0.0, 0.0, 1e9), ""),
        ("network", "eth0", "state", ("up", "up", "down"), "link-down"),
        ("network", "eth0", "carrier_down_count", (1.0, 1.0, 2.0), "link-down"),
        ("network", "eth0", "speed", (100e3, 100e3, 10e3), "rate-fell"),
        ("network", "eth0", "speed", (100e3, 100e3, -1.0), ""),
        ("network", "eth0", "rx_errors", (0.0, 0.0, 11.0), "errors-rose"),
        ("network", "eth0", "rx_dropped", (0.0, 0.0, 900.0), ""),
        ("network", "eth0", "rx_dropped", (0.0, 0.0, 1000.0), "drops-rose"),
        ("tcp", "tcp", "retransmits", (0.0, 12.0, 512.0), "retransmits-rose"),
        ("gpu", "0000:4f:00.0", "ecc_uncorrected", (0.0, 0.0, 1.0), "ecc-uncorrected"),
        ("gpu", "0000:4f:00.0", "ecc_corrected", (0.0, 0.0, 20.0), ""),
        ("gpu", "0000:4f:00.0", "rows_remapped", (0.0, 0.0, 1.0), "rows-remapped"),
        ("gpu", "0000:4f:00.0", "throttle_reasons", (1.0, 4.0, 64.0), "gpu-throttled"),
        ("gpu", "0000:4f:00.0", "throttle_reasons", (0.0, 0.0, 4.0), ""),
        ("gpu", "0000:4f:00.0", "throttle_reasons", (64.0, 64.0, 64.0), ""),
        ("gpu", "0000:4f:00.0", "pcie_width", (16.0, 16.0, 8.0), "pcie-width-fell"),
        ("gpu", "0000:4f:00.0", "pcie_width", (8.0, 8.0, 16.0), ""),
        ("host", "memory", "oom_kills", (0.0, 0.0, 1.0), "oom-kill"),
        ("host", "memory", "stalled_s", (0.0, 0.0, 1.9), ""),
        ("host", "memory", "stalled_s", (0.0, 0.0, 2.0), "memory-pressure"),
        ("host", "memory", "pages_in", (0.0, 0.0, 4000.0), ""),
        ("host", "memory", "pages_in", (0.0, 0.0, 6000.0), "swapping"),
        ("host", "memory", "pages_in", (0.0, 120000.0, 126000.0), ""),
        ("host", "disk", "stalled_s", (0.0, 0.0, 5.0), "io-pressure"),
        ("host", "cpu", "throttled_times", (0.0, 0.0, 50.0), "cpu-throttled"),
    ],
)
def test_a_change(
    source: str, part: str, name: str, values: tuple[Value, Value, Value], expected: str
) -> None:
    assert [what for what, _ in one(source, part, name, values)] == [expected] * bool(expected)


def test_an_event_tells_between_which_looks_it_happened() -> None:
    first, last = (
        look(at, "gpu", "a", ecc_uncorrected=value) for at, value in ((1, 0.0), (2, 2.0))
    )
    (event,) = changes(first, first, last)
    assert (event.since_ns, event.at_ns, event.before, event.after) == (S, 2 * S, 0.0, 2.0)
    assert event.part == "a" and event.fault == "gpu-memory"


def test_a_gpu_that_is_not_listed_any_more_is_gone() -> None:
    before = Look(S, {"gpu": {"a": {"index": 0.0}, "b": {"index": 1.0}}})
    after = Look(2 * S, {"gpu": {"a": {"index": 0.0}}})
    (event,) = changes(before, before, after)
    assert (event.what, event.part) == ("gpu-gone", "b")
    assert changes(before, before, Look(2 * S, {})) == []  # the GPUs were not read


def test_whether_a_part_is_down() -> None:
    values = {"network": {"eth0": {"state": "down"}}, "infiniband": {"mlx5_0": {"state": "ACTIVE"}}}
    assert is_down(values, "eth0") is True and is_down(values, "mlx5_0") is False  # type: ignore[arg-type]
    assert is_down(values, "eth1") is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before_ns", "after_ns", "step_s"),
    [
        pytest.param(100 * S, 137 * S, 37.0, id="forward"),
        pytest.param(100 * S, 98 * S, -2.0, id="back"),
        pytest.param(100 * S, 100 * S + S // 10, 0.0, id="corrected slowly"),
        pytest.param(0, 137 * S, 0.0, id="unknown"),
    ],
)
def test_a_clock_that_was_set(before_ns: int, after_ns: int, step_s: float) -> None:
    before, after = Look(S, {}, before_ns), Look(2 * S, {}, after_ns)
    assert clock_step(before, after) / S == step_s
