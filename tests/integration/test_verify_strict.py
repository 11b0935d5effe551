"""Strict verification of faulty programs on real gloo ranks: the outcome of each case, and the page
with the table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import verify_cases
import verify_forked
from chosen import NATIVE_FIRST, chosen, long
from launching import fsdp2_runs_on_cpu, says_whether_a_call_waits
from verify_cases import CASES, DETECTED, ENDED, PASSES, PREVENTED, STRENGTH
from verify_forked import CAUGHT, REPEATED_FAULTS, ROUNDS
from zygote_client import Zygote

from commlens.verification.ready_clock import STARVED

HERE = Path(__file__).parent
TIMEOUT_S = 200  # takes about 50 s on two cores
OF_THEIR_OWN = ("sigstop", "holds_the_gil", "sender_never_comes")
_first = {(case.family, case.kind, case.ends): case.name for case in reversed(CASES.values())}
USUAL = {*_first.values(), *OF_THEIR_OWN}
"""One case of each family, kind and end, and those whose evidence is of another sort: that each op's
arguments must agree is tested in ``unit/matching``.
"""
JOBS = [
    long(case.name, size, when=size != 2 or case.name not in USUAL, id=f"{case.name}-{size}")
    for case in CASES.values()
    for size in case.sizes
]
CAUGHT_AT = pytest.mark.parametrize(("name", "size"), [("caught", 2), long("caught", 4)])
REPEATED_AT = pytest.mark.parametrize(("name", "size"), [("repeated", 2), long("repeated", 4)])

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


def launch(
    zygote: Zygote,
    out: Path,
    module: str,
    *arguments: str,
    environ: dict[str, str],
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Run one of this folder's programs and return its output."""
    script = str(HERE / f"{module}.py")
    return zygote.run(
        script, str(out), *arguments, folder=out, environ=environ, timeout_s=timeout_s
    )


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest,
    zygote: Zygote,
    tmp_path_factory: pytest.TempPathFactory,
    engine_environment: dict[str, str],
) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("strict")
    engine = engine_environment["COMMLENS_ENGINE"]
    names = [
        f"{name}:{size}"
        for name, size, wanted in chosen(request, "name", "size", "engine_environment")
        if wanted == engine
    ]
    return out, launch(zygote, out, "verify_forked", engine, *names, environ=engine_environment)


MIXED = [
    "all_reduce_op",
    "barrier_or_all_reduce",
    "broadcast_root",
    "gather_or_scatter",
    "async_ops",
    "send_recv_shape",
    "sigkill",
    "never_comes",
]
"""One fault of each kind: these also run with the two engines on alternating ranks."""
MIXED_USUAL = (
    "async_ops",
    "send_recv_shape",
)  # ``caught`` and test_strict_nodes.py have the others


@pytest.fixture(scope="module")
def launched_mixed(
    request: pytest.FixtureRequest,
    zygote: Zygote,
    tmp_path_factory: pytest.TempPathFactory,
    native_cache: Path,
) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("mixed")
    names = [f"{name}:{size}" for name, size in chosen(request, "name", "size")]
    return out, launch(
        zygote,
        out,
        "verify_forked",
        "mixed",
        *names,
        environ={"COMMLENS_NATIVE_DIR": str(native_cache)},
    )


def how_it_ended(ranks: dict[int, dict[str, Any]], involved: list[int]) -> str:
    """Return the outcome in the words of the table, by the ranks' reports."""
    refused = [
        rank for rank in involved if ranks[rank]["raised"] == "DistributedOperationException"
    ]
    if not refused:
        return ENDED if any(ranks[rank]["raised"] for rank in involved) else PASSES
    if refused != involved:
        return ENDED
    return DETECTED if any(ranks[rank]["issued"] for rank in involved) else PREVENTED


@NATIVE_FIRST
@pytest.mark.parametrize(("name", "size"), JOBS)
def test_fault(
    launched: tuple[Path, str], engine_environment: dict[str, str], name: str, size: int
) -> None:
    if name.startswith("fsdp_") and not fsdp2_runs_on_cpu():
        pytest.skip("FSDP2 does not run on CPU")
    ranks = judge(*launched, name, size)
    assert {record["engine"] for record in ranks.values()} == {
        engine_environment["COMMLENS_ENGINE"]
    }


@pytest.mark.parametrize(
    ("name", "size"), [long(name, 2, when=name not in MIXED_USUAL) for name in MIXED]
)
def test_fault_between_ranks_of_both_engines(
    launched_mixed: tuple[Path, str], name: str, size: int
) -> None:
    ranks = judge(*launched_mixed, name, size)
    assert all(record["engine"] == verify_forked.MIXED[rank] for rank, record in ranks.items())


