"""The truth that a trace is held to: torch.profiler's ExecutionTraceObserver, which knows nothing of commlens.

It records every op that the dispatcher runs, on every thread: backward's, compiled code's, and those inside functional collectives.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ExecutionTraceObserver

COLLECTIVES = frozenset(
    schema.name
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("c10d::") and any(argument.name == "process_group" for argument in schema.arguments)
)


@contextlib.contextmanager
def truth() -> Iterator[Counter[str]]:
    """Count the collectives of a block by dispatcher op ("allreduce_"). The counter is filled when the block ends."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="commlens-oracle-") as folder:
        path = Path(folder) / "ops.json"
        observer = ExecutionTraceObserver().register_callback(str(path))
        observer.start()
        try:
            yield counts
        finally:
            observer.stop()
            observer.unregister_callback()
        names = (node["name"] for node in json.loads(path.read_bytes())["nodes"])
        counts.update(name.removeprefix("c10d::") for name in names if name in COLLECTIVES)
