"""What the node that reports learns of another node's ranks is what that node knows of them itself."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec
import pytest
from watch_ranks import member

from commlens.blackbox import layout
from commlens.model.health import HealthEvent, NodeHealth
from commlens.model.ranklog import End, Observation
from commlens.watch.nodes import remote_evidence
from commlens.watch.snapshot import read_logs


def test_the_logs_of_another_node_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "commlens.watch.snapshot.why_unrecorded", lambda pid, joined: f"it has no box, {joined=}"
    )
    members = [
        member(tmp_path, 0),
        member(tmp_path, 1),
        member(tmp_path, 2, box=False),
        member(tmp_path, 3),
    ]
    observations = {
        4000: Observation(end=End.RUNNING, cpu_s=1.5),
        os.getpid(): Observation(end=End.RUNNING),
    }
    assert members[3].box is not None
    os.truncate(members[3].box.path, 1000)
    own, problems = read_logs(members, observations)
    assert (
        len(problems) == 1
        and own[2].unrecorded == "it has no box, joined=True"
        and own[3].problems == ["its black box cannot be read"]
    )

    found = remote_evidence.unpack(remote_evidence.pack(members, observations), "n03")
    assert found.problems == []
    assert {log.job for log in found.logs} == {""}, "to be named by the reporter"
    for mine, theirs in zip(own, found.logs, strict=True):
        same = {"captured_ns": 0, "source": "", "job": ""}
        assert msgspec.structs.replace(theirs, **same) == msgspec.structs.replace(mine, **same)
    assert [(each.rank, each.pid, bool(each.box)) for each in found.ranks] == [
        (0, 4000, True),
        (1, 4001, True),
        (2, os.getpid(), False),
        (3, 4003, False),
    ]


def test_damaged_evidence_is_a_sentence(tmp_path: Path):
    packed = remote_evidence.pack([member(tmp_path, 0)], {})
    assert (
        "could not be read" in remote_evidence.unpack(packed[: len(packed) // 2], "n03").problems[0]
    )


@pytest.mark.parametrize(("oldest_in_flight", "sent"), [(1000, 16), (980, 21), (200, 8 * 16)])
def test_a_rank_sends_its_oldest_record_in_flight_within_bounds(
    tmp_path: Path, oldest_in_flight: int, sent: int
):
    one = member(tmp_path, 0, records=1000, capacity=1024)
    assert one.box is not None
    content = bytearray(one.box.path.read_bytes())
    struct.pack_into("<Q", content, layout.OLDEST_INDEX, oldest_in_flight)
    one.box.path.write_bytes(content)
    (log,) = remote_evidence.unpack(remote_evidence.pack([one], {}, records=16), "n03").logs
    assert [one.index for one in log.collectives] == list(range(1001 - sent, 1001))


def test_the_ranks_of_a_large_job_send_fewer_records():
    assert [remote_evidence.records_of_each(ranks) for ranks in (8, 2048, 10_000, 100_000)] == [
        16_384,
        64,
        16,
        16,
    ]
    assert [
        remote_evidence.first_records_of_each(ranks) for ranks in (8, 2048, 10_000, 100_000)
    ] == [64, 16, 8, 8]
    assert [remote_evidence.more_records_of_each(ranks) for ranks in (16, 72, 10_000)] == [
        1024,
        227,
        64,
    ]


def test_the_newest_of_what_a_node_tells_of_its_hardware_travels(tmp_path: Path):
    events = [
        HealthEvent(what="link-down", fault="network-down", part="eth0", at_ns=at_ns)
        for at_ns in range(1, 301)
    ]
    health = NodeHealth(
        "n03", taken_ns=300, events=events, values={"network": {"eth0": {"state": "down"}}}
    )
    members = [member(tmp_path, 0), member(tmp_path, 1)]
    found = remote_evidence.unpack(remote_evidence.pack(members, {}, health=health), "n03")
    told = NodeHealth("n03", taken_ns=300, events=events[200:])
    assert [log.health for log in found.logs] == [told, None]
    assert found.health == told
