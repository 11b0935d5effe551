"""One name for all forms of a collective."""

from __future__ import annotations

import pytest

from commlens.model import ops


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        ("c10d::allreduce_", "all_reduce"),
        ("_allgather_base_.default", "all_gather"),
        ("recv_any_source_", "recv"),
        ("_some_new_op_", "some_new_op"),
    ],
)
def test_names_in_the_dispatcher(name: str, wire: str) -> None:
    assert ops.wire_op(name) == wire


@pytest.mark.parametrize(
    ("name", "wire", "members"),
    [
        ("_all_gather_base", "all_gather", ""),
        ("ALLGATHER_coalesced", ops.COALESCED, "all_gather"),
        ("allreduce_coalesced", "all_reduce", ""),
        ("all_reduce_barrier", "barrier", ""),
        ("something", "something", ""),
    ],
)
def test_names_in_recorders(name: str, wire: str, members: str) -> None:
    assert (ops.recorder_wire_op(name), ops.composite_wire_op(name)) == (wire, members)


def test_names_in_the_watchdogs_messages_and_in_comm_debug_mode() -> None:
    assert ops.watchdog_wire_op("_ALLGATHER_BASE") == "all_gather"
    assert ops.watchdog_wire_op("NEW_OP_") == "new_op"
    assert ops.api_wire_op("c10d_functional.all_gather_into_tensor_coalesced") == "all_gather"
    assert ops.api_wire_op("_c10d_functional.all_reduce_") == "all_reduce"


def test_every_name_of_the_dispatcher_has_one_in_nccls_recorder() -> None:
    assert ops.NCCL_NAMES.keys() == ops.WIRE_OPS.keys()
    for name, recorded in ops.NCCL_NAMES.items():
        assert ops.recorder_wire_op(recorded) in (ops.WIRE_OPS[name], "barrier")


def test_backends_that_pair_messages_by_tag() -> None:
    assert ops.matches_by_tag("gloo")
    assert not any(map(ops.matches_by_tag, ("nccl", "rccl", "xccl", "hccl")))


@pytest.mark.parametrize(
    ("rows", "splits", "fits"),
    [(7, (), True), (7, (3, 4), True), (7, (3, 3), False), (7, (7,), False)],
)
def test_splits_of_a_tensor(rows: int, splits: tuple[int, ...], fits: bool) -> None:
    assert ops.splits_fit(rows, splits, 2) is fits
