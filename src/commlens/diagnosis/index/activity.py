"""Classify what a rank is doing outside collectives, and whether it visibly works.

A rank whose innermost frame of a library is in ``torch/utils/data/`` and that used 0.9 s of CPU in
1 s loads data, and works. One that stands in ``time.sleep`` of ``load_batch`` and uses no CPU loads
data by the name of its function, and does not work. A pure function of the rank's stacks, the
observations of its process, and its log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from typing import Final, Literal, NamedTuple

import msgspec

from commlens.diagnosis.index.process_exit import ProcessExit
from commlens.diagnosis.select.job import last_moment
from commlens.model.cause import Why
from commlens.model.collective import Collective, Frame, FrameKind, Stack
from commlens.model.frames import SETUP_FUNCTIONS
from commlens.model.ranklog import Observation, RankLog

# of one core over the window; a waiting rank uses below 0.02, watchdog thread included
CPU_WORKING = 0.10
IO_WORKING = 64 * 1024  # bytes within the window
NET_WORKING = 1024  # bytes per second
_POLLS = 0.1  # of the samples: a thread in one wait of the kernel is not seen to run
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
State = Literal[
    "runs",
    "serves",
    "left",
    "not-initialised",
    "expected-slow",
    "uninterruptible",
    "throttled",
    "holds-gil",
    "stopped",
    "debugged",
    "shuts-down",
    "finished",
    "ended",
    "was-ended",
    "in-another-group",
]
"""The kind of work that keeps a rank outside of collectives.

``runs``: its own code, as far as is known. ``serves``: waits in an event loop, such as a
server's. ``left``: its own code, after it destroyed its last process group. ``expected-slow``: in
a block that the program marked. ``debugged``: a debugger has stopped it. ``ended``: by itself or
because of a peer. ``was-ended``: from outside, after the fault, so what counts is where it was
before. ``in-another-group``: in a collective of a group without another known rank.
"""

SignKind = Literal[
    "announced-exit",
    "exit-status-0",
    "process-state",
    "others-have-not-run",
    "quota-used",
    "exit",
    "active-before",
    "waited-for-memory",
    "unsent-bytes",
    "on-stack",
    "in-init",
    "stack-moves",
    "stack-still",
    "used-cpu",
    "spins",
    "waits-for-core",
    "no-cpu",
    "waits-for",
    "lost-child",
    "child-used-cpu",
    "child-waits-for-core",
    "net-bytes",
    "io-bytes",
]


class Sign(NamedTuple):
    """The evidence that a rank works, or does not."""

    kind: SignKind
    amount: float = 0.0  # seconds, bytes, or a fraction
    window_s: float = 0.0  # in which it was observed
    about: str = ""  # the process's state, or what the kernel says that it waits for
    frame: Frame | None = None  # that is on its stack
    exit: ProcessExit | None = None


class FrameClass(NamedTuple):
    """The class of a stack: what its innermost frame that has a class is for."""

    why: Why | None = None
    frame: Frame | None = None  # that frame; None: only that it has not been initialised shows it
    # it is the user's frame, and its name suggests the class; else a library's, or it is observed
    by_name: bool = False

    @property
    def sign(self) -> Sign:
        """The evidence for the class."""
        return Sign("on-stack", frame=self.frame) if self.frame is not None else Sign("in-init")


class Activity(msgspec.Struct):
    """A rank's activity, and the evidence for it."""

    why: Why
    works: bool  # visibly, so no fault is claimed
    state: State
    frame: Frame | None = None  # the user's innermost line
    signs: list[Sign] = []  # the evidence
    observed: bool = False  # the process was watched for movement
    unclear: bool = False  # nothing shows work or a fault: it may wait for a disk or a server
    stack: FrameClass = FrameClass()
    for_ns: int = 0  # outside of collectives; 0: not for long, or unknown
    expecting: str = ""  # the block that the program marked as slow
    exit: ProcessExit | None = None  # if it has ended


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
        silent = log.observation.exit_code == 0 and not log.closed
        sign = Sign("exit-status-0" if silent else "announced-exit")
        return Activity("finished", False, "finished", None, [sign], True)
    if end.kind == "leaving":
        signs, moves, watched = movement(log)
        recently = 0 < (log.captured_ns or last_moment(log)) - log.heartbeat_ns < _LEAVING_NS
        return Activity("finished", moves or recently, "shuts-down", None, signs, watched)
    if end.kind in ("own", "gone", "peer"):
        return Activity(end.why, False, "ended", end.source or frame, [], True, exit=end)
    frames = stack.frames if stack is not None else ()
    doing = _suspended(log.observation, frame)
    if doing is None:
        active_ns_ago = quiet_ns if quiet_ns < stalled_after_ns else 0
        doing = _running(log, end, frames, frame, active_ns_ago)
    doing.for_ns = quiet_ns if quiet_ns > stalled_after_ns else 0
    return doing


