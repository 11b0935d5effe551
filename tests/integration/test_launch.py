"""`commlens launch` is torchrun, and says why the job died or stalls."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chosen import chosen, long
from launching import Bench, Program
from zygote_client import Zygote

from commlens.launch.torchrun import job_name, parse, torchrun_parser
from commlens.processes import senders
from conftest import RunCommlens

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)

TELLS = """
import json, os, sys
import __main__
import torch
seen = [sys.argv, __name__, __main__.__file__, sys.path[0], sys.flags.dev_mode, os.environ["RANK"], sorted(vars(__main__))]
os.write(1, (json.dumps(seen) + "\\n").encode())  # one write: two ranks share the line
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def bench(tmp_path: Path, zygote: Zygote) -> Iterator[Bench]:
    made = Bench(tmp_path, zygote)
    yield made
    made.close()


ARGUMENTS = ("--stall-timeout", "x", "--metric", "acc", "--on", "--c", "--", "-m")


def tells_bench(folder: Path, *, is_installed: bool = True) -> Bench:
    made = Bench(folder, is_installed=is_installed)
    (folder / "tells.py").write_text(TELLS)
    return made


@pytest.fixture(scope="module")
def under_torchrun(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Program]]:
    """By exit status of the script: what it sees under torchrun itself."""
    codes = [code for (code,) in chosen(request, "code")]
    bench = tells_bench(tmp_path_factory.mktemp("torchrun"))
    runs = {code: bench.torchrun("tells.py", code, *ARGUMENTS) for code in codes}
    for run in runs.values():
        run.end()
    yield runs
    bench.close()


def seen_by_ranks(run: Program) -> list[list[object]]:
    """What each rank's script saw, with the folder that the job ran in left out."""
    return sorted(json.loads(line.replace(run.folder, "FOLDER")) for line in run.out)


@pytest.mark.parametrize(
    "is_installed", [True, long(False)], ids=["entry point", "only on the path"]
)
@pytest.mark.parametrize("code", ["0", long("3")])
def test_the_script_sees_what_it_sees_under_torchrun(
    tmp_path: Path, under_torchrun: dict[str, Program], code: str, is_installed: bool
) -> None:
    bench = tells_bench(tmp_path, is_installed=is_installed)
    ours, theirs = (
        bench.launch("--stall-timeout", "9", "tells.py", code, *ARGUMENTS),
        under_torchrun[code],
    )
    assert (ours.end() != 0) == (theirs.end() != 0) == (code != "0")
    assert ours.process.returncode == theirs.process.returncode
    seen = [seen_by_ranks(run) for run in (ours, theirs)]
    if code != "0":  # which rank is ended before it can tell is chance
        seen = [[rank[:5] + rank[6:] for rank in told][:1] for told in seen]
    assert seen[0] == seen[1], ours.report()
    assert len(ours.out) == 2 or code != "0"
    assert json.loads(ours.out[0])[0] == ["tells.py", code, *ARGUMENTS]
    assert "nothing was verified" not in ours.error, "It was not to be verified."
    assert (
        len(
            [
                line
                for line in ours.err
                if line.startswith("commlens: --stall-timeout stands after tells.py")
            ]
        )
        == 1
    )
    bench.close()


@pytest.mark.long
def test_a_module(tmp_path: Path) -> None:
    bench = tells_bench(tmp_path)
    ours, theirs = bench.launch("-m", "tells", "0", "a"), bench.torchrun("-m", "tells", "0", "a")
    assert (ours.end(), theirs.end()) == (0, 0)
    assert seen_by_ranks(ours) == seen_by_ranks(theirs)
    bench.close()


def test_a_rendezvous_that_fails_says_whether_its_address_answers(bench: Bench) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        node = ("--nnodes", "2", "--node-rank", "1", "--rdzv-conf", "timeout=2")
        store = ("--master-addr", "127.0.0.1", "--master-port", port)
        program = bench.start("-m", "commlens", "launch", *node, *store, "train.py", "well")
        assert program.end() == 1
    assert "DistNetworkError: The client socket has timed out" in program.error
    assert program.err[-1].startswith(
        "commlens: this launcher did not join the job: look at rank 0 or the first node's launcher:"
        f" (127.0.0.1, {port}) refuses connections"
    )


