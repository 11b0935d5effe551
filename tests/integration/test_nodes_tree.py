"""Jobs on several nodes whose watchers join the states of their ranks along a tree, one of which is
lost while they do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from chosen import long
from emulated_nodes import PORT, Node, launch, nodes
from zygote_client import Zygote

PROGRAM = """
import os, time
import torch, torch.distributed as dist

def load_batch():
    time.sleep(90)

def main():
    dist.init_process_group("gloo")
    for number in range(20):
        dist.all_reduce(torch.ones(4))
        time.sleep(0.1)
    if dist.get_rank() == 0:
        os.write(1, b"training\\n")
    if dist.get_rank() == 5:
        load_batch()
    dist.all_reduce(torch.ones(4))

main()
"""

SWAPPED = """
import torch, torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    first, second = dist.new_group(), dist.new_group()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(40):
        swaps = dist.get_rank() == 5 and number == 30
        if dist.get_rank() == 0 and number == 30:
            print("swaps now", flush=True)
        for group in (second, first) if swaps else (first, second):
            dist.all_reduce(torch.ones(4), group=group)
        optimizer.step()

main()
"""

SLOTS = """
import sys
from commlens.watch.nodes.beat import Beat, decoded, key
from commlens.watch.nodes.store_client import StoreClient

client = StoreClient(sys.argv[1], int(sys.argv[2]), answer_s=20.0)
values = client.get([key("node", slot) for slot in range(int(sys.argv[3]))])
beats = [decoded(value, Beat) for value in values]
assert client.existing_keys([key("look-states", 0)])
print("slots", *(f"{beat.slot}={min(beat.ranks)}" for beat in beats), "of the tree", flush=True)
"""

KILL = """
import os, signal, sys, time
from commlens.watch.nodes.beat import Beat, decoded, key
from commlens.watch.nodes.store_client import StoreClient

address, port, pids = sys.argv[1], int(sys.argv[2]), dict(pair.split("=") for pair in sys.argv[3:])
client = StoreClient(address, port, answer_s=20.0)
while True:
    keys = client.existing_keys([key("node", slot) for slot in range(8)])
    beats = [beat for value in client.get(keys) if (beat := decoded(value, Beat)) is not None]
    reporter = next((beat for beat in beats if beat.asked and beat.asked.tree), None)
    if reporter is not None:
        # the one with most nodes below it that neither reports nor serves the store
        others = [beat for beat in beats if not beat.serves_store and beat.slot != reporter.slot]
        lost = min(others, key=lambda beat: (5 in beat.ranks, beat.slot))
        os.kill(int(pids[str(min(lost.ranks))]), signal.SIGKILL)
        print("killed the watcher of ranks", *lost.ranks, flush=True)
        break
    time.sleep(0.02)
