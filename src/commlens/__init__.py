"""commlens: which rank, which collective, which line stopped a distributed PyTorch job.

These are the public names. They are loaded when they are first used: importing commlens imports
neither torch nor anything else that is heavy, and changes nothing in the process.
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
        RanksFailed,
        SelectionError,
    )
    from commlens.launch.debug_handler import DebugHandler
    from commlens.launch.recording import disable, dump, enable, expect_slow, verify, world
    from commlens.model.verdict import Verdict
    from commlens.numbers.checks import check_numbers, must_agree, must_differ
    from commlens.traces.trace import Trace
    from commlens.tracing.api import trace
    from commlens.tracing.comm_debug.mode import CommDebugMode
    from commlens.tracing.preview.preview import preview
    from commlens.verification.operation import verify_operation

__all__ = [
    "CommDebugMode",
    "CommandError",
    "CommlensError",
    "ConfigError",
    "DebugHandler",
    "DistributedOperationException",
    "DumpError",
    "EvidenceError",
    "FormatError",
    "MissingDependency",
    "NativeEngineError",
    "OutputError",
    "RanksFailed",
    "SelectionError",
    "Trace",
    "Verdict",
    "__version__",
    "check_numbers",
    "diagnose",
    "disable",
    "dump",
    "enable",
    "expect_slow",
    "must_agree",
    "must_differ",
    "preview",
    "trace",
    "verify",
    "verify_operation",
    "world",
]

_ERRORS = (
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
    "RanksFailed",
    "SelectionError",
)
_FROM = dict.fromkeys(_ERRORS, "errors") | {
    "CommDebugMode": "tracing.comm_debug.mode",
    "DebugHandler": "launch.debug_handler",
    "Trace": "traces.trace",
    "Verdict": "model.verdict",
    "check_numbers": "numbers.checks",
    "diagnose": "diagnosis.api",
    "disable": "launch.recording",
    "dump": "launch.recording",
    "enable": "launch.recording",
    "expect_slow": "launch.recording",
    "must_agree": "numbers.checks",
    "must_differ": "numbers.checks",
    "preview": "tracing.preview.preview",
    "trace": "tracing.api",
    "verify": "launch.recording",
    "verify_operation": "verification.operation",
    "world": "launch.recording",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    home = _FROM.get(name)
    if home is None:
        raise AttributeError(f"module 'commlens' has no attribute {name!r}")
    value = getattr(import_module(f"commlens.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
