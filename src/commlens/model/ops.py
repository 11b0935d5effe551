"""Semantics of collectives: their names in the dispatcher, recorders and logs, and how they involve
the ranks of a group.

Ranks that call different forms of one collective (``all_gather`` into a list on one rank, into a
tensor on another) meet on the wire. So records are compared by their *wire op*, the canonical name
used here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_NUMBER: Final = re.compile(r"\d+")

UNKNOWN_DTYPE: Final = "unknown"
"""Dtype of a tensor in a source that tells only its size."""

STORE_CLIENT: Final = "TCPStore"
"""Op of the constructor of a ``TCPStore`` that waits for its server."""

STORE_SERVER: Final = "TCPStore(is_master=True)"
"""Op of the constructor of a ``TCPStore`` that waits for its clients."""

COALESCED: Final = "coalesced"
"""Wire op of a record that closes a coalesced group, or represents a group of different ops."""

POINT_TO_POINT: Final = frozenset({"send", "recv"})
"""Wire ops between two ranks: matched by pair, never by the group's sequence number."""

BARRIERS: Final = frozenset({"barrier", "monitored_barrier"})
"""Wire ops without data."""

WITHOUT_TENSORS: Final = BARRIERS | {
    "init_process_group",
    "new_group",
    "split_group",
    "init_device_mesh",
}
"""Ops that pass no tensors, so that nothing of these can differ: the barriers, and the calls that
make groups.
"""

NEEDS_ALL: Final = (
    frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}) | BARRIERS
)
"""Wire ops that complete on no rank before all ranks have arrived."""

SENT_BY_ROOT: Final = frozenset({"broadcast", "scatter"})
"""Wire ops that send the root's data to the other ranks."""

SENT_TO_ROOT: Final = frozenset({"gather", "reduce"})
"""Wire ops that send the other ranks' data to the root. Some ranks complete once the root has
entered, so the root must not delay its part until all ranks have arrived.
"""

ROOTED: Final = SENT_BY_ROOT | SENT_TO_ROOT
"""Wire ops with a root, which some ranks may legally leave before others have arrived."""

REDUCING: Final = frozenset({"all_reduce", "reduce", "reduce_scatter"})
"""Wire ops with a reduce op."""

UNEVEN: Final = frozenset({"all_to_all", "gather", "scatter"})
"""Wire ops whose tensors may legally differ in size between ranks."""

ROUTED: Final = frozenset({"dispatch", "combine", "low_latency_dispatch", "low_latency_combine"})
"""Ops of experts' libraries: each rank sends as many rows as its router chose, so sizes differ."""

IN_PLACE: Final = frozenset({"all_reduce", "broadcast", "reduce"}) | POINT_TO_POINT
"""Wire ops whose input is also their output."""

GLOO_WAIT_ONLY: Final = frozenset({"reduce_scatter"}) | POINT_TO_POINT
"""Wire ops whose gloo Work never reports completion (torch 2.6 to 2.15); only a wait reveals it."""

GRAPH_REPLAY: Final = "graph_replay"
"""The op of a record of a CUDA graph's replay, on each group whose collectives the graph contains.
These are not recorded one by one.
"""

LIBRARIES: Final = frozenset(
    {"symmetric memory", "torch window", "ray", "deep_ep", "vllm", "sglang", "nvshmem4py"}
)
"""The libraries whose calls past the dispatcher are recorded, each on channels of a device type
with its name.
"""

WIRE_OPS: Final[dict[str, str]] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "gather_": "gather",
    "gather_into_tensor_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
"""Dispatcher name without ``c10d::`` (torch 2.6 to 2.15) to wire op."""

NCCL_NAMES: Final[dict[str, str]] = WIRE_OPS | {
    "allreduce_coalesced_": "allreduce_coalesced",
    "_allgather_base_": "_all_gather_base",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "_reduce_scatter_base_": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "monitored_barrier_": "barrier",
}
"""Dispatcher name to the name in NCCL's recorder."""


def _key(name: str) -> str:
    return name.replace("_", "").lower()


