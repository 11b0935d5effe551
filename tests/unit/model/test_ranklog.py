"""The state of a process in words."""

from __future__ import annotations

import pytest
from builders import Job, all_reduce

from commlens.model.collective import Frame, FrameKind
from commlens.model.ranklog import UNREMARKABLE, End, Observation, ThreadStack
from commlens.text import process_phrase


@pytest.mark.parametrize(
    ("seen", "words", "is_notable"),
    [
        (Observation(End.KILLED, signal="SIGKILL"), "killed by SIGKILL", True),
        (Observation(End.FAILED, 3), "exited with status 3", True),
        (Observation(End.FAILED), "died of an exception", True),
        (Observation(End.CLEAN), "finished", True),
        (Observation(), "not visible from here", False),
        (Observation(End.RUNNING, proc_state="T", stopped_fraction=1.0), "stopped", True),
        (
            Observation(End.RUNNING, proc_state="t", stopped_fraction=1.0),
            "stopped by a debugger",
            True,
        ),
        (Observation(End.RUNNING, proc_state="R", holds_gil=True), "holds the GIL", True),
        (Observation(End.RUNNING, proc_state="S", cpu_s=4.0, window_s=5.0), "computing", False),
        (Observation(End.RUNNING, proc_state="D"), "in uninterruptible I/O", True),
        (Observation(End.RUNNING, proc_state="S"), "sleeping", False),
    ],
)
def test_states(seen: Observation, words: str, is_notable: bool) -> None:
    assert process_phrase(seen) == words
    assert (seen.state not in UNREMARKABLE) == is_notable


@pytest.mark.parametrize(
    ("inner", "thread"),
    [
        (Frame("/lib/python3.11/concurrent/futures/_base.py", 1, "result", FrameKind.PYTHON), 2),
        (Frame("/lib/python3.11/threading.py", 1, "join", FrameKind.PYTHON), 2),
        # as py-spy tells it
        (Frame("/lib/python3.11/threading.py", 1, "Thread.join", FrameKind.PYTHON), 2),
        (Frame("/lib/python3.11/queue.py", 1, "get", FrameKind.PYTHON), 1),
    ],
)
def test_the_stack_of_the_thread_for_which_the_main_one_waits(inner: Frame, thread: int) -> None:
    native = (Frame("libc.so.6", 0, "pthread_cond_wait", FrameKind.NATIVE),) * 3
    frames = (*native, inner, Frame("/me/train.py", 13, "main"))
    main = ThreadStack(1, "MainThread", frames, is_main=True)
    worker = ThreadStack(2, "worker", (Frame("/me/train.py", 5, "wait_for_tokens"),))
    writer = ThreadStack(3, "writer", (Frame("/me/train.py", 7, "flush_logs"),))
    job = Job(1)
    [log] = job.run(lambda job, _: iter([all_reduce(job.world, line=6, thread=2)])).logs()
    log.stacks = [main, worker, writer]
    assert log.main_stack is not None
    assert log.main_stack.thread == thread
    log.collectives = []  # of the others, none is known to issue collectives
    assert log.main_stack == main
    log.awaited_thread = 3
    assert log.main_stack == writer
