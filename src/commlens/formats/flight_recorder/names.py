"""Parse names in Flight Recorder entries: ``nccl:_all_gather_base``, ``nccl:send 0->1``, C++ dtypes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

__all__ = ["CLOSING", "ProfilingName", "dtype_of", "parse_ranks", "read_name"]

CLOSING: Final = "coalesced"
"""The op of the entry that ends a coalesced group."""

_WIRE_OPS: Final = {
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_v": "all_gather",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_v": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "all_to_all_v_single": "all_to_all",
    "recvAnySource": "recv",
    "recv_any_source": "recv",
    "coalesced": CLOSING,
    "ALLGATHER_coalesced": CLOSING,
    "REDUCE_SCATTER_coalesced": CLOSING,
    "ALLREDUCE_coalesced": CLOSING,
}
"""Names that torch's backends give their operations in its profiler and recorder, torch 2.2 to 2.15."""

_DEVICES: Final = {
    "nccl": "cuda",
    "ncclx": "cuda",
    "rccl": "cuda",
    "gloo": "cpu",
    "mpi": "cpu",
    "xccl": "xpu",
    "hccl": "hpu",
    "mccl": "musa",
}
_P2P: Final = re.compile(r"(send|recv|recvAnySource) ?(\d{1,9})(?:->|<-)(\d{1,9}|\?|-1)")

_DTYPES: Final = {
    "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Half": "float16", "Float": "float32",
    "Double": "float64", "ComplexHalf": "complex32", "ComplexFloat": "complex64", "ComplexDouble": "complex128", "Bool": "bool",
    "BFloat16": "bfloat16", "UInt16": "uint16", "UInt32": "uint32", "UInt64": "uint64",
}  # fmt: skip
"""c10::toString(ScalarType) to the name in Python."""


class ProfilingName(NamedTuple):
    """A parsed profiling name."""

    op: str  # wire op: "all_gather"; an unknown op keeps its name
    raw: str  # "_all_gather_base"
    backend: str  # "nccl", also for "nccl2:..."
    device: str  # "cuda"; "" for an unknown backend
    own_rank: int | None = None  # point-to-point: group rank of the recording rank
    peer: int | None = None  # point-to-point: group rank of the peer, if known

    @property
    def closes(self) -> bool:
        """Whether the entry closes a coalesced group."""
        return self.op == CLOSING


@lru_cache(maxsize=4096)
def read_name(name: str) -> ProfilingName:
    """Parse ``nccl:all_reduce``, ``nccl2:all_reduce``, ``nccl:send 0->1``, ``nccl:recv 1<-0`` or ``nccl2:recv 1<-?``."""
    prefix, _, raw = name.rpartition(":")
    backend = prefix.removesuffix("-lazy").rstrip("0123456789")
    device = _DEVICES.get(backend, "")
    found = _P2P.match(raw)
    if found:
        op = "send" if found[1] == "send" else "recv"
        return ProfilingName(op, found[1], backend, device, int(found[2]), int(found[3]) if found[3].isdecimal() else None)
    raw = raw.split(" ")[0]
    op = _WIRE_OPS.get(raw, raw)
    return ProfilingName(CLOSING if raw.endswith("_coalesced") and raw[:1].isupper() else op, raw, backend, device)


def dtype_of(name: str) -> str:
    """Return ``"float32"`` for ``"Float"``; an unknown name is kept."""
    return _DTYPES.get(name, name.lower() if name.startswith("Float8") else name)


@lru_cache(maxsize=4096)
def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in ``"[0, 1, 5]"``; none for any other text. Nothing is evaluated."""
    inside = text.strip()
    if not (inside.startswith("[") and inside.endswith("]")):
        return ()
    try:
        ranks = tuple(int(part) for part in inside[1:-1].split(",") if len(part) < 12) if inside[1:-1].strip() else ()
    except ValueError:
        return ()
    return ranks if all(rank >= 0 for rank in ranks) else ()
