"""Which rank writes a key."""

from __future__ import annotations

from starting_ranks import in_store, init, rank, verdict, wrote


def test_a_key_with_the_ranks_own_number_is_that_ranks() -> None:
    others = [wrote(rank(n, init(), inside=False), f"ready-{n}") for n in (1, 3)]
    waiting = wrote(in_store(0, "ready-2"), "ready-0")
    found = verdict(waiting, others[0], rank(2, init(), inside=False, at=66), others[1])
    assert (found.kind, found.culprits, found.source) == ("missing", [2], "train.py:66")
