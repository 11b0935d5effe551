from __future__ import annotations

import pytest

from commlens.diagnosis.causes.dead import find_stop
from commlens.diagnosis.words.dead import stopped_line
from commlens.model.sender import Sender

KILL = Sender(
    pid=4242, uid=1000, is_own_user=True, name="kill", parent_pid=4100, parent_name="bash"
)
RECEIVED = "the launcher received"


def line_of(signal: str, sender: Sender | None = None) -> str:
    stop = find_stop(signal, sender)
    assert stop is not None
    return stopped_line(stop)


@pytest.mark.parametrize(
    ("signal", "advice"), [("SIGHUP", "nohup or setsid"), ("SIGTERM", "scheduler's log")]
)
def test_the_sender_is_not_known(signal: str, advice: str):
    line = line_of(signal)
    assert line.startswith(f"{RECEIVED} {signal} and ends the job. ")
    assert advice in line


@pytest.mark.parametrize(
    ("sender", "line"),
    [
        (
            KILL,
            f"{RECEIVED} SIGTERM from kill (pid 4242, the job's own user, started by bash, pid"
            " 4100) and ends the job.",
        ),
        (
            Sender(pid=812, uid=0, name="slurmstepd"),
            f"{RECEIVED} SIGTERM from slurmstepd (pid 812, root) and ends the job. Look at the"
            " scheduler's log (preemption, time limit).",
        ),
        (
            Sender(pid=77, uid=1234),
            f"{RECEIVED} SIGTERM from a process (pid 77, user 1234) and ends the job.",
        ),
        (
            Sender(pid=78, uid=0, is_own_user=True, name="python", rank=3),
            f"{RECEIVED} SIGTERM from rank 3 (pid 78) and ends the job.",
        ),
        (
            Sender(),
            f"{RECEIVED} SIGTERM from a process outside this container and ends the job. Look at"
            " the scheduler's log (preemption, time limit).",
        ),
    ],
)
def test_who_sent_it(sender: Sender, line: str):
    assert line_of("SIGTERM", sender) == line


def test_a_terminal_that_went_away():
    line = line_of("SIGHUP", Sender(is_kernel=True))
    assert line.startswith(f"{RECEIVED} SIGHUP from the kernel and ends the job. The system sends")
