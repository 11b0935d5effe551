"""Communication past torch's dispatcher: the libraries in a rank's process that do it, and the
calls of these that are recorded all the same.

Three facts decide: the files that the process has mapped (``deep_ep_cpp.cpython-312.so`` shows
DeepEP), the adapters that record calls of a library, and the records themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from commlens.model.grouping import grouped
from commlens.model.ranklog import RankLog

_FILES: Final[Mapping[str, str]] = {
    "deep_ep": r"/deep_ep_cpp[^/]*\.so",
    # torch itself links the host library: these are loaded when a program initialises NVSHMEM
    "nvshmem": r"/nvshmem_bootstrap[^/]*\.so|/nvshmem/bindings/",
    "vllm": r"/vllm/_C[^/]*\.so",
    "sgl_kernel": r"/sgl_kernel/[^ ]*\.so",
    "cupy": r"/cupy_backends/cuda/libs/nccl[^/]*\.so",
    "mscclpp": r"/(?:lib|_)?mscclpp[^/]*\.so",
    "mooncake": r"/mooncake/engine[^/]*\.so",
    "nixl": r"/libnixl[^/]*\.so|/nixl[^/]*/_bindings[^/]*\.so",
    "mpi4py": r"/mpi4py/MPI[^/]*\.so",
    "horovod": r"/horovod/[^ ]*\.so",
}
"""By library: the files that only a process which may communicate with it has mapped."""

_MAPPED: Final = re.compile(
    "|".join(f"(?P<{name}>{files})" for name, files in _FILES.items()).encode()
)

SECOND_NCCL: Final = "a second libnccl"

_OF_NCCL: Final = ("cupy", SECOND_NCCL)
"""Libraries that call NCCL, which then tells its plugin."""

Recorded = Literal["calls", "no-call", "other-version", "by-plugin", "never"]
"""``calls``: their records are there. ``no-call``: an adapter records them, and no call is among
the records. ``other-version``: the adapter does not know the signatures. ``by-plugin``: NCCL's
plugin records the communicators that the library makes. ``never``: there is no adapter.
"""


class Bypass(msgspec.Struct, frozen=True):
    """A library of ranks that communicates past torch's dispatcher."""

    library: str
    ranks: tuple[int, ...]
    loaded: bool  # its own files are mapped; a library in Python has none
    recorded: Recorded
    calls: tuple[int, int] = (0, 0)  # the fewest and the most of a rank


def libraries_in(maps: Iterable[bytes]) -> list[str]:
    """Return the libraries that the lines of ``/proc/PID/maps`` tell of."""
    found, nccl = set(), set()
    for line in maps:
        if match := _MAPPED.search(line):
            found.add(match.lastgroup or "")
        elif b"/libnccl.so" in line:
            nccl.add(line.split(None, 5)[-1])
    return sorted(found) + [SECOND_NCCL] * (len(nccl) > 1)


def bypasses_of(logs: Iterable[RankLog]) -> list[Bypass]:
    """Return the libraries of ranks, those of several ranks together."""
    seen = grouped(
        ((library, library in log.observation.libraries, recorded), (log.rank, calls))
        for log in logs
        for library, (recorded, calls) in _recorded(log).items()
    )
    return [
        Bypass(
            library,
            tuple(sorted(rank for rank, _ in ranks)),
            loaded,
            recorded,
            (min(calls for _, calls in ranks), max(calls for _, calls in ranks)),
        )
        for (library, loaded, recorded), ranks in sorted(seen.items())
    ]


def _recorded(log: RankLog) -> dict[str, tuple[Recorded, int]]:
    """Return what is recorded of each library, and how many calls."""
    newest: dict[str, dict[object, int]] = {}
    for op in log.collectives:
        if (library := op.channel.library) is not None:
            numbers = newest.setdefault(library, {})
            counted = op.channel, op.peer, op.op if op.is_point_to_point else ""
            numbers[counted] = max(numbers.get(counted, 0), op.sequence_number)
    found: dict[str, tuple[Recorded, int]] = {
        library: ("calls", sum(numbers.values())) for library, numbers in newest.items()
    }
    for library in log.observation.libraries:
        found.setdefault(library, (_how_recorded(library, log), 0))
    return found


def _how_recorded(library: str, log: RankLog) -> Recorded:
    """Return whether the calls of a library would be recorded that has no records."""
    if library in _OF_NCCL and log.nccl is not None and not log.nccl.is_other_nccl:
        return "by-plugin"
    state = log.adapters.get(library)
    if state is None:
        return "never"
    return "no-call" if state == "applied" else "other-version"
