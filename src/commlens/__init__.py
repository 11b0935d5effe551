"""commlens: which rank, which collective, which line stopped a distributed PyTorch job.

These are the public names. They are loaded when they are first used: importing commlens imports neither torch nor anything
else that is heavy, and changes nothing in the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlens.capture import disable, enable, expect_slow
    from commlens.diagnose.paths import diagnose_paths as diagnose
    from commlens.errors import (
        CommandError,
        CommlensError,
        ConfigError,
        DistributedOperationException,
        DumpError,
        EvidenceError,
        FormatError,
        MissingDependency,
        NativeEngineError,
        OutputError,
        SelectionError,
    )
    from commlens.model.verdict import Verdict
    from commlens.reading.assertions import assert_comms, assert_matches_golden
    from commlens.reading.trace import Trace
    from commlens.trace import trace
    from commlens.trace.comm_debug_mode import CommDebugMode
    from commlens.trace.preview import preview
    from commlens.verify import verify
    from commlens.verify.operation import verify_operation
    from commlens.watch.snapshot import dump

__version__ = "0.1.0"

__all__ = [
    "CommDebugMode",
    "CommandError",
    "CommlensError",
    "ConfigError",
    "DistributedOperationException",
    "DumpError",
    "EvidenceError",
    "FormatError",
    "MissingDependency",
    "NativeEngineError",
    "OutputError",
    "SelectionError",
    "Trace",
    "Verdict",
    "__version__",
    "assert_comms",
    "assert_matches_golden",
    "diagnose",
    "disable",
    "dump",
    "enable",
    "expect_slow",
    "preview",
    "trace",
    "verify",
    "verify_operation",
]

_FROM = {
    "CommDebugMode": "commlens.trace.comm_debug_mode",
    "CommandError": "commlens.errors",
    "CommlensError": "commlens.errors",
    "ConfigError": "commlens.errors",
    "DistributedOperationException": "commlens.errors",
    "DumpError": "commlens.errors",
    "EvidenceError": "commlens.errors",
    "FormatError": "commlens.errors",
    "MissingDependency": "commlens.errors",
    "NativeEngineError": "commlens.errors",
    "OutputError": "commlens.errors",
    "SelectionError": "commlens.errors",
    "Trace": "commlens.reading.trace",
    "Verdict": "commlens.model.verdict",
    "assert_comms": "commlens.reading.assertions",
    "assert_matches_golden": "commlens.reading.assertions",
    "disable": "commlens.capture",
    "dump": "commlens.watch.snapshot",
    "enable": "commlens.capture",
    "expect_slow": "commlens.capture",
    "verify_operation": "commlens.verify.operation",
    "preview": "commlens.trace.preview",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("diagnose", "trace", "verify"):  # packages that can be called: see there
        return import_module(f"commlens.{name}")
    if name not in _FROM:
        raise AttributeError(f"module 'commlens' has no attribute {name!r}")
    value = getattr(import_module(_FROM[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
