"""Parse single lines of a job's log: the rank that wrote them, the collective that timed out, the
progress of a process group. Pure functions of one line. For example, of the line ::

    1: [rank3]:[E1122 07:21:08.1 ProcessGroupNCCL.cpp:632] [PG ID 2 PG GUID 5(dp) Rank 1] Watchdog
    caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE, NumelIn=4, NumelOut=4,
    Timeout(ms)=600000) ran for 600021 milliseconds before timing out.

=====================  =============================================================================
``parse_origin``       global rank 3, local rank 1 (from ``srun --label``), the rest of the line
``parse_group``        group "5", number 2 in this process, "dp", written by its group rank 1
``parse_timeout``      all_reduce 8 of 4 elements, limit 600 s, ran for 600.021 s
``parse_time``         07:21:08.1 on November 22
``is_whole``           yes: a terminal that wraps lines would have cut it before "ran for"
=====================  =============================================================================

Supports the watchdogs of NCCL's backends in torch 1.13 to 2.15, torchrun, srun, and the prefixes
of log collectors. Each pattern stands above the function that uses it.
"""

from __future__ import annotations

import calendar
import json
import re
import time
from typing import Final, NamedTuple

from commlens.text import clean, printable, signal_name

INTERESTING: Final = re.compile(
    rb"\[TC\]\[rank="
    rb"|atchdog|ProcessGroupNCCL|last enqueued|PG (?:ID|GUID|\d)|Traceback \(|CUDA error| "
    rb" (?:exitcode|rank|host|time) +: |MEMBER: \d"
    rb"|terminate called|enforce fail|shared memory broadcast block found|launched up to operation"
    rb"|managed by process"
    rb"|death signal|got signal: |CUDA out of memory|Fatal Python error|Stack trace of the"
    rb" failed|torch[./]distributed|NCCL (?:INFO|WARN)|but didn't join collective|the lagging ranks"
    rb"|[Tt]he above exception|-- Process \d|, thread: \[\d+,\d+,\d+\] Assertion `"
)
"""Matches every line worth parsing, except those inside a traceback: a fast filter of the bytes of
a log. A new pattern below needs a part here that its lines contain.
"""

MENTION: Final = re.compile(rb"[^\[\n]{0,100}\[(?:rank|RANK) ?(\d{1,7})\]")
"""Matches the beginning of a line that has a rank."""

STUCK_WATCHDOG: Final = re.compile(r"watchdog got stuck for (\d{1,7}) seconds")
"""Seconds for which torch's watchdog thread made no progress, as its monitor says."""

WORLD_SIZE: Final = re.compile(
    r"(?:MEMBER: \d+/|default_pg\).*initialization options: size: |[Ss]tarting with )(\d{1,7})\b"
)


class Origin(NamedTuple):
    """The rank that wrote a line, and what it wrote."""

    rank: int | None  # global, if the line has it
    local: int | None  # torchrun's local rank, or srun's task
    line: str  # without the prefixes


class NamedGroup(NamedTuple):
    """A process group as named in a line."""

    name: str  # torch's name, equal on all ranks; "" if the line has only the process-local number
    number: str  # process-local number; "" if none
    description: str
    rank: int  # group rank of the process that wrote the line

    @property
    def is_default(self) -> bool:
        """Whether it is the default group, the first on every rank."""
        return self.description == "default_pg" or (
            not self.name and not self.description and self.number == "0"
        )


class Timeout(NamedTuple):
    """A collective that timed out, or that failed otherwise."""

    number: int  # sequence number in its group
    op: str  # OpType
    inputs: int | None  # elements
    outputs: int | None
    timeout_ms: int  # 0 if unknown
    ran_ms: int  # -1 if unknown
    group_rank: int | None  # of the process that wrote the line, in an unnamed group
    has_failed: bool = False  # NCCL reported an error before the time was over


class Progress(NamedTuple):
    """The progress of a process group on a rank."""

    number: int | None  # sequence number of the work in the line
    enqueued: int
    started: int  # -1 if unknown
    completed: int


# --- who wrote a line

