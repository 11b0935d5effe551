from __future__ import annotations

import pytest

from commlens.diagnosis.words.stopped import stopped_line
from commlens.model.sender import Sender

KILL = Sender(
    pid=4242, uid=1000, is_own_user=True, name="kill", parent_pid=4100, parent_name="bash"
)
RECEIVED = "the launcher received"


@pytest.mark.parametrize(
    ("signal", "advice"),
    [("SIGHUP", "nohup or setsid"), ("SIGTERM", "scheduler's log"), ("SIGINT", None)],
)
def test_the_sender_is_not_known(signal: str, advice: str | None):
    line = stopped_line(signal)
    if advice is None:
        assert line == ""
    else:
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
    assert stopped_line("SIGTERM", sender) == line


def test_a_terminal_that_went_away():
    line = stopped_line("SIGHUP", Sender(is_kernel=True))
    assert line.startswith(f"{RECEIVED} SIGHUP from the kernel and ends the job. The system sends")


def test_ctrl_c_is_not_told():
    assert stopped_line("SIGINT", Sender(is_kernel=True)) == ""
    assert stopped_line("SIGINT", KILL, parent=KILL.pid) == "", "a wrapper passes it on"
    assert stopped_line("SIGINT", KILL).startswith(f"{RECEIVED} SIGINT from kill (pid 4242, ")
