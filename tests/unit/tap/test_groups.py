"""The numbers of a channel's collectives: counted by any thread, and given back where one was not
used.
"""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

from commlens.tap.groups import give_back, numbers


def test_a_number_that_was_given_back_is_the_next_one() -> None:
    draw = numbers()
    assert [draw(), draw(), draw()] == [1, 2, 3]
    assert give_back(draw, 3)
    assert [draw(), draw()] == [3, 4]


def test_the_first_one_too() -> None:
    draw = numbers()
    draw()
    assert give_back(draw, 1)
    assert draw() == 1


def test_not_where_another_has_been_drawn_since() -> None:
    draw = numbers()
    draw(), draw()
    assert not give_back(draw, 1)
    assert draw() == 3


def test_threads_never_get_the_same() -> None:
    draw, drawn = numbers(), []
    threads = [
        threading.Thread(target=lambda: drawn.extend([draw() for _ in range(5_000)]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(drawn) == list(range(1, 20_001))
