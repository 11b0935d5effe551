"""Layout of the black box, version 1, for its writer and readers. docs/protocol.md explains it.

Standard library only, because the training process imports it. All numbers are little-endian.

    header    4096 bytes   static part (checksummed), live words, a JSON text about the process
    ring      ring buffer: capacity records of RECORD_SIZE bytes
    side      ring buffer of blobs: groups, arguments, stacks, texts
    evidence  two slots, written in turn: the threads' stacks, taken by the watchdog thread
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple

MAGIC: Final = b"COMMLENS"
VERSION: Final = 1
HEADER_SIZE: Final = 4096
SUFFIX: Final = ".box"

# --- header: static part
# magic, version, header size, record size, capacity, side offset, side size, evidence offset,
# evidence slot size, total size, pid, rank, world size, local rank (-1: unknown), start time of the
# process in clock ticks, CLOCK_MONOTONIC at creation, Unix time at creation, length of the JSON
# text, CRC-32 of that text
STATIC: Final = struct.Struct("<8sIIIIQQQQQIiIiQQQII")
STATIC_CRC_AT: Final = STATIC.size  # u32: CRC-32 of the static part
ABOUT_AT: Final = 2048
ABOUT_MAX: Final = HEADER_SIZE - ABOUT_AT

# --- header: live words, each an aligned u64
HEARTBEAT_MONO: Final = 256  # CLOCK_MONOTONIC ns of the watchdog thread's last sign of life
HEARTBEAT_UNIX: Final = 264  # the same moment, Unix ns
NEXT_INDEX: Final = 272  # records announced so far
SIDE_HEAD: Final = 280  # bytes ever written to the side table
PHASE: Final = 288  # one of PHASE_*
STEPS: Final = 296  # optimizer steps completed
OLDEST_INDEX: Final = 304  # oldest record in flight, last seen by the watchdog thread; 0: none
OLDEST_SINCE: Final = 312  # its announcement, CLOCK_MONOTONIC ns
LOST: Final = 320  # records lost because of an error in commlens
EVIDENCE_SEQ: Final = 328  # evidence writes so far; number n is in slot n % 2
EXPECTING: Final = 336  # blob {"k": "text"}: label of an open expect_slow, else 0
EXCEPTION: Final = 344  # blob {"k": "exception"}: the uncaught exception, else 0
# last change of the main thread's stack, CLOCK_MONOTONIC ns; 0: unknown
MAIN_STACK_SINCE: Final = 352
RANK_WORLD: Final = 360  # (rank + 1) << 32 | world size, if learned after creation; else 0
# of the process group of the oldest record in flight, if that runs on a device, else of the default
# process group; 0: unknown
TIMEOUT_MS: Final = 368
SETUP: Final = 376  # blob {"k": "setup"}: the newest call that makes a process group; 0: none yet
# its beginning, CLOCK_MONOTONIC ns; SETUP_RETURNED or SETUP_RAISED after its end
SETUP_SINCE: Final = 384
# when torch's watchdog gives up the oldest record in flight on a device, CLOCK_MONOTONIC ns; 0:
# none or unknown; NEVER: it is a library's call, to which no timeout of torch applies
EXPIRES: Final = 392
NEVER: Final = (1 << 63) - 1
HAZARDS: Final = 400  # blob {"k": "hazards"}: latent faults, written at the end; 0: none
WORLD: Final = 408  # blob {"k": "text"}: the name that commlens.world gave; 0: none
# when the watchdog of a backend with abort hooks last gave an op up, CLOCK_MONOTONIC ns; 0: never
GAVE_UP: Final = 416
ADAPTERS: Final = 424  # blob {"k": "adapters"}: libraries whose calls are recorded; 0: none
QUEUES: Final = 432  # blob {"k": "queues"}: the ends of message queues of the process; 0: none
# since when a thread waits to write into a full queue, CLOCK_MONOTONIC ns; 0: none does
QUEUE_SINCE: Final = 440
# when the rank last read durations on devices from torch's recorder, CLOCK_MONOTONIC ns; 0: never
TIMED: Final = 448
# blob {"k": "exception"}: the last recorded one that ended a thread beside the main one; 0: none
THREAD_EXCEPTION: Final = 456
LIVE_WORD: Final = struct.Struct("<Q")

SETUP_RETURNED: Final = 0
SETUP_RAISED: Final = 1

# 0: init_process_group has not returned; before SETUP is written, it has not been called
PHASE_INITIALISED: Final = 1
PHASE_CLOSED: Final = 2  # atexit handlers ran
PHASE_CLOSED_BY_EXCEPTION: Final = 3  # atexit handlers ran after an uncaught exception
PHASE_NEVER_INITIALISED: Final = 2  # added to the two before if init_process_group never returned
PHASES_CLOSED: Final = range(PHASE_CLOSED, PHASE_CLOSED_BY_EXCEPTION + PHASE_NEVER_INITIALISED + 1)
# the last process group was destroyed: nobody waits for this process any more
PHASE_LEFT: Final = 6

# --- records
RECORD: Final = struct.Struct("<QQQQQQQQQqIIiI")  # the fields of Record
SEQUENCE_NUMBER: Final = 48  # u64
RECORD_CRC_AT: Final = RECORD.size  # u32: CRC-32 of the bytes before it
RECORD_SIZE: Final = 192


class Record(NamedTuple):
    """The announced part of a record, field by field as ``RECORD`` packs it."""

    record_index: int  # from 1
    announced_ns: int  # CLOCK_MONOTONIC
    group: int  # this and the next three: positions of blobs, 0 for none
    asked: int
    stack: int = 0
    module: int = 0
    sequence_number: int = 0
    step: int = 0
    coalescing_id: int = 0
    tag: int = 0
    thread: int = 0  # native id
    flags: int = 0
    peer: int = -1  # global rank
    members: int = 0  # of a coalesced group


FLAG_COALESCED_MEMBER: Final = 1 << 0
FLAG_COALESCED_END: Final = 1 << 1  # closes a coalesced group
FLAG_CONCURRENT: Final = 1 << 2  # another thread was issuing on the same channel
FLAG_ENTERED: Final = 1 << 3  # entered the backend at once: the ENTERED word is not written
FLAG_ANY_SOURCE: Final = 1 << 4  # a receive from any rank
FLAG_CAPTURE: Final = 1 << 6  # captured into a CUDA graph, so it did not run (1 << 5 is reserved)

# --- records: life words, aligned u64. The low 16 bits repeat the record's index, so that a word
# left by the slot's former record is never taken for this one's. Times are ticks of 100 ns since
# the box's creation.
TICK_NS: Final = 100
ENTERED: Final = 120
RETURNED: Final = 128
WAIT_BEGAN: Final = 136
WAIT_ENDED: Final = 144
DONE: Final = 152
OUTCOME: Final = 160  # wait thread id << 32 | outcome << 24 | how << 16 | tag
FAILURE: Final = 168  # blob {"k": "text"} position << 16 | tag
REDUCE_OP: Final = 176  # (code + 1) << 16 | tag; codes index REDUCE_OPS
# in its place, of a receive from any rank: (sender's rank in the group + 1) << 16 | tag
SOURCE: Final = REDUCE_OP
DURATION: Final = 184  # ticks << 16 | tag: on the device, with timing
TAG_MASK: Final = 0xFFFF
CAPACITY_MAX: Final = 65_000  # below 2**16, so that tags distinguish the records of a slot

OUTCOME_NONE: Final = 0
OUTCOME_COMPLETED: Final = 1
OUTCOME_FAILED: Final = 2
OUTCOME_UNKNOWN: Final = 3

HOW_NOT_YET: Final = 0
HOW_RETURN: Final = 1
HOW_WAIT: Final = 2
HOW_POLL: Final = 3
HOW_NATIVE_RECORDER: Final = 4
HOW_UNKNOWN: Final = 5
HOW_ENQUEUED: Final = 6  # in flight: torch's recorder knows that the device has not started it
HOW_STARTED: Final = 7  # in flight: torch's recorder knows that the device has started it

REDUCE_OPS: Final = (
    "SUM",
    "AVG",
    "PRODUCT",
    "MIN",
    "MAX",
    "BAND",
    "BOR",
    "BXOR",
    "PREMUL_SUM",
    "UNUSED",
)
"""torch's ReduceOp.RedOpType, in the order of its values (torch 2.6 to 2.15)."""


