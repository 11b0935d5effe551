"""What single lines of a job's log say: who speaks, which collective timed out, how far a process group had come.

The texts are those of ProcessGroupNCCL's watchdog in torch 1.13 to 2.15, of torchrun and srun. Pure functions of one line.
"""

from __future__ import annotations

import calendar
import re
import time
from typing import Final, NamedTuple

__all__ = ["INTERESTING", "Child", "Group", "Progress", "Speaker", "Timeout", "child_of", "group_of", "moment_of", "progress_of", "size_of",
           "speaker_of", "timeouts_of", "unix_ns"]  # fmt: skip

INTERESTING: Final = re.compile(
    rb"atchdog|last enqueued|PG (?:ID|GUID|\d)|Traceback \(|CUDA error|  (?:exitcode|rank|host|time) +: |MEMBER: \d"
    rb"|CUDA out of memory|Fatal Python error|Stack trace of the failed"
)
"""What a line has, apart from those inside a traceback, when it is worth a look."""

_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK: Final = re.compile(r"\[(?:rank|RANK) ?(\d{1,7})\]:? ?")
_LOCAL: Final = re.compile(r"\[([A-Za-z_]+)(\d{1,4})(?:\|\d+)?\]:")  # torchrun: the role's name and the local rank
_LABEL: Final = re.compile(r"\s{0,6}(\d{1,7}): ")  # srun --label, mpirun --tag-output's relatives

_GROUP: Final = re.compile(
    r"\[PG (?:(?:ID (?P<id>\d+) PG )?GUID (?P<guid>[^\s(\]]+) ?(?:\((?P<desc>[^)]*)\))?|(?P<number>\d+) ?(?:\((?P<about>[^)]*)\))?)"
    r" Rank (?P<rank>\d+)\]"
)
_BARE_RANK: Final = re.compile(r"\[Rank (\d{1,7})\]")
_TIMEOUT: Final = re.compile(
    r"WorkNCCL\(SeqNum=(?P<number>\d{1,18}), OpType=(?P<op>\w+)(?:, NumelIn=(?P<inputs>\d{1,18}), NumelOut=(?P<outputs>\d{1,18}))?"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]*)\])?, Timeout\(ms\)=(?P<timeout>\d{1,15})\)(?: ran for (?P<ran>\d{1,15}) milliseconds)?"
)
_PROGRESS: Final = re.compile(
    r"(?:(?:at work(?: sequence id)?|NCCL work): (?P<number>\d{1,18})[.,]?.{0,40}?)?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18})"
    r"(?:, last started (?:NCCL )?work: (?P<started>-?\d{1,18}))?, last completed (?:NCCL )?work: (?P<completed>-?\d{1,18})",
    re.IGNORECASE,
)
_SIZE: Final = re.compile(r"(?:MEMBER: \d+/|default_pg\).*initialization options: size: |[Ss]tarting with )(\d{1,7})\b")
_CHILD_RANK: Final = re.compile(r"\s+rank\s+: (\d{1,7}) \(local_rank: \d+\)")
_CHILD_EXIT: Final = re.compile(r"\s+exitcode\s+: (-?\d{1,5}) \(pid: (\d+)\)")
_CHILD_HOST: Final = re.compile(r"\s+host\s+: (\S{1,255})\s*$")
_CHILD_TIME: Final = re.compile(r"\s+time\s+: (\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)")
_GLOG: Final = re.compile(r"[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")


class Speaker(NamedTuple):
    """Who wrote a line, and what is left of it without the prefixes."""

    rank: int | None  # global, where the line says so
    local: int | None  # torchrun's local rank, or srun's task
    text: str


class Group(NamedTuple):
    """A process group as a line names it."""

    name: str  # torch's own name, the same on all ranks; "" where the line has only the process's own number of it
    number: str  # that number, "" where there is none
    description: str
    rank: int  # of who speaks, in the group

    @property
    def is_default(self) -> bool:
        """Whether it is the default group, which every rank has as its first."""
        return self.description == "default_pg" or (not self.name and not self.description and self.number == "0")


