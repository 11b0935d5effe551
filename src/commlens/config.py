"""Settings: what they are, and where each value came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Every setting, with its default. The names are the YAML keys; ``COMMLENS_<NAME>`` is the environment variable."""

    box_dir: str | None = None  # where black boxes live; None: /dev/shm, else another memory-backed place
    box_entries: int = 2000  # records per rank; 0: no recording
    dump_dir: str = "commlens-dumps"  # one folder per job below it
    keep_dumps: int = 10  # older job folders of ours are pruned
    dump_on_timeout: bool = True  # dump just before a process group's timeout strikes
    stall_timeout: float = 60.0  # seconds that a collective may be waited for before the watcher speaks
    on_stall: str = "warn"  # "warn" or "abort"
    cpp_stack: bool = False  # record C++ frames too
    timing: bool = False  # record durations
    dump_signal: str | None = None  # e.g. "SIGUSR2": install a handler that dumps; none by default
    dump_pipe: str | None = None  # prefix of a named pipe per rank; any byte written to it dumps
    job: str | None = None  # identity of the job; set by the launcher
    watched: bool = False  # somebody (the launcher) watches already
