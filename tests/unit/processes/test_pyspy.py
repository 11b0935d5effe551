"""The profile that py-spy takes."""

from __future__ import annotations

import os

from commlens.model.collective import Frame, FrameKind
from commlens.processes import pyspy


def test_the_profile_of_py_spy() -> None:
    text = (
        "thread (7): MainThread;main (/home/me/train.py:30);Loader.__next__ (/lib/x.py:5) 12\n"
        "thread (8): worker;run (/lib/threading.py:3) 50\n"
        "thread (7): MainThread;main (/home/me/train.py:31) 3\n"
        "broken\n"
    )
    taken = pyspy.parse_profile(
        text, 7, lambda file: FrameKind.USER if file.startswith("/home") else FrameKind.LIBRARY
    )
    outer = Frame("/home/me/train.py", 30, "main")
    assert taken == {
        (Frame("/lib/x.py", 5, "__next__", FrameKind.LIBRARY), outer): 12,
        (Frame("/home/me/train.py", 31, "main"),): 3,
    }


def test_the_profile_of_python_310() -> None:
    text = (
        "thread (0x7F4C3356D6C0): beat;f (/home/me/train.py:3) 39\n"
        "thread (0x7F4CF3A1CB80): MainThread;main (/home/me/train.py:6) 38\n"
        "thread (0x7F4CF3A1CB81);g (/home/me/train.py:9) 7\n"
    )
    taken = pyspy.parse_profile(text, 7, lambda _: FrameKind.USER)
    assert taken == {(Frame("/home/me/train.py", 6, "main"),): 38}


def test_the_main_thread_is_known_without_its_number() -> None:
    """As of a process of Python 3.10 that is not paused, where nothing imports threading."""

    def are_main(*names: str | None) -> list[bool]:
        answer = [{"os_thread_id": None, "thread_name": name, "frames": []} for name in names]
        threads = pyspy.parse(answer, 7, lambda _: FrameKind.USER, 0).threads
        return [thread.stack.is_main for thread in threads]

    assert are_main(None) == [True]
    assert are_main("loader", "MainThread") == [True, False]
    assert are_main(None, None) == [False, False]


def test_a_refusal_names_the_capability_or_the_setting() -> None:
    refused = pyspy.why_refused(os.getpid(), "Permission Denied")
    assert "ptrace_scope" in refused or "SYS_PTRACE" in refused
    other = pyspy.why_refused(os.getpid(), "Error: no such process")
    assert other == "py-spy failed: Error: no such process"
