"""Everything known of one rank: what it recorded, and what was seen of its process from outside."""

from __future__ import annotations

from enum import Enum

import msgspec

from commlens.model.collective import Collective, Frame, Stack, user_frame


class End(str, Enum):
    """Whether a process still runs, and how it ended."""

    RUNNING = "running"
    CLEAN = "clean"  # ran to its end, exit status 0 or not known to be otherwise
    FAILED = "failed"  # an exception or a non-zero exit status
    KILLED = "killed"  # ended by a signal
    GONE = "gone"  # the process no longer exists and nobody saw how it ended
    UNKNOWN = "unknown"  # cannot be told from here (another host, another pid namespace, a dump)


class ThreadStack(msgspec.Struct, frozen=True):
    """Where a thread was when it was looked at."""

    thread: int  # native thread id
    name: str
    frames: Stack  # innermost first
    taken_ns: int = 0  # Unix ns
    is_main: bool = False

    @property
    def source(self) -> Frame | None:
        """The user's innermost line."""
        return user_frame(self.frames)


class Observation(msgspec.Struct):
    """What was seen of a rank's process from outside. Every field may be missing (None): then nothing is known."""

    end: End = End.UNKNOWN
    exit_code: int | None = None
    signal: str | None = None  # "SIGKILL"
    oom_killed: bool | None = None
    ended_ns: int = 0  # Unix ns at which the end was noticed
    seen_ns: int = 0  # Unix ns at which it was last looked at
    window_s: float = 0.0  # over which the next ones were observed
    proc_state: str | None = None  # /proc/PID/stat of the main thread: "R", "S", "D", "T", "Z"
    cpu_s: float | None = None  # CPU time used within the window, all threads
    io_bytes: int | None = None  # read and written within the window
    stack_moved: bool | None = None  # the main thread's stack changed within the window
    holds_gil: bool | None = None  # alive, but its own watchdog thread could not run
    throttled_fraction: float | None = None  # of the window, cgroup CPU throttling
    stopped_fraction: float | None = None  # of the looks within the window at which it was in state T
    memory_pressure: float | None = None  # PSI "full avg10" of its cgroup, percent
    stacks: list[ThreadStack] = []  # taken from outside (py-spy); used when the process's own are stale
    stacks_note: str | None = None  # why there are none, in words


class RankLog(msgspec.Struct):
    """One rank's black box as read, joined with what was observed of its process."""

    rank: int
    world_size: int
    job: str = ""  # identity of the job; logs of different jobs are never mixed
    host: str = ""
    pid: int = 0
    local_rank: int | None = None
    restart: int = 0  # torchelastic's restart count
    collectives: list[Collective] = []  # oldest first, by index; wrapped rings start late
    issued: int = 0  # how many were ever recorded; more than len(collectives) when the ring wrapped
    stacks: list[ThreadStack] = []  # taken by the rank's own watchdog thread
    stacks_ns: int = 0  # Unix ns
    heartbeat_ns: int = 0  # Unix ns of the watchdog thread's last sign of life
    captured_ns: int = 0  # Unix ns at which the box was read or dumped
    steps: int = 0  # optimizer steps completed
    expecting: str | None = None  # label of an open `with commlens.expect_slow(...)`
    closed: bool = False  # the process said goodbye (atexit)
    exception: str | None = None  # the uncaught exception, one line, where there was one
    exception_stack: Stack = ()
    initialised: bool = False  # init_process_group has returned
    timeout_s: float = 0.0  # of the default process group; 0 when not known
    observation: Observation = msgspec.field(default_factory=Observation)
    coverage: list[str] = []  # what the tap cannot see in this process, in words
    source: str = ""  # file that it was read from
    problems: list[str] = []  # what could not be read, in words ("12 of 2000 records are torn")
    script: str = ""  # the program, for the report's head
    versions: dict[str, str] = {}

    @property
    def main_stack(self) -> ThreadStack | None:
        """The main thread's stack, the freshest there is."""
        candidates = [s for s in [*self.observation.stacks, *self.stacks] if s.is_main]
        return max(candidates, key=lambda s: s.taken_ns, default=None)
