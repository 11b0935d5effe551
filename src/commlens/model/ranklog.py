"""The log of one rank: its records, joined with outside observations of its process.

The records come from the rank's black box, or from another tool's dump. The watcher, or ``commlens
dump``, adds what it sees of the process: that it used 0.9 s of CPU in 1 s, or died of SIGKILL.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import islice
from typing import Final, Literal, NamedTuple

import msgspec

from commlens.model.collective import (
    QUEUE,
    Collective,
    Frame,
    FrameKind,
    ProcessGroup,
    Stack,
    user_frame,
    user_lines,
)
from commlens.model.frames import waits_for_thread
from commlens.model.hazard import Hazard
from commlens.model.health import NodeHealth, RankPlace
from commlens.model.nccl import NcclRecord
from commlens.model.refusal import Refusal
from commlens.model.worlds import ONE_WORLD, Worlds

CAUSED_BY = "\ncaused by "
"""In a rank's exception, between the one that was raised and the one that it was raised from."""


class End(str, Enum):
    """Whether a process is running, and how it ended."""

    RUNNING = "running"
    CLEAN = "clean"  # exit status 0, or no sign of another one
    FAILED = "failed"  # exception or non-zero exit status
    KILLED = "killed"  # ended by a signal
    GONE = "gone"  # no longer exists; how it ended was not observed
    UNKNOWN = "unknown"  # not observable from here (another host, another pid namespace, a dump)


Suspended = Literal["debugged", "stopped", "holds-gil"]
"""Why a process cannot run its own code."""

ProcessState = (
    Suspended
    | Literal[
        "running",
        "sleeping",
        "computing",
        "idle",
        "unseen",
        "uninterruptible",
        "finished",
        "gone",
        "failed",
        "killed",
    ]
)
"""What is seen of a process."""

UNREMARKABLE: Final[tuple[ProcessState, ...]] = (
    "running",
    "sleeping",
    "computing",
    "idle",
    "unseen",
)
"""States that do not explain why a rank does not move."""

_ENDED: Final[Mapping[End, ProcessState]] = {
    End.KILLED: "killed",
    End.FAILED: "failed",
    End.CLEAN: "finished",
    End.GONE: "gone",
    End.UNKNOWN: "unseen",
}
_KERNEL: Final[Mapping[str, ProcessState]] = {
    "S": "sleeping",
    "D": "uninterruptible",
    "I": "idle",
}
_COMPUTING: Final = 0.5  # of a core


STOP_SIGNALS: Final = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
"""The signals by which launchers, schedulers and users stop a job."""
LATE_KILL_NS: Final = 5_000_000_000
"""A SIGKILL so long after the first end is the launcher's: torchrun sends it after 30 s."""


AdapterState = Literal["applied", "other-version"]
"""``applied``: the calls of a library that communicates past torch's dispatcher are recorded.
``other-version``: its signatures are not those that commlens knows.
"""


class Sleep(NamedTuple):
    """A thread's sleep, in seconds; zeros if it does not sleep."""

    left_s: float = 0.0
    length_s: float = 0.0  # as far as it was seen


class ThreadStack(msgspec.Struct, frozen=True):
    """A thread's stack at one moment."""

    thread: int  # native thread id
    name: str
    frames: Stack  # innermost first
    taken_ns: int = 0  # Unix ns
    is_main: bool = False
    # it waits, without a timeout, for a lock that is locked, and no other thread runs Python
    locked_out: bool = False
    in_lock: bool = False  # its innermost instruction takes a lock, without a timeout

    @property
    def source(self) -> Frame | None:
        """The innermost user frame."""
        return user_frame(self.frames)

    @property
    def waits_for_thread(self) -> bool:
        """Whether it waits for another thread of its process."""
        of_python = (frame for frame in self.frames if frame.kind is not FrameKind.NATIVE)
        return waits_for_thread((frame.file, frame.function) for frame in islice(of_python, 3))

    @property
    def runs_user_code(self) -> bool:
        """Whether it runs the user's code, and does not wait for another thread."""
        return any(user_lines(self.frames)) and not self.waits_for_thread


class UsualWait(msgspec.Struct, frozen=True):
    """How long the ranks of a node were in the collectives of one place: the same group, op and
    call path.
    """

    times: int  # collectives that have completed
    median_s: float
    longest_s: float  # of the last hour
    limit_s: float  # a longer wait is looked at


class StoreSeen(msgspec.Struct, frozen=True):
    """The address at which a rank in ``init_process_group`` meets the others, seen on its host."""

    address: str  # "127.0.0.1:29500"
    listens: bool  # a process accepts connections at this port
    agent: bool  # its launcher's environment leaves the store to the launcher


class HelperProcess(msgspec.Struct, frozen=True):
    """A process that a rank started and that calls ``init_process_group`` with a rank of its own.
    Its calls are not recorded.
    """

    pid: int
    group: str  # alike for processes that meet at the same address
    stack: Stack = ()  # of its main thread, innermost first; empty: unknown