_COLLECTOR: Final = re.compile(
    r"(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)? (?:std(?:out|err)"
    r" [FP] )?|"
    r"\[pod/[^\]]{1,200}\] |[\w.-]{1,80} *\| |> )+"
)
"""What containerd, kubectl, docker compose, journals and quoting in an issue put before a line."""
# mpirun --tag-output of Open MPI: "[1,3]<stderr>: "
_MPI: Final = re.compile(r"\[\d{1,10},(\d{1,7})\]<std(?:out|err|diag)>: ?")
# Ray's actors, and the workers of vLLM, of which some print their rank: "(Worker rank=3 pid=71) "
_ACTOR: Final = re.compile(r"\([\w.:<>-]{1,80}(?: rank=(\d{1,7}))?(?: pid=\d+)(?:, ip=[\w.:]+)?\) ")
_JSON_LINE: Final = ("log", "message", "msg", "textPayload")  # keys of the line in collectors' JSON
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK: Final = re.compile(r"\[(?:rank|RANK) ?(\d{1,7})\]:? ?")
# torchrun: the role's name and the local rank, "[trainer3]:"; the default role prints "[default3]:"
_LOCAL: Final = re.compile(r"\[([A-Za-z_]+)(\d{1,4})(?:\|\d+)?\]:")
_LABEL: Final = re.compile(r"\s{0,6}(\d{1,7}): ")  # srun --label, mpirun --tag-output's relatives


def parse_origin(line: str) -> Origin:
    """Strip colours and the prefixes of collectors, launchers and torch from a line, the outermost
    first, and return the ranks in them.
    """
    text = printable(_ANSI.sub("", _without_json(line)).expandtabs())
    collector = _COLLECTOR.match(text)
    text = text[collector.end() :] if collector is not None else text
    rank = local = None
    for pattern in (_MPI, _ACTOR):
        if found := pattern.match(text):
            rank = int(found[1]) if found[1] else rank
            text = text[found.end() :]
    label = _LABEL.match(text)
    if label:
        local, text = int(label[1]), text[label.end() :]
    found = _LOCAL.match(text)
    if found and found[1].lower() != "rank":  # "[rank3]:" is torch's own, below
        local, text = int(found[2]), text[found.end() :]
    found = _RANK.search(text, 0, 120)
    if found:
        rank, text = int(found[1]), text[found.end() :]
    return Origin(rank, local, text)


def _without_json(line: str) -> str:
    """Return the line in a collector's JSON object; any other line as it is."""
    if not line.startswith("{"):
        return line
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    texts = (
        [value[key] for key in _JSON_LINE if isinstance(value.get(key), str)]
        if isinstance(value, dict)
        else []
    )
    return texts[0].rstrip("\r\n") if texts else line


# --- lines that a terminal or a collector has wrapped

_FROM_WATCHDOG: Final = "ProcessGroupNCCL.cpp:"


def may_go_on(text: str) -> bool:
    """Return whether a line of the watchdog lacks its facts: they may be in the next line, if a
    terminal or a collector has wrapped it. The lines of torch 2.15's backend are never that long.
    """
    return _FROM_WATCHDOG in text and not is_whole(text) and _NCCL2.search(text) is None


def is_whole(text: str) -> bool:
    """Return whether a line holds a timeout with its end, an error, or the progress of a group."""
    timeout = parse_timeout(text)
    ended = timeout is not None and (timeout.ran_ms >= 0 or timeout.has_failed)
    return ended or parse_progress(text) is not None


_BEGIN: Final = re.compile(
    r"\[(?:rank|RANK) ?\d|\[?[EWIF]\d{3,4} \d\d:|\[[EWIF] \w+\.cpp:|Traceback \("
)


def begins_message(text: str) -> bool:
    """Return whether a line begins a message, so that it does not continue the line before."""
    return _BEGIN.search(text, 0, 120) is not None


# --- what torch's watchdog says

_GROUP: Final = re.compile(
    r"\[PG (?:(?:ID (?P<id>\d+) PG )?GUID (?P<guid>[^\s(\]]+)"
    r" ?(?:\((?P<desc>[^)]*)\))?|(?P<number>\d+) ?(?:\((?P<about>[^)]*)\))?)"
    r" Rank (?P<rank>\d{1,7})\]"
)
# of torch 2.15's NCCL backend, and of torchcomms: the rank is numbered as in the group
_NCCL2: Final = re.compile(r"\[TC\]\[rank=(?P<rank>\d{1,7})\](?:\[name=(?P<name>[^\]]{1,200})\])?")


def parse_group(text: str) -> NamedGroup | None:
    """Return the process group in ``[PG ID 0 PG GUID 0(default_pg) Rank 2]``, ``[PG 1 Rank 0]`` or
    ``[PG 0 (default_pg) Rank 3]``.
    """
    found = _GROUP.search(text)
    if not found:
        return _nccl2_group(text)
    description = (found["desc"] or found["about"] or "").strip()
    description = "" if description == "undefined" else description
    return NamedGroup(
        clean(found["guid"] or ""),
        clean(found["id"] or found["number"] or ""),
        clean(description),
        int(found["rank"]),
    )


