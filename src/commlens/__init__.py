"""commlens: which rank, which collective, which line stopped a distributed PyTorch job.

These are the public names. They are loaded when they are first used: importing commlens imports neither torch nor anything
else that is heavy, and changes nothing in the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commlens.version import __version__

if TYPE_CHECKING:
    from commlens.diagnosis.api import diagnose
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
    from commlens.launch.recording import disable, enable, expect_slow, verify
    from commlens.model.verdict import Verdict
    from commlens.traces.assertions import assert_comms, assert_matches_golden
    from commlens.traces.trace import Trace
    from commlens.tracing.api import trace
    from commlens.tracing.comm_debug.mode import CommDebugMode
    from commlens.tracing.preview.preview import preview
    from commlens.verification.operation import verify_operation
    from commlens.watch.snapshot import dump

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
    "CommDebugMode": "commlens.tracing.comm_debug.mode",
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
    "Trace": "commlens.traces.trace",
    "Verdict": "commlens.model.verdict",
    "assert_comms": "commlens.traces.assertions",
    "assert_matches_golden": "commlens.traces.assertions",
    "disable": "commlens.launch.recording",
    "dump": "commlens.watch.snapshot",
    "enable": "commlens.launch.recording",
    "expect_slow": "commlens.launch.recording",
    "verify_operation": "commlens.verification.operation",
    "diagnose": "commlens.diagnosis.api",
    "preview": "commlens.tracing.preview.preview",
    "trace": "commlens.tracing.api",
    "verify": "commlens.launch.recording",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _FROM:
        raise AttributeError(f"module 'commlens' has no attribute {name!r}")
    value = getattr(import_module(_FROM[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
