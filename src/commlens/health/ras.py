"""A client of NCCL's RAS service, which any NCCL job from 2.24 on offers on a local port: it knows
which ranks of a communicator have launched fewer collectives than others, and which are silent.

The protocol is lines of text: after a greeting and a timeout, one command, whose answer ends with
the connection. From about 2.28 on the answer can be JSON, with the counts of all ranks; the text
names only ranks that differ.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from commlens.model.health import RasCommunicator, RasRank, RasReport
from commlens.model.store_identity import parse_address

RAS_ADDRESS: Final = "NCCL_RAS_ADDR"
DEFAULT_PORT: Final = 28028
_PROTOCOL: Final = 2
_NCCL_WAITS_S: Final = 2  # for the job's other processes; beyond it, it answers without them
_ANSWER_S: Final = 8.0  # for the whole answer; NCCL adds some seconds to its own limit
_CONNECT_S: Final = 1.0
_ANSWER_MAX: Final = 64 << 20  # bytes; JSON takes about 600 for each rank of a communicator


class _SilentError(Exception):
    """There is no usable answer. The message says why, in a clause."""


def address(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the host and port of the service, as the job's environment names them."""
    host, port = parse_address(environment.get(RAS_ADDRESS, "").strip())
    return host.strip("[]") or "localhost", int(port or DEFAULT_PORT)


def ask(environment: Mapping[str, str] = os.environ, *, elsewhere: bool = False) -> RasReport:
    """Ask the RAS service of a job on this machine once. Takes at most ten seconds.

    Args:
        environment: of a rank of the job; it may name the address.
        elsewhere: also ask an address that is not on the loopback interface.
    """
    taken_ns = time.time_ns()
    host, port = address(environment)
    try:
        if not (elsewhere or _is_loopback(host)):
            raise _SilentError(f"{host} is not on the loopback interface")
        with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
            report = _converse(connection)
    except (OSError, _SilentError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, TimeoutError):
            reason = f"it did not answer within {_ANSWER_S:.0f} s"
        return RasReport(answered=False, taken_ns=taken_ns, problem=reason)
    return msgspec.structs.replace(report, taken_ns=taken_ns)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _converse(connection: socket.socket) -> RasReport:
    lines = _Lines(connection)
    lines.send(f"CLIENT PROTOCOL {_PROTOCOL}")
    if not lines.read_line().startswith("SERVER PROTOCOL "):
        raise _SilentError("what listens there is not NCCL's RAS service")
    lines.send(f"TIMEOUT {_NCCL_WAITS_S}")
    if lines.read_line() != "OK":
        raise _SilentError("it does not accept a timeout")
    lines.send("SET FORMAT json")
    is_json = lines.read_line() == "OK"  # an older version answers with an error, and goes on
    lines.send("VERBOSE STATUS")
    answer = lines.read_rest()
    return read_json(answer) if is_json else read_text(answer)


