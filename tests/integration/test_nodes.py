"""Jobs on several nodes, which are emulated: one node reports for all, and nobody is accused when a
node is lost.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated_nodes import Node, launch, nodes, wait
from zygote_client import Zygote

import commlens

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist

def load_batch():
    time.sleep(60)

def step(number):
    odd = how == "mismatch" and number == 10 and dist.get_rank() == 3
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)

def main():
    dist.init_process_group("gloo")
    other = dist.new_group()
    if how == "mismatch":
        time.sleep(3)  # until the watchers of both nodes have met
    for number in range(40):
        step(number)
        time.sleep(0.1)
    os.write(1, b"training\\n")
    if dist.get_rank() == 3:
        if how in ("stall", "mismatch"):
            load_batch()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    if how == "wait":
        time.sleep(3)
    if how == "cycle":
        groups = [dist.group.WORLD, other]
        for group in reversed(groups) if dist.get_rank() == 3 else groups:
            dist.all_reduce(torch.ones(1), group=group)
    step(40)
    if how == "cable":
        time.sleep(8)
        step(41)
    dist.destroy_process_group()

how = sys.argv[1]
main()
"""


@pytest.fixture
def two(tmp_path: Path, zygote: Zygote) -> Iterator[list[Node]]:
    (tmp_path / "train.py").write_text(PROGRAM)
    with nodes(2, tmp_path, zygote) as made:
        yield made


def start(two: list[Node], how: str, **settings: str) -> None:
    script = two[0].folder.parent / "train.py"
    launch(two, [str(script), how], **{"COMMLENS_STALL_TIMEOUT": "3", **settings})


def said(node: Node) -> str:
    """What commlens printed on a node, without line breaks."""
    lines = [
        line.strip()
        for line in node.output.splitlines()
        if re.match(r"commlens: |VERDICT |WHY | {9,10}\S", line)
    ]
    return " ".join(" ".join(lines).split())


def until(node: Node, text: str, *, timeout_s: float) -> float:
    end = time.monotonic() + timeout_s
    while text not in " ".join(node.output.split()):
        assert time.monotonic() < end, f"{text!r} was not printed:\n{node.output}"
        time.sleep(0.05)
    return time.monotonic()


def test_a_mismatch_and_a_stall_on_the_second_node_are_told_on_both(two: list[Node]):
    start(two, "mismatch", COMMLENS_ABORT_ON="stall")
    codes = wait(two, 60)
    first, second = map(said, two)
    assert 0 not in codes, first
    assert None not in codes, first
    # The wrong reduce op hangs nothing. Only the digests of both nodes together show it.
    assert (
        "VERDICT rank 3 disagrees on the reduce op of all_reduce #11 of the default group [0-3]"
        in first
    )
    assert "commlens: Rank 3 disagrees on the reduce op of all_reduce #11" in second
    assert (
        "VERDICT rank 3 never reached all_reduce #41 of the default group [0-3]; ranks 0-2 wait"
        " for it." in first
    )
    assert "load_batch" in first
    assert (
        "commlens: Rank 3 never reached all_reduce #41 of the default group [0-3]; ranks 0-2 wait"
        " for it. (the whole" in second
    )
    assert "VERDICT" not in second
    assert (
        first.count("ending the job, because abort_on includes stall")
        == second.count("ending the job, because abort_on includes stall")
        == 1
    )
    reports = [json.loads(path.read_text()) for path in two[0].folder.glob("dump/*/verdict*.json")]
    assert [report["culprits"] for report in reports] == [[3]]
    # The reporter's dump holds all ranks, so that it can be diagnosed without the other node's.
    (dump,) = two[0].folder.glob("dump/*")
    verdict = commlens.diagnose([dump])
    assert (verdict.kind, verdict.culprits, verdict.missing_evidence) == ("missing", [3], [])


