"""The dtypes and reduce ops that a backend refuses, on the rank that calls it, before it sends
anything.

gloo: each op with each dtype and reduce op on torch 2.13.0, of which 2.6.0 takes no more. NCCL: as
torch's ProcessGroupNCCL checks it (``getNcclDataType`` and ``getNcclReduceOp``). A call that only
some versions refuse is accepted here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from commlens.model.ops import BARRIERS, POINT_TO_POINT

_INTEGERS: Final = frozenset({"int8", "uint8", "int32", "int64", "bool"})
_FLOATS: Final = frozenset({"float16", "bfloat16", "float32", "float64"})
_COMPLEX: Final = frozenset({"complex64", "complex128"})
_EIGHT_BITS: Final = frozenset({"float8_e4m3fn", "float8_e5m2"})
_UNSIGNED: Final = frozenset({"uint16", "uint32", "uint64"})
_BITWISE: Final = frozenset({"BAND", "BOR", "BXOR"})


class _Refusals(NamedTuple):
    dtypes: frozenset[str]
    """Of the tensors of a collective."""
    in_messages: frozenset[str]
    """Of those of a send or a receive."""
    reduce_ops: dict[str, frozenset[str]]
    """The dtypes of a reduction with this op."""


_EVERY_DTYPE: Final = _INTEGERS | _FLOATS | _COMPLEX | _EIGHT_BITS | _UNSIGNED | {"int16"}

_REFUSALS: Final = {
    "gloo": _Refusals(
        dtypes=frozenset({"int16"}) | _UNSIGNED | _EIGHT_BITS,
        in_messages=frozenset(),
        reduce_ops={
            "AVG": _INTEGERS,
            **dict.fromkeys(_BITWISE, _FLOATS | _COMPLEX),
            **dict.fromkeys(("PRODUCT", "MIN", "MAX"), _COMPLEX),
        },
    ),
    "nccl": _Refusals(
        dtypes=frozenset({"int16"}),
        in_messages=frozenset({"int16"}),
        reduce_ops={"AVG": frozenset({"bool"}), **dict.fromkeys(_BITWISE, _EVERY_DTYPE)},
    ),
}

BACKENDS: Final = tuple(_REFUSALS)
"""The backends whose refusals are known."""


def refuses(backend: str, op: str, dtype: str, reduce_op: str | None = None) -> bool:
    """Return whether a backend refuses a wire op because of its dtype, or the two together."""
    refusals = _REFUSALS.get(backend)
    if refusals is None or op in BARRIERS:
        return False
    if op in POINT_TO_POINT:
        return dtype in refusals.in_messages
    if backend == "gloo" and op == "gather" and dtype in _COMPLEX:
        return True
    return dtype in refusals.dtypes or dtype in refusals.reduce_ops.get(reduce_op or "", ())
