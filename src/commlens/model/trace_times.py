"""The time of traced collectives: what a summary says about it."""

from __future__ import annotations

import msgspec


class SlowCall(msgspec.Struct):
    """One of the slowest collectives of a trace."""

    sentence: str
    sequence: int
    step: int
    time_ns: int
    waited_ns: int | None = None


class Bandwidth(msgspec.Struct):
    """The bandwidth that equal collectives achieved, as nccl-tests define it, in bytes per second.

    The algorithm bandwidth is the data's size divided by the time, the bus bandwidth the bytes
    through one rank's link divided by it.
    """

    op: str
    group: str
    group_size: int
    data_bytes: int  # of one collective: the larger of input and output
    wire_bytes: int
    calls: int
    median_ns: int
    algorithm: float
    bus: float
    # other work ran before the wait, so the collectives may have been faster
    at_least: bool = False
    estimated_ns: int | None = None  # by the model of a network


class Times(msgspec.Struct, kw_only=True):
    """The time that a rank spent in collectives, where it is known: ``time_ns`` is the sum of the
    four parts below it.
    """

    answer: str
    source: str  # "record", "profile" or "backend": where the times come from; "" if none is known
    timed: int = 0  # collectives whose time is known
    untimed: int = 0
    time_ns: int = 0  # from issue to end, summed over the timed collectives
    # the part in which the issuing thread was blocked, or in which an accelerator ran nothing else
    waited_ns: int = 0
    overlapped_ns: int = 0  # the part in which other work ran
    # the part in which the issuing thread was blocked in other collectives, whose waited_ns has it
    elsewhere_ns: int = 0
    unsplit_ns: int = 0  # the time of the collectives for which the waiting is unknown
    steps: int = 0  # whole optimizer steps behind step_ns
    step_ns: int | None = None  # median time from one step's first collective to the next one's
    step_spread_ns: tuple[int, int] | None = None  # first and third quartile
    waited_per_step_ns: int | None = None  # median; None if unknown
    slowest: list[SlowCall] = msgspec.field(default_factory=list)
    bandwidth: list[Bandwidth] = msgspec.field(default_factory=list)
