"""The header of a black box: the identity of its writer, and the live words."""

from __future__ import annotations

import zlib
from typing import Any, Final

import msgspec

from commlens.blackbox import layout as L
from commlens.errors import FormatError
from commlens.model.limits import WORLD_MAX
from commlens.text import clean_json

# largest box in bytes; a header that claims more is rejected
SIZE_MAX: Final = L.box_size(L.CAPACITY_MAX) + (16 << 20)
INT_MAX: Final = (1 << 63) - 1  # largest integer that all JSON encoders support


class BoxStatus(msgspec.Struct, frozen=True):
    """The identity and live words of a box: enough to detect a stall without reading records.

    Times ending in ``_mono_ns`` are CLOCK_MONOTONIC on the box's machine, comparable with
    ``time.monotonic_ns()`` there; 0 if it has not happened. Blobs are positions; here it only
    matters whether they are 0.
    """

    job: str
    host: str
    boot_id: str
    pid_namespace: str
    rank: int  # -1 if not yet known
    world_size: int  # 0 if not yet known
    local_rank: int | None
    restart: int
    pid: int
    # start of the process in clock ticks since boot; with the pid it identifies the process
    start_ticks: int
    script: str
    timeout_s: float
    capacity: int
    created_mono_ns: int
    created_ns: int
    heartbeat_mono_ns: int
    heartbeat_ns: int
    issued: int  # records announced so far
    phase: int  # one of layout.PHASE_*
    steps: int
    oldest_index: int  # oldest record in flight, last seen by the rank's watchdog thread; 0: none
    oldest_mono_ns: int
    lost: int  # records lost because of an error in commlens
    evidence_number: int
    expecting: int  # blob
    hazards: int  # blob
    world: int  # blob
    adapters: int  # blob
    queues: int  # blob
    queue_since_mono_ns: int  # 0: no thread waits to write into a full queue
    gave_up_mono_ns: int
    timed_mono_ns: int  # when it last read durations on devices; 0: never
    exception: int  # blob
    thread_exception: int
    main_stack_since_mono_ns: int
    setup: int  # blob
    # of the newest call that makes a process group; or layout.SETUP_*, once it has ended
    setup_since_mono_ns: int
    # when torch's watchdog gives up the oldest record in flight on a device; 0: none or unknown
    expires_mono_ns: int

    @property
    def initialised(self) -> bool:
        """Whether ``init_process_group`` has returned."""
        return L.PHASE_INITIALISED <= self.phase <= L.PHASE_CLOSED_BY_EXCEPTION or self.left

    @property
    def blocked_since_mono_ns(self) -> int:
        """Since when the process waits to write into a full message queue, or is in a call that
        makes a process group or waits in the store; 0: it does not.
        """
        return self.queue_since_mono_ns or (self.setup_since_mono_ns if self.in_setup else 0)

    @property
    def in_setup(self) -> bool:
        """Whether a thread is inside ``init_process_group`` or ``new_group``."""
        return self.setup_since_mono_ns > L.SETUP_RAISED

    @property
    def left(self) -> bool:
        """Whether the process has destroyed its last process group, and makes no new one."""
        return self.phase == L.PHASE_LEFT and not self.in_setup

    @property
    def closed(self) -> bool:
        """Whether the process ran its atexit handlers."""
        return self.phase in L.PHASES_CLOSED

    @property
    def closed_by_exception(self) -> bool:
        """Whether the process exited after an uncaught exception or a non-zero ``sys.exit``."""
        return self.closed and self.phase % 2 == 1


class Identity(msgspec.Struct, frozen=True):
    """The checked static part of a header: the fields of ``layout.STATIC`` from the capacity on,
    and the text about the process.
    """

    capacity: int
    side_at: int
    side_size: int
    evidence_at: int
    evidence_slot: int
    total_size: int
    pid: int
    rank: int
    world_size: int
    local_rank: int
    start_ticks: int
    created_mono_ns: int
    created_ns: int
    about: dict[str, Any] = {}
    problems: tuple[str, ...] = ()


