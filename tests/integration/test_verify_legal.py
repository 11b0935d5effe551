"""No false alarm and no new hang: legal programs on real gloo ranks compute under strict verification what they compute without."""

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


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("legal")
    return out, launch(out, "legal_programs", *(f"{name}:{size}" for name, size in JOBS))


def reported(folder: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) if (path := folder / f"{rank}.json").exists() else {} for rank in range(size)]


@pytest.mark.parametrize(("job", "size", "name"), CASES, ids=[f"{name}-{job}-{size}" for job, size, name in CASES])
def test_legal_program(launched: tuple[Path, str], job: str, size: int, name: str) -> None:
    out, printed = launched
    assert (out / f"{job}:{size}:verified" / "job.json").exists(), f"the job did not run:\n{printed[-4000:]}"
    outputs = "\n".join(
        f"--- {path.parent.name}, rank {path.stem}:\n{path.read_text()[-2000:]}" for path in out.glob(f"{job}:{size}:*/*.out")
    )
    bare, verified = (reported(out / f"{job}:{size}:{how}", size) for how in ("bare", "verified"))
    for rank in range(size):
        expected, found = bare[rank].get(name), verified[rank].get(name)
        assert expected is not None, f"rank {rank} did not come to it without verification\n{outputs}"
        assert "bits" in expected, f"rank {rank} fails without verification: {expected['error']}"
        assert found is not None, f"rank {rank} did not come to it under verification\n{outputs}"
        assert "bits" in found, f"rank {rank}: {found['error']}"
        assert found["bits"] == expected["bits"], f"rank {rank} computes something else under verification"
    assert "stops verifying" not in outputs
