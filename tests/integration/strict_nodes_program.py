"""The ranks of one node of two under strict verification: ``python strict_nodes_program.py NODE
HOW``, with two ranks on each node.

One process imports torch, and forks the ranks. ``HOW`` is ``healthy``, ``without`` (node 1 runs
without commlens) or ``cut``: after ``training`` was printed, the test cuts node 1 off in some way,
and creates the file ``go`` in both working directories.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PER_NODE = 2
NODES = 2


def say(text: str) -> None:
    """Print a line at once, with the rank."""
    os.write(1, f"rank {os.environ['RANK']}: {text}\n".encode())


def collective(group: dist.ProcessGroup | None, size: int = 4) -> str:
    """Run an all_reduce and return how it ended."""
    try:
        dist.all_reduce(torch.ones(size), group=group)
    except Exception as error:
        return f"{type(error).__name__} {str(error).splitlines()[0]}"
    return "done"


def train(node: int, how: str) -> None:
    """Run a healthy program, and go on after the nodes were cut off from each other."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    inside = [dist.new_group([first, first + 1]) for first in range(0, NODES * PER_NODE, PER_NODE)][
        node
    ]
    across = [dist.new_group([first, first + PER_NODE]) for first in range(PER_NODE)][
        int(os.environ["LOCAL_RANK"])
    ]
    began = time.monotonic()
    for _ in range(20):
        for group in (None, inside, across):
            assert collective(group) == "done"
    pair = (dist.get_rank() + PER_NODE) % (NODES * PER_NODE)
    for tag in range(3):
        if node == 0:
            dist.send(torch.ones(4), pair, tag=tag)
        else:
            dist.recv(torch.ones(4), pair, tag=tag)
    say(f"training took {time.monotonic() - began:.2f} s")
    if how != "cut":
        dist.destroy_process_group()
        return
    while not Path("go").exists():
        time.sleep(0.02)
    began = time.monotonic()
    ended = collective(None)
    say(f"across, {time.monotonic() - began:.1f} s: {ended}")
    began, longest = time.monotonic(), 0.0
    for _ in range(200):
        at = time.monotonic()
        assert collective(inside) == "done"
        longest = max(longest, time.monotonic() - at)
    say(f"inside, {longest:.1f} s: done")
    say(f"mismatch: {collective(inside, 4 + dist.get_rank() % 2)}")


def main() -> None:
    node, how = int(sys.argv[1]), sys.argv[2]
    pids = []
    for local in range(PER_NODE):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 1
        try:
            places = {
                "RANK": node * PER_NODE + local,
                "WORLD_SIZE": NODES * PER_NODE,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": PER_NODE,
            }
            os.environ.update({name: str(value) for name, value in places.items()})
            if not (how == "without" and node == 1):
                import commlens

                commlens.enable(debug=True, watched=True)
            train(node, how)
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


if __name__ == "__main__":
    main()