def _suspended(seen: Observation, frame: Frame | None) -> Activity | None:
    """Return why the process cannot run its own code: stopped, starved of CPU, or its threads wait
    for the GIL.
    """
    if seen.suspended == "holds-gil":
        sign = Sign("others-have-not-run")
        return Activity("holding-gil", False, seen.suspended, frame, [sign], True)
    if seen.suspended is not None:
        sign = Sign("process-state", about="t" if seen.suspended == "debugged" else "T")
        return Activity("stopped", False, seen.suspended, frame, [sign], True)
    if (seen.throttled_fraction or 0.0) >= _THROTTLED:
        sign = Sign("quota-used", seen.throttled_fraction or 0.0)
        return Activity("throttled", False, "throttled", frame, [sign], True)
    return None


def _running(
    log: RankLog, end: ProcessExit, frames: Stack, frame: Frame | None, active_ns_ago: int
) -> Activity:
    """Classify a process that could run, by its frames and its movement.

    Args:
        log: the rank's log.
        end: alive, or terminated from outside.
        frames: the main thread's stack.
        frame: the user's innermost frame.
        active_ns_ago: when the rank was last active, if that was recently; else 0.
    """
    kind = classify_frames(log, frames)
    why: Why = kind.why or ("user-code" if frame is not None else "unknown")
    signs, works, watched = movement(log)
    doing = Activity(why, works, "runs", frame, signs, watched, stack=kind)
    if log.expecting is not None:
        doing.why = kind.why or "user-code"
        doing.works, doing.state, doing.expecting = True, "expected-slow", log.expecting
    elif end.kind == "terminated":
        doing.works, doing.state, doing.signs = False, "was-ended", [Sign("exit", exit=end)]
    elif log.left and log.collectives:  # it cannot take part in any more, whatever it does
        doing.works, doing.state, doing.observed = False, "left", True
    elif watched and serves(frames):
        doing.works, doing.state, doing.unclear = True, "serves", not works
    elif not (log.source or frames or log.collectives):
        doing.state = "not-initialised"
        if not works:
            doing.why, doing.works = "initialising", not watched
    elif not works:
        _explain_standing_still(doing, log, active_ns_ago)
    return doing


def _explain_standing_still(doing: Activity, log: RankLog, active_ns_ago: int) -> None:
    """Set why a process that could run does not move, as far as it is known."""
    seen = log.observation
    if active_ns_ago > 0:
        doing.why, doing.works = doing.stack.why or "user-code", True
        doing.signs.append(Sign("active-before", active_ns_ago / 1e9))
    elif seen.proc_state == "D":
        doing.why, doing.state, doing.observed = "uninterruptible-io", "uninterruptible", True
        doing.signs.insert(0, Sign("process-state", about="D"))
    elif is_short_of_memory(seen):
        doing.why = "memory-pressure"
        doing.signs.insert(0, Sign("waited-for-memory", seen.memory_pressure or 0.0))
    elif is_locked_out(log):
        doing.why = "user-code" if doing.frame is not None else "unknown"
    elif seen.unsent_bytes or doing.why in ("compilation", "initialising", "checkpoint-io"):
        # these may wait for a disk or a server, without a sign of it
        doing.works, doing.unclear = True, doing.observed
        if seen.unsent_bytes:
            doing.signs.append(Sign("unsent-bytes", seen.unsent_bytes))
        if doing.stack.why is not None:
            doing.signs.append(doing.stack.sign)


