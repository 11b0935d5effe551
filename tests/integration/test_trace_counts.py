"""Every family of programs, traced: the counts are the oracle's, nothing is changed, nothing is
left.

All families of all jobs run in one launch (``families/__main__.py``), from which each job is forked.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import families
import pytest
from chosen import chosen, long
from zygote_client import Zygote

TIMEOUT_S = 400  # takes about 60 s on two idle cores
JOBS = sorted(
    {
        (backend, size)
        for family in families.load()
        for backend, sizes in family.world_sizes.items()
        for size in sizes
    }
)
ALSO = [("fake", 1024, "plain_calls"), ("gloo", 4, "moe")]
"""Each usual family runs in one job, and these in others; the rest is long."""


def is_usual(backend: str, size: int, family: families.Family) -> bool:
    first = min(family.world_sizes)  # "fake" before "gloo"
    home = first, family.world_sizes[first][0]
    is_home = family.name in families.USUAL and home == (backend, size)
    return is_home or (backend, size, family.name) in ALSO


CASES = [
    long(
        backend,
        size,
        family.name,
        when=not is_usual(backend, size, family),
        id=f"{family.name}-{backend}-{size}",
    )
    for backend, size in JOBS
    for family in families.traced_cases(backend, size)
]

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)

Results = dict[tuple[str, int, str], dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Results, str]:
    """What every rank of every job reported, and what the launch printed."""
    out = tmp_path_factory.mktemp("families") / "results.jsonl"
    names: dict[str, list[str]] = defaultdict(list)
    for backend, size, name in chosen(request, "backend", "size", "name"):
        names[f"{backend}:{size}"].append(name)
    jobs = [f"{job}:{','.join(wanted)}" for job, wanted in names.items()]
    printed = zygote.run(
        *("-m", "families", str(out), *jobs),
        folder=out.parent,
        environ={"TORCHINDUCTOR_CACHE_DIR": str(out.parent / "inductor")},
        timeout_s=TIMEOUT_S,
    )
    results: Results = defaultdict(dict)
    for line in out.read_text().splitlines() if out.exists() else ():
        record = json.loads(line)
        results[record["backend"], record["world_size"], record["family"]][record["rank"]] = record
    return results, printed


@pytest.mark.parametrize(("backend", "size", "name"), CASES)
def test_family(launched: tuple[Results, str], backend: str, size: int, name: str) -> None:
    results, printed = launched
    ranks = results[backend, size, name]
    expected = size if backend == families.GLOO else 1
    assert len(ranks) == expected, (
        f"{len(ranks)} of {expected} ranks reported; the launch printed:\n{printed[-6000:]}"
    )
    for rank, report in sorted(ranks.items()):
        assert "error" not in report, f"rank {rank}: {report['error']}"
        for depth, record in report["depths"].items():
            where = f"rank {rank}, depth {depth}"
            assert record["truth"], f"{where}: the family issues no collective at all"
            # Counts: what the oracle saw without the trace, beside the trace, and what the trace
            # saw.
            assert record["truth_while_traced"] == record["truth"], (
                f"{where}: under the trace the program issues other collectives"
            )
            assert record["traced"] == record["truth"], (
                f"{where}: the trace has not what was issued"
            )
            total = sum(record["truth"].values())
            assert sum(record["by_wire_op"].values()) == total, where
            # The trace's own check of itself.
            assert record["dispatched"] == record["recorded"] == total, where
            assert record["in_order"], f"{where}: sequence numbers have gaps"
            assert record["unclassified"] == [], where
            assert record["unclassified_count"] == 0, where
            # The program is not changed, and nothing stays behind.
            assert record["differs"] == [], f"{where}: not bit-identical under the trace"
            assert record["left"] == [], f"{where}: left behind by the trace"
            assert record["alive"] == [], f"{where}: kept alive by the trace"
            # torch keeps some of each compilation, traced or not
            if not name.startswith("compiled"):
                assert record["tensors"] <= 0, f"{where}: the trace keeps so many tensors"
