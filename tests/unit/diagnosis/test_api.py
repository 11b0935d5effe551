"""Other tools' dumps in, verdict out: the true culprits on generated and on real dumps, whatever
lies beside them.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chosen import long
from dumpgen import MESHES, Conditions, Job
from dumpgen.faults import by_name
from flight_recorder_dumps import dump, entry
from goldens import hold

from commlens.commands import main
from commlens.diagnosis.api import diagnose
from commlens.errors import EvidenceError
from commlens.model.verdict import Verdict


def blamed(verdict: Verdict) -> tuple[int, ...]:
    """The culprits of all root causes."""
    return tuple(
        sorted(
            {
                rank
                for finding in verdict.findings
                if finding.root_cause
                for rank in finding.culprits
            }
        )
    )


def generated(folder: Path, fault: str) -> None:
    """Write the dumps of 8 ranks. test_api_generated.py has all faults, and more ranks."""
    Job(MESHES[8], by_name(fault), Conditions(history=3)).write(folder)


def test_a_second_dump_is_advised_where_the_job_may_have_been_running(tmp_path: Path) -> None:
    generated(tmp_path, "stuck-inside-dp")
    (finding,) = [one for one in diagnose(tmp_path).findings if one.root_cause]
    assert finding.kind == "stuck-inside"
    assert "commlens compare BEFORE AFTER" in (finding.would_raise_confidence or "")


@pytest.mark.parametrize(
    ("folder", "kind", "culprits", "number"),
    [
        ("lock_gil_1st", "missing", [9, 14], 45265),
        ("gpu_error_1st", "stuck-inside", [12, 14], 42806),
    ],
)
def test_real_dumps(
    shared_data: Path, folder: str, kind: str, culprits: list[int], number: int
) -> None:
    verdict = diagnose(shared_data / "megatron_moe_16ranks" / folder)
    assert (verdict.kind, verdict.culprits, list(blamed(verdict))) == (kind, culprits, culprits)
    assert verdict.collective is not None
    assert verdict.collective.sequence_number == number


@pytest.mark.parametrize(
    ("folder", "rank", "size", "culprits"),
    [
        ("gpu_error_1st", 13, 300, [14]),
        long("gpu_error_1st", 13, 0, [14]),
        ("gpu_error_1st", 12, 2000, [14]),
        ("lock_gil_1st", 8, 100, [9, 14]),
        long("lock_gil_1st", 8, 1500, [9, 14]),
        long("lock_gil_1st", 8, 5, [9, 14]),
        ("lock_gil_1st", 9, 300, [14]),
    ],
)
def test_a_real_dump_that_is_cut_off_gets_no_innocent_rank_named(
    shared_data: Path, tmp_path: Path, folder: str, rank: int, size: int, culprits: list[int]
) -> None:
    for path in (shared_data / "megatron_moe_16ranks" / folder).glob("_dump_*"):
        content = path.read_bytes()
        (tmp_path / path.name).write_bytes(
            content[:size] if path.name == f"_dump_{rank}" else content
        )
    verdict = diagnose(tmp_path)
    assert (verdict.culprits, list(blamed(verdict))) == (culprits, culprits)
    assert any(
        f"ank {rank}:" in line or f"_dump_{rank} " in line for line in verdict.missing_evidence
    )


@pytest.mark.parametrize("share", [0, 0.05, 0.5, 0.95])
@pytest.mark.parametrize(("rank", "culprits"), [(6, {7}), (7, set())])
def test_the_rank_of_a_dump_that_is_cut_off_is_not_named(
    stuck: Path, tmp_path: Path, rank: int, culprits: set[int], share: float
) -> None:
    for path in stuck.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (own,) = [path for path in tmp_path.iterdir() if path.name.endswith(f"_{rank}")]
    own.write_bytes(own.read_bytes()[: int(own.stat().st_size * share)])
    verdict = diagnose(tmp_path)
    sure = [finding for finding in verdict.findings if finding.confidence != "low"]
    assert {rank for finding in sure for rank in finding.culprits} == culprits
    assert any(own.name in line or f"Rank {rank}:" in line for line in verdict.missing_evidence)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy") / "job"
    generated(folder, "healthy-done")
    return folder


@pytest.mark.parametrize(
    ("ranks", "size", "status", "summary"),
    [
        ([], None, 0, "nothing is wrong: all collectives agree"),
        ([3], None, 0, "nothing is wrong in what ranks 0-2,4-7 recorded"),  # deleted
        ([3], 3000, 3, "no fault shows, but the newest records of rank 3 are unreadable"),
        ([3, 7], 0, 3, "no fault shows, but the newest records of ranks 3,7 are unreadable"),
        (range(8), 300, 3, "nothing can be said: no record of ranks 0-7 is readable"),
    ],
)
def test_nothing_is_called_healthy_that_could_not_be_read(
    healthy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ranks: Sequence[int],
    size: int | None,
    status: int,
    summary: str,
) -> None:
    for path in healthy.iterdir():
        cut = path.name in [f"rank_{rank}" for rank in ranks]
        if not cut or size is not None:
            (tmp_path / path.name).write_bytes(path.read_bytes()[: size if cut else None])
    assert main(["diagnose", "--json", str(tmp_path)]) == status
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["summary"].startswith(summary)
    assert verdict["kind"] == ("undetermined" if status else "healthy")


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps") / "job"
    generated(folder, "stuck-before-tp")
    return folder


def test_files_are_read_where_the_executor_says(stuck: Path) -> None:
    seen: list[tuple[int, int]] = []
    with ThreadPoolExecutor(2) as executor:
        verdict = diagnose(
            stuck, executor=executor, seen=lambda done, total: seen.append((done, total))
        )
    assert verdict.to_json() == diagnose(stuck).to_json()
    assert seen[-1] == (8, 8)


def test_another_job_in_the_same_folder_is_left_out_and_named(stuck: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for path in stuck.iterdir():
        (tmp_path / "a" / path.name).write_bytes(path.read_bytes())
        if path.name in ("rank_0", "rank_1"):
            (tmp_path / "b" / path.name).write_bytes(path.read_bytes())
    verdict = diagnose(tmp_path)
    assert blamed(verdict) == (7,)
    assert any("ranks 0-1" in text and "another job" in text for text in verdict.missing_evidence)


def test_the_order_of_the_files_does_not_matter(stuck: Path) -> None:
    files = sorted(stuck.iterdir())
    assert diagnose(files).to_json() == diagnose(list(reversed(files))).to_json()


def test_a_cut_file_does_not_stop_the_rest(stuck: Path, tmp_path: Path) -> None:
    for path in stuck.iterdir():
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(
            data[: len(data) // 2] if path.name == "rank_3" else data
        )
    verdict = diagnose(tmp_path)
    assert 7 in blamed(verdict)
    assert any("ends in the middle" in text for text in verdict.missing_evidence)


def test_nothing_readable_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes(b"\x80\x02garbage")
    with pytest.raises(EvidenceError, match="There is nothing to diagnose in"):
        diagnose(tmp_path)


def all_at_one(folder: Path, states: str, **status: int) -> Verdict:
    """Diagnose the dumps of ranks that are all in one collective: started (S), enqueued (E), or
    enqueued without timing (-).
    """
    for rank, state in enumerate(states):
        timed = state != "-"
        began = {"time_discovered_started_ns": 1_700_000_000_050_000_000} if timed else {}
        entries = [entry(number, **began) for number in range(7)]
        stuck = {
            "state": "started" if state == "S" else "scheduled",
            "retired": False,
            "time_discovered_completed_ns": None,
        }
        entries.append(entry(7, **{**stuck, **(began if state == "S" else {})}))
        last = {
            "last_enqueued_collective": 8,
            "last_started_collective": -1 if not timed else 8 if state == "S" else 7,
        }
        (folder / f"nccl_trace_rank_{rank}").write_bytes(
            pickle.dumps(dump(entries, pg_status={"0": {**last, "last_completed_collective": 7}}))
        )
    return diagnose(folder)


@pytest.mark.parametrize(
    ("states", "culprits", "state"),
    [
        ("SSSE", [3], "not-started"),
        ("SEES", [1, 2], "not-started"),
        ("SEEE", [], "not-started"),
        ("EEEE", [], "not-started"),
        ("SSSS", [], "no-progress"),
        ("----", [], "no-progress"),
        ("SSS-", [], "no-progress"),
    ],
)
def test_enqueued_and_never_started_is_not_started_and_never_completed(
    tmp_path: Path, states: str, culprits: list[int], state: str
) -> None:
    verdict = all_at_one(tmp_path, states)
    assert (verdict.kind, verdict.culprits) == ("stuck-inside", culprits)
    assert verdict.cause.state == state
    assert ("network" in verdict.next_step) == (state == "no-progress")
    if states in ("SSSE", "SEEE", "EEEE", "SSSS"):
        hold(f"stuck-inside/devices-{states.lower()}", verdict)


@pytest.mark.parametrize(
    ("name", "agreement", "not_compared"),
    [
        ("nccl:all_reduce", "sizes-and-dtypes", []),
        ("nccl:_all_gather_base", "all", []),
        ("nccl:broadcast", "unknown", ["root"]),
        ("nccl:gather", "unknown", ["root", "shape"]),
        ("nccl:all_to_all", "unknown", ["splits"]),
    ],
)
def test_ranks_agree_only_on_what_was_compared(
    tmp_path: Path, name: str, agreement: str, not_compared: list[str]
) -> None:
    """Recorders tell no root, splits and reduce op: what they do not tell may be what the ranks
    hang in.
    """
    stuck = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
    for rank in range(4):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(
            pickle.dumps(dump([entry(0, name, **stuck)], pg_status={}))
        )
    verdict = diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("stuck-inside", [])
    assert (verdict.cause.agreement, verdict.cause.not_compared) == (agreement, not_compared)
    assert ("network" in verdict.next_step) == (not not_compared)
    assert (verdict.confidence == "low") == bool(not_compared)
    hold(f"stuck-inside/{name.partition(':')[2].strip('_').replace('_', '-')}", verdict)


@pytest.mark.parametrize(
    ("version", "kind"),
    [("2.10", "mismatch/splits"), ("2.4", "mismatch/splits"), ("2.3", "stuck-inside")],
)
def test_an_all_to_all_whose_totals_differ_cannot_fit(
    tmp_path: Path, version: str, kind: str
) -> None:
    """Before format 2.4, the sizes may be those of the first tensors only."""
    for rank, expected in enumerate((11, 14, 11, 13)):
        steps = [
            entry(number, "nccl:all_to_all", input_sizes=[[12, 8]], output_sizes=[[12, 8]])
            for number in range(10)
        ]
        sizes = {"input_sizes": [[12, 8]], "output_sizes": [[expected, 8]]}
        steps.append(
            entry(
                10,
                "nccl:all_to_all",
                state="scheduled",
                retired=False,
                time_discovered_completed_ns=None,
                **sizes,
            )
        )
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(
            pickle.dumps(dump(steps, version=version))
        )
    verdict = diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims, verdict.confidence) == (
        kind,
        [],
        [0, 1, 2, 3],
        "low",
    )
    if version != "2.4":
        hold(f"{kind}/all-to-all-in-format-{version}", verdict)
