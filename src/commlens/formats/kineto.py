"""The trace of torch.profiler (Kineto), as ``export_chrome_trace`` writes it: the collectives and
kernels in it.

The format is Chrome's trace event JSON. The fields that are read are those of torch 2.6 to 2.13;
times are microseconds, since ``baseTimeNanoseconds`` where the file has it (a Unix time), else
since an unknown moment.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from commlens.errors import FormatError
from commlens.formats.trace_json import read_content

_COLLECTIVE_KERNEL: Final = re.compile(r"^(nccl|rccl|mscclpp?|oneccl)", re.IGNORECASE)
_LAUNCHES: Final = (
    "cuda_runtime",
    "cuda_driver",
    "hip_runtime",
    "xpu_runtime",
    "privateuse1_runtime",
)
_GLOO: Final = "gloo:"


class Span(msgspec.Struct):
    """Something that ran from ``start`` to ``end``, in ns of the file's clock."""

    name: str
    start: int
    end: int


class Kernel(Span):
    """A kernel on an accelerator."""

    device: int
    launched: int | None  # when the host launched it; None if the file has no such event
    communicates: bool


class KinetoTrace(msgspec.Struct, kw_only=True):
    """The part of a profiler's trace that concerns collectives. Lists are in order of start."""

    path: str
    rank: int | None  # None if the file does not say
    unix_times: bool  # whether the clock is Unix time
    issues: list[Span]  # calls of c10d ops on the host
    on_cpu: list[Span]  # collectives that gloo ran
    kernels: list[Kernel]


# up to the year 2096 in µs: in ns, the sum of two such times fits in 64 bits
_Time = Annotated[float, msgspec.Meta(ge=-4e15, le=4e15)]


class _EventArgs(msgspec.Struct):
    correlation: int | float | str | None = None  # links a kernel with its launch on the host
    device: Any = 0


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: _Time | str = 0.0
    dur: _Time = 0.0
    args: _EventArgs = msgspec.field(default_factory=_EventArgs)


class _File(msgspec.Struct):
    traceEvents: list[_Event]
    baseTimeNanoseconds: int = 0
    distributedInfo: dict[str, Any] = msgspec.field(default_factory=dict)


def read_kineto(path: Path) -> KinetoTrace:
    """Read a profiler's trace, compressed with gzip or not.

    Raises:
        FormatError: the file cannot be read, or it is not a trace of torch.profiler.
    """
    content = read_content(path)
    try:
        file = msgspec.json.decode(content, type=_File)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{path} is not a trace of torch.profiler (export_chrome_trace): {error}"
        ) from None
    rank = file.distributedInfo.get("rank")
    found = KinetoTrace(
        path=str(path),
        rank=rank if isinstance(rank, int) else None,
        unix_times=file.baseTimeNanoseconds > 0,
        issues=[],
        on_cpu=[],
        kernels=[],
    )
    base = file.baseTimeNanoseconds
    launched = {
        event.args.correlation: base + round(event.ts * 1000)
        for event in file.traceEvents
        if event.cat in _LAUNCHES
        and isinstance(event.ts, float)
        and event.args.correlation is not None
    }
    for event in file.traceEvents:
        if event.ph == "X" and isinstance(event.ts, float):
            _add(found, event, base, launched)
    for spans in (found.issues, found.on_cpu, found.kernels):
        spans.sort(key=lambda span: (span.start, -span.end))
    return found


def _add(found: KinetoTrace, event: _Event, base: int, launched: dict[Any, int]) -> None:
    start = base + round(event.ts * 1000)  # type: ignore[arg-type]
    end = start + round(event.dur * 1000)
    if event.cat == "kernel":
        device = event.args.device if isinstance(event.args.device, int) else 0
        launch = launched.get(event.args.correlation)
        found.kernels.append(
            Kernel(
                event.name, start, end, device, launch, bool(_COLLECTIVE_KERNEL.match(event.name))
            )
        )
    elif event.cat == "cpu_op" and event.name.startswith("c10d::"):
        found.issues.append(Span(event.name.removeprefix("c10d::"), start, end))
    elif event.cat == "user_annotation" and event.name.startswith(_GLOO):
        found.on_cpu.append(Span(event.name.removeprefix(_GLOO), start, end))
