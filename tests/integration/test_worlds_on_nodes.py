"""Worlds on several nodes that share a group made by hand, on real gloo processes: one of them
reports for all, and without the others each speaks for itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from chosen import long
from emulated_nodes import Node, nodes, wait
from zygote_client import Zygote

pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("worlds_programs.py")
PORT = 29712
pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def two(tmp_path: Path, zygote: Zygote) -> Iterator[list[Node]]:
    with nodes(2, tmp_path, zygote, subnet=97) as made:
        yield made


def settings(two: list[Node], node: Node) -> Mapping[str, str]:
    return {
        "GROUP_HOST": two[0].address,
        "GROUP_PORT": str(PORT),
        "GO": str(node.folder.parent / "go"),
        "COMMLENS_STALL_TIMEOUT": "4",
        "COMMLENS_DUMP_DIR": str(node.folder / "dump"),
        "COLUMNS": "200",
    }


def launch(two: list[Node], late: str) -> None:
    """Start the trainers on the first node, and the rollout workers on the second."""
    for node, role in zip(two, ("trainer", "rollout"), strict=True):
        command = [sys.executable, "-m", "commlens", "launch", "--nproc-per-node=2"]
        command += ["--master-addr=127.0.0.1", f"--master-port={PORT + 1 + node.number}"]
        node.start([*command, str(PROGRAM), "two_worlds", late, role], settings(two, node))


def asked(two: list[Node], node: Node, command: str) -> str:
    """Return what a command prints on a node, without line breaks."""
    before = len(node.output)
    process = node.start([sys.executable, "-m", "commlens", command], settings(two, node))
    assert process.wait(60) == 0
    return " ".join(node.output[before:].split())


def end(two: list[Node]) -> None:
    (two[0].folder.parent / "go").touch()
    assert wait(two, 60) == [0, 0]
    for node in two:
        print(node.output)


def said(node: Node) -> str:
    """What was printed on a node, without line breaks."""
    return " ".join(node.output.split())


def until(is_true: Callable[[], object], seconds: float = 75) -> bool:
    until_s = time.monotonic() + seconds
    while not is_true() and time.monotonic() < until_s:
        time.sleep(0.1)
    return bool(is_true())


def watchers(node: Node) -> list[int]:
    """Return the processes that watch a node."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            environ = (path.parent / "environ").read_bytes()
            if b"commlens.watch" in path.read_bytes() and str(node.box_dir).encode() in environ:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("late", ["rollout 1", long("trainer 0")])
def test_one_world_reports_for_both(two: list[Node], late: str) -> None:
    launch(two, late.replace(" ", ":"))
    line = (
        rf"{late} never reached all_reduce #4 of group weight_sync"
        r" \[rollout 0-1, trainer 0\]; .{9,24} waits? for it\."
    )
    pointer = rf"commlens: (?i:{line}) \(the whole verdict was printed on \w+\)"

    def told() -> list[str]:
        return [
            next(
                (what for what in (rf"VERDICT {line}", pointer) if re.search(what, said(each))), ""
            )
            for each in two
        ]

    assert until(lambda: all(told())), [said(each) for each in two]
    for node in two:
        shown = asked(two, node, "status")
        assert re.search(r"4 ranks on 2 hosts.* worlds_programs.py:\d+ sleep", shown), shown
        shown = asked(two, node, "stacks")
        assert "4 ranks of rollout and trainer stand at" in shown, shown
        assert late.capitalize() in shown and "maybe_late" in shown and "its node" not in shown, (
            shown
        )
        shown = asked(two, node, "dump")
        assert "More of its processes are on" in shown, shown
    end(two)
    assert sorted(told()) == sorted([rf"VERDICT {line}", pointer])
    words = said(two[0]) + said(two[1])
    assert words.count("VERDICT") == 1
    assert "dump saved in" in said(two[0]) and "dump saved in" in said(two[1])
    for other in ("failed", "no record of", "never reached barrier"):
        assert other not in words


@pytest.mark.long
def test_healthy_worlds_get_no_word(two: list[Node]) -> None:
    launch(two, "nobody")
    assert wait(two, 75) == [0, 0]
    for node in two:
        assert "commlens:" not in node.output and "VERDICT" not in node.output


@pytest.mark.long
def test_without_the_other_worlds_watcher_nobody_is_named(two: list[Node]) -> None:
    for node, role in zip(two, ("trainer", "rollout"), strict=True):
        for rank in range(2):
            own = {
                **settings(two, node),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(PORT + 1 + node.number),
            }
            command = [sys.executable, "-m", "commlens", "run", str(PROGRAM)]
            node.start([*command, "two_worlds", "rollout:1", role], own)

    def told() -> bool:
        for pid in watchers(two[1]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # a rank may have started another one
        return "VERDICT" in said(two[0])

    assert until(lambda: watchers(two[1]))
    time.sleep(3)
    assert until(told), said(two[0])
    end(two)
    assert "there is no record of members 1-2 of group weight_sync" in said(two[0])
    assert "never reached" not in said(two[0]) and "VERDICT" not in said(two[1])