def read_identity(header: bytes, name: str) -> Identity:
    """Check and unpack the static part.

    Raises:
        FormatError: the file is not a black box of this version, or is damaged.
    """
    if not header:
        raise FormatError(f"{name} is empty.")
    if header[:8] != L.MAGIC[: len(header)]:
        unwritten = not any(header[: L.STATIC.size])
        raise FormatError(
            f"{name} has not been written yet."
            if unwritten
            else f"{name} is not a commlens black box."
        )
    if len(header) < L.HEADER_SIZE:
        raise FormatError(
            f"{name} is cut off within its header: {len(header)} of {L.HEADER_SIZE} bytes are left."
        )
    raw = header[: L.STATIC.size]
    _, version, *sizes, about_size, about_crc = L.STATIC.unpack(raw)
    if version != L.VERSION:
        # Before the checksum, which another version may have elsewhere.
        raise FormatError(
            f"{name} is a black box of layout version {version}, but this commlens reads version"
            f" {L.VERSION}: read it with the commlens that wrote it, unless it is damaged."
        )
    if int.from_bytes(header[L.STATIC_CRC_AT : L.STATIC_CRC_AT + 4], "little") != zlib.crc32(raw):
        raise FormatError(f"{name} has a damaged header: its checksum does not match.")
    identity = Identity(*(min(field, INT_MAX) for field in sizes[2:]))
    fits = sizes[:2] == [L.HEADER_SIZE, L.RECORD_SIZE] and about_size <= L.ABOUT_MAX
    if not (fits and _fits_together(identity)):
        raise FormatError(
            f"{name} has a damaged header: its sizes and offsets contradict each other."
        )
    text = header[L.ABOUT_AT : L.ABOUT_AT + about_size]
    try:
        if zlib.crc32(text) != about_crc:
            raise ValueError
        about = msgspec.json.decode(clean_json(text), type=dict[str, Any]) if text else {}
    except (ValueError, RecursionError):
        problem = "the text about the process (job, host, script) is damaged"
        return msgspec.structs.replace(identity, problems=(problem,))
    return msgspec.structs.replace(identity, about=about)


def _fits_together(identity: Identity) -> bool:
    """Return whether the sizes and offsets of the parts are possible."""
    return (
        1 <= identity.capacity <= L.CAPACITY_MAX
        and L.HEADER_SIZE + identity.capacity * L.RECORD_SIZE <= identity.side_at
        and 0 < identity.side_size <= SIZE_MAX
        and identity.side_at + identity.side_size <= identity.evidence_at
        and L.EVIDENCE.size < identity.evidence_slot <= 1 << 20
        and identity.evidence_at + 2 * identity.evidence_slot <= identity.total_size <= SIZE_MAX
        and identity.world_size <= WORLD_MAX
    )


def about_text(about: dict[str, Any], key: str) -> str:
    """Return a text from the JSON about the process; "" if missing."""
    value = about.get(key, "")
    return value if isinstance(value, str) else str(value) if isinstance(value, int) else ""


def about_number(about: dict[str, Any], key: str) -> float:
    """Return a non-negative number from the JSON about the process; 0 if missing."""
    value = about.get(key, 0)
    return (
        value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= INT_MAX
        else 0
    )


def read_live(header: bytes, identity: Identity) -> BoxStatus:
    """Unpack the live words."""
    if len(header) < L.HEADER_SIZE:
        raise FormatError("The black box was cut off while it was read.")

    def word(offset: int) -> int:
        return min(int(L.LIVE_WORD.unpack_from(header, offset)[0]), INT_MAX)

    def moment(offset: int, otherwise: int = 0) -> int:
        """Return a moment; ``otherwise`` if the word is no moment since the box was created."""
        since = word(offset)
        return since if since >= identity.created_mono_ns else otherwise

    rank, world_size = identity.rank, identity.world_size
    learned = word(L.RANK_WORLD)
    if 0 < learned >> 32 <= learned & 0xFFFFFFFF <= WORLD_MAX:
        rank, world_size = (learned >> 32) - 1, learned & 0xFFFFFFFF
    about = identity.about
    return BoxStatus(
        job=about_text(about, "job"),
        host=about_text(about, "host"),
        boot_id=about_text(about, "boot_id"),
        pid_namespace=about_text(about, "pid_namespace"),
        rank=rank,
        world_size=world_size,
        local_rank=identity.local_rank if identity.local_rank >= 0 else None,
        restart=int(about_number(about, "restart")),
        pid=identity.pid,
        start_ticks=min(identity.start_ticks, INT_MAX),
        script=about_text(about, "script"),
        timeout_s=word(L.TIMEOUT_MS) / 1000,
        capacity=identity.capacity,
        created_mono_ns=identity.created_mono_ns,
        created_ns=identity.created_ns,
        heartbeat_mono_ns=word(L.HEARTBEAT_MONO),
        heartbeat_ns=word(L.HEARTBEAT_UNIX),
        issued=word(L.NEXT_INDEX),
        phase=word(L.PHASE),
        steps=word(L.STEPS),
        oldest_index=word(L.OLDEST_INDEX),
        oldest_mono_ns=moment(L.OLDEST_SINCE),
        lost=word(L.LOST),
        evidence_number=word(L.EVIDENCE_SEQ),
        expecting=word(L.EXPECTING),
        exception=word(L.EXCEPTION),
        thread_exception=word(L.THREAD_EXCEPTION),
        main_stack_since_mono_ns=moment(L.MAIN_STACK_SINCE),
        setup=word(L.SETUP),
        setup_since_mono_ns=moment(L.SETUP_SINCE, min(word(L.SETUP_SINCE), L.SETUP_RAISED)),
        expires_mono_ns=word(L.EXPIRES),
        hazards=word(L.HAZARDS),
        world=word(L.WORLD),
        adapters=word(L.ADAPTERS),
        queues=word(L.QUEUES),
        queue_since_mono_ns=moment(L.QUEUE_SINCE),
        gave_up_mono_ns=word(L.GAVE_UP),
        timed_mono_ns=word(L.TIMED),
    )