def _nccl2_group(text: str) -> NamedGroup | None:
    """Return the process group in ``[TC][rank=2][name=default_pg]``."""
    found = _NCCL2.search(text)
    if found is None or not found["name"]:
        return None
    name = clean(found["name"])
    is_default = name in ("0", "default_pg")
    return NamedGroup(
        "0" if is_default else name, "", "default_pg" if is_default else "", int(found["rank"])
    )


_NCCL2_TIMEOUT: Final = re.compile(
    r"Operation timed out after (?P<ms>\d{1,12}) ?ms|detected operation timeout"
)


def parse_nccl2_timeout(text: str) -> int | None:
    """Return after how many ms an operation timed out, in a line of torch 2.15's NCCL backend,
    which does not name it; 0 if the line does not say, None for any other line.
    """
    found = _NCCL2_TIMEOUT.search(text) if _NCCL2.search(text) else None
    return int(found["ms"] or 0) if found is not None else None


_BARE_RANK: Final = re.compile(r"\[Rank (\d{1,7})\]")
_TIMEOUT: Final = re.compile(
    r"WorkNCCL\((?P<fields>[^()\n]{0,2000}Timeout\(ms\)=[^()\n]{1,2000})\)(?: ran for"
    r" (?P<ran>\d{1,15}) milliseconds)?"
)
_ASYNC_ERROR: Final = "raised the following async exception: "
_FIELD: Final = re.compile(r"(\w{1,40})(?:\(ms\))?=(\[[^\]]{0,1000}\]|[^,]{0,1000})")


def parse_timeout(text: str) -> Timeout | None:
    """Parse ``WorkNCCL(SeqNum=8, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)``."""
    found = _TIMEOUT.search(text)
    fields = dict(_FIELD.findall(found["fields"])) if found else {}
    number, op = _number(fields.get("SeqNum", "")), fields.get("OpType", "").strip()
    if not found or number is None or not re.fullmatch(r"\w{1,80}", op):
        return None
    rank = _BARE_RANK.search(text)
    return Timeout(
        number,
        op,
        _number(fields.get("NumelIn", "")),
        _number(fields.get("NumelOut", "")),
        _number(fields.get("Timeout", "")) or 0,
        int(found["ran"]) if found["ran"] else -1,
        int(rank[1]) if rank else None,
        _ASYNC_ERROR in text,
    )


_INT_MAX: Final = (1 << 63) - 1


def _number(text: str) -> int | None:
    """Return a number that fits in 64 bits; None for any other text: some torch versions print
    sizes of -1 as 18446744073709551615.
    """
    text = text.strip()
    value = int(text) if text.isdecimal() and text.isascii() and len(text) < 20 else -1
    return value if 0 <= value <= _INT_MAX else None


_PROGRESS: Final = re.compile(
    r"(?:(?:at work(?: sequence id)?|NCCL work): (?P<number>\d{1,18})[.,]?.{0,40}?)?last enqueued"
    r" (?:NCCL )?work: (?P<enqueued>-?\d{1,18})"
    r"(?:, last started (?:NCCL )?work: (?P<started>-?\d{1,18}))?, last completed (?:NCCL )?work:"
    r" (?P<completed>-?\d{1,18})",
    re.IGNORECASE,
)


def parse_progress(text: str) -> Progress | None:
    """Parse ``last enqueued work: 811, last completed work: 807``, in the wording of any torch
    version.
    """
    found = _PROGRESS.search(text)
    if not found:
        return None
    number = found["number"]
    return Progress(
        int(number) if number else None,
        int(found["enqueued"]),
        int(found["started"] or -1),
        int(found["completed"]),
    )


def is_unread(text: str) -> bool:
    """Return whether a line of the watchdog is about a timeout or the progress of a group, but has
    a form that is not known here, as in a later version of torch.
    """
    if "operation timeout: NCCL operation" in text:  # of torch 2.15, which names no collective
        return False
    of_timeout = "WorkNCCL(" in text or "collective operation timeout" in text
    of_progress = "last enqueued" in text.lower() and "work" in text
    return (of_timeout and parse_timeout(text) is None) or (
        of_progress and parse_progress(text) is None
    )


_HEAD: Final = re.compile(r"(?:\[[^\]]{0,200}\] ?){1,8}")


def without_head(text: str) -> str:
    """Return a C++ line without ``[E1122 07:21:08 ProcessGroupNCCL.cpp:632] [Rank 1] ``."""
    head = _HEAD.match(text)
    return text[head.end() :] if head is not None else text


# --- other lines

_OF_A_JOB: Final = re.compile(r"torch[./]distributed|NCCL (?:INFO|WARN)|ProcessGroup|c10d|gloo")


