"""The verdict on a rank that makes a running job slow."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from builders import SCRIPT, START
from device_jobs import DeviceJob, Fault
from goldens import hold
from paced_jobs import job
from paced_samples import found, late, samples

from commlens.diagnosis.examine import straggler_verdict
from commlens.model.collective import Frame, FrameKind, Stack
from commlens.model.verdict import Verdict
from commlens.speed.pace import PaceMeter, find_slow_ranks, recent, with_since


def test_a_slow_rank_that_is_alone_on_its_node() -> None:
    load = Frame(SCRIPT, 7, "load_batch")
    slow = find_slow_ranks(samples(job(4, 200, late)))
    assert slow is not None
    log = job(4, 200, late)[2]
    verdict = straggler_verdict(slow, [log], {2: Counter({(load,): 40, (): 60})}, compared=range(4))
    assert (verdict.source, verdict.victims) == (None, [0, 1, 3]), (
        "no other rank's profile shows what is usual"
    )
    hold("straggler/alone-on-its-node", verdict)


def test_the_verdict_with_records_alone() -> None:
    logs = job(4, 200, late)
    verdict = straggler_verdict(found(logs), logs)
    assert (verdict.kind, verdict.culprits, verdict.victims, verdict.confidence) == (
        "straggler",
        [2],
        [0, 1, 3],
        "medium",
    )
    hold("straggler/records-alone", verdict)


def test_the_verdict_on_the_ranks_of_one_node_says_so() -> None:
    logs = job(4, 200, late)
    for log in logs:
        log.host, log.world_size = "n03", 8
    hold("straggler/ranks-of-one-node", straggler_verdict(found(logs), logs))


def test_the_verdict_with_profiles() -> None:
    main, load, read = (
        Frame(SCRIPT, 30, "main"),
        Frame(SCRIPT, 7, "load_batch"),
        Frame("/lib/python3/io.py", 3, "read", FrameKind.LIBRARY),
    )
    profiles = {
        2: Counter({(read, load, main): 40, (main,): 60}),
        0: Counter({(read, load, main): 2, (main,): 98}),
    }
    logs = job(4, 200, late)
    verdict = straggler_verdict(found(logs), logs, profiles)
    assert verdict.why == "data-loading"
    assert verdict.source == "train.py:7"
    hold("straggler/profiles", verdict)


def test_a_rank_without_a_cpu() -> None:
    logs = job(4, 200, late)
    paces = [
        each._replace(
            no_cpu_s={rank: (0.3 if rank == 2 else 0.01) * each.window_s for rank in range(4)}
        )
        for each in samples(logs)
    ]
    slow = find_slow_ranks(paces)
    assert slow is not None
    verdict = straggler_verdict(slow, logs)
    assert verdict.why == "no-cpu"
    hold("straggler/no-cpu", verdict)


def followed(fault: Fault, profiles: dict[int, Counter[Stack]], **shape: Any) -> Verdict:
    """The verdict on a simulated job whose hosts run ahead of their devices."""
    meter, paces, logs = PaceMeter(START), [], []
    for _, logs in DeviceJob(8, fault=fault, **shape).looks(70.0):
        paces += meter.measure(logs, 2, 5.0)
    slow = find_slow_ranks(recent(paces))
    assert slow is not None
    return straggler_verdict(with_since(slow, paces), logs, profiles)


LOAD, WAIT = (Frame(SCRIPT, 7, "load_batch"),), (Frame(SCRIPT, 30, "main"),)
ALIKE = {rank: Counter({LOAD: 4, WAIT: 196}) for rank in (2, 3, 0)}
DEVICES = {
    "device": (Fault("device", 3, 1.3, 20.0), ALIKE, "slow-device", {}),
    "host": (
        Fault("host", 3, 1.3, 20.0),
        {3: Counter({LOAD: 50, WAIT: 150}), 0: Counter({LOAD: 4, WAIT: 196})},
        "data-loading",
        {},
    ),
    "either": (Fault("device", 3, 1.3, 20.0), {}, "unknown", {}),
    "link": (Fault("link", 3, 1.3, 20.0), ALIKE, "slow-link", {"tp": 2}),
    "work": (Fault("work", 3, 1.5, 20.0), ALIKE, "uneven-work", {"experts": True}),
}


@pytest.mark.parametrize("name", DEVICES)
def test_why_a_device_is_late(name: str) -> None:
    fault, profiles, why, shape = DEVICES[name]
    verdict = followed(fault, profiles, **shape)
    assert (verdict.why, verdict.culprits) == (why, [2, 3] if name == "link" else [3])
    hold(f"straggler/on-devices-{name}", verdict)
