"""Programs that make groups by hand, and worlds that meet in them: on real gloo processes, started
one by one, each the late member is named, and healthy ones get no word.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chosen import long
from ports import free_port

pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("worlds_programs.py")
TIMEOUT_S = 75
pytestmark = pytest.mark.timeout(150)


def run(
    shape: str,
    late: str,
    worlds: dict[str, int],
    folder: Path,
    meanwhile: Callable[[dict[str, str]], None] = lambda _: None,
) -> dict[str, str]:
    """Start all processes of all worlds. Returns what each printed.

    ``meanwhile`` is called with the environment while they run.
    """
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "GROUP_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "COMMLENS_STALL_TIMEOUT": "5",
        "COMMLENS_DUMP_DIR": str(folder / "dumps"),
        "COMMLENS_BOX_DIR": str(folder / "boxes"),
        "COLUMNS": "200",
    }
    (folder / "boxes").mkdir()
    started = {}
    for role, size in worlds.items():
        port = str(free_port())
        for rank in range(size):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": port}
            started[f"{role}:{rank}"] = subprocess.Popen(
                [sys.executable, "-m", "commlens", "run", str(PROGRAM), shape, late, role],
                env=common | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
    try:
        meanwhile(common)
        return {name: each.communicate(timeout=TIMEOUT_S)[0] for name, each in started.items()}
    finally:
        for each in started.values():
            each.kill()
            each.wait()


def words_of(outputs: dict[str, str]) -> str:
    print("\n".join(f"--- {name}\n{text}" for name, text in outputs.items()))
    return " ".join("\n".join(outputs.values()).split())


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
            "rollout 1 never reached all_reduce #4 of group weight_sync [rollout 0-1, trainer 0];"
            " rollout 0 and trainer 0 wait for it.",
        ),
        long("two_worlds", {"trainer": 2, "rollout": 2}, "trainer:0", "trainer 0 never reached"),
    ],
)
def test_the_late_member_is_named(
    tmp_path: Path, shape: str, worlds: dict[str, int], late: str, said: str
) -> None:
    words = words_of(run(shape, late, worlds, tmp_path))
    assert said in words
    assert words.count("VERDICT") <= len(worlds)
    for other in ("default group [0-1]", "failed, the job goes on", "wait for each other"):
        assert other not in words


def test_the_stacks_of_worlds_that_meet_are_one_picture(tmp_path: Path) -> None:
    shown = ""

    def look(environment: dict[str, str]) -> None:
        nonlocal shown
        command = [sys.executable, "-m", "commlens", "stacks"]
        until = time.monotonic() + TIMEOUT_S
        both = re.compile(r"rollout 1\n  maybe_late.*rollout 0 and trainer 0\n", re.S | re.I)
        while not both.search(shown) and time.monotonic() < until:
            shown = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            ).stdout

    run("two_worlds", "rollout:1", {"trainer": 2, "rollout": 2}, tmp_path, look)
    assert shown.startswith("4 ranks of rollout and trainer stand at ")
    assert "Rollout 1\n  maybe_late" in shown
    assert "rollout 0 and trainer 0" in shown.lower()


@pytest.mark.parametrize(
    ("shape", "worlds"),
    [
        long("part_of_a_world", {"job": 3}),
        ("two_worlds", {"trainer": 2, "rollout": 2}),
        long("no_default_group", {"job": 2}),
        long("made_again", {"job": 2}),
    ],
)
def test_healthy_worlds_get_no_word(tmp_path: Path, shape: str, worlds: dict[str, int]) -> None:
    words = words_of(run(shape, "nobody", worlds, tmp_path))
    assert "commlens:" not in words and "VERDICT" not in words and "Error" not in words
