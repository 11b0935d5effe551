"""Read the ranks that an error's text names: what it says that they did, where the text is one that
a library is known to raise.

The texts are those of torch's sources (C++ and Python), versions as noted at each.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from commlens.model.ops import watchdog_wire_op

About = Literal["op", "shape", "dtype", "parameters", "checkpoint", "worker", "sizes", "barrier"]
"""The subject of a claim: ranks differ in an op, its shapes or dtypes, or in a model's parameters;
a rank failed in a checkpoint; a data loader's worker ended; a message had another size than its
receiver expects; ranks did not come to a monitored barrier.
"""

_TEXT_MAX: Final = 4000
_RANKS_MAX: Final = 10_000


class Claim(NamedTuple):
    """What an error's text says about ranks, as numbered in the group of the call."""

    about: About
    own: int = -1  # the rank that raised it, according to the text
    values: tuple[tuple[int, str], ...] = ()  # what ranks did, where they differ
    ranks: tuple[int, ...] = ()  # the ranks that failed, or did not come
    error: str = ""  # the error of the first of them; of a worker, how it ended; of sizes, both
    file: str = ""  # that a rank failed on in a checkpoint


_FINGERPRINT: Final = (
    r"CollectiveFingerPrint\(SequenceNumber=\d+,? ?OpType=(?P<NAME_op>\w+)"
    r"(?:, TensorShape=(?P<NAME_shape>\[[\d, \[\]]{0,200}\])(?:,"
    r" TensorDtypes=(?P<NAME_dtype>\w+))?)?"
)

# torch 1.10 to 2.15 with TORCH_DISTRIBUTED_DEBUG=DETAIL: ProcessGroupWrapper.cpp
_DETAIL: Final = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank (?P<own>\d{1,7}) is running"
    r" collective: "
    + _FINGERPRINT.replace("NAME", "own")
    + r".*?, but Rank (?P<other>\d{1,7}) is running collective: "
    + _FINGERPRINT.replace("NAME", "other"),
    re.DOTALL,
)
_ASPECTS: Final[tuple[About, ...]] = ("op", "shape", "dtype")

_PARAMETERS: Final = re.compile(  # torch 1.11 to 2.15: reducer.cpp, verify_params_across_processes
    r"DDP expects same model across all ranks, but Rank (?P<own>\d{1,7}) has (?P<mine>\d{1,12})"
    r" params, "
    r"while rank (?P<other>\d{1,7}) has inconsistent (?P<theirs>\d{1,12}) params"
)
# torch 1.10 to 2.15: reducer.cpp, where the first rank's parameters are the reference
_PARAMETER_SIZES: Final = re.compile(
    r"\[(?P<own>\d{1,7})\]: (?P<name>params\[\d{1,7}\]) in this process with"
    r" (?P<what>sizes|strides) (?P<mine>\[[\d, ]{0,200}\]) appears not to match"
)
_CHECKPOINT: Final = re.compile(  # torch 2.0 to 2.15: torch/distributed/checkpoint/api.py
    r"CheckpointException ranks: ?dict_keys\(\[(?P<ranks>\d{1,7}(?:, \d{1,7})*)\]\)(?P<rest>.*)",
    re.DOTALL,
)
_OF_RANK: Final = re.compile(
    r"\(RANK \d{1,7}\) (?:\(file (?P<file>[^\n;)]{1,1000})\) )?(?P<error>[^\n;]+)"
)
_WORKER: Final = re.compile(  # torch 1.0 to 2.15: DataLoader.cpp, torch/utils/data/dataloader.py
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]{1,200})\) (?P<end>is killed by signal:"
    r" \w+|exited unexpectedly)"
)

# torch 1.9 to 2.13: ProcessGroupGloo.cpp. With wait_all_ranks, as in
# TORCH_DISTRIBUTED_DEBUG=DETAIL, it names all of them, else the first.
_NOT_PASSED: Final = re.compile(
    r"(?:\[Rank (?P<own>\d{1,7})\]: )?Ranks? (?P<ranks>\d{1,7}(?:, ?\d{1,7})*) failed to pass"
    r" monitoredBarrier in (?P<ms>\d{1,12}) ms"
)
_PASSED: Final = re.compile(r"Rank (?P<own>\d{1,7}) successfully reached monitoredBarrier, but")

