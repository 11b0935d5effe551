"""The truth that a trace is held to: torch's own profiler, which knows nothing of commlens.

It records every op that the dispatcher runs, on every thread: backward's, compiled code's, and
those inside functional collectives.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, _ExperimentalConfig, profile

COLLECTIVES = frozenset(
    schema.name
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("c10d::")
    and any(argument.name == "process_group" for argument in schema.arguments)
)
PROFILES_ALL_THREADS = "profile_all_threads" in (_ExperimentalConfig.__init__.__doc__ or "")


@contextlib.contextmanager
def truth() -> Iterator[Counter[str]]:
    """Count the collectives of a block by dispatcher op ("allreduce_"). The counter is filled when
    the block ends.
    """
    counts: Counter[str] = Counter()
    with _profiled() if PROFILES_ALL_THREADS else _observed() as names:
        yield counts
    counts.update(name.removeprefix("c10d::") for name in names if name in COLLECTIVES)


@contextlib.contextmanager
def _profiled() -> Iterator[list[str]]:
    names: list[str] = []
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(
        activities=[ProfilerActivity.CPU], acc_events=True, experimental_config=everywhere
    ) as profiler:
        yield names
    names += [event.name() for event in profiler.profiler.kineto_results.events()]


@contextlib.contextmanager
def _observed() -> Iterator[list[str]]:
    """As above, for a torch whose profiler follows one thread only (2.6).

    Not wherever it can be had: it is not safe with threads, and DDP's crash it now and then (1 job
    of 10 to 30, torch 2.13).
    """
    names: list[str] = []
    with tempfile.TemporaryDirectory(prefix="commlens-oracle-") as folder:
        path = Path(folder) / "ops.json"
        observer = ExecutionTraceObserver().register_callback(str(path))
        observer.start()
        try:
            yield names
        finally:
            observer.stop()
            observer.unregister_callback()
        names += [node["name"] for node in json.loads(path.read_bytes())["nodes"]]
