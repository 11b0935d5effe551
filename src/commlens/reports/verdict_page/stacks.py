"""The stacks of all ranks, merged into classes."""

from __future__ import annotations

from collections import defaultdict

from commlens.model.collective import Stack
from commlens.model.ranklog import ThreadStack
from commlens.reports.verdict_page.data import ROLES, FrameRef, Role, StackClass
from commlens.reports.verdict_page.job import PageJob, phrase
from commlens.text import format_ranks

_CLASSES_MAX = 60
_FRAMES_MAX = 80
_OTHER_THREADS_OF = 4  # culprits whose other threads are shown


def stacks(job: PageJob) -> tuple[list[StackClass], dict[int, int]]:
    """Return the classes, those of the culprits first, and the class of each rank's main thread."""
    found: dict[tuple[Role, str, str, Stack], list[int]] = defaultdict(list)
    for rank, view in job.index.views.items():
        role = job.role(rank)
        main = view.log.main_stack
        if main is not None and main.frames:
            found[role, "main thread", "", main.frames].append(rank)
            continue
        block = job.block_of(rank)
        op = block.op if block is not None else view.last_op
        if op is not None and op.stack:
            found[
                role,
                "the thread that issued it",
                f"{phrase(op)} was issued here; there is no later stack.",
                op.stack,
            ].append(rank)
    for rank in [rank for rank in job.index.views if job.role(rank) in ("culprit", "awaited")][
        :_OTHER_THREADS_OF
    ]:
        for other in _other_threads(job, rank):
            found[job.role(rank), f"thread {other.name or other.thread}", "", other.frames].append(
                rank
            )
    mains = ("main thread", "the thread that issued it")
    ordered = sorted(
        found.items(),
        key=lambda item: (ROLES.index(item[0][0]), item[0][1] not in mains, -len(item[1]), item[1]),
    )
    class_of: dict[int, int] = {}
    classes: list[StackClass] = []
    for (role, thread, note, frames), ranks in ordered[:_CLASSES_MAX]:
        if thread in mains:
            class_of |= dict.fromkeys(ranks, len(classes))
        shown = [
            FrameRef(frame.function, frame.where, f"{frame.file}:{frame.line}", frame.kind.value)
            for frame in frames[:_FRAMES_MAX]
        ]
        classes.append(StackClass(format_ranks(ranks), len(ranks), role, thread, shown, note))
    return classes, class_of


def _other_threads(job: PageJob, rank: int) -> list[ThreadStack]:
    log = job.index.views[rank].log
    threads = {
        stack.thread: stack
        for stack in [*log.stacks, *log.observation.stacks]
        if not stack.is_main and stack.frames
    }
    return [threads[number] for number in sorted(threads)][:16]
