"""Words about faults of a job as a whole that text logs show: "the scheduler ended the job because
its time limit was over".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from commlens.diagnosis.words.error_steps import known_step
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.next_steps import outside_cause, outside_step
from commlens.matching.errors import SYSTEM_REASON, known_error
from commlens.model.cause import OF_THE_STORE, JobEnding, LogReport, ToldByLogs, UnplacedTimeout
from commlens.model.ranklog import CAUSED_BY
from commlens.model.xids import xid
from commlens.text import count, joined, rank_phrase, ranks_and_verb, ranks_phrase

LOOK_AT_MORE: Final = (
    "diagnose the logs of all ranks, or the Flight Recorder's dumps (by default"
    " ~/.cache/torch/comm_lib_trace_rank_* or /tmp/nccl_trace_rank_*)"
)
_ERROR_MAX = 160  # characters
_SHOWN = 4  # numbers, or lines
_SEE_INNER: Final = ". See inner exception for details"
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
"""The statement of a line, and the next step."""


def words(cause: ToldByLogs) -> Words:
    """Return what a finding says about lines of logs."""
    return _WORDS[cause.report](cause)


def timeout_phrase(timeout: UnplacedTimeout) -> str:
    """``"rank 2: it timed out in ..."``; without a rank if none is known."""
    return f"{ranks_phrase(timeout.ranks)}: {timeout.text}" if timeout.ranks else timeout.text


def _lagging(cause: ToldByLogs) -> Words:
    ranks = ranks_phrase(cause.culprits)
    return Words(
        summary=(
            f"{ranks} did not join the collective in which the others timed out, as torch's desync"
            " report tells"
        ),
        next_step=(
            f"look at the output of {ranks} before the timeout; in the next run, take a stack"
            " (py-spy dump)"
        ),
        evidence=[f"{timeout_phrase(timeout)}." for timeout in cause.timeouts],
        would_raise_confidence=(
            "The report numbers the ranks as their group does: in the default group, as the job"
            " does."
        ),
    )


def _behind(cause: ToldByLogs) -> Words:
    (rank,), (last, number) = cause.culprits, cause.numbers
    return Words(
        summary=(
            f"{rank_phrase(rank)} timed out in {cause.op} #{last} and"
            f" {ranks_phrase(cause.victims)} in"
            f" #{number}: it is {count(number - last, 'collective')} behind, if these are of one"
            " process group"
        ),
        next_step=(
            f"look at the output of {rank_phrase(rank)} before that, and at the Flight"
            " Recorder's dumps if"
            " there are any"
        ),
        evidence=[f"{timeout_phrase(timeout)}." for timeout in cause.timeouts],
        would_raise_confidence=(
            "The lines do not name the process group; those of torch 2.2 and later do."
        ),
    )


def _timed_out(cause: ToldByLogs) -> Words:
    first, *others = [timeout_phrase(timeout) for timeout in cause.timeouts]
    return Words(
        summary=f"{first}; the ranks that it waited for are unknown",
        next_step=LOOK_AT_MORE,
        evidence=[f"{text}." for text in others],
        would_raise_confidence=(
            "The last collectives that each rank enqueued and completed in that group would show"
            " the missing ranks."
        ),
    )


def _launcher_ended(cause: ToldByLogs) -> Words:
    signals = cause.signals
    return Words(
        summary=(
            f"the job was ended from outside: its launcher was ended by {' and '.join(signals)}"
        ),
        explanation=outside_cause(signals[0]),
        next_step=outside_step(signals[0]),
    )


def _ended(cause: ToldByLogs) -> Words:
    assert cause.ending is not None
    if cause.ending in OF_THE_STORE:
        return _store_unreached(cause)
    summary, step = _ENDINGS[cause.ending]
    if cause.nodes:
        summary += f": {joined(cause.nodes)}"
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


def _store_unreached(cause: ToldByLogs) -> Words:
    text = "\n".join(cause.lines)
    known = known_error(text)
    who = ranks_phrase(cause.ranks) if cause.ranks else "a process that the log does not name"
    store = f"torch's store{f' at {known.detail}' if known and known.detail else ''}"
    did = f"{who} could not {'listen for' if cause.listens else 'connect to'} {store}"
    why = next(iter(SYSTEM_REASON.findall(text)[::-1]), "")
    waits = cause.ending == "store-awaited"
    return Words(
        summary=f"{'no line tells a fault, but ' * waits}{did}{f': {why}' if why else ''}",
        next_step=known_step(text) or LOOK_AT_MORE,
        evidence=[f'a line says "{line}".' for line in cause.lines[:_SHOWN]],
        would_raise_confidence="No line tells whether a later attempt succeeded.",
    )


def _stuck_watchdog(cause: ToldByLogs) -> Words:
    ranks = ranks_phrase(cause.ranks)
    return Words(
        summary=(
            f"torch's watchdog of {ranks} made no progress for {cause.waited_s:.0f} s, and"
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


def _raised(cause: ToldByLogs) -> Words:
    by_launcher = cause.by_launcher
    where = "" if by_launcher else cause.line
    error, *more = (
        text.partition("\n")[0][:_ERROR_MAX].rstrip(". ")
        for text in cause.exception.split(CAUSED_BY)
    )
    if error.endswith(_SEE_INNER) and more:
        error = f"{error.removesuffix(_SEE_INNER)}, because of {more[0]}"
    subject = "the launcher" if by_launcher else "a rank that the log does not name"
    step = known_step(cause.exception)
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


def _ras_behind(cause: ToldByLogs) -> Words:
    numbers = joined([f"#{number}" for number in cause.numbers[:_SHOWN]])
    listed = ranks_and_verb(cause.listed, "is", "are") if cause.listed else ""
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


def _engine_waits(cause: ToldByLogs) -> Words:
    return Words(
        summary=(
            f"vLLM waited {cause.waited_s:.0f} s for a worker to read its broadcast in shared"
            " memory; no line tells which worker, or why"
        ),
        next_step=(
            "take stacks of the engine's workers (py-spy dump): one of them hangs, or works for"
            " long (compilation, quantization)"
        ),
        would_raise_confidence="The line tells only that a worker did not read.",
    )


def _store_lost(cause: ToldByLogs) -> Words:
    ranks = cause.ranks
    return Words(
        summary=(
            f"{ranks_and_verb(ranks, 'does', 'do')} not reach torch's store any more: the process"
            " that hosts it (rank 0, or the launcher of its node) had ended before"
        ),
        explanation="At the end of a job that is no fault: the ranks do not end at one moment.",
        next_step="look at the output of rank 0 and of its node's launcher for the first error",
        would_raise_confidence="No line tells how the process of the store ended.",
    )


_WORDS: Mapping[LogReport, Callable[[ToldByLogs], Words]] = {
    "behind": _behind,
    "desync": _lagging,
    "timed-out": _timed_out,
    "launcher-ended": _launcher_ended,
    "ended": _ended,
    "raised": _raised,
    "watchdog-stuck": _stuck_watchdog,
    "ras-behind": _ras_behind,
    "engine-waits": _engine_waits,
    "store-lost": _store_lost,
}
