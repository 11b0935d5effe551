"""No false alarm and no new hang: legal programs on real gloo ranks compute the same with and
without strict verification.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import families
from legal_programs import AT_FOUR, ODDITIES
from test_verify_strict import launch

TIMEOUT_S = 400  # takes about 100 s on two cores
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


MIXED = [("oddities", 2), ("oddities", 4), RANDOM[1]]
"""These also run with the two engines on alternating ranks."""


ON_TWO_NODES = [(("oddities", 4), "nodes"), (RANDOM[1], "nodes"), (RANDOM[1], "sample")]
"""These also run with the ranks on two nodes in turns, and verified in samples."""


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """Run all jobs in all ways. One process imports torch for all of them."""
    out, environ = tmp_path_factory.mktemp("legal"), {}
    wanted = [(job, way) for job in JOBS for way in ("bare", "python")]
    with contextlib.suppress(pytest.skip.Exception):
        environ["COMMLENS_NATIVE_DIR"] = str(request.getfixturevalue("native_cache"))
        wanted += [
            *((job, "native") for job in JOBS),
            *((job, "mixed") for job in MIXED),
            *ON_TWO_NODES,
        ]
    return out, launch(
        out,
        "legal_programs",
        *(f"{name}:{size}:{way}" for (name, size), way in wanted),
        environ=environ,
        timeout_s=TIMEOUT_S,
    )


def reported(folder: Path, size: int) -> list[dict[str, Any]]:
    return [
        json.loads(path.read_text()) if (path := folder / f"{rank}.json").exists() else {}
        for rank in range(size)
    ]


IDS = [f"{name}-{job}-{size}" for job, size, name in CASES]
AMONG_BOTH = [case for case in CASES if case[:2] in MIXED]


@pytest.mark.parametrize(("job", "size", "name"), CASES, ids=IDS)
def test_legal_program(
    launched: tuple[Path, str], engine_environment: dict[str, str], job: str, size: int, name: str
) -> None:
    judge(launched, engine_environment["COMMLENS_ENGINE"], job, size, name)


@pytest.mark.parametrize(
    ("job", "size", "name"), AMONG_BOTH, ids=[IDS[CASES.index(case)] for case in AMONG_BOTH]
)
@pytest.mark.usefixtures("native_cache")
def test_legal_program_with_both_engines(
    launched: tuple[Path, str], job: str, size: int, name: str
) -> None:
    judge(launched, "mixed", job, size, name)


TWO_NODES = [(way, *case) for job, way in ON_TWO_NODES for case in CASES if case[:2] == job]


@pytest.mark.parametrize(
    ("way", "job", "size", "name"),
    TWO_NODES,
    ids=[f"{name}-{job}-{way}" for way, job, _, name in TWO_NODES],
)
@pytest.mark.usefixtures("native_cache")
def test_legal_program_on_two_nodes(
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
