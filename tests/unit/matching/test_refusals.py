"""The dtypes and reduce ops that a backend refuses: gloo itself is asked, in a world of one rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from commlens.matching.refusals import BACKENDS, refuses

DTYPES = [
    *("float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32"),
    *("int64", "complex64", "float8_e4m3fn", "uint16"),
]
REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def ones(dtype: str) -> Any:
    return torch.ones(4, dtype=torch.uint8).to(getattr(torch, dtype))


CALLS: dict[str, Callable[[str], Any]] = {
    "broadcast": lambda dtype: dist.broadcast(ones(dtype), 0),
    "all_gather": lambda dtype: dist.all_gather([ones(dtype)], ones(dtype)),
    "gather": lambda dtype: dist.gather(ones(dtype), [ones(dtype)], 0),
    "scatter": lambda dtype: dist.scatter(ones(dtype), [ones(dtype)], 0),
    "all_to_all": lambda dtype: dist.all_to_all_single(ones(dtype), ones(dtype)),
}


@pytest.fixture(scope="module")
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def takes(call: Callable[..., Any], *arguments: Any) -> bool:
    try:
        call(*arguments)
    except (RuntimeError, ValueError):
        return False
    return True


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="an older gloo refuses more")
@pytest.mark.usefixtures("gloo")
def test_gloo_refuses_what_the_table_says() -> None:
    for (op, call), dtype in itertools.product(CALLS.items(), DTYPES):
        assert takes(call, dtype) is not refuses("gloo", op, dtype), (op, dtype)
    for dtype, name in itertools.product(DTYPES, REDUCE_OPS):
        reduced = takes(dist.all_reduce, ones(dtype), getattr(dist.ReduceOp, name))
        assert reduced is not refuses("gloo", "all_reduce", dtype, name), (dtype, name)


@pytest.mark.parametrize(
    ("op", "dtype", "reduce_op", "by"),
    [
        ("all_reduce", "float32", "SUM", []),
        ("all_reduce", "float32", "BAND", ["gloo", "nccl"]),
        ("all_reduce", "int64", "BAND", ["nccl"]),
        ("reduce", "int64", "AVG", ["gloo"]),
        ("reduce_scatter", "bool", "AVG", ["gloo", "nccl"]),
        ("broadcast", "int16", None, ["gloo", "nccl"]),
        ("send", "int16", None, ["nccl"]),
        ("all_gather", "float8_e5m2", None, ["gloo"]),
        ("barrier", "int16", None, []),
    ],
)
def test_which_backends_refuse(op: str, dtype: str, reduce_op: str | None, by: list[str]) -> None:
    assert [name for name in BACKENDS if refuses(name, op, dtype, reduce_op)] == by
    assert not refuses("mpi", op, dtype, reduce_op)
