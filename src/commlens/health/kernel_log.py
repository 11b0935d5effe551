"""The kernel's log: ``/dev/kmsg``, systemd's journal, or a file of it.

Only lines about hardware, memory and storage are kept. A file's times may lack the year and the
time zone: they are read as this machine's, of the latest such day.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from commlens.health.sources import ROOT, UnreadableError, normal_address, output_of
from commlens.model.health import Fault, HealthEvent, What
from commlens.model.xids import xid
from commlens.text import clean

LOG_FILES: Final = (
    "kern.log",
    "journal.txt",
    "dmesg.txt",
    "var/log/kern.log",
    "var/log/messages",
    "var/log/syslog",
)
"""Below the root: what a support bundle may hold, and where distributions keep it."""

KMSG: Final = "/dev/kmsg"
READ_MAX: Final = 8 << 20  # bytes of a log that are read at once, the newest
_JOURNAL_S: Final = 3.0
_RECORD_MAX: Final = 8192  # bytes of a record of /dev/kmsg
_DAY_S: Final = 86400.0


_PCI: Final = r"(?P<pci>[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F])"
_Row = tuple[str, What, Fault, str]
"""A pattern, the event and the fault that a line with it reports, and the part that is at fault
where the line names none. Of the pattern's groups, ``pci`` or ``part`` is the part, ``xid`` the
number of the event, ``pid`` and ``name`` the process.
"""

_ROWS: Final[tuple[_Row, ...]] = (
    (
        r"NVRM: Xid \((?P<pci>(?:PCI:)?[0-9a-fA-F:.]+)\): (?P<xid>\d{1,4})"
        r"(?:, pid='?(?P<pid>\d+))?",
        "xid",
        "gpu-fault",
        "",
    ),
    (
        r"SXid \((?P<pci>(?:PCI:)?[0-9a-fA-F:.]+)\): \d+, Fatal",
        "nvswitch-error",
        "gpu-fault",
        "",
    ),
    (rf"NVRM: GPU {_PCI}: GPU has fallen off the bus", "gpu-gone", "gpu-fault", ""),
    (rf"amdgpu {_PCI}.*GPU reset begin", "gpu-reset", "gpu-fault", ""),
    (rf"amdgpu {_PCI}.*uncorrectable hardware errors", "ecc-uncorrected", "gpu-memory", ""),
    (rf"{_PCI}: PCIe Bus Error: severity=Correct", "pcie-error-corrected", "pcie", ""),
    (rf"{_PCI}: PCIe Bus Error: severity=Uncorrect", "pcie-error", "pcie", ""),
    (rf"AER: (?:Multiple )?Uncorrect\w+ \(\S+\) error.*{_PCI}", "pcie-error", "pcie", ""),
    (r"EDAC \S+: \d+ UE ", "memory-error", "host-memory", "memory"),
    (r"EDAC \S+: \d+ CE ", "memory-error-corrected", "host-memory", "memory"),
    (
        r"Memory failure: \S+ (?:Sending SIGBUS to|Killing) (?P<name>.{1,40}):(?P<pid>\d+) due to",
        "memory-error",
        "host-memory",
        "memory",
    ),
    # Without an exception, the line tells of an error that was found later: most were corrected.
    # Of the bank's status, bit 61 tells that this one was not (x86's manuals, MCi_STATUS.UC).
    (
        r"\[Hardware Error\]: .*Machine Check(?: Exception|: \w+ Bank \d+: [2367abef])",
        "machine-check",
        "host-memory",
        "cpu",
    ),
    (
        r"[Oo]ut of memory: Killed process (?P<pid>\d+) \((?P<name>[^)]*)\)",
        "oom-kill",
        "host-memory",
        "memory",
    ),
    (rf"mlx5_core {_PCI} \S+: Link down", "link-down", "network-down", ""),
    (rf"mlx5_core {_PCI} \S+: Link up", "link-up", "network-down", ""),
    (
        rf"mlx5_core {_PCI}: Port module event.*(?:[Uu]nplugged|[Ee]rror)",
        "adapter-error",
        "network-errors",
        "",
    ),
    (
        rf"mlx5_core {_PCI}.*(?:health compromised|health poll failed|Fatal error"
        r"|[Ii]nternal error|leak of a command resource|[Hh]igh [Tt]emperature)",
        "adapter-error",
        "network-errors",
        "",
    ),
    (
        r"(?P<part>[A-Za-z][\w.-]{1,14}):? (?:NIC )?Link (?:is )?(?:Down|down)\b",
        "link-down",
        "network-down",
        "",
    ),
    (
        r"(?P<part>[A-Za-z][\w.-]{1,14}):? (?:NIC )?Link (?:is )?(?:Up|up)\b",
        "link-up",
        "network-down",
        "",
    ),
    (
        r"link status definitely down for interface (?P<part>[\w.-]+)",
        "link-down",
        "network-down",
        "",
    ),
    (
        r"NETDEV WATCHDOG: (?P<part>[\w.-]+).*timed out",
        "adapter-error",
        "network-errors",
        "",
    ),
    (r"nfs: server (?P<part>\S+) not responding", "nfs-silent", "storage", ""),
    (r"nfs: server (?P<part>\S+) OK", "nfs-back", "storage", ""),
    (
        r"Connection to (?P<part>\S+) .*was lost; in progress operations",
        "nfs-silent",
        "storage",
        "",
    ),
    (r"Lustre: .*Connection restored to (?P<part>\S+)", "nfs-back", "storage", ""),
    (
        r"INFO: task (?P<name>[^:\n]{1,40}):(?P<pid>\d+) blocked for more than \d+ seconds",
        "hung-task",
        "storage",
        "disk",
    ),
    (
        r"I/O error, dev (?P<part>[\w-]+)|nvme \w+: I/O .*timeout",
        "io-error",
        "storage",
        "disk",
    ),
    (
        r"EXT4-fs error|XFS \(\S+\): .*(?:I/O error|[Cc]orruption)"
        r"|Remounting filesystem read-only",
        "io-error",
        "storage",
        "disk",
    ),
    # from Linux 6.8 on, the line names the file system and the client before the server
    (r"ceph: (?:\[\S+ \d+\]: )?(?P<part>mds\d+) hung", "nfs-silent", "storage", ""),
    (
        r"ceph: (?:\[\S+ \d+\]: )?(?P<part>mds\d+) (?:came back|recovery completed)",
        "nfs-back",
        "storage",
        "",
    ),
    (r"(?:Core|Package) temperature.*above threshold", "cpu-throttled", "thermal", "cpu"),
)
_PATTERNS: Final = [(re.compile(row[0]), *row[1:]) for row in _ROWS]
_ANY: Final = re.compile(
    r"Xid|fallen off|amdgpu|PCIe Bus Error|AER:|EDAC|Memory failure|Hardware Error|Killed process"
    r"|mlx5_core|[Ll]ink (?:is )?(?:[Dd]own|[Uu]p)|definitely down|NETDEV WATCHDOG|nfs: server"
    r"|Lustre|was lost; in progress|blocked for more|I/O|temperature|EXT4-fs|XFS|read-only|ceph: "
)
"""Every line that one of the patterns matches matches this one, which is quicker."""


def event_of(text: str, at_ns: int) -> HealthEvent | None:
    """Return the event that a message of the kernel reports; None if it is not of interest."""
    text = clean(text)
    if not _ANY.search(text):
        return None
    for pattern, what, fault, part in _PATTERNS:
        if match := pattern.search(text):
            named = match.groupdict()
            number = int(named.get("xid") or 0)
            pci = named.get("pci")
            return HealthEvent(
                what=what,
                fault=xid(number).fault if number else fault,
                part=normal_address(pci) if pci else named.get("part") or part,
                at_ns=at_ns,
                number=number,
                pid=int(named.get("pid") or 0),
                name=(named.get("name") or "")[:40],
            )
    return None


# --- the times of lines

_ISO: Final = re.compile(
    r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?\s"
)
_SYSLOG: Final = re.compile(r"([A-Z][a-z]{2})\s+(\d{1,2}) (\d\d):(\d\d):(\d\d)\s")
_DMESG: Final = re.compile(r"\[([A-Z][a-z]{2} [A-Z][a-z]{2}\s+\d{1,2} \d\d:\d\d:\d\d \d{4})\]")
_UNIX: Final = re.compile(r"(\d{9,11})\.(\d{3,9})\s")
_MONTHS: Final = "JanFebMarAprMayJunJulAugSepOctNovDec"


def time_of(line: str, now_s: float) -> int:
    """Return the time at the beginning of a log's line as Unix ns; 0 if there is none.

    Understood are ``journalctl -o short-unix`` and ``short-iso``, ``dmesg -T``, ``dmesg
    --time-format iso``, and syslog's files.
    """
    with contextlib.suppress(ValueError, OverflowError):
        if found := _UNIX.match(line):
            return int(found[1]) * 1_000_000_000 + int(found[2].ljust(9, "0"))
        if found := _ISO.match(line):
            zone = (found[3] or "").replace("Z", "+00:00")
            zone = zone if not zone or ":" in zone else f"{zone[:3]}:{zone[3:]}"
            seconds = datetime.fromisoformat(found[1].replace(" ", "T") + zone).timestamp()
            return int(seconds) * 1_000_000_000 + int((found[2] or "").ljust(9, "0"))
        if found := _DMESG.match(line):
            text = " ".join(found[1].split())
            moment = time.strptime(text, "%a %b %d %H:%M:%S %Y")
            return int(time.mktime(moment)) * 1_000_000_000
        if found := _SYSLOG.match(line):
            return _of_the_latest_year(found, now_s)
    return 0


def _of_the_latest_year(found: re.Match[str], now_s: float) -> int:
    month = _MONTHS.index(found[1]) // 3 + 1
    day, hour, minute, second = (int(part) for part in found.groups()[1:])
    year = time.localtime(now_s).tm_year
    moment = time.mktime((year, month, day, hour, minute, second, 0, 0, -1))
    if moment > now_s + _DAY_S:
        moment = time.mktime((year - 1, month, day, hour, minute, second, 0, 0, -1))
    return int(moment) * 1_000_000_000


def events_in(lines: Iterable[str]) -> list[HealthEvent]:
    """Return the events that a log's lines report. Lines without a time are left out."""
    now_s = time.time()
    events = []
    for line in lines:
        if _ANY.search(line) and (at_ns := time_of(line, now_s)):
            event = event_of(line, at_ns)
            if event is not None:
                events.append(event)
    return events