"""


def start(
    made: list[Node], per_node: int, stall_timeout: str = "4", program: str = PROGRAM
) -> None:
    script = made[0].folder.parent / "train.py"
    script.write_text(program)
    launch(
        made,
        [str(script)],
        per_node=per_node,
        COMMLENS_STALL_TIMEOUT=stall_timeout,
        COMMLENS_TEST_TREE_ARITY=arity(made),
    )


def arity(made: list[Node]) -> str:
    return "2" if len(made) > 3 else "1"


def ask(node: Node, verb: str, made: list[Node]) -> Any:
    """Return what a command says on a node, as JSON."""
    said = node.folder / f"{verb}.json"
    said.unlink(missing_ok=True)
    commands = [
        f"{sys.executable} -m commlens {verb} --json > {said}.part",
        f"mv {said}.part {said}",
    ]
    node.start(["sh", "-c", " && ".join(commands)], {"COMMLENS_TEST_TREE_ARITY": arity(made)})
    end = time.monotonic() + 90
    while not said.exists():
        assert time.monotonic() < end, node.output
        time.sleep(0.1)
    return json.loads(said.read_text())


def until(node: Node, *texts: str, timeout_s: float = 90.0) -> str:
    end = time.monotonic() + timeout_s
    while not any(text in (said := " ".join(node.output.split())) for text in texts):
        assert time.monotonic() < end, f"none of {texts} was printed:\n{node.output}"
        time.sleep(0.05)
    return said


def verdicts(made: list[Node]) -> list[dict[str, Any]]:
    """Return all verdicts that were saved."""
    found = [path for node in made for path in node.folder.glob("dump/*/verdict*.json")]
    return [json.loads(path.read_text()) for path in found]


SHAPES = [(3, 2), (4, 2), (2, 4)]


def judge(made: list[Node], size: int) -> None:
    """Require the verdict on a rank that the others wait for."""
    said = until(made[0], "VERDICT")
    until(made[0], "dump saved in")
    (verdict,) = verdicts(made)  # before the nodes are killed, which others may report
    assert f"rank 5 never reached all_reduce #21 of the default group [0-{size - 1}]; ranks" in said
    assert verdict["culprits"] == [5]
    assert verdict["victims"] == [rank for rank in range(size) if rank != 5]


@pytest.mark.long
def test_a_few_ranks_tell_what_is_wrong_with_all(tmp_path: Path, zygote: Zygote) -> None:
    with nodes(3, tmp_path, zygote) as made:
        start(made, 2)
        judge(made, 6)


@pytest.mark.long  # test_stall_certain.py judges the states
@pytest.mark.parametrize(("count", "per_node"), SHAPES)
def test_a_fault_that_is_certain_is_reported_before_the_stall_timeout(
    tmp_path: Path, zygote: Zygote, count: int, per_node: int
) -> None:
    with nodes(count, tmp_path, zygote) as made:
        start(made, per_node, stall_timeout="auto", program=SWAPPED)
        until(made[0], "swaps now")
        began = time.monotonic()
        until(made[0], "VERDICT")
        assert time.monotonic() - began < 45, "the stall timeout is 60 s"
        until(made[0], "dump saved in")
        (verdict,) = verdicts(made)
    assert verdict["culprits"] == [5] and verdict["certain"]


@pytest.mark.long  # unit/watch/nodes/test_states_collecting.py loses nodes
@pytest.mark.parametrize(("count", "per_node"), SHAPES)
def test_nobody_is_blamed_for_a_watcher_that_is_killed_when_it_is_asked(
    tmp_path: Path, zygote: Zygote, count: int, per_node: int
) -> None:
    with nodes(count, tmp_path, zygote) as made:
        start(made, per_node)
        until(made[0], "training")
        pids = [f"{node.number * per_node}={node.processes[0].pid}" for node in made]
        made[0].start([sys.executable, "-c", KILL, made[0].address, str(PORT), *pids], {})
        until(made[0], "killed the watcher of ranks")
        until(made[0], "VERDICT", "no longer answers", "did not answer")
        time.sleep(5)
        said = verdicts(made)
    assert all(verdict["culprits"] in ([], [5]) for verdict in said)


@pytest.mark.parametrize(("count", "per_node"), [(2, 3), long(4, 2), long(2, 4)])
def test_watchers_and_commands_learn_of_all_ranks_from_a_few(
    tmp_path: Path, zygote: Zygote, count: int, per_node: int
) -> None:
    with nodes(count, tmp_path, zygote) as made:
        start(made, per_node)
        size = count * per_node
        judge(made, size)
        (job,) = ask(made[1], "status", made)
        assert job["verdict"]["culprits"] == [5], job
        assert job["verdict"]["victims"] == [r for r in range(size) if r != 5]
        assert f"{size} ranks on" in job["job"] and job["other_nodes"] == []
        assert sorted(rank for row in job["ranks"] for rank in row["ranks"]) == [*range(size)]
        classes = ask(made[1], "stacks", made)
        assert sorted(rank for each in classes for rank in each["ranks"]) == [*range(size)]
        assert [5] in [each["ranks"] for each in classes]
        # an inner node of the tree is lost: its children are read in its place
        script = [sys.executable, "-c", SLOTS, made[0].address, str(PORT), str(count)]
        made[0].start(script, {})
        said = until(made[0], "of the tree").partition("slots ")[2].split()
        first_ranks = dict(map(int, pair.split("=")) for pair in said if "=" in pair)
        inner = made[first_ranks[1] // per_node]
        if count > 2 and inner.number:
            asks = next(node for node in made if node is not inner and node.number)
            # stopped: were it killed, its ranks would start another one
            os.kill(inner.processes[0].pid, signal.SIGSTOP)
            (job,) = ask(asks, "status", made)
            (line,) = job["other_nodes"]
            assert line.startswith("Node ") and "did not answer" in line
            assert f"rank {first_ranks[1]}" in line or f"ranks {first_ranks[1]}-" in line
