"""Which rank writes a key."""

from __future__ import annotations

import msgspec
import pytest
from starting_ranks import in_store, init, rank, verdict, wrote

from commlens.diagnosis.graph.wait_graph import expected_writer
from commlens.diagnosis.index.log_index import index_logs


def test_a_key_with_the_ranks_own_number_is_that_ranks() -> None:
    others = [wrote(rank(n, init(), inside=False), f"ready-{n}") for n in (1, 3)]
    waiting = wrote(in_store(0, "ready-2"), "ready-0")
    found = verdict(waiting, others[0], rank(2, init(), inside=False, at=66), others[1])
    assert (found.kind, found.culprits, found.source) == ("missing", [2], "train.py:66")


@pytest.mark.parametrize(("key", "writer"), [("ready-0", 2), ("ready-1", None), ("ready-7", None)])
def test_a_key_holds_the_rank_in_the_writers_own_world(key: str, writer: int | None) -> None:
    """Processes 2 to 5 are ranks 0 to 3 of the second world."""
    waiting = wrote(in_store(3, key), "ready-1")
    logs = [
        *(rank(n, inside=False) for n in (0, 1, 2)),
        waiting,
        wrote(rank(4), "ready-2"),
        wrote(rank(5), "ready-3"),
    ]
    job = index_logs([msgspec.structs.replace(log, world_size=6) for log in logs], 1.0)
    wait = waiting.store_wait
    assert wait is not None
    group = msgspec.structs.replace(wait.channel.group, ranks=(2, 3, 4, 5))
    channel = msgspec.structs.replace(wait.channel, group=group)
    assert expected_writer(job, msgspec.structs.replace(wait, channel=channel)) == writer
