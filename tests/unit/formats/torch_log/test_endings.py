"""Lines in which a scheduler, the kernel or a launcher tell why a job ended."""

from __future__ import annotations

import pytest

from commlens.formats.torch_log.endings import (
    INTERESTING,
    parse_ending,
    parse_failed_node,
    parse_rank_ending,
    parse_xid,
)

SLURM = "slurmstepd: error: *** JOB 581234 ON node01 CANCELLED AT 2025-03-02T09:14:55"
ENDINGS = {
    f"{SLURM} DUE TO TIME LIMIT ***": "time-limit",
    f"{SLURM} DUE TO PREEMPTION ***": "preemption",
    f"{SLURM} DUE to PREEMPTION ***": "preemption",
    f"{SLURM} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***": "node-failure",
    f"{SLURM} ***": "cancelled",
    # of several slurmd on one machine
    "slurmstepd-n1: error: *** JOB 2 ON n1 CANCELLED AT 2026-11-30T01:27:38 ***": "cancelled",
    "srun: error: Node failure on gpu-12": "node-failure",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=913377.0. Some of the step": (
        "out-of-memory"
    ),
    "slurmstepd: error: Detected 2 oom-kill event(s) in step 3756240.batch cgroup.": (
        "out-of-memory"
    ),
    "srun: error: node07: task 3: Out Of Memory": "out-of-memory",
    "srun: error: node07: tasks 0-3,5: Killed": "killed",
    "srun: error: node07: task 3: Exited with exit code 1": "process-failed",
    "srun: error: node07: task 3: Segmentation fault (core dumped)": "process-failed",
    "      Reason:       OOMKilled": "out-of-memory",
    "[81234.1] Out of memory: Killed process 4711 (python) total-vm:1kB": "out-of-memory",
    "[81234.1] Memory cgroup out of memory: Killed process 4711 (python)": "out-of-memory",
    "(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers": (
        "out-of-memory"
    ),
    "  Warning  Evicted    3m   kubelet  The node was low on resource: memory.": "evicted",
    "  Normal   Preempted  3m   default-scheduler  Preempted by pod 1a2b on node n7": "preemption",
    "run.sh: line 14: 20311 Killed                  python train.py": "killed",
    "[launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = -9": "killed",
    "[launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = 1": (
        "process-failed"
    ),
    "E0309 1 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9)"
    " local_rank: 5 (pid: 77) of binary: python": "killed",
    "E0309 1 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1)"
    " local_rank: 5 (pid: 77) of binary: python": "process-failed",
    "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>.": "killed",
    "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGSEGV: 11>.": (
        "process-failed"
    ),
    "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1.": (
        "process-failed"
    ),
    "CalledProcessError: Command '['/opt/py/bin/python3.12', '-m', 'train']' returned non-zero"
    " exit status 1.": "process-failed",
    "=>> PBS: job killed: walltime 3636 exceeded limit 3600": "time-limit",
    "=>> PBS: job killed: mem 67108864kb exceeded limit 62914560kb": "out-of-memory",
    "TERM_RUNLIMIT: job killed after reaching LSF run time limit.": "time-limit",
    "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.": "out-of-memory",
    "TERM_PREEMPT: job killed after preemption.": "preemption",
    "=   KILLED BY SIGNAL: 9 (Killed)": "killed",
    "=   KILLED BY SIGNAL: 6 (Aborted)": "process-failed",
    "  Process name: [[41234,1],2]": "process-failed",
    "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal SIGKILL": (
        "killed"
    ),
    "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with exit code 1": (
        "process-failed"
    ),
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before": "process-failed",
    "ERROR [multiproc_executor.py:140] Worker proc VllmWorker-1 died unexpectedly": (
        "process-failed"
    ),
    "[ 8123.4] NVRM: Xid (PCI:0000:3b:00): 79, pid=4173, GPU has fallen off the bus.": "gpu-error",
}


@pytest.mark.parametrize(("line", "ending"), ENDINGS.items())
def test_the_line_tells_why(line: str, ending: str) -> None:
    assert INTERESTING.search(line.encode()) is not None
    assert parse_ending(line) == ending
    assert parse_xid(line) == (79 if ending == "gpu-error" else 0)


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: *** STEP 5123.0 ON n1 CANCELLED AT 2025-01-11T20:02:09 ***",
        "srun: error: node06: tasks 0-1: Terminated",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "['python', 'train.py'] exits with return code = 0",
        "epoch 3 | word error rate 12.1 | Killed mutants: 3",
        "out of memory errors so far: 0",
        "NVRM: Xid (PCI:0000:3b:00): 63, pid=4173, Row Remapper: New row marked for remapping",
        "the evicted keys of the cache: 17",
        "CalledProcessError: Command '['git', 'rev-parse', 'HEAD']' returned non-zero exit status"
        " 128.",
        "CalledProcessError: Command 'nvidia-smi' died with <Signals.SIGKILL: 9>.",
    ],
)
def test_another_line_tells_no_reason(line: str) -> None:
    """A step is cancelled by srun, too, after one of its tasks has failed."""
    assert parse_ending(line) is None


MPIRUN = "mpirun noticed that process rank 3 with PID 0 on node node2 exited on signal 9 (Killed)."
LIGHTNING = "[rank: 1] Child process with PID 3481 terminated with code {}. Forcefully terminating"


@pytest.mark.parametrize(
    ("line", "ending"),
    [
        (MPIRUN, (3, False, "node2", -9)),
        (LIGHTNING.format(-9), (1, True, "", -9)),
        (LIGHTNING.format(1), (1, True, "", 1)),
        (LIGHTNING.format(0), None),
        ("process rank 3 is ready", None),
    ],
)
def test_mpirun_and_lightning_tell_how_a_rank_ended(
    line: str, ending: tuple[int, bool, str, int] | None
) -> None:
    assert parse_rank_ending(line) == ending
    assert ending is None or INTERESTING.search(line.encode()) is not None


def test_the_node_that_failed() -> None:
    assert parse_failed_node("srun: error: Node failure on gpu-12") == "gpu-12"
    assert parse_failed_node(SLURM) == ""
