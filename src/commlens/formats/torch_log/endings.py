"""Parse the lines in which a scheduler, a container's runtime, the kernel or a launcher says that
it ended a job, or that a process of the job ended.

So are the lines in which torch's store says that it cannot connect or listen yet: unless it can
later, the program ends because of that.

Slurm 20 to 24, Kubernetes 1.20 to 1.33, Ray 2.0 to 2.50, DeepSpeed 0.8 to 0.17, torchrun 1.9 to
2.15, the kernel's OOM killer, bash. Pure functions of one line.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from commlens.model.cause import JobEnding
from commlens.model.xids import xid

INTERESTING: Final = re.compile(
    rb"CANCELLED AT |srun: Job step aborted|oom[-_]kill|srun: error: |OOMKilled|Evicted"
    rb"|low on resource|[Oo]ut of memory: Killed process|low on memory|due to memory pressure"
    rb"|NVRM: Xid|exits with return code = |: line \d+: +\d+ Killed|Preempted|\(exitcode: "
    rb"|PBS: job killed|TERM_[A-Z]+: job killed|noticed that process rank|Process name: \[\["
    rb"|KILLED BY SIGNAL|BAD TERMINATION|terminated with code|ProcessExitedException"
    rb"|ray\.exceptions\.|died unexpectedly|CalledProcessError: |\[c10d\] The (?:client|server|IPv)"
)
"""Matches every line that :class:`LogParser` can use for this, and others: a first, cheap test."""

# Accelerate's, of what it launched: a healthy program may try other commands that fail
_LAUNCHED: Final = (
    r"CalledProcessError: Command '\['[^']*(?:python|torchrun|accelerate|deepspeed|mpirun)[^']*'"
)
_XID: Final = re.compile(r"NVRM: Xid \(PCI:[^)]{1,40}\): (\d{1,4})\b")
_FAILED_NODE: Final = re.compile(r"srun: error: Node failure on (\S{1,255})")
_ENDINGS: Final[tuple[tuple[JobEnding, re.Pattern[str]], ...]] = (
    (
        "out-of-memory",
        re.compile(
            r"slurmstepd\S*: error: Detected \d+ oom[-_]kill event"
            r"|srun: error: \S+: tasks? [\d,-]+: Out Of Memory"
            r"|\bOOMKilled\b"
            r"|[Oo]ut of memory: Killed process \d+"
            r"|oom-kill:constraint="
            r"|Workers \(tasks / actors\) killed due to memory pressure \(OOM\)"
            r"|was killed due to the node running low on memory"
            r"|PBS: job killed: v?mem |TERM_MEMLIMIT: job killed"
        ),
    ),
    ("node-failure", re.compile(r"DUE [Tt][Oo] NODE FAIL|srun: error: Node failure on ")),
    (
        "preemption",
        re.compile(
            r"DUE [Tt][Oo] PREEMPTION|^\s*(?:Normal|Warning)\s+Preempted\b"
            r"|TERM_PREEMPT: job killed"
        ),
    ),
    (
        "time-limit",
        re.compile(
            r"CANCELLED AT \S+ DUE [Tt][Oo] TIME LIMIT|PBS: job killed: walltime "
            r"|TERM_(?:RUN|CPU)LIMIT: job killed"
        ),
    ),
    ("evicted", re.compile(r"\bWarning\s+Evicted\b|The node was low on resource: ")),
    ("gpu-error", _XID),
    (
        "killed",
        re.compile(
            r": line \d+: +\d+ Killed\b"
            r"|exits with return code = -9\b"
            r"|failed \(exitcode: -9\) local_rank: \d+"
            r"|srun: error: \S+: tasks? [\d,-]+: Killed|KILLED BY SIGNAL: 9\b"
            r"|ProcessExitedException: process \d+ terminated with signal SIGKILL"
            rf"|{_LAUNCHED}.*died with <Signals\.SIGKILL: 9>"
        ),
    ),
    (
        "process-failed",
        re.compile(
            r"srun: error: \S+: tasks? [\d,-]+: (?:Exited with exit code [1-9]|Aborted"
            r"|Segmentation fault|Bus error)"
            r"|exits with return code = -?[1-9]"
            r"|failed \(exitcode: -?[1-9]\d*\) local_rank: \d+"
            r"|ProcessExitedException: process \d+ terminated with"
            rf"|{_LAUNCHED}.*(?:died with <Signals|returned non-zero exit status)"
            r"|^\s*Process name: \[\[\d+,\d+\],\d+\]|KILLED BY SIGNAL: \d"
            r"|ray\.exceptions\.(?:RayActorError|ActorDiedError|WorkerCrashedError)\b"
            r"|Worker proc \S+ died unexpectedly"
        ),
    ),
    (
        "cancelled",
        # a job that Slurm requeues starts again: nobody cancelled it
        re.compile(
            r"slurmstepd\S*: error: \*\*\* JOB \d+ ON \S+ CANCELLED AT (?!\S+ DUE TO JOB REQUEUE)"
        ),
    ),
    # sockets of torch's store
    (
        "store-unreachable",
        re.compile(
            r"\[c10d\] The (?:client socket has (?:timed out|failed to connect to any network)"
            r"|server socket has failed to listen)"
        ),
    ),
    (
        "store-awaited",
        re.compile(
            r"\[c10d\] The (?:client socket has failed to connect to [\[(]"
            r"|server socket has failed to bind|IPv[46] network addresses of )"
        ),
    ),
)
"""The strongest first: a job that is out of memory is cancelled, too."""


_RANK_ENDINGS: Final = (
    # Open MPI's mpirun
    re.compile(
        r"noticed that process rank (?P<rank>\d{1,7}) with PID \d+ on node (?P<host>\S{1,255})"
        r" exited on signal (?P<signal>\d{1,2})\b"
    ),
    # Lightning, with the rank on its node
    re.compile(
        r"\[rank: (?P<local>\d{1,7})\] Child process with PID \d+ terminated with code"
        r" (?P<code>-?[1-9]\d{0,2})\b"
    ),
)


class RankEnding(NamedTuple):
    """How a rank ended, according to its launcher."""

    rank: int
    is_local: bool  # the rank is the one on its node
    host: str  # "" if unknown
    code: int  # the exit status; -9: killed by signal 9


def parse_rank_ending(text: str) -> RankEnding | None:
    """Return how a rank ended, from a line of mpirun or Lightning; None for any other line."""
    for pattern in _RANK_ENDINGS:
        if found := pattern.search(text):
            fields = found.groupdict()
            is_local = "local" in fields
            code = int(fields["code"]) if "code" in fields else -int(fields["signal"])
            rank = int(fields["local" if is_local else "rank"])
            return RankEnding(rank, is_local, fields.get("host") or "", code)
    return None


def parse_ending(text: str) -> JobEnding | None:
    """Return why a line says that a job, or one of its processes, ended; None for any other line,
    also for an Xid that stops nothing.
    """
    ending = next((ending for ending, pattern in _ENDINGS if pattern.search(text)), None)
    if ending == "gpu-error" and xid(parse_xid(text)).effect == "sign":
        return None
    return ending


def parse_failed_node(text: str) -> str:
    """Return the node of which a line of Slurm tells that it failed; empty if none."""
    found = _FAILED_NODE.search(text)
    return found[1] if found else ""


def parse_xid(text: str) -> int:
    """Return the number of the Xid that a line of the kernel's log reports; 0 if there is none."""
    found = _XID.search(text)
    return int(found[1]) if found else 0
