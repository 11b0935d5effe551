"""The ranks' stacks for the page: ranks with the same stack share a class."""

from __future__ import annotations

from typing import Any, NamedTuple

from commlens.model.collective import Stack
from commlens.model.grouping import grouped
from commlens.model.ranklog import ThreadStack
from commlens.reports.verdict_page.data import ROLES, FrameRef, Role, StackClass
from commlens.reports.verdict_page.job import PageJob, phrase
from commlens.text import format_ranks

_CLASSES_MAX = 60
_FRAMES_MAX = 80
_OTHER_THREADS_OF = 4  # culprits whose other threads are shown
_OTHER_THREADS_MAX = 16
_MAIN_THREADS = _MAIN, _ISSUER = "main thread", "the thread that issued it"


class _ClassKey(NamedTuple):
    role: Role
    thread: str
    note: str
    frames: Stack


def stacks(job: PageJob) -> tuple[list[StackClass], dict[int, int]]:
    """Return the classes, those of the culprits first, and the class of each rank's main thread."""
    ranks_of = grouped((key, rank) for rank in job.index.views if (key := _main_stack(job, rank)))
    suspects = [rank for rank in job.index.views if job.role(rank) in ("culprit", "awaited")]
    for rank in suspects[:_OTHER_THREADS_OF]:
        for other in _other_threads(job, rank):
            thread = f"thread {other.name or other.thread}"
            key = _ClassKey(job.role(rank), thread, "", other.frames)
            ranks_of.setdefault(key, []).append(rank)

    def order(key: _ClassKey) -> tuple[Any, ...]:
        ranks = ranks_of[key]
        return ROLES.index(key.role), key.thread not in _MAIN_THREADS, -len(ranks), ranks

    class_of: dict[int, int] = {}
    classes: list[StackClass] = []
    for key in sorted(ranks_of, key=order)[:_CLASSES_MAX]:
        (role, thread, note, frames), ranks = key, ranks_of[key]
        if thread in _MAIN_THREADS:
            class_of |= dict.fromkeys(ranks, len(classes))
        shown = [
            FrameRef(frame.function, frame.where, f"{frame.file}:{frame.line}", frame.kind.value)
            for frame in frames[:_FRAMES_MAX]
        ]
        classes.append(StackClass(format_ranks(ranks), len(ranks), role, thread, shown, note))
    return classes, class_of


def _main_stack(job: PageJob, rank: int) -> _ClassKey | None:
    """Return the rank's main stack, or else the stack of the last collective that it issued."""
    view = job.index.views[rank]
    main = view.log.main_stack
    if main is not None and main.frames:
        return _ClassKey(job.role(rank), _MAIN, "", main.frames)
    block = job.block_of(rank)
    op = block.op if block is not None else view.last_op
    if op is None or not op.stack:
        return None
    note = f"{phrase(op)} was issued here; there is no later stack."
    return _ClassKey(job.role(rank), _ISSUER, note, op.stack)


def _other_threads(job: PageJob, rank: int) -> list[ThreadStack]:
    log = job.index.views[rank].log
    threads = {
        each.thread: each
        for each in [*log.stacks, *log.observation.stacks]
        if not each.is_main and each.frames
    }
    return [threads[number] for number in sorted(threads)][:_OTHER_THREADS_MAX]
