"""The call in which a thread waits for other ranks, as its stack shows it: the collective, its
group, its peer or root, from the names of frames, their local variables and the user's source line.

A frame ``all_reduce`` in ``torch/distributed/distributed_c10d.py``, whose variable ``group`` is at
the address that ``tp_group`` has in the user's frame, is ``Call("collective", "all_reduce",
"tp_group", line=...)``. Calls in C++ have no frame: the user's line ``store.get("ready")`` is
``Call("store", "store.get")``.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from commlens.model.collective import Frame
from commlens.model.frames import SETUP_FUNCTIONS, FrameKind
from commlens.model.ops import recorder_wire_op
from commlens.outside.sample import DEFAULT_GROUP, Call
from commlens.processes.pyspy import SeenFrame

Locals = Mapping[str, str]


_COLLECTIVES: Final[dict[str, str]] = {
    name: recorder_wire_op(name)
    for name in (
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_gather_object",
        "all_gather_tensor",
        "all_gather_coalesced",
        "_all_gather_base",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "_reduce_scatter_base",
        "broadcast",
        "broadcast_object_list",
        "barrier",
        "monitored_barrier",
        "gather",
        "gather_object",
        "scatter",
        "scatter_object_list",
        "reduce",
        "all_to_all",
        "all_to_all_single",
    )
} | {"_sync_params_and_buffers": "broadcast", "_verify_param_shape_across_processes": "all_gather"}
_MESSAGES: Final[dict[str, str]] = {
    "send": "send",
    "isend": "send",
    "send_object_list": "send",
    "recv": "recv",
    "irecv": "recv",
    "recv_object_list": "recv",
}
_SETUP: Final = SETUP_FUNCTIONS | {"destroy_process_group"}
_REQUESTS: Final = frozenset({"wait_tensor", "trigger_wait", "wait"})
_DISTRIBUTED: Final = re.compile(r"/torch/distributed/|/torch/nn/parallel/distributed\.py$")
_WAIT_SOURCE: Final = re.compile(r"\.wait\(")
_STORE_SOURCE: Final = re.compile(r"\b(\w+)(?:\(\))?\.(get|multi_get|wait)\(")
_METHOD_SOURCE: Final = re.compile(
    r"\b(\w+)\.(_?(?:all|reduce|broadcast|gather|scatter|barrier)\w*)\("
)
"""A collective by a method of a process group, as programs with groups made by hand issue them."""
_GROUP_NAME: Final = re.compile(r"(group|pg)$", re.IGNORECASE)
_CONSTRUCTOR_SOURCE: Final = re.compile(r"\b(ProcessGroup\w+|TCPStore)\(")
_DEVICE_SOURCE: Final = re.compile(r"\.(item|cpu|tolist|numpy|synchronize|nonzero)\(|\.to\(")
_DEVICE_FRAME: Final = re.compile(r"/torch/(cuda|xpu|npu|accelerator)/(__init__|streams)\.py$")
_WAITS_FOR_DEVICE: Final = frozenset({"synchronize", "wait_stream", "wait_event", "query"})


def find_call(frames: Sequence[SeenFrame], pid: int) -> Call | None:
    """Return the call that a thread waits in; None if its innermost frames are not one.

    Args:
        frames: innermost first.
        pid: of the process, to read its source files, also in a container.
    """
    users = (at for at, seen in enumerate(frames) if seen.frame.kind is FrameKind.USER)
    border = next(users, len(frames))
    inner, outer = frames[:border], frames[border:]  # outer begins with the user's innermost frame
    # without a user frame, in a library's own loop, the library's frame stands for the user's line
    libraries = (seen.frame for seen in frames if seen.frame.kind is FrameKind.LIBRARY)
    line = outer[0].frame if outer else next(libraries, None)
    values = outer[0].values if outer else {}
    return _in_distributed(inner, outer, line) or _call_outside_c10d(inner, line, values, pid)


def _in_distributed(
    inner: Sequence[SeenFrame], outer: Sequence[SeenFrame], line: Frame | None
) -> Call | None:
    """Recognise torch.distributed's functions; of nested ones, the outermost: it is the one that
    the user called.
    """
    found: Call | None = None
    for position, seen in enumerate(inner):
        if not _DISTRIBUTED.search(seen.frame.file.replace("\\", "/")):
            continue
        name = seen.name
        if name in _SETUP:
            found = Call("setup", name, line=line, by_hand=name == "_new_process_group_helper")
        elif name in _MESSAGES:
            found = Call(
                "message",
                _MESSAGES[name],
                _group(inner[position:], outer),
                peer=_rank_in(seen, "dst", "src"),
                line=line,
            )
        elif name in _COLLECTIVES and (found is None or found.kind in ("request", "collective")):
            found = Call(
                "collective",
                _COLLECTIVES[name],
                _group(inner[position:], outer),
                root=_rank_in(seen, "src", "dst"),
                line=line,
            )
        elif name in _REQUESTS and found is None:
            found = Call("request", name, line=line)
    if found is None and inner and _DISTRIBUTED.search(inner[0].frame.file.replace("\\", "/")):
        # a function that is not in the tables, such as DDP's own calls into C++
        found = Call("collective", "", line=line)
    return found


def _call_outside_c10d(
    inner: Sequence[SeenFrame], line: Frame | None, values: Locals, pid: int
) -> Call | None:
    """Recognise calls outside of torch.distributed's Python code. ``values``: the local variables
    of the user's frame.
    """
    if (
        any(seen.name == "_engine_run_backward" for seen in inner)
        and inner[0].frame.kind is FrameKind.TORCH
    ):
        return Call("backward", "backward", line=line)
    if any(
        seen.name in _WAITS_FOR_DEVICE and _DEVICE_FRAME.search(seen.frame.file) for seen in inner
    ):
        return Call("device", "synchronize", line=line)
    if inner and inner[0].frame.kind is not FrameKind.TORCH:
        return None
    if line is None or line.kind is not FrameKind.USER:
        return None
    return _in_source(line, values, pid, is_innermost=not inner)


def _in_source(line: Frame, values: Locals, pid: int, *, is_innermost: bool) -> Call | None:
    """Recognise a method that is written in C++: it has no frame, only the source line shows it."""
    source = source_line(line, pid)
    match = _STORE_SOURCE.search(source) if is_innermost else None
    if match and ("Store at" in values.get(match[1], "") or match[1].lower().endswith("store")):
        return Call("store", f"store.{match[2]}", line=line)
    if is_innermost and (call := _by_hand(source, line, values)) is not None:
        return call
    if is_innermost and _WAIT_SOURCE.search(source):
        return Call("request", "wait", line=line)
    match = _DEVICE_SOURCE.search(source)
    if match and _uses_gpu(pid):
        return Call("device", (match[1] or "to") + "()", line=line)
    return None


def _by_hand(source: str, line: Frame, values: Locals) -> Call | None:
    match = _METHOD_SOURCE.search(source)
    if match and ("ProcessGroup" in values.get(match[1], "") or _GROUP_NAME.search(match[1])):
        return Call("collective", recorder_wire_op(match[2]), match[1], line=line, by_hand=True)
    match = _CONSTRUCTOR_SOURCE.search(source)
    return Call("setup", match[1], line=line, by_hand=True) if match else None


def _group(frames: Sequence[SeenFrame], outer: Sequence[SeenFrame]) -> str:
    """Name the process group of a call: by the user's variable that holds it, or as the default
    group if none was passed.

    Args:
        frames: the call's frame, and those that lead to it.
        outer: the user's frame that called it, and the frames around it.
    """
    for wrapper in frames[1:2]:
        if wrapper.frame.file.endswith("/c10d_logger.py"):  # c10d's decorator, with the arguments
            passed = wrapper.values.get("args", "") + wrapper.values.get("kwargs", "")
            if "ProcessGroup" not in passed:
                return DEFAULT_GROUP
    address = frames[0].addresses.get("group", 0)
    for seen in [*frames[1:], *outer][:16]:
        for name, there in seen.addresses.items():
            if (
                there == address
                and name not in ("group", "pg", "process_group", "self")
                and "ProcessGroup" in seen.values[name]
            ):
                return name
    return ""


def _rank_in(seen: SeenFrame, *names: str) -> int | None:
    """Return the first of these local variables that holds a rank."""
    values = (seen.values.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), None)


def meeting_place(frames: Sequence[SeenFrame]) -> tuple[str, str] | None:
    """Return the host and port where torch makes a store or connects to it; None if a thread is not
    about to.
    """
    values = next((seen.values for seen in frames if seen.name == "_create_c10d_store"), {})
    host, port = values.get("hostname", ""), values.get("port", "")
    return (host.strip("\"'"), port) if host and port else None


@functools.lru_cache(maxsize=4096)
def source_line(frame: Frame, pid: int) -> str:
    """Return the text of a frame's line, as the process sees the file; empty if it cannot be
    read.
    """
    path = Path(f"/proc/{pid}/root{frame.file}")
    with contextlib.suppress(OSError), path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if number == frame.line:
                return text[:400].decode("utf-8", "replace").strip()
    return ""


@functools.lru_cache(maxsize=4096)
def _uses_gpu(pid: int) -> bool:
    """Return whether a process has opened a GPU."""
    try:
        return any(
            re.search(r"/dev/(nvidia\d|kfd|dri/|davinci)", str(entry.readlink()))
            for entry in Path(f"/proc/{pid}/fd").iterdir()
        )
    except OSError:
        return False


def counters(frames: Sequence[SeenFrame]) -> dict[str, int]:
    """Return the small whole numbers on the user's frames that look like loop variables, by
    ``"function.name"``.
    """
    return {
        f"{seen.name}.{name}": int(value)
        for seen in frames
        if seen.frame.kind is FrameKind.USER
        for name, value in seen.values.items()
        if _COUNTER_NAME.search(name) and value.isdecimal() and len(value) < 12
    }


_COUNTER_NAME: Final = re.compile(
    r"^(i|it|n_?iter|iteration|iter_num|step|global_step|batch_idx|batch_index|idx|epoch|i?step_?\w*|epoch_?\w*)$"
)


def fingerprint(frames: Sequence[SeenFrame]) -> int:
    """Return a number that changes when a thread moves: of its lines, and of the values and
    addresses on its frames.
    """
    return hash(
        tuple(
            (
                seen.frame.file,
                seen.frame.line,
                seen.frame.function,
                *(sorted(seen.addresses.items())),
                *sorted(seen.values.items()),
            )
            for seen in frames
        )
    )