_SIZES: Final = re.compile(  # torch 1.8 to 2.15: gloo's transport/tcp/pair.cc
    r"op\.preamble\.length <= op\.nbytes\. (?P<sent>\d{1,18}) vs (?P<expected>\d{1,18})"
)

_BACKENDS: Final = re.compile(
    r"gloo[/:]|\[gloo|monitoredBarrier|ncclRemoteError|ncclSystemError|NCCL"
    r" error|ProcessGroup(?:NCCL|Gloo)|TCPStore|DistNetworkError|DistBackendError"
)
"""Marks of the code of torch's backends and stores in an error."""


def names_backend(text: str) -> bool:
    """Return whether an error's text shows that a backend or a store of torch raised it, whatever
    the stack.
    """
    return _BACKENDS.search(text) is not None


def claim_of(text: str | None) -> Claim | None:
    """Return what an error says about ranks; None if it is no text that does."""
    text = (text or "")[:_TEXT_MAX]
    for read in (_of_detail, _of_parameters, _of_checkpoint, _of_worker, _of_sizes, _of_barrier):
        claim = read(text)
        if claim is not None:
            return claim
    return None


def worker_end(error: str | None) -> str:
    """Return how a data loader's worker ended, if that is a rank's error; else nothing."""
    claim = claim_of(error)
    return claim.error if claim is not None and claim.about == "worker" else ""


def _of_detail(text: str) -> Claim | None:
    found = _DETAIL.search(text)
    if found is None:
        return None
    alike: About = "op"
    about = next(
        (aspect for aspect in _ASPECTS if found[f"own_{aspect}"] != found[f"other_{aspect}"]), alike
    )
    values = [found[f"{name}_{about}"] or "unknown" for name in ("own", "other")]
    if about == "op":
        values = [watchdog_wire_op(value) for value in values]
    return Claim(
        about, int(found["own"]), ((int(found["own"]), values[0]), (int(found["other"]), values[1]))
    )


def _of_parameters(text: str) -> Claim | None:
    found = _PARAMETERS.search(text)
    if found is None and (size := _PARAMETER_SIZES.search(text)) is not None:
        own, of = int(size["own"]), f"{size['name']} of"
        values = ((own, f"{of} {size['what']} {size['mine']}"), (0, f"{of} other {size['what']}"))
        return Claim("parameters", own, values)
    if found is None:
        return None
    own, other = int(found["own"]), int(found["other"])
    return Claim(
        "parameters",
        own,
        ((own, f"{found['mine']} parameters"), (other, f"{found['theirs']} parameters")),
    )


def _of_checkpoint(text: str) -> Claim | None:
    found = _CHECKPOINT.search(text)
    if found is None:
        return None
    ranks = tuple(int(rank) for rank in found["ranks"].split(", "))[:_RANKS_MAX]
    errors = list(_OF_RANK.finditer(found["rest"]))
    return Claim(
        "checkpoint",
        ranks=ranks,
        error=next((error["error"].strip() for error in errors), ""),
        file=next((error["file"] for error in errors if error["file"]), ""),
    )


def _of_sizes(text: str) -> Claim | None:
    found = _SIZES.search(text)
    return (
        Claim("sizes", error=f"{found['sent']} bytes where it expects {found['expected']}")
        if found is not None
        else None
    )


def _of_barrier(text: str) -> Claim | None:
    found = _NOT_PASSED.search(text)
    if found is not None:
        ranks = tuple(int(rank) for rank in found["ranks"].split(","))
        return Claim("barrier", int(found["own"] or 0), ranks=ranks[:_RANKS_MAX])
    passed = _PASSED.search(text)
    return Claim("barrier", int(passed["own"])) if passed is not None else None


def _of_worker(text: str) -> Claim | None:
    ends = [found["end"] for found in _WORKER.finditer(text)]
    # a worker that a signal killed also "exited unexpectedly", in the error that follows
    return Claim("worker", error=max(ends, key=lambda end: "signal" in end)) if ends else None
