"""Calls a function on several ranks, as ``run_on_ranks`` does, but the ranks are forks of a process
that has imported torch: for tests of what the function does.

``forked_calls.py CALL`` is one rank.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from zygote_client import Zygote, has_ended

from commlens.config import Settings, settings_environment

TIMEOUT_S = 60.0


class OnRanks:
    """``on_ranks(function, argument, world_size=3)`` returns what each rank returned."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self._zygote = zygote
        self._folder = folder
        self._calls = 0

    def __call__(self, function: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
        self._calls += 1
        folder = self._folder / f"call{self._calls}"
        folder.mkdir()
        call = folder / "call"
        call.write_bytes(pickle.dumps((function, args)))
        settings = Settings(box_dir=str(folder), job="ranks", watched=True)
        common = {
            **settings_environment(settings),
            "COMMLENS": "1",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        ranks = [
            {
                "environment": {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                "arguments": [__file__, str(call)],
            }
            for rank in range(world_size)
        ]
        pids = self._zygote.ask(do="start", folder=str(folder), store=False, ranks=ranks)["pids"]
        deadline = time.monotonic() + TIMEOUT_S
        while not all(map(has_ended, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
        statuses = self._zygote.reap(pids)
        said = "".join(
            f"--- rank {rank}, status {statuses[pid]}\n{(folder / f'rank{rank}.out').read_text()}"
            for rank, pid in enumerate(pids)
        )
        assert not any(statuses.values()), said
        print(said)
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]


def main() -> None:
    call = Path(sys.argv[1])
    rank = os.environ["RANK"]
    function, args = pickle.loads(call.read_bytes())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{call.with_name('store')}",
        rank=int(rank),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    call.with_name(f"result{rank}").write_bytes(pickle.dumps(function(*args)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
