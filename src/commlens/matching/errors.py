"""Read errors: the ranks that a library's text names and what it says that they did, and the errors
whose text decides what to do: a GPU that two ranks use, a port that is taken, a store that cannot
be reached.

The texts are those of NCCL 2.18 to 2.28 and of torch's sources (C++ and Python), versions as noted
at each.
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

StoreReason = Literal["unknown-name", "refused"]
"""Why a store does not answer: the name of its host is not known, or no process listens there."""

_TEXT_MAX: Final = 4000
_RANKS_MAX: Final = 10_000


class Claim(NamedTuple):
    """The claims of an error's text about ranks, as numbered in the group of the call."""

    about: About
    own: int = -1  # the rank that raised it, according to the text
    # what two ranks did, where they differ: first the rank that raised the error, then the other
    values: tuple[tuple[int, str], ...] = ()
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
    r"(?:op\.preamble\.length <= op\.nbytes\. "
    # NCCL 2.4 to 2.28: transport/net_socket.cc, and net_ib.cc, which tells the receiver's size last
    r"|message truncated : receiving |collective mismatch error, local size )(?P<sent>\d{1,18})"
    r"(?: vs | bytes instead of | remote size )(?P<expected>\d{1,18})"
)

_BACKENDS: Final = re.compile(
    r"gloo[/:]|\[gloo|monitoredBarrier|nccl(?:Remote|System|Internal)Error|[Hh][Cc][Cc][Ll]\b"
    r"|NCCL (?:[Ee]rror|Async Error|operation|communicator|\w{1,40} failed)"
    r"|ProcessGroup(?:[NH]CCL|Gloo)|TCPStore|DistNetworkError|DistBackendError"
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


ErrorKind = Literal[
    "shared-gpu",
    "no-such-gpu",
    "device-assert",
    "bad-kernel",
    "shared-memory",
    "port-taken",
    "not-all-joined",
    "store-unreachable",
    "store-lost",
    "rendezvous",
    "no-interface",
    "old-driver",
    "fabric-manager",
    "network-link",
    "locked-memory",
    "gpu-direct",
    "nvls",
    "peer-access",
    "gpu-memory",
    "versions",
    "unused-parameters",
]
"""What the error is about.

``shared-gpu``: two ranks use one GPU. ``no-such-gpu``: the node shows fewer GPUs than ranks.
``device-assert``: a check in a kernel of the rank's program failed. ``bad-kernel``: such a kernel
failed otherwise. ``shared-memory``: /dev/shm is full.
``port-taken``: another process listens on the store's port. ``not-all-joined``: fewer processes
came to the store than the world size says. ``store-unreachable``: the store's address does not
answer. ``store-lost``: the store's process ended. ``rendezvous``: not all nodes came to torchrun's
rendezvous. ``no-interface``: NCCL finds no network interface. ``old-driver``: a node's driver is
older than CUDA needs. ``fabric-manager``: the service for NVSwitch does not run.
``network-link``: an InfiniBand connection broke. ``locked-memory``: a process may not pin the
memory that InfiniBand needs. ``gpu-direct``: the adapter may not read a GPU's memory. ``nvls``:
NVLink SHARP, which NVSwitches do, fails. ``peer-access``: a process may not open a GPU's memory of
another one. ``gpu-memory``: none is left on the GPU for NCCL's buffers.
``versions``: a message has another length than its receiver's NCCL sends. ``unused-parameters``:
DDP waits for gradients that were not computed.
"""

_KINDS: Final[tuple[tuple[ErrorKind, re.Pattern[str]], ...]] = (
    ("shared-gpu", re.compile(r"Duplicate GPU detected")),
    ("no-such-gpu", re.compile(r"CUDA error: invalid device ordinal")),
    ("device-assert", re.compile(r"CUDA error: device-side assert")),
    (
        "bad-kernel",
        re.compile(
            r"CUDA error: (?:an illegal memory access|misaligned address"
            r"|unspecified launch failure|an illegal instruction)"
        ),
    ),
    (
        "shared-memory",
        re.compile(
            r"/dev/shm\b.{0,200}(?:No space left|error 28)|No space left on device.{0,80}/dev/shm"
            r"|killed by signal: Bus error|insufficient shared memory \(shm\)",
            re.DOTALL,
        ),
    ),
    ("port-taken", re.compile(r"EADDRINUSE|[Aa]ddress already in use")),
    (
        "not-all-joined",
        re.compile(
            r"waiting for clients\. (?P<detail>\d{1,7}/\d{1,7}) clients joined"
            r"|world_size=(?P<size>\d{1,7}),"
            r" (?:num_workers_joined|worker_count)=(?P<joined>\d{1,7})"
        ),
    ),
    (
        "store-unreachable",
        re.compile(
            r"(?:client socket has (?:timed out|failed).{0,80} to connect to"
            r"(?: any network address of)?|IPv[46] network addresses of)"
            r" (?P<detail>\([^)\n]{1,255}\)|\[[^\n]{1,255}?\]:\d{1,5})"
        ),
    ),
    (
        "store-lost",
        re.compile(r"RendezvousConnectionError|connection to the C10d store has failed"),
    ),
    ("rendezvous", re.compile(r"Rendezvous(?:Timeout|Closed|GracefulExit)Error")),
    ("no-interface", re.compile(r"[Nn]o socket interface found")),
    ("old-driver", re.compile(r"CUDA driver version is insufficient|driver .{0,40} is too old")),
    ("fabric-manager", re.compile(r"Error 802: system not yet initialized|'system not yet init")),
    (
        "network-link",
        re.compile(
            r"NET/IB ?: .{0,120}ompletion .{0,120}(?:status=|error )(?:12\b|IBV_WC_RETRY_EXC_ERR)"
        ),
    ),
    (
        "locked-memory",
        re.compile(
            r"(?:ibv_(?:reg_mr\w*|create_[cq]\w+) failed|nable to register memory)"
            r".{0,200}Cannot allocate memory"
        ),
    ),
    ("gpu-direct", re.compile(r"ibv_reg_mr\w* failed with error Bad address")),
    ("nvls", re.compile(r"NVLink SHARP|nvls\.cc:\d+ NCCL WARN|Multicast memory")),
    (
        "peer-access",
        re.compile(
            r"(?:CUDA IPC|(?:cuda|hip)Ipc\w+|[Pp]2[Pp]).{0,80}[Hh]andle|peer access is not support"
            r"|p2p\.cc:\d+ NCCL WARN (?:Cuda|HIP) failure (?!.{0,9}'out of mem)"
        ),
    ),
    (
        "gpu-memory",
        re.compile(
            r"Failed to (?:CUDA|HIP|Cuda) \w{0,9}alloc|(?:Cuda|HIP) failure:? (?:\d+ )?'out of mem"
        ),
    ),
    ("versions", re.compile(r"Message truncated ?: received \d+ bytes instead of \d+")),
    (
        "unused-parameters",
        re.compile(r"Expected to have finished reduction in the prior iteration"),
    ),
)
SYSTEM_REASON: Final = re.compile(r"\((?:errno|gai error): -?\d{1,6} - ([^)\n]{1,100})\)")
"""The system's messages about a socket of torch's store."""

_STORE_REASONS: Final[tuple[tuple[StoreReason, re.Pattern[str]], ...]] = (
    ("unknown-name", re.compile(r"gai error|[Nn]ame or service not known|in name resolution")),
    ("refused", re.compile(r"[Cc]onnection refused|ECONNREFUSED")),
)
_OWN: Final = (
    "shared-gpu",
    "no-such-gpu",
    "device-assert",
    "bad-kernel",
    "shared-memory",
    "port-taken",
    "no-interface",
    "old-driver",
    "fabric-manager",
    "locked-memory",
    "gpu-direct",
    "nvls",
    "peer-access",
    "gpu-memory",
    "unused-parameters",
)
_PEER_HOST: Final = re.compile(
    r"(?:by|from|to) (?:remote )?peer (?P<host>[A-Za-z0-9][\w.:-]{0,254}?)<\d{1,5}>"
)
_LOOPBACK: Final = re.compile(r"localhost$|127\.")


class KnownError(NamedTuple):
    """The kind of error that a text shows, and its facts."""

    kind: ErrorKind
    detail: str = ""  # the address that does not answer; how many joined, of how many
    reason: StoreReason | None = None  # why it does not answer, if the text tells
    of_launcher: bool = False  # a launcher's rendezvous does not reach it


def known_error(text: str | None) -> KnownError | None:
    """Return the known error that a text shows; None if it shows none."""
    text = (text or "")[:_TEXT_MAX]
    for kind, pattern in _KINDS:
        if found := pattern.search(text):
            fields = found.groupdict()
            joined = f"{fields['joined']}/{fields['size']}" if fields.get("joined") else ""
            reasons = (reason for reason, said in _STORE_REASONS if said.search(text))
            of_store = kind == "store-unreachable"
            return KnownError(
                kind,
                fields.get("detail") or joined,
                next(reasons, None) if of_store else None,
                of_store and "rendezvous" in text.lower(),
            )
    return None


def peer_host(text: str | None) -> str:
    """Return the host or address of the peer that an error of NCCL names; empty if none, or if it
    is this machine's name for itself.
    """
    found = _PEER_HOST.search((text or "")[:_TEXT_MAX])
    return found["host"] if found is not None and not _LOOPBACK.match(found["host"]) else ""


def is_kernel_error(text: str | None) -> bool:
    """Return whether an error is of a kernel of the rank's program."""
    known = known_error(text)
    return known is not None and known.kind in ("device-assert", "bad-kernel")


def is_own_error(text: str | None) -> bool:
    """Return whether an error's text shows that no peer's end caused it, whatever words of peers it
    holds: NCCL calls a full /dev/shm a system error, as it does a broken connection.
    """
    known = known_error(text)
    return known is not None and known.kind in _OWN
