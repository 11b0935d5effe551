"""What collectives and tensor ops read and write."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from commlens.tap import tap
from commlens.tracing.in_flight.operands import OpAccess, operands_of

A, B = torch.ones(2), torch.zeros(2)
SPECS = {spec.name: spec for _, spec in tap.ops()}


def called(name: str, root: int = 0, **tensors: Any) -> list[tuple[str, bool]]:
    """Return the names of the tensors of a call and whether it writes them, on rank 1."""
    spec = SPECS[name]
    schema = getattr(torch.ops.c10d, name).default._schema
    arguments = [
        root if "root_rank" in argument.name else tensors.get(argument.name)
        for argument in schema.arguments
    ]
    names = {id(A): "a", id(B): "b"}
    return [
        (names[id(each.tensor)], each.written) for each in operands_of(spec, tuple(arguments), 1)
    ]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (called("allreduce_", tensors=[A]), [("a", True)]),
        (called("broadcast_", tensors=[A], root=0), [("a", True)]),
        (called("broadcast_", tensors=[A], root=1), [("a", False)]),
        (called("reduce_", tensors=[A], root=0), [("a", False)]),
        (called("reduce_", tensors=[A], root=1), [("a", True)]),
        (called("send", tensors=[A]), [("a", False)]),
        (called("recv_", tensors=[A]), [("a", True)]),
        (
            called("allgather_", output_tensors=[[A]], input_tensors=[B]),
            [("a", True), ("b", False)],
        ),
        (called("scatter_", output_tensors=[A], input_tensors=[[B]]), [("a", True), ("b", False)]),
        (called("barrier", tensor=A), []),
    ],
)
def test_a_collective(found: object, expected: object) -> None:
    assert found == expected


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "expected"),
    [
        ("add.Tensor", (A, B), {}, [False, False]),
        ("add_.Tensor", (A, B), {}, [True, False]),
        ("add.out", (A, B), {"out": torch.ones(2)}, [False, False, True]),
        ("copy_", (A, B), {}, [True, False]),
        ("_foreach_add_.List", ([A, A], [B, B]), {}, [True, True, False, False]),
        ("view", (A, [2]), {}, []),
        ("_unsafe_view", (A, [2]), {}, []),
        ("t_", (A,), {}, []),
        ("zeros_like", (A,), {}, []),
        ("new_empty", (A, [2]), {}, []),
        ("set_.source_Tensor", (A, B), {}, []),
    ],
)
def test_a_tensor_op(op: str, args: Any, kwargs: Any, expected: list[bool]) -> None:
    name, _, overload = op.partition(".")
    found = OpAccess(getattr(getattr(torch.ops.aten, name), overload or "default"))
    assert [each.written for each in found.accesses(args, kwargs)] == expected
