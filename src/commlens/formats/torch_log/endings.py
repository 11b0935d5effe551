"""Parse the lines in which a scheduler, a container's runtime, the kernel or a launcher tell that
they ended a job, or that one of its processes ended.

Slurm 20 to 24, Kubernetes 1.20 to 1.33, Ray 2.0 to 2.50, DeepSpeed 0.8 to 0.17, torchrun 1.9 to
2.15, the kernel's OOM killer, bash. Pure functions of one line.
"""

from __future__ import annotations

import re
from typing import Final

from commlens.model.cause import JobEnding

INTERESTING: Final = re.compile(
    rb"CANCELLED AT |oom[-_]kill|srun: error: |OOMKilled|Evicted|low on resource"
    rb"|[Oo]ut of memory: Killed process|low on memory|due to memory pressure|NVRM: Xid"
    rb"|exits with return code = |: line \d+: +\d+ Killed|Preempted|\(exitcode: "
)
"""Matches every line worth parsing."""

_ENDINGS: Final[tuple[tuple[JobEnding, re.Pattern[str]], ...]] = (
    (
        "out-of-memory",
        re.compile(
            r"slurmstepd: error: Detected \d+ oom[-_]kill event"
            r"|srun: error: \S+: tasks? [\d,-]+: Out Of Memory"
            r"|\bOOMKilled\b"
            r"|[Oo]ut of memory: Killed process \d+"
            r"|oom-kill:constraint="
            r"|Workers \(tasks / actors\) killed due to memory pressure \(OOM\)"
            r"|was killed due to the node running low on memory"
        ),
    ),
    ("node-failure", re.compile(r"DUE [Tt][Oo] NODE FAIL|srun: error: Node failure on ")),
    ("preemption", re.compile(r"DUE [Tt][Oo] PREEMPTION|^\s*(?:Normal|Warning)\s+Preempted\b")),
    ("time-limit", re.compile(r"CANCELLED AT \S+ DUE [Tt][Oo] TIME LIMIT")),
    ("evicted", re.compile(r"\bWarning\s+Evicted\b|The node was low on resource: ")),
    ("gpu-error", re.compile(r"NVRM: Xid \(PCI:[^)]{1,40}\): \d{1,4}\b")),
    (
        "killed",
        re.compile(
            r": line \d+: +\d+ Killed\b"
            r"|exits with return code = -9\b"
            r"|failed \(exitcode: -9\) local_rank: \d+"
            r"|srun: error: \S+: tasks? [\d,-]+: Killed"
        ),
    ),
    (
        "process-failed",
        re.compile(
            r"srun: error: \S+: tasks? [\d,-]+: (?:Exited with exit code [1-9]|Aborted"
            r"|Segmentation fault|Bus error)"
            r"|exits with return code = -?[1-9]"
            r"|failed \(exitcode: -?[1-9]\d*\) local_rank: \d+"
        ),
    ),
    ("cancelled", re.compile(r"slurmstepd: error: \*\*\* JOB \d+ ON \S+ CANCELLED AT ")),
)
"""The strongest first: a job that is out of memory is cancelled, too."""


def parse_ending(text: str) -> JobEnding | None:
    """Return why a line says that a job, or one of its processes, ended; None for any other
    line.
    """
    return next((ending for ending, pattern in _ENDINGS if pattern.search(text)), None)
