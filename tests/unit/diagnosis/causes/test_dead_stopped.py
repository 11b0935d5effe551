from __future__ import annotations

import pytest

from commlens.diagnosis.causes.dead import find_stop
from commlens.model.sender import Sender

KILL = Sender(pid=4242, uid=1000, is_own_user=True, name="kill")


@pytest.mark.parametrize(
    ("signal", "sender", "by"),
    [
        ("SIGTERM", None, "unknown"),
        ("SIGHUP", Sender(is_kernel=True), "unknown"),
        ("SIGHUP", KILL, "unknown"),
        ("SIGTERM", Sender(), "system"),
        ("SIGTERM", Sender(pid=812, uid=0), "system"),
        ("SIGTERM", Sender(pid=78, uid=0, is_own_user=True), "process"),
        ("SIGTERM", KILL, "process"),
        ("SIGINT", KILL, "process"),
        ("SIGINT", Sender(pid=812, uid=0), "process"),
    ],
)
def test_what_sent_the_signal(signal: str, sender: Sender | None, by: str) -> None:
    stop = find_stop(signal, sender)
    assert stop is not None
    assert (stop.signal, stop.sender, stop.by) == (signal, sender, by)


def test_ctrl_c_is_no_stop() -> None:
    assert find_stop("SIGINT") is None
    assert find_stop("SIGINT", Sender(is_kernel=True)) is None
    assert find_stop("SIGINT", KILL, parent=KILL.pid) is None, "a wrapper passes it on"