@pytest.mark.long
def test_ranks_of_two_nodes_that_wait_for_each_other_are_told_soon(two: list[Node]):
    start(two, "cycle", COMMLENS_STALL_TIMEOUT="auto", COMMLENS_ABORT_ON="stall")
    began = until(two[0], "training", timeout_s=100)
    ended = until(two[0], "ending the job, because abort_on includes stall", timeout_s=40)
    assert None not in wait(two, 60), two[0].output
    assert ended - began < 25, said(two[0])
    first, second = map(said, two)
    assert "wait for each other" in first and "wait for each other" in second
    assert (first.count("VERDICT"), second.count("VERDICT")) == (1, 0)


@pytest.mark.long
def test_a_death_on_the_second_node_is_told_on_both(two: list[Node]):
    start(two, "kill")
    codes = wait(two, 60)
    first, second = map(said, two)
    assert None not in codes, first
    line = (
        "ank 3 died of SIGKILL; ranks 0-2 were waiting for it in all_reduce #41 of the default"
        " group [0-3]."
    )
    assert f"VERDICT r{line}" in first
    assert f"commlens: R{line}" in second
    assert (first + second).count("VERDICT") == 1


@pytest.mark.long
def test_a_healthy_job_on_two_nodes_says_nothing(two: list[Node]):
    start(two, "wait", COMMLENS_STALL_TIMEOUT="10")
    assert wait(two, 60) == [0, 0], two[0].output
    assert [said(node) for node in two] == ["", ""]


def test_a_node_without_a_network_is_lost_and_nobody_is_blamed(two: list[Node]):
    if not two[0].isolated:
        pytest.skip("needs ip netns")
    start(two, "cable")
    for node in two:
        end = time.monotonic() + 60
        while node.output.count("training") < 2:
            assert time.monotonic() < end, node.output
            time.sleep(0.05)
    time.sleep(1)
    two[1].pull_the_cable()
    until(two[0], "Node node1 (ranks 2-3) no longer answers.", timeout_s=30)
    until(
        two[1],
        "Of ranks 0-1 on other nodes nothing is known: the job's store at 10.99.0.1:29511 has not"
        " answered",
        timeout_s=30,
    )
    for node in two:
        reports = [
            json.loads(path.read_text()) for path in node.folder.glob("dump/*/verdict*.json")
        ]
        assert [report["culprits"] for report in reports if report["culprits"]] == []


TOP = """
import os, pty, select, sys, time
pid, terminal = pty.fork()
if not pid:
    os.execv(sys.executable, [sys.executable, "-m", "commlens", "top", "--interval", "0.3"])
seen, end = b"", time.monotonic() + 20
while b"4 ranks on" not in seen and time.monotonic() < end:
    seen += os.read(terminal, 65536) if select.select([terminal], [], [], 0.2)[0] else b""
time.sleep(0.5)
seen += os.read(terminal, 65536) if select.select([terminal], [], [], 0)[0] else b""
os.write(terminal, b"q")
os.waitpid(pid, 0)
os.write(1, seen)
"""


@pytest.mark.long
def test_the_next_node_speaks_if_the_first_is_killed(two: list[Node], tmp_path: Path):
    start(two, "stall")
    until(two[1], "Rank 3 never reached all_reduce #41", timeout_s=60)
    before = len(two[1].output)
    two[1].start([sys.executable, "-m", "commlens", "status"], {}).wait(30)
    shown = [re.split(r"  +", line.strip()) for line in two[1].output[before:].splitlines()]
    rows = [line for line in shown if line[0] in ("0-2", "3")]
    assert len(rows) == 2, shown
    assert not two[0].isolated or [row[1] for row in rows] == ["2 hosts", "node1"]
    assert rows[0][-2:] == ["3", "train.py:10 step"] and "load_batch" in rows[1][-1]
    two[1].start(
        [sys.executable, "-c", TOP], {"TERM": "xterm", "COLUMNS": "120", "LINES": "24"}
    ).wait(30)
    assert (
        "4 ranks on" in two[1].output and "load_batch" in two[1].output.rpartition("4 ranks on")[2]
    ), two[1].output
    two[0].kill()
    # Its store ended with it, and so did the connections of the second node's ranks.
    until(two[1], "rank 2", timeout_s=20)
