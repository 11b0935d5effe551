"""Jobs on several nodes whose watchers join the states of their ranks along a tree, one of which is
lost while they do.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from emulated_nodes import PORT, Node, launch, nodes

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

KILL = """
import os, signal, sys, time
from commlens.watch.nodes.beat import decoded, key
from commlens.watch.nodes.store_client import StoreClient

address, port, pids = sys.argv[1], int(sys.argv[2]), dict(pair.split("=") for pair in sys.argv[3:])
client = StoreClient(address, port, answer_s=20.0)
while True:
    keys = client.existing([key("node", slot) for slot in range(8)])
    beats = [beat for beat in map(decoded, client.get(keys)) if beat is not None]
    reporter = next((beat for beat in beats if beat.asked_tree is not None), None)
    if reporter is not None:
        # the one with most nodes below it that neither reports nor serves the store
        others = [beat for beat in beats if not beat.serves_store and beat.slot != reporter.slot]
        lost = min(others, key=lambda beat: (5 in beat.ranks, beat.slot))
        os.kill(int(pids[str(min(lost.ranks))]), signal.SIGKILL)
        print("killed the watcher of ranks", *lost.ranks, flush=True)
        break
    time.sleep(0.02)
"""


def start(made: list[Node], per_node: int) -> None:
    script = made[0].folder.parent / "train.py"
    script.write_text(PROGRAM)
    launch(
        made,
        [str(script)],
        per_node=per_node,
        COMMLENS_STALL_TIMEOUT="4",
        COMMLENS_TEST_TREE_ARITY="2" if len(made) > 2 else "1",
    )


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


SHAPES = [(4, 2), pytest.param(2, 4, marks=pytest.mark.long)]


@pytest.mark.parametrize(("count", "per_node"), SHAPES)
def test_a_few_ranks_tell_what_is_wrong_with_all(tmp_path: Path, count: int, per_node: int) -> None:
    with nodes(count, tmp_path) as made:
        start(made, per_node)
        said = until(made[0], "VERDICT")
        until(made[0], "dump saved in")
    assert (
        "rank 5 never reached all_reduce #21 of the default group [0-7]; ranks 0-4,6-7 wait for it"
        in said
    )
    (verdict,) = verdicts(made)
    assert verdict["culprits"] == [5]


@pytest.mark.parametrize(("count", "per_node"), SHAPES)
def test_nobody_is_blamed_for_a_watcher_that_is_killed_when_it_is_asked(
    tmp_path: Path, count: int, per_node: int
) -> None:
    with nodes(count, tmp_path) as made:
        start(made, per_node)
        until(made[0], "training")
        pids = [f"{node.number * per_node}={node.processes[0].pid}" for node in made]
        made[0].start([sys.executable, "-c", KILL, made[0].address, str(PORT), *pids], {})
        until(made[0], "killed the watcher of ranks")
        until(made[0], "VERDICT", "no longer answers", "did not answer")
        time.sleep(5)
        said = verdicts(made)
    assert all(verdict["culprits"] in ([], [5]) for verdict in said)
