"""Looks at a node over time, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from node_files import NodeFiles, RasServer, communicator, gpu_address

from commlens.health import monitor
from commlens.health.changes import Look
from commlens.health.monitor import Monitor, NodeRecord, NodeSampler, look_once
from commlens.health.places import RankOfNode
from commlens.model.health import HealthEvent, NodeHealth, NotRead, Values

S = 1_000_000_000
RANKS = [RankOfNode(0, 70, 0, {}), RankOfNode(1, 71, 1, {})]


def whats(health: NodeHealth) -> list[tuple[str, str]]:
    return [(event.what, event.part) for event in health.events]


def test_a_change_between_two_looks_is_reported(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path, gpus=2)
    node = Monitor(tmp_path, "n03")
    try:
        healthy = node.report(RANKS, wait_s=20)
        files.log("NVRM: Xid (PCI:0000:11:00): 79, pid=71, name=python, bus", time.time_ns())
        files.port("mlx5_0", symbol_error="99")
        node.look_now()
        health = node.report(RANKS, wait_s=20)
    finally:
        node.close()
    assert (healthy.host, healthy.events, healthy.not_read) == ("n03", [], [])
    assert sorted(whats(health)) == [("errors-rose", "mlx5_0"), ("xid", gpu_address(1))]
    assert [place.gpu for place in health.ranks] == [gpu_address(0), gpu_address(1)]
    assert health.began_ns < health.events[0].at_ns <= health.taken_ns
    assert not node._thread.is_alive()


def test_ras_is_asked_once_when_a_stall_is_suspected(tmp_path: Path) -> None:
    NodeFiles(tmp_path)
    with RasServer([communicator([70, 71], [4, 3])]) as server:
        node = Monitor(tmp_path)
        try:
            assert node.report(RANKS, wait_s=20).ras is None
            node.look_now(server.environment)
            told = node.report(RANKS, wait_s=20).ras
            assert node.report(RANKS, wait_s=20).ras == told
        finally:
            node.close()
    assert told is not None and told.communicators[0].behind[0].pid == 71
    assert server.commands.count("verbose status") == 1


def test_what_is_asked_for_while_it_is_done_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NodeFiles(tmp_path)
    first, release, asked = threading.Event(), threading.Event(), []

    def ask(environment: Mapping[str, str]) -> None:
        asked.append(environment)
        first.set()
        release.wait(30)

    monkeypatch.setattr(monitor.ras, "ask", ask)
    node = Monitor(tmp_path)
    try:
        node.look_now({"RANK": "0"})
        assert first.wait(20)
        node.look_now({"RANK": "1"})
        release.set()
        node.report(RANKS, wait_s=20)
    finally:
        release.set()
        node.close()
    assert asked == [{"RANK": "0"}, {"RANK": "1"}]


def test_a_source_that_blocks_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def block(_: Path) -> dict[str, object]:
        release.wait(30)
        return {}

    monkeypatch.setattr(monitor, "read_infiniband", block)
    NodeFiles(tmp_path)
    node = Monitor(tmp_path)
    try:
        began = time.monotonic()
        health = node.report(RANKS, wait_s=0.2)
        assert time.monotonic() - began < 5
        assert [each.source for each in health.not_read] == ["this node"]
    finally:
        release.set()
        node.close()


def test_nobody_waits_for_a_thread_that_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no sampler")

    monkeypatch.setattr(monitor, "NodeSampler", fail)
    node = Monitor(tmp_path, "n03")
    node._thread.join(20)
    try:
        node.look_now({})
        began = time.monotonic()
        health = node.report(RANKS, wait_s=20)
        assert time.monotonic() - began < 5
    finally:
        node.close()
    assert (health.host, health.events, health.not_read) == ("n03", [], [])
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "commlens: the node's hardware is not watched any more: RuntimeError: no sampler"
    ]


def test_a_source_that_fails_is_named_once_and_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail(_: Path) -> dict[str, object]:
        calls.append(1)
        raise ValueError("odd file")

    monkeypatch.setattr(monitor, "read_tcp", fail)
    NodeFiles(tmp_path)
    sampler = NodeSampler(tmp_path)
    try:
        for _ in range(3):
            sampler.look(thorough=True)
    finally:
        sampler.close()
    assert [(each.source, each.reason) for each in sampler.not_read] == [
        ("tcp", "ValueError: odd file")
    ]
    assert len(calls) == 1


def test_a_source_that_goes_on_failing_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NodeFiles(tmp_path)
    sampler = NodeSampler(tmp_path)
    try:
        sampler.look(thorough=True)
        assert sampler.not_read == []
        (tcp,) = (source for source in sampler._sources if source.name == "tcp")

        def fail() -> Values:
            raise ValueError("driver gone")

        monkeypatch.setattr(tcp, "read", fail)
        for _ in range(3):
            sampler.look(thorough=True)
    finally:
        sampler.close()
    assert sampler.not_read == [NotRead("tcp", "ValueError: driver gone")]


def test_a_costly_source_is_read_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NodeFiles(tmp_path)
    real = monitor.read_infiniband

    def burn(root: Path) -> dict[str, object]:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass
        return real(root)  # type: ignore[return-value]

    monkeypatch.setattr(monitor, "read_infiniband", burn)
    sampler = NodeSampler(tmp_path)
    try:
        sampler.look(thorough=True)
        due = {source.name: source.due - time.monotonic() for source in sampler._sources}
        assert "infiniband" not in sampler.look(thorough=False)[0]
        assert "infiniband" in sampler.look(thorough=True)[0]
    finally:
        sampler.close()
    # 30 ms are three times the share of one of five sources in 50 ms a minute
    assert due["infiniband"] > 2.5 * monitor.EVERY_S
    assert due["network"] < 1.1 * monitor.EVERY_S


def event(what: str, part: str, at_s: float, since_s: float = 0.0) -> HealthEvent:
    return HealthEvent(
        what=what,  # type: ignore[arg-type]
        fault="network-down",
        part=part,
        at_ns=int(at_s * S),
        since_ns=int(since_s * S),
    )


def values_of(files: NodeFiles) -> dict[str, Values]:
    sampler = NodeSampler(files.root)
    values, _ = sampler.look(thorough=True)
    sampler.close()
    return values


def test_what_the_kernel_dates_exactly_is_told_once(tmp_path: Path) -> None:
    values = values_of(NodeFiles(tmp_path))
    record = NodeRecord("n0")
    record.add(Look(100 * S, values), [])
    record.add(
        Look(
            160 * S, {"infiniband": {"mlx5_1": {**values["infiniband"]["mlx5_1"], "state": "DOWN"}}}
        ),
        [event("link-down", "0000:81:00.0", 130.5)],
    )
    (told,) = record.health().events
    assert (told.what, told.part, told.at_ns) == ("link-down", "mlx5_1", int(130.5 * S))
    assert not told.over


def test_each_of_two_failures_of_one_part_is_told_once() -> None:
    """The kernel dates both exactly, and its counter shows each between two looks."""
    record = NodeRecord("n0")
    for taken_s, times_down, logged in (
        (100, 1.0, []),
        (160, 2.0, [event("link-down", "eth0", 130)]),
        (220, 2.0, []),
        (280, 3.0, [event("link-down", "eth0", 250)]),
    ):
        values: dict[str, Values] = {"network": {"eth0": {"carrier_down_count": times_down}}}
        record.add(Look(taken_s * S, values), logged)
    assert [each.at_ns // S for each in record.health().events] == [130, 250]


def test_faults_are_counted_though_old_events_are_forgotten() -> None:
    record = NodeRecord("n0")
    record.add(Look(100 * S, {}), [event("link-down", "eth0", 50 + at_s) for at_s in range(400)])
    record.add(Look(900 * S, {}), [event("link-down", "eth1", 500 + at_s) for at_s in range(400)])
    record.add(Look(901 * S, {}), [event("link-up", "eth1", 900)])
    assert record.faults == {"network-down": 800}
    assert len(record.health().events) == monitor.EVENTS_MAX


def test_a_link_that_came_up_again_is_over(tmp_path: Path) -> None:
    values = values_of(NodeFiles(tmp_path))
    record = NodeRecord("n0")
    record.add(Look(100 * S, values), [])
    record.add(Look(160 * S, values), [event("link-down", "eth0", 130)])
    assert [each.over for each in record.health().events] == [True]


def test_one_look_tells_the_past_that_the_kernel_has_logged(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path, gpus=1)
    files.log("NVRM: Xid (PCI:0000:10:00): 63, pid=1, name=python, remap", 5 * S)
    health = look_once(tmp_path, "n03")
    assert whats(health) == [("xid", gpu_address(0))]
    assert health.began_ns > 0 and health.networks == ["mlx5_0", "mlx5_1", "eth0"]


def test_a_folder_without_anything_is_read_without_an_error(tmp_path: Path) -> None:
    health = look_once(tmp_path, "n03")
    assert health.values == {} and [each.source for each in health.not_read] == ["kernel log"]


def test_all_times_are_on_the_present_clock() -> None:
    """The clock is set 100 s forward between the second look and the third."""
    record = NodeRecord("n0")
    record.add(Look(100 * S, {}, 10 * S), [])
    record.add(Look(160 * S, {}, 10 * S), [event("link-down", "eth0", 150)])
    told = [event("link-down", "eth1", 190), event("link-down", "eth2", 310)]  # before it, after it
    record.add(Look(320 * S, {}, 110 * S), told)
    health = record.health()
    assert [(each.part, each.at_ns // S) for each in health.events] == [
        ("eth0", 250),
        ("eth1", 290),
        ("eth2", 310),
        ("clock", 320),
    ]
    step = health.events[-1]
    assert (step.what, step.after, step.since_ns) == ("clock-step", 100.0, 260 * S)
    assert (health.began_ns, record.faults["clock"]) == (200 * S, 1)