class Observation(msgspec.Struct):
    """Outside observations of a rank's process. Every field may be missing (None or 0), which means
    unknown.
    """

    end: End = End.UNKNOWN
    exit_code: int | None = None
    signal: str | None = None  # "SIGKILL"
    oom_killed: bool | None = None
    # by a signal that stops jobs, when no other rank was being ended
    ended_alone: bool | None = None
    ended_ns: int = 0  # Unix ns when the end was noticed
    seen_ns: int = 0  # Unix ns of the last observation
    window_s: float = 0.0  # seconds over which the fields below were observed
    proc_state: str | None = None  # /proc/PID/stat of the main thread: "R", "S", "D", "T", "Z"
    cpu_s: float | None = None  # CPU time used within the window, all threads
    # of the observations in the window that found its main thread in state R
    running_fraction: float | None = None
    io_bytes: int | None = None  # read and written within the window, also by its child processes
    children_cpu_s: float | None = None  # CPU time that its child processes used within the window
    # of the observations in the window that found one of them in state R
    children_running_fraction: float | None = None
    # sent and received over TCP within the window, without connections that hardly move
    net_bytes: int | None = None
    unsent_bytes: int | None = None  # written to TCP connections, and not taken by the other side
    # what its main thread waited for in the kernel at the last observation, in words
    waits_for: str = ""
    wakes_in_s: float = 0.0  # its main thread sleeps for so much longer; 0: unknown, or it does not
    sleeps_s: float = 0.0  # the length of that sleep, as far as it was seen
    waits_for_pid: int = 0  # the process that holds the lock that it waited for, if it is known
    lost_child: str = ""  # a child process that is stopped, or has failed, in words
    stack_moved: bool | None = None  # the main thread's stack changed within the window
    # of the collective that it waits in; None: the watcher has not learned it
    usual_wait: UsualWait | None = None
    holds_gil: bool | None = None  # alive, but its watchdog thread could not run
    # where it meets the others, while it is in init_process_group; None: unknown, or elsewhere
    store: StoreSeen | None = None
    # libraries that communicate past torch's dispatcher, of which it has mapped the files
    libraries: list[str] = []
    throttled_fraction: float | None = None  # of the window, by the cgroup's CPU limit
    # of the observations in the window that found it in state T
    stopped_fraction: float | None = None
    memory_pressure: float | None = None  # PSI "full avg10" of its cgroup, percent
    # taken from outside (py-spy); used if the process's own are stale
    stacks: list[ThreadStack] = []
    stacks_note: str | None = None  # why there are no stacks, in words
    helpers: list[HelperProcess] = []

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended."""
        return self.end not in (End.RUNNING, End.UNKNOWN)

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped, or was for most of the window."""
        return self.proc_state in ("T", "t") or (self.stopped_fraction or 0.0) > 0.5

    @property
    def suspended(self) -> Suspended | None:
        """Why it cannot run its own code; None if it can, or if that is unknown."""
        if self.is_stopped:
            return "debugged" if self.proc_state == "t" else "stopped"
        return "holds-gil" if self.holds_gil else None

    @property
    def state(self) -> ProcessState:
        """The state of the process."""
        if self.end in _ENDED:
            return _ENDED[self.end]
        if self.suspended is not None:
            return self.suspended
        if self.cpu_s and self.window_s and self.cpu_s / self.window_s > _COMPUTING:
            return "computing"
        return _KERNEL.get(self.proc_state or "", "running")