class _Lines:
    """The lines of a connection, until the time for the whole answer is over."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = time.monotonic() + _ANSWER_S
        self._buffer = b""

    def send(self, line: str) -> None:
        self._connection.sendall(f"{line}\n".encode())

    def read_line(self) -> str:
        while b"\n" not in self._buffer:
            if not self._receive():
                raise _SilentError("it closed the connection")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace").strip()

    def read_rest(self) -> str:
        while self._receive():
            pass
        return self._buffer.decode("utf-8", "replace")

    def _receive(self) -> bool:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        received = self._connection.recv(65536)
        self._buffer += received
        if len(self._buffer) > _ANSWER_MAX:
            raise _SilentError("its answer is too long")
        return bool(received)


# --- JSON


class _Status(msgspec.Struct):
    unresponsive: bool = False
    considered_dead: bool = False


class _RasRank(msgspec.Struct):
    rank: int
    host: str = ""
    pid: int = 0
    status: _Status = msgspec.field(default_factory=_Status)
    collective_counts: dict[str, int] = {}


class _Communicator(msgspec.Struct):
    hash: str = ""
    size: int = 0
    ranks: list[_RasRank] = []
    missing_ranks: list[_RasRank] = []


class _Answer(msgspec.Struct):
    nccl_version: str = ""
    communicators: list[_Communicator] = []


def read_json(text: str) -> RasReport:
    """Read an answer in JSON.

    Raises:
        _SilentError: it is not what NCCL 2.28 sends.
    """
    try:
        answer = msgspec.json.decode(text, type=_Answer)
    except (msgspec.DecodeError, RecursionError):
        raise _SilentError("its answer cannot be read") from None
    return RasReport(
        answered=True,
        version=answer.nccl_version,
        communicators=[_from_json(each) for each in answer.communicators],
    )


def _from_json(found: _Communicator) -> RasCommunicator:
    pids = [0] * min(found.size, 1 << 20)
    for rank in (*found.ranks, *found.missing_ranks):
        if 0 <= rank.rank < len(pids):
            pids[rank.rank] = rank.pid
    op, behind = _ranks_behind({rank.rank: rank.collective_counts for rank in found.ranks})
    return RasCommunicator(
        name=found.hash,
        size=found.size,
        pids=pids,
        op=op,
        apart=bool(behind),
        behind=[_as_model(rank) for rank in found.ranks if rank.rank in behind],
        silent=[
            _as_model(rank)
            for rank in found.missing_ranks
            if rank.status.unresponsive or rank.status.considered_dead
        ],
    )


def _as_model(rank: _RasRank) -> RasRank:
    return RasRank(rank.rank, max(0, rank.pid), rank.host)


def _ranks_behind(counts: Mapping[int, Mapping[str, int]]) -> tuple[str, set[int]]:
    """Return the op in whose count the ranks of a communicator differ most, and the ranks that have
    launched it fewer times than others; none if all counts are equal. ``counts`` are by rank and
    op.
    """
    ops = sorted({op for each in counts.values() for op in each})
    by_op = {op: {rank: each.get(op, 0) for rank, each in counts.items()} for op in ops}
    spread = {op: max(launched.values()) - min(launched.values()) for op, launched in by_op.items()}
    worst = max(ops, key=lambda op: spread[op], default="")
    if not worst or not spread[worst]:
        return "", set()
    most = max(by_op[worst].values())
    return worst, {rank for rank, launched in by_op[worst].items() if launched < most}


# --- text

_VERSION: Final = re.compile(r"NCCL version (\S+)")
_SECTION: Final = re.compile(r"#\d+-\d+ \(([0-9a-f]+)\) (MISMATCH|INCOMPLETE|ERROR)")
_COUNTS: Final = re.compile(
    r"^  Communicator ranks have different (\w+) operation counts", re.MULTILINE
)
_GROUP: Final = re.compile(
    r"  (\d+) ranks have (?:launched up to operation (\d+)|not launched any operations)"
)
_RANK: Final = re.compile(
    r"  Rank (\d+) (?:has (?:launched up to operation (\d+)|(not) launched any operations) )?-- "
    r"(?:.*managed by process (\d+) on node (\S+))?"
)


def read_text(text: str) -> RasReport:
    """Read an answer in text, which names only ranks that differ from most of the others.

    Raises:
        _SilentError: it is not NCCL's.
    """
    version = _VERSION.search(text)
    if version is None:
        raise _SilentError("its answer cannot be read")
    communicators: dict[str, RasCommunicator] = {}
    parts = _SECTION.split(text)[1:]  # of each section the name, the fault, and the lines about it
    for name, kind, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        known = communicators.get(name, RasCommunicator(name=name))
        if kind == "INCOMPLETE":
            silent = [_named(found) for found in map(_RANK.match, body.splitlines()) if found]
            known = msgspec.structs.replace(known, silent=silent)
        elif kind == "MISMATCH":
            op, behind = _behind_in_text(body)
            known = msgspec.structs.replace(known, op=op, apart=bool(op), behind=behind)
        communicators[name] = known
    return RasReport(answered=True, version=version[1], communicators=list(communicators.values()))


def _behind_in_text(text: str) -> tuple[str, list[RasRank]]:
    """Return the first op in whose count ranks differ, and the ranks that launched fewer than the
    others; none if the text does not list them.

    A line on a group of ranks is followed by lines on each, unless they are most of all ranks; a
    rank's own line may have the count in place of the group's::

          Communicator ranks have different AllReduce operation counts
          14 ranks have launched up to operation 54
          1 ranks have launched up to operation 52
          Rank 3 -- GPU 3 managed by process 4121 on node n07
          Rank 4 has launched up to operation 53 -- GPU 4 managed by process 4122 on node n07
    """
    parts = _COUNTS.split(text)  # what is before the first op, and of each op its name and lines
    if len(parts) == 1:
        return "", []
    op, lines = parts[1:3]
    count = 0
    listed: dict[int, list[RasRank]] = {}  # ranks by their count
    for line in lines.splitlines():
        if group := _GROUP.match(line):
            count = int(group[2] or 0)
            listed.setdefault(count, [])
        elif rank := _RANK.match(line):
            if rank[2] or rank[3]:
                count = int(rank[2] or 0)
            listed.setdefault(count, []).append(_named(rank))
    most = max(listed, default=0)
    return op, [rank for count, ranks in listed.items() if count < most for rank in ranks]


def _named(found: re.Match[str]) -> RasRank:
    return RasRank(int(found[1]), int(found[4] or 0), found[5] or "")
