"""Calls that gloo refuses on one rank because of their own arguments."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from commlens.tap.rejections import was_not_issued, will_be_refused


def tensor(*shape: int) -> list[Any]:
    return [list(shape), "float32"]


def asked(name: str, inputs: list[Any], outputs: list[Any], **splits: list[int]) -> dict[str, Any]:
    return {"dop": name, "in": inputs, "out": outputs, "is": [], "os": [], **splits}


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        (asked("allgather_", [tensor(4)], [tensor(4), tensor(4)]), False),
        (asked("allgather_", [tensor(4)], [tensor(4), tensor(3)]), True),
        (asked("allgather_", [tensor(4)], [tensor(4)]), True),
        (asked("scatter_", [tensor(4), tensor(4)], [tensor(4)]), False),
        (asked("scatter_", [], [tensor(4)]), False),
        (asked("scatter_", [tensor(4)], [tensor(4)]), True),
        (asked("gather_", [tensor(4)], []), False),
        (asked("gather_", [tensor(4)], [tensor(4), tensor(5)]), True),
        (asked("reduce_scatter_", [tensor(4)], [tensor(4)]), True),
        (asked("alltoall_base_", [tensor(4, 2)], [tensor(8)]), False),
        (asked("alltoall_base_", [tensor(4)], [tensor(5)]), True),
        (asked("alltoall_base_", [tensor(4)], [tensor(5)], **{"is": [1, 3], "os": [2, 3]}), False),
        (asked("alltoall_base_", [tensor(4)], [tensor(5)], **{"is": [1, 2], "os": [2, 3]}), True),
        (asked("_allgather_base_", [tensor(4)], [tensor(8)]), False),
        (asked("_allgather_base_", [tensor(4)], [tensor(4)]), True),
        (asked("_reduce_scatter_base_", [tensor(8)], [tensor(4)]), False),
        (asked("_reduce_scatter_base_", [tensor(7)], [tensor(4)]), True),
        (asked("allreduce_", [tensor(4)], [tensor(4)]), False),
    ],
)
def test_tensors_that_do_not_fit_each_other(content: dict[str, Any], refused: bool) -> None:
    assert will_be_refused(content, 2) is refused


def test_nccl_takes_lists_of_tensors_of_different_sizes() -> None:
    uneven = asked("allgather_", [tensor(4)], [tensor(4), tensor(3)])
    assert will_be_refused(uneven, 2) and not will_be_refused(uneven, 2, "nccl")
    assert will_be_refused(uneven, 3, "nccl")


def test_an_error_about_the_arguments_shows_that_nothing_was_sent() -> None:
    assert was_not_issued("all_to_all", RuntimeError("Split sizes doesn't match total dim 0 size"))
    assert not was_not_issued("all_reduce", RuntimeError("Connection closed by peer"))
    assert not was_not_issued("all_reduce", KeyboardInterrupt())
    assert not was_not_issued("monitored_barrier", RuntimeError("wrong"))
