"""Programs that make groups by hand, and worlds that meet in them: on real gloo processes, started
one by one, each the late member is named, and healthy ones get no word.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
from chosen import long
from harness import kill
from ports import free_port
from zygote_client import Zygote, has_ended

from commlens.processes import pyspy

pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("worlds_programs.py")
TIMEOUT_S = 75
pytestmark = pytest.mark.timeout(150)


def run(
    zygote: Zygote,
    shape: str,
    late: str,
    worlds: dict[str, int],
    folder: Path,
    meanwhile: Callable[[Mapping[str, str]], None] = lambda _: None,
    *,
    recorded: Collection[str] | None = None,
) -> str:
    """Start all processes of all worlds. Returns what they printed.

    ``meanwhile`` is called with the environment, and the pid of one of them in FIRST_PID, before
    the late one goes on. Of the roles, ``recorded`` are; by default all. If some are not, each
    process imports torch itself, so that what others see of it from outside is its own.
    """
    common = {
        **{name: value for name, value in os.environ.items() if name.startswith("COMMLENS")},
        "MASTER_ADDR": "127.0.0.1",
        "GROUP_PORT": str(free_port()),
        "GO": str(folder / "go"),
        "COMMLENS_STALL_TIMEOUT": "4",
        "COMMLENS_DUMP_DIR": str(folder / "dumps"),
        "COMMLENS_BOX_DIR": str(folder / "boxes"),
        "COLUMNS": "200",
    }
    (folder / "boxes").mkdir()
    started: list[int] = []
    for role, size in worlds.items():
        port = str(free_port())
        on = "1" if recorded is None or role in recorded else "0"
        named = {"COMMLENS_WORLD": role} if len(worlds) > 1 and recorded is None else {}
        ranks = [
            {
                "environment": {
                    **(common | named),
                    "COMMLENS" if recorded is None else "ALONE": on,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "MASTER_PORT": port,
                },
                "arguments": [str(PROGRAM), shape, late, role],
            }
            for rank in range(size)
        ]
        (folder / role).mkdir()
        asked = zygote.ask(do="start", folder=str(folder / role), store=False, ranks=ranks)
        started += asked["pids"]
    try:
        meanwhile({**os.environ, **common, "FIRST_PID": str(started[0])})
        (folder / "go").touch()
        until(lambda: all(map(has_ended, started)))
    finally:
        kill(started, signal.SIGKILL)
        zygote.reap(started)
        words = words_in(folder)
        print(words)
    return words


def words_in(folder: Path) -> str:
    """Return what the processes have printed so far, without line breaks."""
    return " ".join(" ".join(path.read_text() for path in sorted(folder.glob("*/*.out"))).split())


def until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not is_true() and time.monotonic() < end:
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("shape", "worlds", "late", "said"),
    [
        (
            "part_of_a_world",
            {"job": 3},
            "job:2",
            "rank 2 never reached all_reduce #4 of group pair [1-2]; rank 1 waits for it.",
        ),
        (
            "commands",
            {"job": 3},
            "job:0",
            "rank 0 waits for rank 1 to write the key 'result-3', and rank 1 waits for",
        ),
        (
            "no_server",
            {"job": 3},
            "job:1",
            "at localhost:",
        ),
        (
            "no_default_group",
            {"job": 2},
            "job:1",
            "rank 1 never reached all_reduce #4 of group engines [0-1]; rank 0 waits for it.",
        ),
        (
            "made_again",
            {"job": 2},
            "job:1",
            "rank 1 never reached all_reduce #2 of group torchft/2/0 [0-1]; rank 0 waits for it.",
        ),
        (
            "two_worlds",
            {"trainer": 2, "rollout": 2},
            "rollout:1",
            "rollout 1 never reached all_reduce #4 of group weight_sync [",
        ),
        long("two_worlds", {"trainer": 2, "rollout": 2}, "trainer:0", "trainer 0 never reached"),
    ],
)
def test_the_late_member_is_named(
    zygote: Zygote, tmp_path: Path, shape: str, worlds: dict[str, int], late: str, said: str
) -> None:
    shown = ""

    def look(environment: Mapping[str, str]) -> None:
        nonlocal shown
        until(lambda: said in words_in(tmp_path))
        if len(worlds) > 1:
            command = [sys.executable, "-m", "commlens", "stacks"]
            shown = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            ).stdout

    words = run(zygote, shape, late, worlds, tmp_path, look)
    assert said in words
    assert words.count("VERDICT") <= len(worlds)
    for other in ("default group [0-1]", "failed, the job goes on", "wait for each other"):
        assert other not in words
    if late == "rollout:1":  # the stacks of worlds that meet are one picture
        # which world comes first is chance
        both = "(rollout and trainer|trainer and rollout)"
        assert re.match(f"4 ranks of {both} stand at ", shown), shown
        assert "Rollout 1\n  maybe_late" in shown or "Rollout 1\n  sleep" in shown
        assert re.search("(rollout 0 and trainer 0|trainer 0 and rollout 0)", shown.lower())


@pytest.mark.parametrize("late", ["job:1", long("nobody")])
def test_a_rank_that_does_not_ask_its_process_is_named(
    zygote: Zygote, tmp_path: Path, late: str
) -> None:
    """The processes that write checkpoints are not recorded: their stacks show who waits."""
    if pyspy.find() is None:
        pytest.skip("py-spy is not installed")

    def look(_: Mapping[str, str]) -> None:
        until(lambda: late == "nobody" or "dump saved" in words_in(tmp_path))

    words = run(zygote, "checkpointers", late, {"job": 3}, tmp_path, look)
    if late == "nobody":
        assert "VERDICT" not in words and "Error" not in words
        return
    assert (
        "VERDICT ranks 0,2 wait for processes that they started, which are in gather_object"
        " without that of rank 1; rank 1 waits for ranks 0,2 in barrier #4"
    ) in words
    assert "which rank 1 started, waits for a request." in words


@pytest.mark.parametrize(
    ("shape", "worlds"),
    [
        long("part_of_a_world", {"job": 3}),
        long("commands", {"job": 3}),
        ("two_worlds", {"trainer": 2, "rollout": 2}),
        long("no_default_group", {"job": 2}),
        long("made_again", {"job": 2}),
    ],
)
def test_healthy_worlds_get_no_word(
    zygote: Zygote, tmp_path: Path, shape: str, worlds: dict[str, int]
) -> None:
    words = run(zygote, shape, "nobody", worlds, tmp_path)
    assert "commlens:" not in words and "VERDICT" not in words and "Error" not in words


@pytest.mark.long
def test_worlds_that_are_not_recorded_are_one_picture(zygote: Zygote, tmp_path: Path) -> None:
    if pyspy.find() is None:
        pytest.skip("py-spy is not installed")
    shown = ""

    def look(environment: Mapping[str, str]) -> None:
        nonlocal shown

        def attach() -> bool:
            nonlocal shown
            command = [sys.executable, "-m", "commlens", "attach", environment["FIRST_PID"]]
            shown = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            ).stdout
            return "rollout 1 is in" in shown

        until(attach)
        shown = " ".join(shown.split())

    run(
        zygote, "two_worlds", "rollout:1", {"trainer": 2, "rollout": 2}, tmp_path, look, recorded=[]
    )
    print(shown)
    assert "worlds_programs.py:67 sleep; trainer 0-1 and rollout 0 wait in all_reduce of" in shown
    assert "Trainer 1: in barrier of the default group at" in shown
    assert "Looked at 4 ranks of 4 of trainer and rollout (pids" in shown
    assert "Confidence: medium" in shown


@pytest.mark.long
def test_a_process_that_may_be_a_member_without_a_record_is_evidence(
    zygote: Zygote, tmp_path: Path
) -> None:
    def look(_: Mapping[str, str]) -> None:
        until(lambda: "dump saved" in words_in(tmp_path))

    worlds = {"trainer": 2, "rollout": 2}
    words = run(zygote, "two_worlds", "rollout:1", worlds, tmp_path, look, recorded=["trainer"])
    assert "2 of 3 members of group weight_sync" in words
    assert words.count("is not recorded by commlens, and is connected with rank 0") == 2
    if pyspy.find() is not None:
        assert "connected with rank 0: it is in worlds_programs.py:67 sleep." in words
