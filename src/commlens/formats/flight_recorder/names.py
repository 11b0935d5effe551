"""Parse names in Flight Recorder entries: ``nccl:_all_gather_base``, ``nccl:send 0->1``, C++
dtypes.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from commlens.model.limits import WORLD_MAX
from commlens.model.ops import COALESCED, recorder_wire_op

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
_RANK_MAX: Final = 1 << 31
_P2P: Final = re.compile(r"(send|recv|recvAnySource) ?(\d{1,9})(?:->|<-)(\d{1,9}|\?|-1)")

DTYPES: Final = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "ComplexHalf": "complex32",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Bool": "bool",
    "BFloat16": "bfloat16",
    "UInt16": "uint16",
    "UInt32": "uint32",
    "UInt64": "uint64",
}
"""From the name that c10::toString(ScalarType) writes to the name in Python."""


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
        return self.op == COALESCED


@lru_cache(maxsize=4096)
def read_name(name: str) -> ProfilingName:
    """Parse ``nccl:all_reduce``, ``nccl2:all_reduce``, ``nccl:send 0->1``, ``nccl:recv 1<-0`` or
    ``nccl2:recv 1<-?``.
    """
    prefix, _, raw = name.rpartition(":")
    backend = prefix.removesuffix("-lazy").rstrip("0123456789")  # of torch 2.14 and later
    device = _DEVICES.get(backend, "")
    found = _P2P.match(raw)
    if found:
        op = "send" if found[1] == "send" else "recv"
        return ProfilingName(
            op,
            found[1],
            backend,
            device,
            int(found[2]),
            int(found[3]) if found[3].isdecimal() else None,
        )
    raw = raw.split(" ")[0]
    return ProfilingName(recorder_wire_op(raw), raw, backend, device)


def dtype_of(name: str) -> str:
    """Return ``"float32"`` for ``"Float"``; an unknown name is kept."""
    return DTYPES.get(name, name.lower() if name.startswith("Float8") else name)


def has_too_many_ranks(text: str) -> bool:
    """Return whether a list of ranks is longer than that of any job."""
    return text.count(",") >= WORLD_MAX


# no long numbers, which take long to parse
_RANKS: Final = re.compile(r"\s*\[\s*([0-9]{1,10}\s*(,\s*[0-9]{1,10}\s*)*)?\]\s*")


@lru_cache(maxsize=4096)
def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in ``"[0, 1, 5]"``; none for any other text, or if there are more than a job
    has. Nothing is evaluated.
    """
    if has_too_many_ranks(text) or _RANKS.fullmatch(text) is None:
        return ()
    ranks = tuple(map(int, re.findall(r"[0-9]+", text)))
    return ranks if max(ranks, default=0) < _RANK_MAX else ()