# --- how long a rank has been outside of collectives


def _issued_by_main(log: RankLog, ops: Iterable[Collective]) -> Iterator[Collective]:
    """Yield the collectives that no other thread of Python issued."""
    main = log.main_stack
    others = {each.thread for each in log.stacks if main is not None and each.thread != main.thread}
    return (op for op in ops if op.issue_thread not in others)


def quiet_ns(log: RankLog) -> int:
    """Return how long ago the rank's main thread last issued or left a collective; 0 if unknown."""
    now = log.captured_ns or last_moment(log)
    latest = 0
    for op in islice(_issued_by_main(log, reversed(log.collectives)), 8):
        latest = max(latest, op.announced_ns, op.returned_ns, op.wait_ended_ns, op.wait_began_ns)
    return max(0, now - latest) if latest else 0


def longest_gap_ns(log: RankLog) -> int:
    """Return the longest time that the rank's main thread spent between two collectives, as far as
    it is recorded.
    """
    left = longest = 0
    for op in _issued_by_main(log, log.collectives):
        longest = max(longest, op.announced_ns - left if left else 0)
        left = max(left, op.returned_ns, op.wait_ended_ns)
    return longest


# --- what a thread may wait for


def is_locked_out(log: RankLog) -> bool:
    """Return whether the main thread waits for a lock that nothing in its process releases: no
    other thread of Python, and no callback of a collective or of autograd.
    """
    main = log.main_stack
    return (
        main is not None
        and main.locked_out
        and not any(op.in_flight for op in log.collectives)
        and all(frame.function != "_engine_run_backward" for frame in main.frames)
    )


_SERVERS: Final = frozenset({"serve_forever", "wait_for_termination", "main_loop"})
_LOOPS: Final = re.compile(r"/(python[\d.]+t?|(site|dist)-packages)/(asyncio|zmq|tornado)/")


def serves(frames: Stack) -> bool:
    """Return whether a thread waits in a library's event loop, such as a server's, which only an
    event, such as a request, makes go on.
    """
    library = takewhile(lambda frame: frame.kind is not FrameKind.USER, frames)
    return any(
        frame.function.rpartition(".")[2] in _SERVERS or _LOOPS.search(frame.file)
        for frame in library
    )


_CHILD: Final = re.compile(
    r"/concurrent/futures/|/torch/distributed/checkpoint/|/subprocess\.py$"
    r"|/multiprocessing/(connection|process|popen_\w+)\.py$"
)
_NO_WAIT: Final = frozenset({"stopped", "holding-gil", "throttled", "data-loading", "finished"})


def may_wait_for_child(log: RankLog, doing: Activity) -> bool:
    """Return whether the main thread may wait for a process that it started: its own stack shows
    it, or is unknown.
    """
    if doing.why in _NO_WAIT or (doing.works and not doing.unclear) or is_locked_out(log):
        return False
    for frame in log.main_stack.frames if log.main_stack is not None else ():
        if frame.kind is FrameKind.USER:
            return False
        if _CHILD.search(frame.file):
            return True
    return log.main_stack is None


# --- the class of a stack


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
        of_user = frame.kind is FrameKind.USER
        why = (_class_by_name if of_user else _class_in_library)(frame)
        if why is not None:
            return FrameClass(why, frame, by_name=of_user)
    starts = not log.initialised and not log.collectives and not frames
    return FrameClass("initialising" if starts else None)


def _class_in_library(frame: Frame) -> Why | None:
    file = frame.file.replace("\\", "/")
    # else it is being imported
    if _COMPILING.search(file) and frame.function != "<module>":
        return "compilation"
    if frame.function in SETUP_FUNCTIONS and "torch/" in file:
        return "initialising"
    if _CHECKPOINT_FILES.search(file):
        return "checkpoint-io"
    return "data-loading" if _DATA_FILES.search(file) else None