def is_of_a_job(text: str) -> bool:
    """Return whether a line shows that its log is of a distributed job."""
    return _OF_A_JOB.search(text) is not None


_LAUNCHER_SIGNAL: Final = re.compile(
    r"Received (?:Signals\.)?(\w{1,10}) death signal|Process \d+ got signal:"
    r" (?:Signals\.)?(\w{1,10})"
)


def parse_launcher_signal(text: str) -> str:
    """Return the signal in ``Received 1 death signal, shutting down workers``: ``"SIGHUP"``; empty
    in any other line.
    """
    found = _LAUNCHER_SIGNAL.search(text)
    name = (found[1] or found[2]) if found else ""
    return signal_name(int(name)) if name.isdecimal() else name


# by kind (RankColumns.remarks says what each is): the line, with the number that is kept
_REMARKS: Final = (
    (
        "broadcast-wait",
        re.compile(r"No available shared memory broadcast block found in (\d{1,7}) second"),
    ),
    (
        "ras-behind",
        re.compile(r"\d{1,7} ranks? (?:has|have) launched up to operation (\d{1,18})"),
    ),
    (
        "ras-rank",
        re.compile(r"Rank (\d{1,7}) -- GPU \d{1,3}\b.{0,40} managed by process \d"),
    ),
    (
        "store-lost",
        re.compile(r"Rank (\d{1,7})\] Failed to check the \"should dump\" flag on TCPStore"),
    ),
)
# torch's TraceUtils.h, with TORCH_NCCL_DESYNC_DEBUG=1 (before torch 2.2: NCCL_DESYNC_DEBUG): ranks,
# as numbered in the group
_LAGGING: Final = re.compile(
    r"\[(?P<behind>\d{1,7}(?:, \d{1,7})*)\] finished collective #\d{1,18}, but didn't join"
    r" collective #|ranks \[(?P<never>\d{1,7}(?:, \d{1,7})*)\] are the lagging ranks"
)


def parse_remarks(text: str) -> list[tuple[str, int]]:
    """Return what a line of vLLM's broadcast queue (0.6 to 0.11), of NCCL's RAS report (2.24 to
    2.28), of torch's desync report or of its heartbeat monitor shows, as in RankColumns.remarks.
    """
    for kind, pattern in _REMARKS:
        if found := pattern.search(text):
            return [(kind, int(found[1]))]
    if found := _LAGGING.search(text):
        ranks = (found["behind"] or found["never"]).split(", ")
        return [("lagging", int(rank)) for rank in ranks]
    return []


def number_in(pattern: re.Pattern[str], text: str) -> int:
    """Return the number that a pattern finds in a line, such as :data:`STUCK_WATCHDOG`; 0 if it
    finds none.
    """
    found = pattern.search(text)
    return int(found[1]) if found else 0


_WORKER_FIELD: Final = re.compile(
    r"\s+(?:rank\s+: (?P<rank>\d{1,7}) \(local_rank: \d+\)"
    r"|exitcode\s+: (?P<exit>-?\d{1,5}) \(pid: (?P<pid>\d+)\)"
    r"|host\s+: (?P<host>\S{1,255})\s*$"
    r"|time\s+: (?P<time>\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d))"
)


def parse_worker_field(text: str) -> dict[str, str]:
    """Return ``rank``, ``exit`` with ``pid``, ``host`` or ``time`` from a line of torchrun's list
    of failed workers; nothing from any other line.
    """
    found = _WORKER_FIELD.match(text)
    return {key: value for key, value in found.groupdict().items() if value} if found else {}


_GLOG: Final = re.compile(r"[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")


def parse_time(text: str) -> int:
    """Return the time in a C++ line (``E1206 18:44:12.715298746``) as Unix ns, read as UTC of the
    latest such day; 0 if none.

    The line has neither year nor time zone, so times are comparable only within one log.
    """
    found = _GLOG.search(text, 0, 160)
    if not found:
        return 0
    # tomorrow: in the time zone of the log it may be the next day already
    latest = time.gmtime(time.time() + 24 * 3600)
    month, day, hour, minute, second = (int(part) for part in found.groups()[:5])
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60):
        return 0
    year = latest.tm_year - ((month, day) > (latest.tm_mon, latest.tm_mday))
    return calendar.timegm((year, month, day, hour, minute, second)) * 1_000_000_000 + int(
        found[6].ljust(9, "0")
    )


def parse_torchrun_time(text: str) -> int:
    """Return torchrun's ``2024-01-26_05:13:33``, read as UTC, as Unix ns; 0 for anything else."""
    try:
        return calendar.timegm(time.strptime(text, "%Y-%m-%d_%H:%M:%S")) * 1_000_000_000
    except ValueError:
        return 0
