"""Values grouped by a key, and sorted names."""

from __future__ import annotations

from commlens.model.grouping import grouped, natural


def test_values_keep_their_order_and_keys_that_of_their_first_value() -> None:
    found = grouped((rank % 2 == 0, rank) for rank in (3, 0, 1, 2))
    assert found == {False: [3, 1], True: [0, 2]}
    assert list(found) == [False, True]
    assert grouped(()) == {}


def test_numbers_in_names_are_sorted_as_numbers() -> None:
    long = f"a{'9' * 5000}"  # more digits than int() takes
    names = ["a10b", "7", "a2b", long, "a", "10", "b"]
    ordered = ["7", "10", "a", long, "a2b", "a10b", "b"]
    assert sorted(names, key=natural) == ordered
