"""No false alarm and no new hang: legal programs on real gloo ranks compute the same with and
without strict verification.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import families
from chosen import NATIVE_FIRST, chosen, long
from legal_programs import AT_FOUR, FAMILIES, ODDITIES
from test_verify_strict import launch
from zygote_client import Zygote

TIMEOUT_S = 400  # takes about 100 s on two cores
USUAL = ("ddp", "fsdp2", "gpipe", "moe", "compiled_part")
"""Families that issue what verification could take for a fault; test_trace_counts.py runs the others."""
RANDOM = [("random-500-1", 2), ("random-500-2", 4), ("random-500-3", 8)]
JOBS = [("families", 2), ("families", 4), ("oddities", 2), ("oddities", 4), *RANDOM]
AT_SIZE = {
    size: [
        family.name
        for family in families.cases(families.GLOO, size)
        if size == 2 or family.name in AT_FOUR
    ]
    for size in (2, 4)
}
CASES = [
    *(("families", size, name) for size, names in AT_SIZE.items() for name in names),
    *(("oddities", size, name) for size in (2, 4) for name in ODDITIES),
    *((job, size, "random") for job, size in RANDOM),
]

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """Run the jobs of all tests in their ways, and without verification. One process imports torch
    for all of them.
    """
    out = tmp_path_factory.mktemp("legal")
    wanted = chosen(request, "job", "size", "way", "engine_environment", "name")
    jobs = {
        f"{job}:{size}:{way or engine or 'mixed'}": f"{job}:{size}:bare"
        for job, size, way, engine, _ in wanted
    }
    environ = {FAMILIES: ",".join({name: None for *_, name in wanted})}
    try:
        environ["COMMLENS_NATIVE_DIR"] = str(request.getfixturevalue("native_cache"))
    except pytest.skip.Exception:
        jobs = {job: bare for job, bare in jobs.items() if job.endswith(":python")}
    return out, launch(
        zygote,
        out,
        "legal_programs",
        *dict.fromkeys(jobs.values()),
        *jobs,
        environ=environ,
        timeout_s=TIMEOUT_S,
    )


def reported(folder: Path, size: int) -> list[dict[str, Any]]:
    return [
        json.loads(path.read_text()) if (path := folder / f"{rank}.json").exists() else {}
        for rank in range(size)
    ]


def cases(jobs: list[tuple[str, int]], usual: list[tuple[str, int]]) -> list[Any]:
    """Return the rows of these jobs; those of other jobs or families than the usual are long."""
    return [
        long(
            *case,
            when=case[:2] not in usual or (case[0] == "families" and case[2] not in USUAL),
            id=f"{case[2]}-{case[0]}-{case[1]}",
        )
        for case in CASES
        if case[:2] in jobs
    ]


@NATIVE_FIRST
@pytest.mark.parametrize(
    ("job", "size", "name"), cases(JOBS, [("families", 2), ("oddities", 2), RANDOM[1]])
)
def test_legal_program(
    launched: tuple[Path, str], engine_environment: dict[str, str], job: str, size: int, name: str
) -> None:
    judge(launched, engine_environment["COMMLENS_ENGINE"], job, size, name)


@pytest.mark.long  # the nodes below run both engines, too
@pytest.mark.parametrize(
    ("job", "size", "name"), cases([("oddities", 2), ("oddities", 4), RANDOM[1]], [RANDOM[1]])
)
@pytest.mark.usefixtures("native_cache")
def test_legal_program_with_both_engines(
    launched: tuple[Path, str], job: str, size: int, name: str
) -> None:
    judge(launched, "mixed", job, size, name)


@pytest.mark.parametrize("way", ["nodes"])
@pytest.mark.parametrize(("job", "size", "name"), cases([("oddities", 4), RANDOM[1]], [RANDOM[1]]))
@pytest.mark.usefixtures("native_cache")
def test_legal_program_on_two_nodes(
    launched: tuple[Path, str], way: str, job: str, size: int, name: str
) -> None:
    judge(launched, way, job, size, name)


@pytest.mark.parametrize("way", ["sample"])
@pytest.mark.parametrize(("job", "size", "name"), cases([RANDOM[1]], [RANDOM[1]]))
@pytest.mark.usefixtures("native_cache")
def test_legal_program_verified_in_samples(
    launched: tuple[Path, str], way: str, job: str, size: int, name: str
) -> None:
    judge(launched, way, job, size, name)


def judge(launched: tuple[Path, str], way: str, job: str, size: int, name: str) -> None:
    """Require the same results as without verification."""
    out, printed = launched
    folder, without = out / f"{job}:{size}:{way}", out / f"{job}:{size}:bare"
    assert (folder / "job.json").exists(), f"the job did not run:\n{printed[-4000:]}"
    outputs = "\n".join(
        f"--- {path.parent.name}, rank {path.stem}:\n{path.read_text()[-2000:]}"
        for each in (without, folder)
        for path in each.glob("*.out")
    )
    for rank, (expected, found) in enumerate(
        zip(reported(without, size), reported(folder, size), strict=True)
    ):
        assert name in expected, f"rank {rank} did not reach it without verification\n{outputs}"
        assert "bits" in expected[name], (
            f"rank {rank} fails without verification: {expected[name]['error']}"
        )
        assert name in found, f"rank {rank} did not reach it under verification\n{outputs}"
        assert "bits" in found[name], f"rank {rank}: {found[name]['error']}"
        assert found[name]["bits"] == expected[name]["bits"], (
            f"rank {rank} computes another result under verification"
        )
    assert "stops verifying" not in outputs
    assert "records in Python" not in outputs
    assert "the job goes on" not in outputs
    assert "never waited for" not in outputs
