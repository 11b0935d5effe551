"""The project's scenarios as dumps of other tools, run over gloo with the harness of the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from dumpgen import Truth, converted
from harness import harness
from more_scenarios import SCENARIOS, find

from commlens.scenarios import Ending

WORLD_SIZE = 4


def run_all(folder: Path, only: str = "") -> Iterator[tuple[str, str, Truth, Path, bool]]:
    """Run each faulty scenario once; yield the kind of dumps, scenario, truth, folder of files
    rank_N, and whether no dump is missing.
    """
    with harness() as jobs:
        for scenario in SCENARIOS:
            # by recorders of collectives
            is_recorded = scenario.fault is not None and scenario.family != "startup"
            if not is_recorded or scenario.impossible() or only not in scenario.name:
                continue
            native = folder / scenario.name / "native"
            environment = {"PYTEST_NATIVE_DUMPS": str(native), "TORCH_FR_BUFFER_SIZE": "2000"}
            result = jobs.run_job(
                scenario, WORLD_SIZE, folder / scenario.name, environment=environment
            )
            yield from _as_dumps(
                scenario.name, scenario.family, result, folder / scenario.name, native
            )


def _as_dumps(
    name: str, family: str, result: Any, folder: Path, native: Path
) -> Iterator[tuple[str, str, Truth, Path, bool]]:
    truth, without = (
        converted.truth_in_dumps(name, WORLD_SIZE),
        converted.without_dump(name, WORLD_SIZE),
    )
    for timing in (False, True):
        to = folder / f"timing-{timing}"
        converted.write(result.logs(), to, timing=timing, without=without)
        yield (
            f"scenarios as NCCL, {WORLD_SIZE} ranks, {'timing' if timing else 'plain'}",
            name,
            truth,
            to,
            not without,
        )
    # gloo's recorder records no messages. A job that dies, or a thread that cannot run, leaves no
    # dump.
    if (
        find(name).ending is not Ending.HANGS
        or family in ("p2p", "pipeline")
        or name in ("stopped", "holds-gil", "throttled")
    ):
        return
    to = folder / "gloo"
    to.mkdir()
    for dump in native.glob("gloo_*[0-9]"):
        dump.rename(to / f"rank_{dump.name.removeprefix('gloo_')}")
    files = list(to.iterdir())
    if files:
        yield (
            f"scenarios as gloo, {WORLD_SIZE} ranks, plain",
            name,
            truth,
            to,
            len(files) == WORLD_SIZE,
        )