# --- the sources


class KernelLog:
    """Reads what is new in the kernel's log.

    Args:
        root: the folder below which the log is.
        past: also read what was logged before.

    Raises:
        UnreadableError: there is no log that this user may read.
    """

    def __init__(self, root: Path = ROOT, *, past: bool = False) -> None:
        self._kmsg = -1
        self._read_ns = 0 if past else time.time_ns()  # when it was last read; 0: never
        self._file: Any = None
        self._path = root
        self._rest = b""  # of its last line, which is not complete yet
        self._journal_since_s = 0.0 if past else time.time()
        self._journal = ""
        if root == ROOT and not self._open_kmsg(past=past):
            program = shutil.which("journalctl") or ""
            self._journal = program if program and _journal_lines(program, "-7d", "-n", "1") else ""
        if not (
            self._kmsg >= 0
            or self._journal
            or any(self._open_file(root / name, past=past) for name in LOG_FILES)
        ):
            raise UnreadableError(
                "neither /dev/kmsg, systemd's journal nor a file in /var/log may be read: it takes"
                " the group adm or systemd-journal, or kernel.dmesg_restrict=0"
                if root == ROOT
                else f"there is no kernel log in {root}, such as kern.log"
            )

    def _open_file(self, path: Path, *, past: bool) -> bool:
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                return False
            self._file, self._path = path.open("rb"), path
        except OSError:
            return False
        end = self._file.seek(0, os.SEEK_END)
        if past:
            self._file.seek(max(0, end - READ_MAX))
        return True

    def _open_kmsg(self, *, past: bool) -> bool:
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self._kmsg = os.open(KMSG, flags)
            os.lseek(self._kmsg, 0, os.SEEK_SET if past else os.SEEK_END)
        except OSError:
            self.close()
            return False
        return True

    def read_new(self, *, thorough: bool = False) -> list[HealthEvent]:
        """Return the events logged since the last call.

        Args:
            thorough: also ask systemd's journal, which starts a process.
        """
        if self._kmsg >= 0:
            return self._read_kmsg()
        if self._file is not None:
            content = self._rest + self._read_file()
            whole, newline, self._rest = content.rpartition(b"\n")
            return events_in((whole + newline).decode("utf-8", "replace").splitlines())
        if not thorough or not self._journal:
            return []
        since_s, self._journal_since_s = self._journal_since_s, time.time()
        return events_in(_journal_lines(self._journal, f"@{since_s:.0f}"))

    def _read_file(self) -> bytes:
        """Return what is new in the file, and in the one that log rotation put in its place."""
        file = self._file
        content: bytes = file.read(READ_MAX)
        if self._was_rotated() and self._open_file(self._path, past=True):
            file.close()
            content += self._file.read(READ_MAX)
        return content

    def _was_rotated(self) -> bool:
        """Return whether the file was replaced or emptied."""
        try:
            now = self._path.stat()
        except OSError:
            return False
        is_same = os.path.samestat(now, os.fstat(self._file.fileno()))
        return not is_same or now.st_size < self._file.tell()

    def _read_kmsg(self) -> list[HealthEvent]:
        now_ns = time.time_ns()
        boot_ns = now_ns - time.monotonic_ns()
        events = []
        size = 0
        while size < READ_MAX:
            try:
                record = os.read(self._kmsg, _RECORD_MAX)
            except BlockingIOError:
                break  # nothing more
            except BrokenPipeError:
                continue  # older records were overwritten
            except OSError:
                break
            size += len(record)
            head, _, text = record.decode("utf-8", "replace").partition(";")
            fields = head.split(",")
            if len(fields) < 3 or not fields[2].isdecimal():
                continue
            # the kernel's clock of messages drifts away from the others in weeks of running
            at_ns = min(max(boot_ns + int(fields[2]) * 1000, self._read_ns), now_ns)
            event = event_of(text.partition("\n")[0], at_ns)
            if event is not None:
                events.append(event)
        self._read_ns = now_ns
        return events

    def close(self) -> None:
        """Close what is open."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._kmsg >= 0:
            os.close(self._kmsg)
            self._kmsg = -1


def _journal_lines(program: str, since: str, *more: str) -> list[str]:
    command = [program, "-k", "-q", "-o", "short-unix", "--no-pager", "--since", since, *more]
    # of a damaged journal, journalctl prints what it can read, and fails
    output = output_of(command, _JOURNAL_S, check=False)[-READ_MAX:]
    return output.decode("utf-8", "replace").splitlines()
