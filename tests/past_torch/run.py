"""Run the programs of ``programs.py``, and count what commlens says: right if it names the rank at
fault and no other, undecided if it names none, wrong if it names another one, or any in a healthy
program.

Usage: run.py [--ranks N] [--at-once N] [NAME ...]
       run.py --healthy N [--seed FIRST] [--ranks N] [--at-once N]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "site"))
from meeting import last_arrival  # noqa: E402

sys.path.remove(str(HERE / "site"))  # its stand-ins have the names of real packages

STALL_S = 5
STAY_S = 22
WAIT_S = 150
NCCL_WAIT_S = 60  # a kernel that waits never ends

REPORTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "dummy_batch_left_out": ("vllm#28224", (1,)),
    "other_mode": ("vllm#25906", (1,)),
    "crashes_before_combine": ("sglang#25404", (1,)),
    "asleep_before_combine": ("vllm#28224, later in the layer", (1,)),
    "combine_left_out": ("sgl-kernel-npu#69", (1,)),
    "extra_all_gather": ("vllm#28224, across groups", (1,)),
    "all_inside": ("sglang#34582, DeepEP#707", ()),
    "left_in_the_kernel": ("vllm#8410", (1,)),
    "custom_and_torch": ("none: a kernel that one rank does not use", (1,)),
    "queue_full": ("vllm#27313", (1,)),
    "worker_stuck_behind_queue": ("vllm#46611", (1,)),
    "result_not_sent": ("prime-rl#3016, by a queue", (0,)),
    "weights_not_received": ("NeMo-RL#4019", (1,)),
    "first_ray_collective": ("verl#6967", (1,)),
    "trainer_never_broadcasts": ("prime-rl#3016", (0,)),
    "dead_shard": ("NeMo-RL#3591", (1,)),
    "drafter_skipped": ("vllm#44185", (1,)),
    "empty_step_left_out": ("vllm#43547", (1,)),
    "finishes_early": ("vllm#18932", (1,)),
    "other_order": ("DeepEP#496", (1,)),
    "elastic_combine": ("torchtitan#3877", ()),
    "still_initialising": ("vllm#55319", (1,)),
    "prefetch_check_extra": ("sglang#30760", (1,)),
    "aborted_on_one_rank": ("sglang#27221", (1,)),
    "source_has_no_list": ("sglang#37590", (1,)),
    "two_streams": ("sglang#31117", ()),
    "memory_of_a_sub_group": ("pytorch#196082", ()),
    "freed_by_the_collector": ("pytorch#195500", (1,)),
    "first_allocation": ("pytorch#195501", (1,)),
    "signal_of_another_group": ("pytorch#192581", ()),
    "groups_in_other_order": ("verl#7262", (1,)),
    "driver_dies": ("vllm#53157", (0,)),
    "caught_in_the_worker": ("vllm#7145", (1,)),
    "communicator_left_out": ("none: torchcomms used directly", (1,)),
    "signal_not_sent": ("none: a signal of symmetric memory", (1,)),
    "window_signal_not_sent": ("none: a signal of a window", (1,)),
}
"""By program: the public report whose fault it has, as far as the report tells it, and the ranks at
fault; none: nobody is to be named.
"""

UNDECIDED = (
    "left_in_the_kernel",
    "result_not_sent",
    "first_allocation",
    "groups_in_other_order",
)
"""Of these, nobody is named: nothing tells which device has left a kernel, a server that has no
request looks like one that sends none, and of ranks that wait for each other nothing tells which
ones have the right order.
"""

HEALTHY = (
    "healthy_experts",
    "healthy_idle_server",
    "healthy_queue_ahead",
    "healthy_timeouts",
    "healthy_caught_error",
    "healthy_sub_groups",
    "healthy_made_again",
    "healthy_overlap",
    "healthy_communicators",
    "healthy_one_sided",
)
RANDOM = "healthy_random"

NCCL_REPORTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "step_left_out": ("vllm#43547", (1,)),
    "drafter_left_out": ("vllm#44954", (1,)),
    "stands_before_replay": ("pytorch#196133", (1,)),
    "device_stands_before_replay": ("vllm#41725", (1,)),
    "other_graph": ("vllm#45610", (1,)),
    "eager_among_graphs": ("vllm#46097, vllm#48720", (1,)),
    "stands_after_eager": ("vllm#46097, later", (0,)),
    "stands_before_torch": ("none: torch between two replays", (1,)),
    "device_stands_before_torch": ("none: torch's call, which NCCL tells of, too", (1,)),
}
NCCL_HEALTHY = (
    "healthy_replays",
    "healthy_eager_and_graphs",
    "healthy_eager_among_graphs",
    "healthy_torch",
)
"""Those of ``nccl_programs.py``, which call NCCL past torch."""
REPORTS |= NCCL_REPORTS
HEALTHY += NCCL_HEALTHY


def nccl_like() -> Any:
    """The emulation of NCCL, on which those programs run."""
    sys.path.append(str(HERE.parent))
    try:
        return importlib.import_module("nccl_like")
    finally:
        sys.path.remove(str(HERE.parent))


def _nccl_variables() -> dict[str, str]:
    """Return the environment that puts a rank on it, with commlens's plugin."""
    sites = [HERE.parent / "nccl_like" / "site", HERE.parent, HERE / "site"]
    folders = [*sites, os.environ.get("PYTHONPATH", "")]
    return {
        **nccl_like().variables("nccl"),
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders),
        "COMMLENS_NCCL_PROFILER": "kernels",
    }