def _class_by_name(frame: Frame) -> Why | None:
    if _CHECKPOINT_NAMES.search(frame.function):
        return "checkpoint-io"
    if _DATA_NAMES.search(frame.function) or _DATA_FILES.search(frame.file.replace("\\", "/")):
        return "data-loading"
    return "initialising" if frame.function in SETUP_FUNCTIONS else None


# --- waits for a device

_DEVICE_WAITS = frozenset(
    {"synchronize", "item", "tolist", "cpu", "numpy", "wait_event", "wait_stream", "nonzero"}
)
_SPINS: Final = 0.8  # of the observations found the main thread running

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
    return not (seen.stack_moved or lasting_wait(seen))


def lasting_wait(seen: Observation) -> str:
    """Return what the main thread waits for, as the kernel shows it; empty if it ran within the
    window. Then it polls, and the last look at it may have met a short sleep in between.
    """
    return seen.waits_for if (seen.running_fraction or 0.0) < _POLLS else ""


def spins(seen: Observation) -> bool:
    """Return whether a process was seen to stand in one place and use a whole core, as in a call of
    the driver that waits for the device.
    """
    runs = (seen.running_fraction or 0.0) >= _SPINS
    return runs and seen.stack_moved is False and may_wait_for_device(seen)


def is_short_of_memory(seen: Observation) -> bool:
    """Return whether the tasks of the process's cgroup spend much of their time waiting for
    memory.
    """
    return (seen.memory_pressure or 0.0) >= _PRESSURE


def device_is_busy(log: RankLog) -> bool:
    """Return whether a collective is in flight on the rank's device, for which a thread may wait
    without a trace but its use of the CPU.
    """
    return any(op.in_flight and op.channel.runs_ahead for op in reversed(log.collectives))


# --- movement


def movement(log: RankLog) -> tuple[list[Sign], bool, bool]:
    """Return the signs of movement in the window, whether the process works, and whether it was
    watched for long enough.

    A thread that waits for a device uses a whole core: there, only a stack that moves shows work.
    """
    seen = log.observation
    if seen.window_s < _WINDOW_S:
        return [], False, False
    signs, works = _own_movement(seen, log.sleep.left_s, device_is_busy=device_is_busy(log))
    if seen.lost_child:
        signs.append(Sign("lost-child", about=seen.lost_child))
    work: list[Sign] = []
    if seen.children_cpu_s is not None:
        if seen.children_cpu_s / seen.window_s >= CPU_WORKING:
            work.append(Sign("child-used-cpu", seen.children_cpu_s))
        elif (seen.children_running_fraction or 0.0) >= _RUNNABLE:
            work.append(Sign("child-waits-for-core"))
    if seen.net_bytes is not None and seen.net_bytes >= NET_WORKING * seen.window_s:
        work.append(Sign("net-bytes", seen.net_bytes, seen.window_s))
    if seen.io_bytes is not None and seen.io_bytes >= IO_WORKING:
        work.append(Sign("io-bytes", seen.io_bytes, seen.window_s))
    return [*signs, *work], works or bool(work), bool(signs or work)


def _own_movement(
    seen: Observation, wakes_in_s: float, *, device_is_busy: bool
) -> tuple[list[Sign], bool]:
    """Return the signs of movement of the process itself, and whether it works."""
    signs: list[Sign] = []
    if seen.stack_moved is not None:
        signs.append(Sign("stack-moves" if seen.stack_moved else "stack-still"))
    if seen.cpu_s is None:
        return signs, bool(seen.stack_moved)
    uses = seen.cpu_s / seen.window_s >= CPU_WORKING
    runs = (seen.running_fraction or 0.0) >= _RUNNABLE
    if uses:
        spins = device_is_busy and not seen.stack_moved
        signs.append(Sign("spins" if spins else "used-cpu", seen.cpu_s, seen.window_s))
    else:
        signs.append(Sign("waits-for-core" if runs else "no-cpu"))
    if (wait := lasting_wait(seen)) and not (uses or seen.stack_moved):
        signs.append(Sign("waits-for", wakes_in_s, about=wait))
    return signs, bool(seen.stack_moved) or (not device_is_busy and (uses or runs))
