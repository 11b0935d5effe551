"""The backend that behaves as NCCL does: its results are right, frameworks train on it, and it
hangs and ends as NCCL.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chosen import long
from harness import exit_status
from launching import Bench, fsdp2_runs_on_cpu
from zygote_client import Zygote, has_ended

HERE = Path(__file__).parent
PROGRAMS = HERE / "nccl_like_programs.py"
sys.path.append(str(HERE.parent))

import nccl_like  # noqa: E402

ABORTED = -signal.SIGABRT
pytestmark = pytest.mark.timeout(240)  # the first test compiles it


@dataclass
class Ended:
    """A job's ranks: exit statuses, or minus a signal's number, and what they said."""

    statuses: list[int]
    outputs: list[str]
    seconds: float

    def said(self, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for line in self.outputs[rank].splitlines():
            if line.startswith("{"):
                found.update(json.loads(line))
        return found


@pytest.fixture(scope="module", params=["nccl", "nccl2"])
def nccl(request: pytest.FixtureRequest) -> str:
    """The emulated engine: ProcessGroupNCCL, or that of torch 2.15."""
    if why_not := nccl_like.why_not(request.param):
        pytest.skip(why_not)
    return str(request.param)


@pytest.fixture(scope="module")
def job(
    nccl: str, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Ended]:
    """Runs a program of nccl_like_programs.py: ``job("results", ranks=3)``."""

    def run(
        *arguments: str,
        ranks: int = 2,
        seconds: float = 40,
        emulated: bool = True,
        fr: Path | None = None,
        **environ: str,
    ) -> Ended:
        folder = tmp_path_factory.mktemp("job")
        common = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCH_FR_DUMP_TEMP_FILE": str((fr or folder) / "nccl_trace_rank_"),
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "300",
            "TORCH_NCCL_COORD_CHECK_MILSEC": "200",
            **environ,
        }
        if emulated:
            common |= nccl_like.variables(nccl)
        each = [
            {
                "environment": {**common, "RANK": str(r), "LOCAL_RANK": str(r)},
                "arguments": [str(PROGRAMS), *arguments],
            }
            for r in range(ranks)
        ]
        began = time.monotonic()
        started = zygote.ask(do="start", folder=str(folder), store=True, ranks=each)
        pids = started["pids"]
        limit = began + seconds
        while not all(map(has_ended, pids)) and time.monotonic() < limit:
            if any(has_ended(pid) and exit_status(pid) for pid in pids):
                limit = min(limit, time.monotonic() + 3)  # a launcher ends the others
            time.sleep(0.02)
        took = time.monotonic() - began
        for pid in (*pids, started["store"]):
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
        statuses = zygote.reap([*pids, started["store"]])
        outputs = [
            (folder / f"rank{rank}.out").read_text(errors="replace") for rank in range(ranks)
        ]
        for rank, output in enumerate(outputs):
            print(f"--- rank {rank}\n{output[-3000:]}")  # pytest shows it when the test fails
        return Ended([os.waitstatus_to_exitcode(statuses[pid]) for pid in pids], outputs, took)

    return run


# The emulation is a tool: what it does is tested where it changes, what commlens says of programs on
# it always (test_nccl_like_verdicts.py).
OF_THE_TOOL = pytest.mark.long


@OF_THE_TOOL
@pytest.mark.parametrize("ranks", [2, 3])
def test_results_are_those_of_gloo(job, ranks):
    ended = job("results", ranks=ranks)
    assert ended.statuses == [0] * ranks
    assert ended.said()["compared"] > 30


@OF_THE_TOOL
def test_results_are_right_on_a_slow_device(job):
    ended = job("results", NCCL_LIKE_DELAY_S="0.01")
    assert ended.statuses == [0, 0]


@OF_THE_TOOL
def test_frameworks_train_as_on_gloo(job):
    """DDP, FSDP2, tensor parallelism, a pipeline, and compiled functions."""
    arguments = ("training", *(["fsdp2"] if fsdp2_runs_on_cpu() else []))
    ours, gloo = job(*arguments, NCCL_LIKE_DELAY_S="0.002"), job(*arguments, emulated=False)
    assert ours.statuses == gloo.statuses == [0, 0]
    for rank in range(2):
        assert ours.said(rank) == gloo.said(rank)
    assert len(ours.said(1)["pipeline"]) == 3


@OF_THE_TOOL
def test_the_host_runs_ahead(job, nccl):
    """3,000 calls return while the other rank is not there; nobody holds a Work or, but for torch's
    hooks on nccl2, asks for an event until this program does.
    """
    ended = job("run_ahead")
    assert ended.statuses == [0, 0]
    first, second = (
        json.loads(line) for line in ended.outputs[0].splitlines() if line.startswith("{")
    )
    assert first["pending"] == 3000
    assert (first["left"], first["works"]) == (0, 0)
    assert (second["held"], second["works"]) == (1, 0)
    assert nccl == "nccl2" or (first["queries"], second["queries"]) == (0, 1)


@OF_THE_TOOL
def test_a_replay_waits_for_a_rank_that_does_not_replay(job):
    ended = job("replay_alone")
    assert ended.statuses == [0, 0]
    said = ended.said()
    assert (said["captured"], said["replayed"]) == ([1.0] * 4, [2.0] * 4)
    assert (said["pending"], said["number"]) == (1, 2)


@OF_THE_TOOL
def test_collectives_behind_a_compute_kernel_do_not_start(job):
    ended = job("occupied", ranks=1, TORCH_NCCL_ENABLE_TIMING="1")
    assert ended.statuses == [0]
    assert ended.said() == {"state": "scheduled", "pending": 2, "then": [1.0] * 4}


@OF_THE_TOOL
def test_a_program_ends_with_a_collective_in_flight(job):
    ended = job("leave")
    assert ended.statuses == [0, 0]
    assert ended.seconds < 20


@OF_THE_TOOL
def test_the_end_of_a_rank_can_be_an_error(job):
    ended = job("peer_dies", NCCL_LIKE_PEER_DEATH="error")
    assert ended.statuses == [ABORTED, 7]
    assert ended.said()["result"] == 2  # COMM_ERROR


HANGS = {
    "skipped": ("never reached all_reduce #2 of the default group", [ABORTED, -signal.SIGKILL]),
    "sizes": ("ranks disagree in all_reduce #2 of the default group", [ABORTED, ABORTED]),
    "swapped": ("", [ABORTED, ABORTED]),
}


TIMED_OUT = {
    "nccl": "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=",
    "nccl2": "Operation timed out after ",
}


@pytest.mark.parametrize("name", [long(name, when=name != "skipped") for name in HANGS])
def test_a_hang_ends_with_dumps_that_commlens_reads(job, nccl, run_commlens, tmp_path, name):
    """In nccl2, only a rank that waits itself writes a dump."""
    verdict, statuses = HANGS[name]
    ended = job(name, fr=tmp_path)
    assert ended.statuses == statuses
    assert ended.said()["ran_on"]  # the call returned
    assert TIMED_OUT[nccl] in ended.outputs[0]
    files = sorted(path.name for path in tmp_path.glob("nccl_trace_rank_*"))
    waits = [rank for rank in range(2) if nccl == "nccl" or statuses[rank] == ABORTED]
    assert files == [f"nccl_trace_rank_{rank}" for rank in waits]
    said = run_commlens("diagnose", str(tmp_path)).stdout
    assert len(waits) < 2 or verdict in " ".join(said.split()), said


TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
group = dist.group.WORLD._get_backend(torch.device("cpu"))
for step in range(3):
    loss = torch.ones(4)
    dist.all_reduce(loss)
print(f"{dist.get_backend()} {group.name()} {loss.tolist()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", [long("torchrun"), "commlens"])
def test_any_program_runs_on_it_unchanged(nccl, tmp_path, launcher):
    """Through the entry point of the folder ``site``, with torch's launcher, and with commlens
    beside it.
    """
    bench = Bench(tmp_path)
    try:
        bench.script.write_text(TRAIN)
        path = os.pathsep.join([str(nccl_like.HERE / "site"), bench.environ["PYTHONPATH"]])
        start = bench.torchrun if launcher == "torchrun" else bench.launch
        program = start("train.py", PYTHONPATH=path, **nccl_like.variables(nccl))
        assert program.end(timeout_s=90) == 0, program.report()
        assert program.out.count(f"nccl_like {nccl} [2.0, 2.0, 2.0, 2.0]") == 2, program.report()
        assert "not recording" not in program.error
    finally:
        bench.close()


def test_the_folder_changes_nothing_unless_asked(tmp_path):
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch.distributed as dist; print('NCCL_LIKE' in dir(dist.Backend))",
        ],
        env={**os.environ, "PYTHONPATH": str(nccl_like.HERE / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stdout.strip() == "False", ended.stderr