_BY_KEY: Final = {_key(name): op for name, op in WIRE_OPS.items()} | {
    "allreducesparse": "all_reduce",
    "allreducebarrier": "barrier",
    "broadcastoop": "broadcast",
    "reduceoop": "reduce",
    "allgatherintotensor": "all_gather",
    "allgathersingle": "all_gather",
    "allgathertensor": "all_gather",
    "allgatherv": "all_gather",
    "reducescattertensor": "reduce_scatter",
    "reducescattersingle": "reduce_scatter",
    "reducescatterv": "reduce_scatter",
    "alltoallsingle": "all_to_all",
    "alltoallvsingle": "all_to_all",
    "sharddimalltoall": "all_to_all",
    "coalesced": COALESCED,
}
"""Wire op by any of torch's names for a collective, without underscores and in lower case: in the
dispatcher, in recorders (torch 2.2 to 2.15), c10d's OpType in the watchdog's messages, and
functional collectives.
"""


def wire_op(dispatcher_name: str) -> str:
    """Return the wire op of a ``c10d`` op; an unknown op keeps its name without the underscores at
    its ends.
    """
    name = dispatcher_name.removeprefix("c10d::").split(".")[0]
    return WIRE_OPS.get(name, name.strip("_"))


def recorder_wire_op(name: str) -> str:
    """Return the wire op of a name in a recorder: ``"all_gather"`` for ``"_all_gather_base"``. An
    unknown op keeps its name.
    """
    return COALESCED if _composite(name) else _BY_KEY.get(_key(name), name)


def composite_wire_op(name: str) -> str:
    """Return the wire op that the members of a coalesced group make up: ``"all_gather"`` for
    ``"ALLGATHER_coalesced"``; "" if none.

    NCCL makes an all_gather of tensors of different sizes from broadcasts, and a reduce_scatter
    from reduces.
    """
    return _BY_KEY.get(_key(_composite(name)), "")


def _composite(name: str) -> str:
    """Return the OpType in the name of an entry that closes a group: ``"ALLGATHER"`` in
    ``"ALLGATHER_coalesced"``; "" if there is none.
    """
    op_type = name.removesuffix("_coalesced")
    return op_type if op_type != name and op_type.isupper() else ""


def watchdog_wire_op(op_type: str) -> str:
    """Return the wire op of an OpType: ``"all_gather"`` for ``"_ALLGATHER_BASE"``. An unknown op
    keeps its name in lower case.
    """
    return _BY_KEY.get(_key(op_type), op_type.strip("_").lower())


def api_wire_op(name: str) -> str:
    """Return the wire op of a name in CommDebugMode: ``"all_gather"`` for
    ``"c10d_functional.all_gather_into_tensor"``.
    """
    name = (
        name.rsplit(".", 1)[-1]
        .removesuffix("_")
        .removesuffix("_out")
        .removesuffix("_coalesced")
        .removesuffix("_autograd")
    )
    return _BY_KEY.get(_key(name), name)


def matches_by_tag(backend: str) -> bool:
    """Return whether a backend pairs messages by tag, in any order, as gloo does.

    NCCL and its relatives (RCCL, XCCL, HCCL, ...) ignore tags: the first send meets the first
    receive.
    """
    return "ccl" not in backend


def splits_fit(rows: int, splits: Sequence[int], size: int) -> bool:
    """Return whether a rank's splits fit its own tensor; if not, its backend refuses the call and
    sends nothing.
    """
    return not splits or (len(splits) == size and sum(splits) == rows)


def tells_totals(name: str) -> bool:
    """Return whether the recorded sizes of an all_to_all are all that a rank sends and receives.

    In the watchdog's messages, those of the list form are of its first tensor only (torch before
    2.4).
    """
    return name != "ALLTOALL"


def key_kind(key: str) -> str:
    """Return a key of the store, or a store's prefix, with ``#`` for each number: programs number
    those of one kind, ``rate-7`` after ``rate-6``.
    """
    return _NUMBER.sub("#", key)
