"""Findings of what text logs tell of a job as a whole: timeouts in groups without a name, signals
to the launcher, other tools' reports.

They count only if the ranks' records show no fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from commlens.diagnosis.words.next_steps import outside_cause, outside_step
from commlens.model.collective import user_frame
from commlens.model.verdict import Finding
from commlens.text import count, frame_phrase, joined, ranks_phrase

if TYPE_CHECKING:
    from commlens.diagnosis.index.columns import RankDump

LOOK_AT_MORE: Final = (
    "diagnose the logs of all ranks, or the Flight Recorder's dumps (by default"
    " ~/.cache/torch/comm_lib_trace_rank_* or /tmp/nccl_trace_rank_*)"
)


def find_told(
    dumps: Sequence[RankDump], chosen: Sequence[RankDump], timeouts: Sequence[str]
) -> Finding | None:
    """Return the strongest finding of the logs' lines about the job; None if they tell none.

    Args:
        dumps: of all files.
        chosen: those of the ranks of the job that is diagnosed.
        timeouts: the sentences of :func:`unplaced_timeouts`.
    """
    ranks = sorted({dump.rank for dump in chosen})
    if timeouts:
        numbers = {dump.rank: dump.unplaced for dump in dumps if dump.unplaced and dump.rank >= 0}
        waiting = sorted({dump.rank for dump in dumps if dump.timeouts and dump.rank >= 0})
        return _behind(numbers, timeouts) or _timed_out(timeouts, waiting)
    if raised := [dump for dump in dumps if dump.is_log and dump.rank < 0 and dump.exception]:
        return _raised(raised[0])
    if signals := sorted({dump.launcher_signal for dump in dumps if dump.launcher_signal}):
        return _launcher_ended(signals, ranks)
    remarks = [remark for dump in dumps for remark in dump.remarks]
    operations = sorted({number for kind, number in remarks if kind == "ras-behind"})
    if len(operations) > 1:
        return _ras_behind(operations, ranks)
    waits = [number for kind, number in remarks if kind == "broadcast-wait"]
    return _broadcast_wait(max(waits), ranks) if waits else None


def unplaced_timeouts(dumps: Sequence[RankDump]) -> list[str]:
    """Return the sentences about timeouts that cannot be aligned across ranks, each with the ranks
    that it is of.
    """
    ranks: dict[str, set[int]] = {}
    for dump in dumps:
        for text in dump.timeouts:
            ranks.setdefault(text, set()).add(dump.rank)
    known = {text: sorted(rank for rank in of if rank >= 0) for text, of in ranks.items()}
    ordered = sorted(known.items(), key=lambda item: (-len(item[1]), item[1], item[0]))
    return [f"{ranks_phrase(of)}: {text}" if of else text for text, of in ordered]


def _behind(
    numbers: Mapping[int, list[tuple[str, int]]], timeouts: Sequence[str]
) -> Finding | None:
    """Report the rank that timed out in an earlier collective than all others did, in logs that do
    not name the process group.

    Args:
        numbers: op and number of the collectives in which each rank timed out.
        timeouts: sentences about them.
    """
    met: dict[tuple[str, int], list[int]] = {}
    for rank, ops in sorted(numbers.items()):
        for one in set(ops):
            met.setdefault(one, []).append(rank)
    (op, number), others = max(
        met.items(), key=lambda item: (len(item[1]), item[0]), default=(("", 0), [])
    )
    odd = [rank for rank in numbers if rank not in others]
    last = max((own for rank in odd for name, own in numbers[rank] if name == op), default=number)
    if (
        len(odd) != 1
        or len(others) < 2
        or any(own >= number for _, own in numbers[odd[0]])
        or last >= number
    ):
        return None
    return Finding(
        kind="missing",
        why="unknown",
        root_cause=True,
        culprits=odd,
        victims=others,
        confidence="low",
        summary=(
            f"rank {odd[0]} timed out in {op} #{last} and {ranks_phrase(others)} in #{number}: "
            f"it is {count(number - last, 'collective')} behind, if these are of one process group"
        ),
        next_step=(
            f"look at the output of rank {odd[0]} before that, and at the Flight Recorder's dumps"
            " if there are any"
        ),
        evidence=[f"{text}." for text in timeouts],
        would_raise_confidence=(
            "The lines do not name the process group; those of torch 2.2 and later do."
        ),
    )


def _timed_out(timeouts: Sequence[str], waiting: list[int]) -> Finding:
    """Report a hang from text logs that do not name its process group: that it happened, with no
    culprit.
    """
    return Finding(
        kind="missing",
        why="unknown",
        root_cause=True,
        culprits=[],
        victims=waiting,
        confidence="low",
        summary=f"{timeouts[0]}; the ranks that it waited for are unknown",
        next_step=LOOK_AT_MORE,
        evidence=[f"{text}." for text in timeouts[1:]],
        would_raise_confidence=(
            "The last collectives that each rank enqueued and completed in that group would show"
            " the missing ranks."
        ),
    )


def _launcher_ended(signals: Sequence[str], ranks: list[int]) -> Finding:
    """Report a signal that ended the launcher, and with it the job: nothing else shows a fault."""
    return Finding(
        kind="dead",
        why="killed",
        root_cause=True,
        culprits=[],
        victims=ranks,
        confidence="high",
        summary=(
            f"the job was ended from outside: its launcher was ended by {' and '.join(signals)}"
        ),
        explanation=outside_cause(signals[0]),
        next_step=outside_step(signals[0]),
    )


def _raised(log: RankDump) -> Finding:
    """Report the exception of a rank that no line of its traceback names."""
    frame = user_frame(log.exception_stack)
    where = f" at {frame_phrase(frame)}" if frame is not None else ""
    return Finding(
        kind="dead",
        why="exception",
        root_cause=True,
        culprits=[],
        victims=[],
        confidence="low",
        summary=(
            f"a rank that the log does not name raised {log.exception[:160].rstrip('. ')}{where}"
        ),
        next_step=(
            f"look at {frame_phrase(frame)}, and in the whole log for the rank"
            if frame is not None
            else LOOK_AT_MORE
        ),
        would_raise_confidence="No line of the traceback names the rank.",
    )


def _ras_behind(operations: Sequence[int], ranks: list[int]) -> Finding:
    """Report a communicator of which NCCL's RAS tells that its ranks launched different numbers of
    operations.
    """
    return Finding(
        kind="missing",
        why="unknown",
        root_cause=True,
        culprits=[],
        victims=ranks,
        confidence="low",
        summary=(
            "ranks of a communicator launched up to different operations, as NCCL's RAS reports: "
        )
        + joined([f"#{number}" for number in operations[:4]]),
        next_step=(
            "take stacks of the processes that the report lists under the lower number (py-spy"
            " dump)"
        ),
        would_raise_confidence=(
            "A second report would show whether these ranks move: those of a job that runs may be a"
            " few apart, too."
        ),
    )


def _broadcast_wait(seconds: int, ranks: list[int]) -> Finding:
    """Report that vLLM's engine waits for a worker, which is all that its line tells."""
    return Finding(
        kind="undetermined",
        why="unknown",
        root_cause=False,
        culprits=[],
        victims=ranks,
        confidence="low",
        summary=(
            f"vLLM waited {seconds} s for a worker to read its broadcast in shared memory; no line"
            " tells which worker, or why"
        ),
        next_step=(
            "take stacks of the engine's workers (py-spy dump): one of them hangs, or works for"
            " long (compilation, quantization)"
        ),
        would_raise_confidence="The line tells only that a worker did not read.",
    )