def reduce_op_of(stored: int) -> str | None:
    """Return the name of a reduce op from its stored code + 1; None for 0 and unknown codes."""
    return REDUCE_OPS[stored - 1] if 0 < stored <= len(REDUCE_OPS) else None


# --- side table
BLOB: Final = struct.Struct("<IIQ")  # payload length, CRC-32 of (position, payload), position
BLOB_ALIGN: Final = 8
BLOB_MAX: Final = 64 * 1024
# A position is SIDE_HEAD at the start of the blob, plus 1; the blob is at side offset + (position -
# 1) % side size. Positions start at 1, 0 means none. A blob never wraps: the writer skips to the
# table's start instead. A blob is alive while position > SIDE_HEAD - side size.

# --- evidence
# payload length, CRC-32 of payload, number, CLOCK_MONOTONIC ns
EVIDENCE: Final = struct.Struct("<IIQQ")
EVIDENCE_SLOT: Final = 128 * 1024


def side_size(capacity: int) -> int:
    """Return the bytes of the side table for ``capacity`` records."""
    return (512 * 1024 + capacity * 512 + 4095) // 4096 * 4096


def box_size(capacity: int) -> int:
    """Return the bytes of a whole box. 2000 records take 2.2 MB."""
    ring = (capacity * RECORD_SIZE + 4095) // 4096 * 4096
    return HEADER_SIZE + ring + side_size(capacity) + 2 * EVIDENCE_SLOT


def blob_crc(position: int, payload: bytes) -> int:
    """Return the checksum of a blob. It covers the position, so that an older blob at the same
    place is not mistaken for it.
    """
    return zlib.crc32(payload, position & 0xFFFFFFFF)
