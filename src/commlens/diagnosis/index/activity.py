"""Classify what a rank is doing outside collectives, and whether it visibly works.

A pure function of the rank's stacks, the observations of its process, and its log.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from commlens.diagnosis.index.process_exit import ProcessExit
from commlens.diagnosis.select.job import last_moment
from commlens.model.cause import Why
from commlens.model.collective import Frame, FrameKind, Stack
from commlens.model.frames import SETUP_FUNCTIONS
from commlens.model.ranklog import Observation, RankLog
from commlens.text import duration, frame_phrase, size

# of one core over the window; a waiting rank uses below 0.02, watchdog thread included
CPU_WORKING = 0.10
IO_WORKING = 64 * 1024  # bytes within the window
NET_WORKING = 1024  # bytes per second
_RUNNABLE = 0.3  # of the samples: the process works or, on a busy machine, would if it got a core
_WINDOW_S = 0.4  # shorter observations say nothing about movement
_THROTTLED = 0.5
_LEAVING_NS = 10_000_000_000  # an interpreter with torch in it may take seconds to shut down
_PRESSURE = 20.0  # percent of the last 10 s in which all tasks of the cgroup waited for memory

# Files that are on the stack only while a graph is compiled. eval_frame.py and runtime_wrappers.py
# are also there when it runs.
_COMPILING = re.compile(
    r"torch/_dynamo/(convert_frame|symbolic_convert|output_graph|bytecode_transformation|variables/)|"
    r"torch/_inductor/(graph|scheduler|lowering|async_compile|cpp_builder|codegen/|compile_worker/|fx_passes/)|"
    r"torch/_functorch/(_aot_autograd/(dispatch_and_compile_graph|jit_compile_runtime|graph_compile|traced_function)|partitioners)|"
    r"triton/(compiler|runtime/(jit|build|autotuner))|torch/utils/cpp_extension|torch/export/"
)
_CHECKPOINT_FILES = re.compile(
    r"torch/serialization\.py|torch/distributed/checkpoint/|/safetensors/|/orbax/|/tensorstore/"
)
_CHECKPOINT_NAMES = re.compile(
    r"(save|write|load|restore|dump|store|read|upload|resume).*(checkpoint|ckpt|state_dict)|(checkpoint|ckpt).*(save|write|load|restore)|"
    r"^_?load_(model|state|pretrained|weights|training_state)$|^_*(maybe_|do_)?(save|checkpoint|snapshot|upload|push_to_hub)(_|$)",
    re.IGNORECASE,
)
_DATA_FILES = re.compile(
    r"torch/utils/data/|/datasets/|/webdataset/|/torchdata/|/streaming/base/|/nvidia/dali/|/ffcv/|/torchvision/datasets/"
)
_DATA_NAMES = re.compile(
    r"^_*(load|get|read|fetch|next|prepare|make|sample|build|draw|collate|iter)?_?(next|the|a)?_?(train|val|eval|test)?(ing)?_?"
    r"(mini|micro)?_?(batch(es)?|data(set)?|samples?|examples?|shards?|items?|records?)(_iter(ator)?|_fn|_index|_async)?$|"
    r"data_?loader|dataset|^__getitem__$|collate|^_?tokeni[sz]e",
    re.IGNORECASE,
)
DEBUGGED = "is stopped by a debugger"


class FrameClass(NamedTuple):
    """The class of a stack: what its innermost frame that has a class is for."""

    why: Why | None = None
    named: str = ""  # a sentence that names the frame
    # it is the user's frame, and its name suggests the class; else a library's, or it is observed
    by_name: bool = False


class Activity(msgspec.Struct):
    """What a rank is doing."""

    why: Why
    works: bool  # visibly, so no fault is claimed
    phrase: str  # "has been in train.py:57 load_batch for 31 s"
    frame: Frame | None = None  # the user's innermost line
    signs: list[str] = []  # the evidence, in sentences
    observed: bool = False  # the process was watched for movement
    unclear: bool = False  # nothing shows work or a fault: it may wait for a disk or a server
    by_name: bool = False  # only a name in the user's code suggests the reason


def activity_of(
    log: RankLog, end: ProcessExit, *, quiet_ns: int = 0, stalled_after_ns: int = 1_000_000_000
) -> Activity:
    """Classify what a rank is doing.

    Args:
        log: the rank's log.
        end: how its process ended, or that it has not.
        quiet_ns: how long ago the rank last issued or left a collective; 0 if unknown.
        stalled_after_ns: a rank that was active more recently than this counts as working.
    """
    stack = log.main_stack
    frame = stack.source if stack is not None else None
    if end.kind == "clean":
        return Activity(
            "finished", False, "has finished", None, ["its process announced its exit"], True
        )
    if end.kind == "leaving":
        signs, moves, watched = movement(log.observation, device_is_busy=device_is_busy(log))
        recently = 0 < (log.captured_ns or last_moment(log)) - log.heartbeat_ns < _LEAVING_NS
        return Activity(
            "finished", moves or recently, "has finished and is shutting down", None, signs, watched
        )
    if end.kind in ("own", "gone", "peer"):
        return Activity(end.why, False, end.text, end.source or frame, [], True)
    since = f" for {duration(quiet_ns)}" if quiet_ns > stalled_after_ns else ""
    suspended = _suspended(log.observation, frame, since)
    if suspended is not None:
        return suspended
    frames = stack.frames if stack is not None else ()
    kind = classify_frames(log, frames)
    doing = _running(
        log, end, frames, kind, frame, since, quiet_ns if quiet_ns < stalled_after_ns else 0
    )
    doing.by_name = kind.by_name
    return doing


def _suspended(seen: Observation, frame: Frame | None, since: str) -> Activity | None:
    """Return why the process cannot run its own code: stopped, starved of CPU, or its threads wait
    for the GIL.
    """
    where = frame_phrase(frame)
    if seen.is_stopped:
        if seen.proc_state == "t":
            return Activity("stopped", False, DEBUGGED, frame, ["its process is in state t"], True)
        return Activity(
            "stopped",
            False,
            "is stopped (by SIGSTOP or a debugger)",
            frame,
            ["its process is in state T"],
            True,
        )
    if seen.holds_gil:
        return Activity(
            "holding-gil",
            False,
            f"holds the GIL{_in(where)}{since}",
            frame,
            ["its other threads have not run since"],
            True,
        )
    if (seen.throttled_fraction or 0.0) >= _THROTTLED:
        signs = [f"its CPU quota was used up {seen.throttled_fraction:.0%} of the time"]
        return Activity(
            "throttled",
            False,
            f"is starved of CPU by its cgroup's quota{_in(where)}",
            frame,
            signs,
            True,
        )
    return None


def _running(
    log: RankLog,
    end: ProcessExit,
    frames: Stack,
    kind: FrameClass,
    frame: Frame | None,
    since: str,
    active_ns_ago: int,
) -> Activity:
    """Classify a process that could run, by its frames and its movement.

    Args:
        log: the rank's log.
        end: alive, or terminated from outside.
        frames: the main thread's stack.
        kind: its class.
        frame: the user's innermost frame.
        since: " for 31 s", or nothing.
        active_ns_ago: when the rank was last active, if that was recently; else 0.
    """
    seen, where = log.observation, frame_phrase(frame)
    why, named = kind.why, kind.named
    otherwise: Why = "user-code" if frame is not None else "unknown"
    signs, moves, watched = movement(seen, device_is_busy=device_is_busy(log))
    phrase = (
        _phrase(why, where, since)
        if log.source or frames or log.collectives
        else "has not called init_process_group yet"
    )
    if log.expecting is not None:
        return Activity(
            why or "user-code",
            True,
            f"is in a block marked as slow ({log.expecting})",
            frame,
            signs,
            watched,
        )
    if end.kind == "terminated":
        # The launcher ended it after the fault, so what counts is where it was before.
        return Activity(
            why or otherwise,
            False,
            f"was {(where and f'in {where}') or 'elsewhere'}",
            frame,
            [end.text],
            watched,
        )
    if moves:
        return Activity(why or otherwise, True, phrase, frame, signs, watched)
    if not (log.source or frames or log.collectives):
        return Activity("initialising", not watched, phrase, None, signs, watched)
    if active_ns_ago > 0:
        return Activity(
            why or "user-code",
            True,
            phrase,
            frame,
            [*signs, f"it was active {duration(active_ns_ago)} before"],
            watched,
        )
    if seen.proc_state == "D":
        signs = ["its process is in state D", *signs]
        return Activity(
            "uninterruptible-io",
            False,
            f"is in uninterruptible I/O{_in(where)}{since}",
            frame,
            signs,
            True,
        )
    if (seen.memory_pressure or 0.0) >= _PRESSURE:
        pressure = f"its cgroup waited for memory {seen.memory_pressure:.0f} % of the time"
        return Activity("memory-pressure", False, phrase, frame, [pressure, *signs], watched)
    if seen.unsent_bytes:
        signs.append(
            f"its TCP connections hold {size(seen.unsent_bytes)} that the other side does not take"
        )
    if seen.unsent_bytes or why in ("compilation", "initialising", "checkpoint-io"):
        return Activity(
            why or otherwise,
            True,
            phrase,
            frame,
            [*signs, *filter(None, [named])],
            watched,
            unclear=watched,
        )
    return Activity(why or otherwise, False, phrase, frame, signs, watched)


def quiet_ns(log: RankLog) -> int:
    """Return how long ago the rank last issued or left a collective; 0 if unknown."""
    now = log.captured_ns or last_moment(log)
    latest = 0
    for op in reversed(log.collectives[-8:]):
        latest = max(latest, op.announced_ns, op.returned_ns, op.wait_ended_ns, op.wait_began_ns)
    return max(0, now - latest) if latest else 0


def longest_gap_ns(log: RankLog) -> int:
    """Return the longest time that the rank spent between two collectives, as far as it is
    recorded.
    """
    left = longest = 0
    for op in log.collectives:
        longest = max(longest, op.announced_ns - left if left else 0)
        left = max(left, op.returned_ns, op.wait_ended_ns)
    return longest


def torch_is_innermost(stack: Stack) -> bool:
    """Whether the thread is inside torch, or its stack is unknown: it may be waiting for a
    collective in C++.
    """
    innermost = next(
        (frame for frame in stack if frame.kind not in (FrameKind.NATIVE, FrameKind.COMMLENS)), None
    )
    return innermost is None or innermost.kind is FrameKind.TORCH


def classify_frames(log: RankLog, frames: Stack) -> FrameClass:
    """Return the class of the innermost frame that has one."""
    for frame in frames:
        file = frame.file.replace("\\", "/")
        named = f"{frame_phrase(frame)} is on its stack"
        if frame.kind is not FrameKind.USER:
            # else it is being imported
            if _COMPILING.search(file) and frame.function != "<module>":
                return FrameClass("compilation", named)
            if frame.function in SETUP_FUNCTIONS and "torch/" in file:
                return FrameClass("initialising", named)
            if _CHECKPOINT_FILES.search(file):
                return FrameClass("checkpoint-io", named)
            if _DATA_FILES.search(file):
                return FrameClass("data-loading", named)
            continue
        if _CHECKPOINT_NAMES.search(frame.function):
            return FrameClass("checkpoint-io", named, by_name=True)
        if _DATA_NAMES.search(frame.function) or _DATA_FILES.search(file):
            return FrameClass("data-loading", named, by_name=True)
        if frame.function in SETUP_FUNCTIONS:
            return FrameClass("initialising", named, by_name=True)
    if not log.initialised and not log.collectives and not frames:
        return FrameClass("initialising", "it has not returned from init_process_group")
    return FrameClass()


_DEVICE_WAITS = frozenset(
    {"synchronize", "item", "tolist", "cpu", "numpy", "wait_event", "wait_stream", "nonzero"}
)
_DRIVER_WAITS = re.compile(
    r"^(cu|cuda|hip)(Stream|Device|Event|Ctx)Synchronize|^(cu|cuda|hip)Memcpy(DtoH)?|^hsa_signal_wait"
)


def waits_for_device(frames: Stack) -> bool:
    """Return whether the innermost frames show a call that waits for a device: of torch in Python,
    or of the driver in C.
    """
    for frame in frames:
        if frame.kind is FrameKind.USER:
            return False
        if frame.kind is FrameKind.NATIVE and _DRIVER_WAITS.search(frame.function):
            return True
        if frame.kind is FrameKind.TORCH and frame.function in _DEVICE_WAITS:
            return True
    return False


def may_wait_for_device(seen: Observation) -> bool:
    """Return whether a process whose device waits may wait for it, too: its main thread stands
    still, and not in another wait.

    The driver spins, so such a thread uses a whole core. A driver that blocks instead shows no
    system call that is known to wait.
    """
    return not (seen.stack_moved or seen.waits_for)


def device_is_busy(log: RankLog) -> bool:
    """Return whether a collective is in flight on the rank's device, for which a thread may wait
    without a trace but its use of the CPU.
    """
    return any(op.in_flight and op.channel.runs_ahead for op in reversed(log.collectives))


def movement(seen: Observation, *, device_is_busy: bool = False) -> tuple[list[str], bool, bool]:
    """Return the signs of movement in the window, whether the process works, and whether it was
    watched for long enough.

    A thread that waits for a device uses a whole core: there, only a stack that moves shows work.
    """
    signs: list[str] = []
    works = watched = False
    window = seen.window_s
    if seen.stack_moved is not None and window >= _WINDOW_S:
        watched = True
        works = works or seen.stack_moved
        signs.append("its stack moves" if seen.stack_moved else "its stack does not move")
    if seen.cpu_s is not None and window >= _WINDOW_S:
        watched = True
        share = seen.cpu_s / window
        runs = (seen.running_fraction or 0.0) >= _RUNNABLE
        spins = device_is_busy and not seen.stack_moved and (share >= CPU_WORKING or runs)
        works = works or (not spins and (share >= CPU_WORKING or runs))
        used = f"it used {seen.cpu_s:.1f} s of CPU in {window:.0f} s"
        if spins:
            used += ", as a thread does that waits for a device"
        signs.append(
            used if share >= CPU_WORKING else "it waits for a core" if runs else "it uses no CPU"
        )
        if seen.waits_for and share < CPU_WORKING and not (runs or seen.stack_moved):
            signs.append(seen.waits_for)
    if seen.children_cpu_s is not None and window >= _WINDOW_S:
        busy = seen.children_cpu_s / window >= CPU_WORKING
        if busy or (seen.children_running_fraction or 0.0) >= _RUNNABLE:
            works = watched = True
            signs.append(
                f"its child processes used {seen.children_cpu_s:.1f} s of CPU"
                if busy
                else "a child process waits for a core"
            )
    if (
        seen.net_bytes is not None
        and window >= _WINDOW_S
        and seen.net_bytes >= NET_WORKING * window
    ):
        works = watched = True
        signs.append(f"it sent or received {size(seen.net_bytes)} in {window:.0f} s")
    if seen.io_bytes is not None and window >= _WINDOW_S and seen.io_bytes >= IO_WORKING:
        works = watched = True
        signs.append(f"it read or wrote {size(seen.io_bytes)} in {window:.0f} s")
    return signs, works, watched


def _phrase(why: Why | None, where: str, since: str) -> str:
    if why == "compilation":
        return f"has been compiling{_in(where)}{since}" if since else f"is compiling{_in(where)}"
    if why == "initialising":
        return f"is still initialising{_in(where)}{since}"
    if not where:
        return f"has been outside any collective{since}" if since else "is outside any collective"
    return f"has been in {where}{since}" if since else f"is in {where}"


def _in(where: str) -> str:
    return f" in {where}" if where else ""
