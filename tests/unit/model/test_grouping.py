"""Values grouped by a key."""

from __future__ import annotations

from commlens.model.grouping import grouped


def test_values_keep_their_order_and_keys_that_of_their_first_value() -> None:
    found = grouped((rank % 2 == 0, rank) for rank in (3, 0, 1, 2))
    assert found == {False: [3, 1], True: [0, 2]}
    assert list(found) == [False, True]
    assert grouped(()) == {}
