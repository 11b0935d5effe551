"""Words about faults that text logs tell of a job as a whole."""

from __future__ import annotations

from typing import Final

from commlens.diagnosis.causes.told_by_logs import FoundInLogs, UnplacedTimeout
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.next_steps import outside_cause, outside_step
from commlens.text import count, frame_phrase, joined, ranks_phrase

LOOK_AT_MORE: Final = (
    "diagnose the logs of all ranks, or the Flight Recorder's dumps (by default"
    " ~/.cache/torch/comm_lib_trace_rank_* or /tmp/nccl_trace_rank_*)"
)
_ERROR_MAX = 160  # characters
_SHOWN = 4  # numbers


def words(found: FoundInLogs) -> Words:
    """Return what a finding says about lines of logs."""
    match found.cause.report:
        case "behind":
            return _behind(found)
        case "desync":
            return _lagging(found)
        case "timed-out":
            return _timed_out(found)
        case "launcher-ended":
            return _launcher_ended(found)
        case "raised":
            return _raised(found)
        case "ras-behind":
            return _ras_behind(found)
        case "engine-waits":
            return _engine_waits(found)


def timeout_phrase(timeout: UnplacedTimeout) -> str:
    """``"rank 2: it timed out in ..."``; without a rank if none is known."""
    return f"{ranks_phrase(timeout.ranks)}: {timeout.text}" if timeout.ranks else timeout.text


def _lagging(found: FoundInLogs) -> Words:
    ranks = ranks_phrase(found.cause.culprits)
    return Words(
        summary=(
            f"{ranks} did not join the collective in which the others timed out, as torch's desync"
            " report tells"
        ),
        next_step=(
            f"look at the output of {ranks} before the timeout; in the next run, take a stack"
            " (py-spy dump)"
        ),
        evidence=[f"{timeout_phrase(timeout)}." for timeout in found.timeouts],
        would_raise_confidence=(
            "The report numbers the ranks as their group does: in the default group, as the job"
            " does."
        ),
    )


def _behind(found: FoundInLogs) -> Words:
    (rank,), (last, number) = found.cause.culprits, found.cause.numbers
    return Words(
        summary=(
            f"rank {rank} timed out in {found.op} #{last} and {ranks_phrase(found.others)} in"
            f" #{number}: it is {count(number - last, 'collective')} behind, if these are of one"
            " process group"
        ),
        next_step=(
            f"look at the output of rank {rank} before that, and at the Flight Recorder's dumps if"
            " there are any"
        ),
        evidence=[f"{timeout_phrase(timeout)}." for timeout in found.timeouts],
        would_raise_confidence=(
            "The lines do not name the process group; those of torch 2.2 and later do."
        ),
    )


def _timed_out(found: FoundInLogs) -> Words:
    first, *others = [timeout_phrase(timeout) for timeout in found.timeouts]
    return Words(
        summary=f"{first}; the ranks that it waited for are unknown",
        next_step=LOOK_AT_MORE,
        evidence=[f"{text}." for text in others],
        would_raise_confidence=(
            "The last collectives that each rank enqueued and completed in that group would show"
            " the missing ranks."
        ),
    )


def _launcher_ended(found: FoundInLogs) -> Words:
    signals = found.cause.signals
    return Words(
        summary=(
            f"the job was ended from outside: its launcher was ended by {' and '.join(signals)}"
        ),
        explanation=outside_cause(signals[0]),
        next_step=outside_step(signals[0]),
    )


def _raised(found: FoundInLogs) -> Words:
    where = frame_phrase(found.frame)
    error = found.exception[:_ERROR_MAX].rstrip(". ")
    return Words(
        summary=(
            f"a rank that the log does not name raised {error}{f' at {where}' if where else ''}"
        ),
        next_step=(
            f"look at {where}, and in the whole log for the rank" if where else LOOK_AT_MORE
        ),
        would_raise_confidence="No line of the traceback names the rank.",
    )


def _ras_behind(found: FoundInLogs) -> Words:
    numbers = joined([f"#{number}" for number in found.cause.numbers[:_SHOWN]])
    return Words(
        summary=(
            "ranks of a communicator launched up to different operations, as NCCL's RAS reports:"
            f" {numbers}"
        ),
        next_step=(
            "take stacks of the processes that the report lists under the lower number (py-spy"
            " dump)"
        ),
        would_raise_confidence=(
            "A second report would show whether these ranks move: those of a job that runs may be a"
            " few apart, too."
        ),
    )


def _engine_waits(found: FoundInLogs) -> Words:
    return Words(
        summary=(
            f"vLLM waited {found.cause.waited_s:.0f} s for a worker to read its broadcast in shared"
            " memory; no line tells which worker, or why"
        ),
        next_step=(
            "take stacks of the engine's workers (py-spy dump): one of them hangs, or works for"
            " long (compilation, quantization)"
        ),
        would_raise_confidence="The line tells only that a worker did not read.",
    )
