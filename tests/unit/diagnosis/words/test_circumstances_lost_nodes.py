"""Words about nodes that have fallen silent."""

from __future__ import annotations

import pytest

from commlens.diagnosis.words.circumstances import with_lost_nodes
from commlens.diagnosis.words.finding import Words
from commlens.model.cause import LostNode, NoFault

ONE = [LostNode("n07", [2, 3], 6.4, False)]
TWO = [*ONE, LostNode("n08", [4], 5.2, False)]


def words(nodes: list[LostNode], waits: str = "") -> Words:
    cause = NoFault(
        kind="missing",
        why="unknown",
        root_cause=True,
        blamed_by="unknown",
        confidence="low",
        lost_nodes=nodes,
        state="all-agree",
        ranks=[],
        finished=[],
        newest_unreadable=[],
        files_unreadable=0,
    )
    return with_lost_nodes(cause, Words("ranks 2-3 never came; rank 0 waits", "why", waits=waits))


def test_without_lost_nodes_the_words_stay() -> None:
    assert words([]).summary == "ranks 2-3 never came; rank 0 waits"
    assert words([]).explanation == "why"


@pytest.mark.parametrize(
    ("nodes", "waits", "summary"),
    [
        (ONE, "rank 0 waits", "rank 0 waits; node n07 (ranks 2-3) no longer answers"),
        (
            TWO,
            "",
            "ranks 2-3 never came; rank 0 waits; nodes n07 (ranks 2-3) and n08 (rank 4) no longer"
            " answer",
        ),
    ],
)
def test_silent_nodes(nodes: list[LostNode], waits: str, summary: str) -> None:
    assert words(nodes, waits).summary == summary
    assert words(nodes, waits).explanation == "why"


@pytest.mark.parametrize(
    ("waits", "summary"),
    [
        ("", "nodes n07 (ranks 2-3) and n08 (rank 4) vanished"),
        ("rank 0 waited", "nodes n07 (ranks 2-3) and n08 (rank 4) vanished; rank 0 waited"),
    ],
)
def test_nodes_that_vanished(waits: str, summary: str) -> None:
    gone = [LostNode(node.host, node.ranks, node.silent_s, True) for node in TWO]
    said = words(gone, waits)
    assert said.summary == summary
    assert said.explanation.startswith("The watcher of n07 and n08 fell silent 5 s ago")
