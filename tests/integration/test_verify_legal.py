"""No false alarm and no new hang: legal programs on real gloo ranks compute the same with and without strict verification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import families
from legal_programs import AT_FOUR, ODDITIES
from test_verify_strict import TIMEOUT_S, launch

RANDOM = [("random-500-1", 2), ("random-500-2", 4), ("random-500-3", 8)]
JOBS = [("families", 2), ("families", 4), ("oddities", 2), ("oddities", 4), *RANDOM]
AT_SIZE = {size: [family.name for family in families.cases(families.GLOO, size) if size == 2 or family.name in AT_FOUR] for size in (2, 4)}
CASES = [
    *(("families", size, name) for size, names in AT_SIZE.items() for name in names),
    *(("oddities", size, name) for size in (2, 4) for name in ODDITIES),
    *((job, size, "random") for job, size in RANDOM),
]

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


MIXED = [("oddities", 2), ("oddities", 4), RANDOM[1]]
"""These also run with the two engines on alternating ranks."""


def launch_all(out: Path, way: str, jobs: list[tuple[str, int]], environ: dict[str, str]) -> tuple[Path, str]:
    return out, launch(out, "legal_programs", way, *(f"{name}:{size}" for name, size in jobs), environ=environ)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return launch_all(tmp_path_factory.mktemp("bare"), "bare", JOBS, {})


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory, engine_environment: dict[str, str]) -> tuple[Path, str]:
    return launch_all(tmp_path_factory.mktemp("legal"), engine_environment["COMMLENS_ENGINE"], JOBS, engine_environment)


@pytest.fixture(scope="module")
def verified_by_both(tmp_path_factory: pytest.TempPathFactory, native_cache: Path) -> tuple[Path, str]:
    return launch_all(tmp_path_factory.mktemp("mixed"), "mixed", MIXED, {"COMMLENS_NATIVE_DIR": str(native_cache)})


def reported(folder: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) if (path := folder / f"{rank}.json").exists() else {} for rank in range(size)]


IDS = [f"{name}-{job}-{size}" for job, size, name in CASES]
AMONG_BOTH = [case for case in CASES if case[:2] in MIXED]


@pytest.mark.parametrize(("job", "size", "name"), CASES, ids=IDS)
def test_legal_program(
    bare: tuple[Path, str], verified: tuple[Path, str], engine_environment: dict[str, str], job: str, size: int, name: str
) -> None:
    judge(bare, verified, engine_environment["COMMLENS_ENGINE"], job, size, name)


@pytest.mark.parametrize(("job", "size", "name"), AMONG_BOTH, ids=[IDS[CASES.index(case)] for case in AMONG_BOTH])
def test_legal_program_with_both_engines(
    bare: tuple[Path, str], verified_by_both: tuple[Path, str], job: str, size: int, name: str
) -> None:
    judge(bare, verified_by_both, "mixed", job, size, name)


def judge(bare: tuple[Path, str], verified: tuple[Path, str], way: str, job: str, size: int, name: str) -> None:
    """Require the same results as without verification."""
    folder = verified[0] / f"{job}:{size}:{way}"
    assert (folder / "job.json").exists(), f"the job did not run:\n{verified[1][-4000:]}"
    without = bare[0] / f"{job}:{size}:bare"
    outputs = "\n".join(
        f"--- {path.parent.name}, rank {path.stem}:\n{path.read_text()[-2000:]}"
        for each in (without, folder)
        for path in each.glob("*.out")
    )
    for rank, (expected, found) in enumerate(zip(reported(without, size), reported(folder, size), strict=True)):
        assert name in expected, f"rank {rank} did not reach it without verification\n{outputs}"
        assert "bits" in expected[name], f"rank {rank} fails without verification: {expected[name]['error']}"
        assert name in found, f"rank {rank} did not reach it under verification\n{outputs}"
        assert "bits" in found[name], f"rank {rank}: {found[name]['error']}"
        assert found[name]["bits"] == expected[name]["bits"], f"rank {rank} computes another result under verification"
    assert "stops verifying" not in outputs
    assert "records in Python" not in outputs
    assert "the job goes on" not in outputs