class RankLog(msgspec.Struct):
    """One rank's black box, joined with the observation of its process."""

    rank: int
    world_size: int
    job: str = ""  # job id; logs of different jobs are never mixed
    host: str = ""
    pid: int = 0
    local_rank: int | None = None
    restart: int = 0  # torchelastic's restart count
    launcher: str = ""  # "torchrun", "srun", "mpirun"; empty if its environment shows none
    size_in_environment: int | None = None  # WORLD_SIZE, 0 if it is not set; None: not recorded
    collectives: list[Collective] = []  # oldest first, by index; a wrapped ring buffer starts late
    # processes that have this rank: the pid, and that of the launcher's rank which started it
    twins: list[tuple[int, int]] = []
    # why the process keeps no black box although it has loaded torch, and what to do, in a clause
    unrecorded: str = ""
    # calls that make process groups, oldest first; their arguments are the group and the label in
    # "module"
    setups: list[Collective] = []
    # the present wait for a key in the job's store; its group's name is the key
    store_wait: Collective | None = None
    # the first write of each kind of key, which are the same but for numbers; named like that
    keys_written: list[Collective] = []
    issued: int = 0  # number ever recorded; more than len(collectives) if the ring buffer wrapped
    stacks: list[ThreadStack] = []  # taken by the rank's own watchdog thread
    stacks_ns: int = 0  # Unix ns
    # Unix ns of the last change of the main thread's stack; 0 if unknown
    main_stack_since_ns: int = 0
    heartbeat_ns: int = 0  # Unix ns of the watchdog thread's last sign of life
    captured_ns: int = 0  # Unix ns when the box was read or dumped
    awaited_thread: int = 0  # should issue what others wait for, if it is not the main one
    head_lost: bool = False  # the collective that its device waits in is overwritten
    steps: int = 0  # optimizer steps completed
    expecting: str | None = None  # label of an open `with commlens.expect_slow(...)`
    closed: bool = False  # the process ran its atexit handlers
    # the process has destroyed its last process group, and not ended yet or without atexit handlers
    left: bool = False
    exception: str | None = None  # the uncaught exception in one line, if any
    exception_stack: Stack = ()
    # the last uncaught exception of a thread beside the main one, which it ended
    thread_exception: str = ""
    thread_exception_stack: Stack = ()
    warnings: list[str] = []  # the first ones of NCCL, as its output tells them
    # the first assertion that failed in one of its kernels, as its output tells it
    device_assertion: str = ""
    refusal: Refusal | None = None  # if that is, or was raised from, one of strict verification's
    hazards: list[Hazard] = []  # latent faults, which its process found at its end
    initialised: bool = False  # init_process_group has returned
    timeout_s: float = 0.0  # of the default process group; 0 if unknown
    # when the watchdog of a backend last gave an op up, as its abort hook told; 0: never or unknown
    gave_up_ns: int = 0
    stall_timeout_s: float = 0.0  # the setting; 0 if unknown
    observation: Observation = msgspec.field(default_factory=Observation)
    # by library that communicates past torch's dispatcher: whether its calls are recorded
    adapters: dict[str, AdapterState] = {}
    source: str = ""  # file name
    problems: list[str] = []  # unreadable parts, in words ("12 of 2000 records are torn")
    script: str = ""  # the program, for the head of reports
    world: str = ""  # the name that its settings give its program
    versions: dict[str, str] = {}
    # the parts of its node that it uses, as a text log tells them
    place: RankPlace | None = None
    # the hardware of its node; only one log of a node has it
    health: NodeHealth | None = None
    # what NCCL told the process itself; None: its plugin is off, or NCCL was not used
    nccl: NcclRecord | None = None
    # of communicators that torch did not make: those of which the process has called nothing
    unused_groups: list[ProcessGroup] = []
    # of a process that shares a group made by hand: ranks in the log are numbers of these processes
    worlds: Worlds = ONE_WORLD

    @property
    def told_error(self) -> str:
        """The exception, and what NCCL printed before it: these tell what happened."""
        return "\n".join((self.exception or "", *self.warnings))

    @property
    def lost_newest(self) -> bool:
        """Whether the newest records are unreadable, so that the rank may have issued anything
        since.
        """
        return self.issued > (self.collectives[-1].index if self.collectives else 0)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for the next message of a queue, as the workers of a server do that has
        no request.
        """
        return any(op.channel.device == QUEUE and op.wait_began_ns for op in self.setups)

    @property
    def current_collective(self) -> Collective | None:
        """The oldest collective in flight, otherwise the last one."""
        return next(
            (each for each in self.collectives if each.in_flight),
            self.collectives[-1] if self.collectives else None,
        )

    @property
    def main_stack(self) -> ThreadStack | None:
        """The most recent stack of the thread for which others wait, if that is known; else of the
        main thread, or of the thread that runs the user's code if the main one runs only a
        library's or waits for another thread.
        """
        everything = [*self.observation.stacks, *self.stacks]
        awaited = self.awaited_thread
        main = max(
            (each for each in everything if (each.thread == awaited if awaited else each.is_main)),
            key=lambda stack: stack.taken_ns,
            default=None,
        )
        if main is None or not main.frames or main.runs_user_code or awaited:
            return main
        return self._stack_for(main, everything)

    @property
    def sleep(self) -> Sleep:
        """The sleep of the thread of ``main_stack``. It is known only of the main thread."""
        stack, seen = self.main_stack, self.observation
        is_main = stack is None or stack.is_main
        return Sleep(seen.wakes_in_s, seen.sleeps_s) if is_main else Sleep()

    def _stack_for(self, main: ThreadStack, everything: list[ThreadStack]) -> ThreadStack:
        """Return the stack of the thread that runs the user's code in place of the main one."""
        others = [stack for stack in everything if not stack.is_main and stack.source is not None]
        issuing = self.collectives[-1].issue_thread if self.collectives else 0
        of_thread = [stack for stack in others if stack.thread == issuing]
        if main.source is None or not self.collectives:
            of_thread = of_thread or others
        if len({stack.thread for stack in of_thread}) != 1:
            return main
        return max(of_thread, key=lambda stack: stack.taken_ns)

    @property
    def current_stack(self) -> ThreadStack | None:
        """The main thread's stack if it was taken after the rank issued and left its newest
        collective; None: it has moved since.
        """
        stack, newest = self.main_stack, self.collectives[-1] if self.collectives else None
        moved_ns = (
            max(newest.announced_ns, newest.done_ns, newest.wait_ended_ns)
            if newest is not None
            else 0
        )
        return stack if stack is not None and stack.taken_ns > moved_ns else None