class Timeout(NamedTuple):
    """A collective that timed out."""

    number: int  # sequence number in its group
    op: str  # OpType
    inputs: int | None  # elements
    outputs: int | None
    timeout_ms: int
    ran_ms: int  # -1 where the line does not say
    group_rank: int | None  # of who speaks, in a group that is not named


class Progress(NamedTuple):
    """How far a process group had come on a rank."""

    number: int | None  # the work that the line is about
    enqueued: int
    started: int  # -1 where the line does not say
    completed: int


class Child(NamedTuple):
    """One line of torchrun's summary of failed workers."""

    what: str  # "rank", "exit", "host", "time"
    value: str


def speaker_of(line: str) -> Speaker:
    """Take the prefixes of torch, torchrun and srun off a line."""
    text = _ANSI.sub("", line)
    rank = local = None
    label = _LABEL.match(text)
    if label:
        local, text = int(label[1]), text[label.end() :]
    found = _LOCAL.match(text)
    if found and found[1].lower() != "rank":
        local, text = int(found[2]), text[found.end() :]
    found = _RANK.search(text, 0, 120)
    if found:
        rank, text = int(found[1]), text[found.end() :]
    return Speaker(rank, local, text)


def group_of(text: str) -> Group | None:
    """The process group in ``[PG ID 0 PG GUID 0(default_pg) Rank 2]``, ``[PG 1 Rank 0]`` or ``[PG 0 (default_pg) Rank 3]``."""
    found = _GROUP.search(text)
    if not found:
        return None
    description = (found["desc"] or found["about"] or "").strip()
    description = "" if description == "undefined" else description
    return Group(found["guid"] or "", found["id"] or found["number"] or "", description, int(found["rank"]))


def timeouts_of(text: str) -> Timeout | None:
    """What ``WorkNCCL(SeqNum=8, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)`` says."""
    found = _TIMEOUT.search(text)
    if not found:
        return None
    rank = _BARE_RANK.search(text)
    return Timeout(
        int(found["number"]),
        found["op"],
        int(found["inputs"]) if found["inputs"] else None,
        int(found["outputs"]) if found["outputs"] else None,
        int(found["timeout"]),
        int(found["ran"]) if found["ran"] else -1,
        int(rank[1]) if rank else None,
    )


def progress_of(text: str) -> Progress | None:
    """What ``last enqueued work: 811, last completed work: 807`` says, of all torch versions."""
    found = _PROGRESS.search(text)
    if not found:
        return None
    number = found["number"]
    return Progress(int(number) if number else None, int(found["enqueued"]), int(found["started"] or -1), int(found["completed"]))


def size_of(text: str) -> int:
    """The world size, where a line says it; else 0."""
    found = _SIZE.search(text)
    return int(found[1]) if found else 0


def child_of(text: str) -> Child | None:
    """A line of the list that torchrun prints when workers have failed."""
    for what, pattern in (("rank", _CHILD_RANK), ("exit", _CHILD_EXIT), ("host", _CHILD_HOST), ("time", _CHILD_TIME)):
        found = pattern.match(text)
        if found:
            return Child(what, found[1])
    return None


def moment_of(text: str) -> int:
    """Unix ns of a line of C++ (``E1206 18:44:12.715298746``), taken as UTC of the latest such day; 0 where there is none.

    The year is not in it, nor the time zone: moments of one log compare with each other, not with a clock.
    """
    found = _GLOG.search(text, 0, 160)
    if not found:
        return 0
    now = time.gmtime()
    month, day, hour, minute, second = (int(part) for part in found.groups()[:5])
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60):
        return 0
    year = now.tm_year - ((month, day) > (now.tm_mon, now.tm_mday + 1))
    return calendar.timegm((year, month, day, hour, minute, second)) * 1_000_000_000 + int(found[6].ljust(9, "0"))


def unix_ns(text: str) -> int:
    """Unix ns of torchrun's ``2024-01-26_05:13:33``, taken as UTC; 0 for anything else."""
    try:
        return calendar.timegm(time.strptime(text, "%Y-%m-%d_%H:%M:%S")) * 1_000_000_000
    except ValueError:
        return 0
