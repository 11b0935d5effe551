"""Nodes that have fallen silent, as evidence."""

from __future__ import annotations

import time

import pytest
from builders import Job, all_reduce

from commlens.model.collective import State
from commlens.model.ranklog import RankLog
from commlens.watch.nodes.beat import Beat
from commlens.watch.nodes.known_nodes import Lost
from commlens.watch.nodes.lost import as_evidence, find_vanished, logs_of_vanished

CLOSED = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41234"


def closed_connection(ago_s: float) -> list[RankLog]:
    """Return the log of a rank whose connection was closed so long ago."""
    (log, _) = Job(2).run(lambda job, rank: iter([all_reduce(job.world, 8, line=10)])).logs()
    op = log.collectives[-1]
    op.state, op.error, op.done_ns = State.FAILED, CLOSED, time.time_ns() - int(ago_s * 1e9)
    return [log]


@pytest.mark.parametrize(
    ("silent_s", "read_every_s", "has_vanished"),
    [
        (9.0, 0.0, True),
        (14.0, 0.0, False),  # its watcher fell silent before
        (48.0, 20.0, True),  # it is heard so seldom
        (80.0, 20.0, False),
    ],
)
def test_a_node_has_vanished_if_connections_were_closed_at_that_moment(
    silent_s: float, read_every_s: float, *, has_vanished: bool
) -> None:
    node = Lost(Beat(1, "n1", [1]), silent_s, by_itself=True, read_every_s=read_every_s)
    assert find_vanished([node], closed_connection(10.0)) == [node] * has_vanished


def test_ranks_of_a_lost_node_have_the_numbers_of_their_world() -> None:
    node = Lost(Beat(1, "n1", [0, 1]), 9.0, by_itself=True)
    assert [log.rank for log in logs_of_vanished([node], closed_connection(10.0), 3)] == [3, 4]
    assert [each.ranks for each in as_evidence([node], [node], 3)] == [[3, 4]]