def judge(
    out: Path, printed: str, name: str, size: int, nodes: int = 1
) -> dict[int, dict[str, Any]]:
    """Require the outcome that a case declares, and return the ranks' reports."""
    case, folder = CASES[name], out / (f"{name}:{size}" if nodes == 1 else f"{name}:{size}:{nodes}")
    assert (folder / "job.json").exists(), f"the job did not run: {printed[-4000:]}"
    job = json.loads((folder / "job.json").read_text())
    outputs = "\n".join(
        f"--- rank {rank}:\n{(folder / f'{rank}.out').read_text()[-3000:]}" for rank in range(size)
    )
    ranks = {
        rank: json.loads(path.read_text())
        for rank in range(size)
        if (path := folder / f"{rank}.json").exists()
    }
    shown = f"{json.dumps(ranks, indent=1)}\n{outputs}"
    assert not job["hung"], (
        f"ranks {job['hung']} were ended by force after {job['seconds']:.0f} s\n{shown}"
    )
    # Ranks that died or left by themselves do not raise, nor do ranks that take no part in a
    # message.
    survivors = [rank for rank in ranks if not (rank == 1 and case.leaves)]
    involved = [rank for rank in survivors if rank < 2 or not case.pair]
    assert set(ranks) >= set(range(size)) - ({1} if case.leaves else set()), shown
    ended = how_it_ended(ranks, involved)
    prevents = case.ends == PREVENTED and says_whether_a_call_waits()
    least = case.ends if prevents or case.ends != PREVENTED else ENDED
    assert STRENGTH.index(ended) >= STRENGTH.index(least), f"{ended}, not {least}\n{shown}"
    if case.ends == PASSES:
        assert ended == PASSES, shown
        return ranks
    if any("does not support" in record["text"] for record in ranks.values()):
        pytest.skip("gloo has no such operation in this torch")
    for record in ranks.values():
        # torch 2.6 adds where in a compiled graph it was
        record["text"] = record["text"].split("\n\nWhile executing ")[0]
    texts = {
        ranks[rank]["text"]
        for rank in involved
        if ranks[rank]["raised"] == "DistributedOperationException"
    }
    if case.kind:
        assert len(texts) == 1, f"not one text on all ranks\n{shown}"
    for text in texts:
        assert all(
            ranks[rank]["kind"] == case.kind for rank in involved if ranks[rank]["text"] == text
        ), shown
        for words in (*case.shows, *case.lines):
            assert words in text, f"{words!r} is not in\n{text}\n{shown}"
    if case.usable and (prevents or case.ends != PREVENTED):
        assert all(ranks[rank]["usable"] for rank in ranks), (
            f"the group was not usable afterwards\n{shown}"
        )
    if case.kind == "missing":
        assert all(
            ranks[rank]["seconds"] < STARVED * case.timeout_s + 10
            for rank in involved
            if ranks[rank]["kind"]
        ), shown
    elif case.kind == "dead" and prevents:
        # because of the death, not of the timeout
        assert all(ranks[rank]["seconds"] < case.timeout_s for rank in involved), shown
    return ranks


@NATIVE_FIRST
@CAUGHT_AT
def test_groups_are_usable_after_caught_refusals(
    launched: tuple[Path, str], name: str, size: int
) -> None:
    judge_caught(*launched, size)


@CAUGHT_AT
def test_groups_are_usable_after_caught_refusals_with_both_engines(
    launched_mixed: tuple[Path, str], name: str, size: int
) -> None:
    judge_caught(*launched_mixed, size)


def judge_caught(out: Path, printed: str, size: int, nodes: int = 1) -> None:
    """Require that every refusal was caught and that the groups still compute."""
    if not says_whether_a_call_waits():
        pytest.skip(
            "with this torch, faults are found when gloo has the operation already, and no group"
            " survives that"
        )
    folder = out / (f"caught:{size}" if nodes == 1 else f"caught:{size}:{nodes}")
    expected = [step for name in CAUGHT for step in (CASES[name].kind, True)]
    for rank in range(size):
        report = folder / f"{rank}.json"
        assert report.exists(), printed[-4000:]
        output = (folder / f"{rank}.out").read_text()
        assert json.loads(report.read_text())["seen"] == expected, f"rank {rank}\n{output[-4000:]}"


@NATIVE_FIRST
@REPEATED_AT
def test_the_native_engine_verifies_repeated_collectives_without_python(
    launched: tuple[Path, str], name: str, size: int
) -> None:
    judge_repeated(*launched, size)


@REPEATED_AT
def test_repeated_collectives_with_both_engines(
    launched_mixed: tuple[Path, str], name: str, size: int
) -> None:
    judge_repeated(*launched_mixed, size)


def judge_repeated(out: Path, printed: str, size: int, nodes: int = 1) -> None:
    """Require that a native rank calls Python only for a slow or wrong peer, and that a Python rank
    does each time.
    """
    for rank in range(size):
        report = (
            out
            / (f"repeated:{size}" if nodes == 1 else f"repeated:{size}:{nodes}")
            / f"{rank}.json"
        )
        assert report.exists(), (
            f"{printed[-4000:]}\n{report.with_suffix('.out').read_text()[-4000:]}"
        )
        found = json.loads(report.read_text())
        entered, rounds = sum(found["entered"].values()), ROUNDS * len(found["entered"])
        assert entered < rounds / 4 if found["engine"] == "native" else entered > rounds, (
            f"rank {rank}: {found}"
        )
        assert found["seen"] == [
            kind for (_, odd), kind in REPEATED_FAULTS.items() if odd or rank != 1
        ], f"rank {rank}: {found}"
        if found["engine"] == "python":
            assert found["continued"] == 0, f"rank {rank}: {found}"
        elif found["seen"]:
            assert found["continued"] > 0, f"rank {rank}: {found}"


def test_the_page_matches_the_cases() -> None:
    assert verify_cases.TABLE.read_text() == verify_cases.table(), (
        "write it anew: python tests/integration/verify_cases.py"
    )
