"""Every exception that commlens raises on purpose.

    CommlensError
    ├── CommandError        what a command refuses: wrong usage, unreadable input; carries the exit status
    │   ├── EvidenceError   too little that can be read (exit status 3)
    │   ├── ConfigError     a setting's key or value is wrong
    │   ├── NativeEngineError  the native engine cannot be built, or what was built cannot be used
    │   └── SelectionError  a trace has no such field, phase or step to select by
    ├── FormatError         a file is not what it should be
    ├── DumpError           a dump could not be saved
    ├── OutputError         a trace or a report of one could not be written
    ├── DistributedOperationException  a collective would go wrong (strict verification)
    └── MissingDependency   a feature needs a package that is not installed

Each has a ``slug``, its heading in docs/errors.md.
"""

from __future__ import annotations


class CommlensError(Exception):
    """Base of all. The message is a full sentence: what happened, where, and what to do."""

    slug = "commlens-error"


class CommandError(CommlensError):
    """A command cannot do what was asked. ``exit_code`` is the process's status (2: wrong usage)."""

    slug = "command-error"

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EvidenceError(CommandError):
    """There is not enough readable evidence for a verdict."""

    slug = "not-enough-evidence"

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=3)


class ConfigError(CommandError):
    """A setting is wrong. The message names the key, where it was set, and the accepted values."""

    slug = "bad-setting"


class NativeEngineError(CommandError):
    """The native engine cannot be built, or what was built cannot be used. Without it commlens records in Python."""

    slug = "native-engine"


class SelectionError(CommandError):
    """What a trace is filtered or counted by does not exist. The message holds what does."""

    slug = "unknown-selection"


class FormatError(CommlensError):
    """A file cannot be read as what it claims to be. The message names the file."""

    slug = "unreadable-file"


class DumpError(CommlensError):
    """A dump could not be saved, or not all of it. The message names the folder."""

    slug = "dump-not-saved"


class OutputError(CommlensError):
    """A trace, or a report of one, could not be written. The message names the file."""

    slug = "not-written"


class DistributedOperationException(CommlensError):
    """A collective would go wrong, and was not issued. The message holds what every rank asked for, the same on all of them.

    ``kind`` is the verdict's word: "mismatch/shape", "missing", "dead", "cycle".
    """

    slug = "distributed-operation"
    kind = ""


class MissingDependency(CommlensError):
    """A feature needs a package that is not installed. The message holds the pip line to type."""

    slug = "missing-dependency"

    @classmethod
    def torch(cls, what: str, error: ImportError | None = None) -> MissingDependency:
        """``what`` needs torch; ``error`` is why it could not be imported, where it was tried."""
        reason = "is not installed" if error is None else f"cannot be imported ({error})"
        return cls(f"{what} needs torch, which {reason}: pip install 'commlens[torch]'")
