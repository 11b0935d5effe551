"""Words about faults that text logs tell of a job as a whole."""

from __future__ import annotations

from typing import Final

from commlens.diagnosis.causes.told_by_logs import FoundInLogs, UnplacedTimeout
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.known_errors import known_step
from commlens.diagnosis.words.next_steps import outside_cause, outside_step
from commlens.model.cause import JobEnding
from commlens.model.xids import xid
from commlens.text import count, frame_phrase, joined, ranks_and_verb, ranks_phrase

LOOK_AT_MORE: Final = (
    "diagnose the logs of all ranks, or the Flight Recorder's dumps (by default"
    " ~/.cache/torch/comm_lib_trace_rank_* or /tmp/nccl_trace_rank_*)"
)
_ERROR_MAX = 160  # characters
_SHOWN = 4  # numbers, or lines
_ENDINGS: Final[dict[JobEnding, tuple[str, str]]] = {
    "out-of-memory": (
        "a process of the job was killed because memory was used up",
        "give the job more memory, or use less: fewer data loader workers, smaller shards; the"
        " lines name the node or the step",
    ),
    "node-failure": (
        "the scheduler ended the job because a node failed",
        "leave the node out (Slurm: --exclude), and start the job again from its last checkpoint",
    ),
    "preemption": (
        "the scheduler ended the job because it was preempted",
        "start the job again from its last checkpoint; a signal before the end lets it save one"
        " (Slurm: --signal, --requeue)",
    ),
    "time-limit": (
        "the scheduler ended the job because its time limit was over",
        "ask for more time (Slurm: --time), or save a checkpoint before the end (Slurm: --signal)"
        " and start again from it; if the job made no progress before, look for a hang",
    ),
    "evicted": (
        "Kubernetes evicted a pod of the job because its node ran low on a resource",
        "request the resource that the line names (resources.requests), or use less of it",
    ),
    "gpu-error": (
        "the driver reports an error of a GPU",
        "look at the other messages of that time in the kernel log of the node (dmesg), and run"
        " `commlens doctor` there",
    ),
    "killed": (
        "a process of the job was killed by SIGKILL",
        "look for the OOM killer in dmesg and at the memory limits of the cgroup and the scheduler,"
        " for memory is the usual reason",
    ),
    "process-failed": (
        "a process of the job failed, and the launcher ended the others",
        "look at the output of the process that the first line names",
    ),
    "cancelled": (
        "the scheduler cancelled the job",
        "find out who cancelled it (scancel, an administrator): the line tells no reason, so it was"
        " neither a time limit nor preemption",
    ),
}
"""What a line says, and the next step."""


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
        case "ended":
            return _ended(found)
        case "raised":
            return _raised(found)
        case "watchdog-stuck":
            return _stuck_watchdog(found)
        case "ras-behind":
            return _ras_behind(found)
        case "engine-waits":
            return _engine_waits(found)
        case "store-lost":
            return _store_lost(found)


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


def _ended(found: FoundInLogs) -> Words:
    cause = found.cause
    assert cause.ending is not None
    summary, step = _ENDINGS[cause.ending]
    if cause.numbers:
        summary += f": {joined([f'Xid {one} ({xid(one).meaning})' for one in cause.numbers])}"
    return Words(
        summary=summary,
        next_step=step,
        evidence=[f'a line says "{line}".' for line in cause.lines[:_SHOWN]],
        would_raise_confidence=(
            None if cause.confidence == "high" else "No line tells which rank it was, or why."
        ),
    )


def _stuck_watchdog(found: FoundInLogs) -> Words:
    ranks = ranks_phrase(found.cause.ranks)
    return Words(
        summary=(
            f"torch's watchdog of {ranks} made no progress for {found.cause.waited_s:.0f} s, and"
            " its monitor ended the process"
        ),
        explanation=(
            "The watchdog waits for a CUDA or NCCL call that does not return, or for Python's"
            " global lock."
        ),
        next_step=(
            "in the next run, take a stack with native frames (py-spy dump --native) of"
            f" {ranks}; {LOOK_AT_MORE}"
        ),
        would_raise_confidence="No line tells which collective was in flight.",
    )


def _raised(found: FoundInLogs) -> Words:
    by_launcher = found.cause.by_launcher
    where = "" if by_launcher else frame_phrase(found.frame)
    error = found.exception.splitlines()[0][:_ERROR_MAX].rstrip(". ")
    subject = "the launcher" if by_launcher else "a rank that the log does not name"
    step = known_step(found.exception)
    if not step and where:
        step = f"look at {where}, and in the whole log for the rank"
    return Words(
        summary=f"{subject} raised {error}{f' at {where}' if where else ''}",
        next_step=step or LOOK_AT_MORE,
        would_raise_confidence=(
            "It may have ended because of a worker, or of another node's launcher."
            if by_launcher
            else "No line of the traceback names the rank."
        ),
    )


def _ras_behind(found: FoundInLogs) -> Words:
    numbers = joined([f"#{number}" for number in found.cause.numbers[:_SHOWN]])
    listed = ranks_and_verb(found.cause.listed, "is", "are") if found.cause.listed else ""
    return Words(
        summary=(
            "ranks of a communicator launched up to different operations, as NCCL's RAS reports:"
            f" {numbers}{f'; {listed} behind, as numbered in it' if listed else ''}"
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


def _store_lost(found: FoundInLogs) -> Words:
    ranks = found.cause.ranks
    return Words(
        summary=(
            f"{ranks_and_verb(ranks, 'does', 'do')} not reach torch's store any more: the process"
            " that hosts it (rank 0, or the launcher of its node) had ended before"
        ),
        explanation="At the end of a job that is no fault: the ranks do not end at one moment.",
        next_step="look at the output of rank 0 and of its node's launcher for the first error",
        would_raise_confidence="No line tells how the process of the store ended.",
    )