class Outcome(NamedTuple):
    """What commlens said of one program."""

    name: str
    said: str  # "right", "undecided", "wrong", or "unfinished" of a healthy one
    culprits: list[int]
    summary: str
    output: str
    seconds: float  # from the last call in the stand-ins to the first verdict; 0 without one


def run(name: str, folder: Path, ranks: int = 4) -> Outcome:
    """Run one program, and judge the verdict in its dump. ``healthy_random:SEED`` is the random one
    with a seed.
    """
    name, _, seed = name.partition(":")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "boxes").mkdir(parents=True)
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "site"), os.environ.get("PYTHONPATH", "")]),
        "PAST_TORCH_DIR": str(folder),
        "PAST_TORCH_STAY_S": str(STAY_S),
        "PAST_TORCH_SEED": seed,
        "COMMLENS_BOX_DIR": str(folder / "boxes"),
        "COMMLENS_DUMP_DIR": str(folder / "dumps"),
        "COMMLENS_STALL_TIMEOUT": str(STALL_S),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    program = HERE / "programs.py"
    if name in (*NCCL_REPORTS, *NCCL_HEALTHY):
        program = HERE / "nccl_programs.py"
        common |= _nccl_variables()
    output = folder / "output"
    started = []
    with output.open("w") as file:
        for rank in range(ranks):
            environ = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "commlens", "run", str(program), name]
            started.append(subprocess.Popen(command, env=environ, stdout=file, stderr=file))
    seconds = 0.0
    try:
        end = time.monotonic() + (NCCL_WAIT_S if name in NCCL_REPORTS else WAIT_S)
        while time.monotonic() < end and any(one.poll() is None for one in started):
            time.sleep(0.2)
            if not seconds and _verdicts(folder) and (arrived := last_arrival(folder)):
                seconds = time.time() - arrived
            if name in REPORTS and _names_a_rank(folder):
                break
    finally:
        for one in started:
            one.kill()
        for one in started:
            one.wait()
    return judge(name, folder, output.read_text(), seconds, [one.returncode for one in started])


def _names_a_rank(folder: Path) -> bool:
    return any(json.loads(file.read_text())["culprits"] for file in _verdicts(folder))


def _verdicts(folder: Path) -> list[Path]:
    return sorted(folder.glob("dumps/*/verdict.json"), key=lambda file: file.stat().st_mtime)


def judge(
    name: str, folder: Path, output: str, seconds: float, statuses: list[int | None]
) -> Outcome:
    """Compare the verdict that was saved with the fault."""
    verdicts = [json.loads(file.read_text()) for file in _verdicts(folder)]
    verdict = verdicts[-1] if verdicts else {"culprits": [], "summary": "no word"}
    culprits, summary = verdict["culprits"], verdict["summary"]
    if name in (*HEALTHY, RANDOM):
        is_quiet = not verdicts and "VERDICT" not in output
        said = "wrong" if not is_quiet else "unfinished" if any(statuses) else "right"
        return Outcome(name, said, culprits, summary, output, seconds)
    wanted = list(REPORTS[name][1])
    said = "right" if culprits == wanted and verdicts else "wrong" if culprits else "undecided"
    return Outcome(name, said, culprits, summary, output, seconds)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--healthy", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.healthy)
    names = [f"{RANDOM}:{seed}" for seed in seeds] or arguments.names or [*REPORTS, *HEALTHY]
    counted: dict[str, Counter[str]] = {"reports": Counter(), "healthy": Counter()}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.at_once) as pool:
        jobs = [pool.submit(run, name, Path(folder, name), arguments.ranks) for name in names]
        for name, job in zip(names, jobs, strict=True):
            each = job.result()
            counted["healthy" if each.name in (*HEALTHY, RANDOM) else "reports"][each.said] += 1
            told = f"{each.said:9} {each.seconds:4.1f} s {name:28}"
            print(f"{told} {each.culprits} {each.summary}", flush=True)
    for kind, said in counted.items():
        print(f"{kind}: {dict(said)}")
    return any(said["wrong"] or said["unfinished"] for said in counted.values())


if __name__ == "__main__":
    sys.exit(main())
