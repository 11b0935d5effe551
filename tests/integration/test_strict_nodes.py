"""Strict verification across nodes: the same refusals as on one node, and no harm where the other
node is out of reach.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

import verify_forked
from chosen import chosen, long
from emulated_nodes import PORT, Node, nodes, wait
from test_verify_strict import TIMEOUT_S, judge, judge_caught, launch
from zygote_client import Zygote

PROGRAM = Path(__file__).parent / "strict_nodes_program.py"
FAULTS = (
    "all_reduce_shape",
    "async_ops",
    "broadcast_root",
    "ddp_skipped_step",
    "fsdp_forward_order",
    "gather_or_scatter",
    "never_comes",
    "order_swap_groups",
    "both_receive",
    "send_recv_shape",
    "sigkill",
)
"""One fault of each kind. Rank 1, which deviates, is on the second node; ranks 0 and 1 run
different engines.
"""
USUAL = ("all_reduce_shape", "broadcast_root", "never_comes", "order_swap_groups", "sigkill")

pytestmark = [pytest.mark.timeout(TIMEOUT_S + 20), pytest.mark.launches]


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest,
    zygote: Zygote,
    tmp_path_factory: pytest.TempPathFactory,
    native_cache: Path,
) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("strict_nodes")
    names = [f"{name}:{size(name)}:2" for (name,) in chosen(request, "name") if name]
    return out, launch(
        zygote,
        out,
        "verify_forked",
        "mixed",
        "caught:4:2",
        *names,
        environ={"COMMLENS_NATIVE_DIR": str(native_cache)},
    )


def size(name: str) -> int:
    """Return how many ranks run a case."""
    import verify_cases

    return max(verify_cases.CASES[name].sizes)


@pytest.mark.parametrize("name", [long(name, when=name not in USUAL) for name in FAULTS])
def test_a_fault_on_the_second_node_is_refused_alike_on_all_nodes(
    launched: tuple[Path, str], name: str
) -> None:
    ranks = judge(*launched, name, size(name), 2)
    assert all(record["engine"] == verify_forked.MIXED[rank % 2] for rank, record in ranks.items())


def test_groups_are_usable_after_caught_refusals_across_nodes(launched: tuple[Path, str]) -> None:
    judge_caught(*launched, 4, 2)


def start(made: Sequence[Node], how: str, **settings: str) -> None:
    """Start the program on two nodes."""
    for node in made:
        node.start(
            [sys.executable, str(PROGRAM), str(node.number), how],
            {
                "MASTER_ADDR": made[0].address,
                "MASTER_PORT": str(PORT),
                "COMMLENS_ENGINE": "python",
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
                **settings,
            },
        )


def lines(node: Node, beginning: str) -> list[str]:
    """Return the lines of a node's output that begin so."""
    return [line for line in node.output.splitlines() if line.startswith(beginning)]


def until_trained(made: Sequence[Node]) -> None:
    """Wait until both nodes have run the healthy part, without a word of commlens."""
    end = time.monotonic() + 60
    while any(node.output.count("training took") < 2 for node in made):
        assert time.monotonic() < end, f"{made[0].output}\n{made[1].output}"
        time.sleep(0.05)
    assert [lines(node, "commlens") for node in made] == [[], []]


def judge_cut(made: Sequence[Node], *, across: str) -> None:
    """Require that the ranks of each node went on with each other, and that a collective across
    nodes ended in this way.
    """
    for node in made:
        for rank in (2 * node.number, 2 * node.number + 1):
            ended, inside, mismatch = lines(node, f"rank {rank}:")[1:]
            assert across in ended, ended
            assert "DistributedOperation" not in ended, ended
            # 5 to 7 s until the node is given up, 8 s until the backend's timeout
            assert float(ended.split()[3]) < 16, ended
            assert float(inside.split()[3]) < 2, inside
            assert (
                "DistributedOperationException Cannot apply desired operation due to shape"
                " mismatches" in mismatch
            )


def test_a_node_that_does_not_take_part_or_is_cut_off_harms_nothing(
    tmp_path: Path, zygote: Zygote
) -> None:
    # All at once, because most of the time is spent waiting.
    with (
        nodes(2, tmp_path / "without", zygote, subnet=98) as without,
        nodes(2, tmp_path / "stopped", zygote, subnet=97) as stopped,
        nodes(2, tmp_path / "cable", zygote) as cable,
    ):
        if not cable[0].isolated:
            pytest.skip("needs ip netns")
        start(without, "without")
        start(cable, "cut")
        start(stopped, "cut", COMMLENS_VERIFY_TIMEOUT="4")
        until_trained(cable)
        cable[1].pull_the_cable()
        until_trained(stopped)
        for pid in stopped[1].pids("commlens.verification.relay"):
            os.kill(pid, signal.SIGSTOP)
        for node in (*cable, *stopped):
            (node.folder / "go").touch()

        assert wait(without, 60) == [0, 0], f"{without[0].output}\n{without[1].output}"
        (line,) = lines(without[0], "commlens")
        assert line.startswith(
            "commlens: ranks 2-3 did not join strict verification within 10 s (commlens is not"
            " switched on there"
        )
        assert lines(without[1], "commlens") == []

        assert wait(cable, 60) == [0, 0], f"{cable[0].output}\n{cable[1].output}"
        judge_cut(cable, across="RuntimeError")  # of the backend
        for node, lost in zip(cable, ("ranks 2-3 on node1", "ranks 0-1 on node0"), strict=True):
            (line,) = lines(node, "commlens")
            assert f"strict verification has lost {lost}" in line

        assert wait(stopped, 60) == [0, 0], f"{stopped[0].output}\n{stopped[1].output}"
        judge_cut(stopped, across="done")
        assert "strict verification has lost ranks 2-3 on node1" in stopped[0].output
        assert "the relay of this node has stopped" in stopped[1].output
