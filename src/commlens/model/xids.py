"""NVIDIA's Xid messages: what each number means, in our words after NVIDIA's documentation (XID
Errors, and the Xid catalog of the data-center drivers).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from commlens.model.health import Fault

Effect = Literal["stops", "program", "sign"]
"""``stops``: the GPU or the processes on it cannot go on. ``program``: so it is, but usually the
program is to blame. ``sign``: it stops nothing by itself, or follows from another Xid.
"""


class Xid(NamedTuple):
    """The meaning of an Xid."""

    fault: Fault
    effect: Effect
    meaning: str  # a clause: what the driver reports


XIDS: Final[dict[int, Xid]] = {
    8: Xid("gpu-fault", "stops", "a kernel ran into the GPU's time limit"),
    13: Xid("gpu-fault", "program", "a kernel made an illegal access or instruction"),
    31: Xid("gpu-fault", "program", "a kernel accessed memory that is not mapped"),
    32: Xid("gpu-fault", "stops", "the stream of commands to the GPU was corrupted"),
    38: Xid("gpu-fault", "stops", "the driver's firmware failed"),
    43: Xid("gpu-fault", "program", "the GPU stopped working for a program that had failed"),
    44: Xid("gpu-fault", "stops", "the GPU failed while it switched between programs"),
    45: Xid("gpu-fault", "sign", "the driver ended a program's work after an earlier error"),
    46: Xid("gpu-fault", "stops", "the GPU stopped processing"),
    48: Xid("gpu-memory", "stops", "the GPU's memory had an error that cannot be corrected"),
    61: Xid("gpu-fault", "stops", "the GPU's internal controller hit a breakpoint"),
    62: Xid("gpu-fault", "stops", "the GPU's internal controller halted"),
    63: Xid("gpu-memory", "sign", "a row or page of the GPU's memory was marked for replacement"),
    64: Xid("gpu-memory", "sign", "a bad row or page of the GPU's memory could not be replaced"),
    66: Xid("gpu-fault", "stops", "the driver made an illegal access"),
    68: Xid("gpu-fault", "program", "the video decoder failed"),
    69: Xid("gpu-fault", "program", "a command to the GPU was illegal"),
    74: Xid("gpu-fault", "stops", "an NVLink connection of the GPU failed"),
    79: Xid("gpu-fault", "stops", "the GPU fell off the bus: the host cannot reach it any more"),
    92: Xid("gpu-memory", "sign", "the GPU's memory had many errors that were corrected"),
    94: Xid("gpu-memory", "stops", "an error of the GPU's memory ended the program it belonged to"),
    95: Xid("gpu-memory", "stops", "an error of the GPU's memory affects all programs on it"),
    109: Xid("gpu-fault", "stops", "the GPU did not switch between programs in time"),
    119: Xid("gpu-fault", "stops", "the GPU's system processor (GSP) did not answer the driver"),
    120: Xid("gpu-fault", "stops", "the GPU's system processor (GSP) failed"),
    121: Xid("gpu-fault", "sign", "the connection between CPU and GPU corrected errors"),
    122: Xid("gpu-fault", "sign", "the GPU's settings memory could not be read"),
    123: Xid("gpu-fault", "stops", "the GPU's power management failed"),
    136: Xid("gpu-fault", "stops", "an NVLink connection could not be trained"),
    137: Xid("gpu-fault", "program", "another GPU refused an NVLink access of this one"),
    140: Xid("gpu-memory", "stops", "the GPU's memory had an error that was not recovered from"),
    143: Xid("gpu-fault", "stops", "the GPU could not be initialised"),
    **{
        number: Xid("gpu-fault", "stops", "an NVLink connection of the GPU failed")
        for number in range(144, 151)
    },
    154: Xid("gpu-fault", "sign", "the driver says how the GPU can be recovered"),
    155: Xid("gpu-fault", "sign", "an NVLink connection went down"),
    156: Xid("gpu-fault", "sign", "a part of the GPU was retired"),
}
"""By number."""

UNKNOWN: Final = Xid("gpu-fault", "sign", "the driver reports an error of the GPU")


def xid(number: int) -> Xid:
    """Return the meaning of an Xid, also of one that is not in the table."""
    return XIDS.get(number, UNKNOWN)