def test_a_clean_end_says_and_leaves_nothing(bench: Bench) -> None:
    program = bench.launch("train.py", "well")
    assert program.end() == 0
    assert program.out.count("finished") == 2
    assert "commlens" not in program.error
    assert bench.boxes_left == []
    assert not bench.dumps.exists()


@pytest.mark.parametrize("how", [long("kill"), "raise", long("exit")])
def test_a_death_is_reported_before_torchruns_own_report(bench: Bench, how: str) -> None:
    program = bench.launch("train.py", how)
    assert program.end() == 1
    told, account = (
        program.until("VERDICT", stream="err"),
        program.until("ChildFailedError", stream="err"),
    )
    assert told <= account
    assert program.err.index(
        next(line for line in program.err if "VERDICT" in line)
    ) < program.err.index(next(line for line in program.err if "ChildFailedError" in line))
    verdict = next(line for line in program.err if "VERDICT" in line)
    assert "rank 1" in verdict, program.report()
    told = program.err[program.err.index(verdict) :]
    assert not any("Traceback" in line for line in told), "the worker's stands above it"
    assert bench.dumped == ["rank0", "rank1"]
    assert bench.boxes_left == []


def test_a_stall_is_reported_in_time_and_aborted(bench: Bench, tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    program = bench.launch(
        "--stall-timeout",
        "2",
        "--abort-on",
        "stall",
        "train.py",
        "sleep",
        TORCHELASTIC_ERROR_FILE=str(error_file),
    )
    stalled = program.until("training")
    told = program.until("VERDICT", stream="err")
    assert 1.5 < told - stalled < 4.5, program.report()
    assert program.end() != 0
    assert "rank 1" in next(line for line in program.err if "VERDICT" in line)
    assert program.error.count("VERDICT") == 1
    assert json.loads(error_file.read_text())["message"]["message"].startswith(
        "VERDICT  rank 1 never reached"
    )
    assert bench.dumped == ["rank0", "rank1"]
    assert bench.boxes_left == []


@pytest.mark.long
def test_a_late_rank_and_the_end_of_the_wait(bench: Bench) -> None:
    program = bench.launch("--stall-timeout", "1.5", "train.py", "late")
    assert program.end() == 0
    assert "arrived after" in program.error, program.report()
    assert bench.boxes_left == []


@pytest.mark.parametrize(
    ("slurm", "name"), [("", "train-n0-29500"), ("4711", "train-4711-n0-29500")]
)
def test_all_nodes_name_the_job_alike(
    monkeypatch: pytest.MonkeyPatch, slurm: str, name: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", slurm)
    for rank in ("0", "1"):
        rendezvous = ["--master-addr", "n0", "--master-port", "29500", "--node-rank", rank]
        assert job_name(parse(["--nnodes", "2", *rendezvous, "train.py"])) == name


def test_slurms_id_is_in_the_name_of_a_job_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of an array on several nodes may have the same pid and start."""
    names = []
    for slurm in ("4711", "4712", ""):
        monkeypatch.setenv("SLURM_JOB_ID", slurm)
        program, date, clock, *ids = job_name(parse(["--standalone", "train.py"])).split("-")
        names.append((program, len(date), len(clock), ids))
    pid = str(os.getpid())
    assert names == [
        ("train", 8, 6, ["4711", pid]),
        ("train", 8, 6, ["4712", pid]),
        ("train", 8, 6, [pid]),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, long(signal.SIGTERM)])
def test_ctrl_c_is_as_with_torchrun(bench: Bench, number: signal.Signals) -> None:
    ours, theirs = bench.launch("train.py", "sleep"), bench.torchrun("train.py", "sleep")
    for program in (ours, theirs):
        program.until("training")
        time.sleep(0.5)
        os.kill(program.process.pid, number)
    assert ours.end() == theirs.end() != 0
    assert "VERDICT" not in ours.error
    assert ("the launcher received SIGTERM" in ours.error) == (number == signal.SIGTERM)
    assert bench.boxes_left == []


def test_a_job_whose_terminal_goes_away(bench: Bench) -> None:
    program = bench.launch("train.py", "sleep")
    program.until("training")
    kill = subprocess.Popen(["kill", "-HUP", str(program.process.pid)])
    assert program.end() != 0
    assert kill.wait(60) == 0  # only now: the system forgets its name with this
    said = " ".join(program.error.split())
    sender = f" from kill (pid {kill.pid}, " if senders.AVAILABLE else " and ends the job."
    assert f"commlens: the launcher received SIGHUP{sender}" in said
    assert (
        " and ends the job. The system sends SIGHUP to the programs of a terminal or an ssh"
        " session that goes away. Start the job so that it outlives its terminal"
    ) in said
    assert "VERDICT" not in said


@pytest.mark.skipif(not senders.AVAILABLE, reason="the handler in C was not built here")
def test_a_rank_that_ends_the_job(bench: Bench) -> None:
    program = bench.launch("train.py", "end")
    assert program.end() != 0
    said = " ".join(program.error.split())
    assert "commlens: the launcher received SIGTERM from rank 1 (pid " in said, program.report()


@pytest.mark.long
def test_restarted_workers_are_another_job_in_the_same_place(bench: Bench) -> None:
    # torchrun's workers otherwise share one store over all starts, in which gloo finds the
    # addresses of the run before: of 21 such jobs (torch 2.13), in turns, 13 did not come back
    # under torchrun itself and 12 under commlens. With a store for each start all did, 8 of 8 and 8
    # of 8.
    program = bench.launch(
        "--max-restarts", "1", "train.py", "once", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
    )
    assert program.end() == 0, program.report()
    assert "rank 1" in next(line for line in program.err if "VERDICT" in line)
    assert bench.boxes_left == []


def test_without_torch(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "site" / "torch.py").write_text("raise ImportError('no torch here')\n")
    program = bench.launch("train.py", "well")
    assert program.end() == 2
    assert "pip install torch" in program.error
    assert "Traceback" not in program.error
    bench.close()


def test_a_bad_setting_is_refused(tmp_path: Path, call_commlens: RunCommlens) -> None:
    (tmp_path / "train.py").write_text("")
    refused = call_commlens("launch", "--abort-on", "panic", "train.py", "well")
    assert refused.returncode == 2
    assert "nothing, all, or some of stall, mismatch, diverged" in refused.stderr


def test_help_shows_both() -> None:
    text = torchrun_parser().format_help()
    assert "--stall-timeout" in text
    assert "--nproc-per-node" in text


def test_a_run_without_a_process_group_says_that_nothing_was_verified(bench: Bench) -> None:
    (bench.folder / "alone.py").write_text("import torch\n")
    program = bench.launch("--debug", "alone.py")
    assert program.end() == 0, program.report()
    assert program.error.count("nothing was verified: this run made no process group") == 1


KILLS = """
import os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(4):
    dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(4))
"""


def test_the_exit_status_says_whether_to_start_a_job_again(bench: Bench) -> None:
    """A rank that is killed may have had bad luck; one that is killed again had not."""
    bench.script.write_text(KILLS)
    plain = bench.launch("train.py")
    plain.end()
    assert plain.process.returncode == 1
    again = bench.launch("--exit-by-action", "train.py")
    again.end()
    assert again.process.returncode == 77, again.report()
    actions = [
        json.loads(file.read_text())["action"]
        for file in sorted(bench.dumps.glob("*/verdict.json"))
    ]
    assert [(one["do"], one["because"], one.get("attempts", 1)) for one in actions] == [
        ("retry", "killed", 1),
        ("stop", "killed", 2),
    ]
    other = bench.launch("--exit-by-action", "train.py", "--another")
    other.end()
    assert other.process.returncode == 75
