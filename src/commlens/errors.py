"""The exceptions of commlens.

    CommlensError
    ├── CommandError        wrong usage or unreadable input; carries the exit status
    │   ├── EvidenceError   not enough readable evidence (exit status 3)
    │   ├── ConfigError     unknown setting or invalid value
    │   ├── NativeEngineError  the native engine cannot be built or used
    │   └── SelectionError  unknown trace field, phase or step
    ├── FormatError         a file has the wrong format or is damaged
    ├── DumpError           a dump could not be saved
    ├── OutputError         a trace or a report could not be written
    ├── DistributedOperationException  a collective would hang or fail (strict verification)
    ├── RanksFailed         a function that a test ran on several ranks raised, died or hung
    └── MissingDependency   a package is not installed

Each class has a ``slug``, its heading in docs/errors.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any


class CommlensError(Exception):
    """Base class. The message is a full sentence: what happened, where, and what to do."""

    slug = "commlens-error"


class CommandError(CommlensError):
    """A command cannot run. ``exit_code`` is the exit status of the process (2: wrong usage)."""

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
    """Unknown setting or invalid value. The message names the key, where it was set, and the
    accepted values.
    """

    slug = "bad-setting"


class NativeEngineError(CommandError):
    """The native engine cannot be built or used. Without it commlens records in Python."""

    slug = "native-engine"


class SelectionError(CommandError):
    """Unknown trace field, phase or step; the message lists the valid ones."""

    slug = "unknown-selection"


class FormatError(CommlensError):
    """A file has the wrong format or is damaged. The message names the file."""

    slug = "unreadable-file"


class DumpError(CommlensError):
    """A dump could not be saved completely. The message names the folder."""

    slug = "dump-not-saved"


class OutputError(CommlensError):
    """A trace or a report could not be written. The message names the file."""

    slug = "not-written"


class DistributedOperationException(CommlensError):
    """A collective would hang or fail, so it was not issued. The message, the same on all ranks,
    lists every rank's arguments.

    :mod:`commlens.verification` sets both fields: ``kind`` is the kind in a verdict
    ("mismatch/shape", "missing", "dead", "cycle"), and ``refusal`` holds the kind, the aspect and
    the ranks under these names.
    """

    slug = "distributed-operation"
    kind = ""

    def __init__(self, *text: object) -> None:
        super().__init__(*text)
        self.refusal: dict[str, Any] = {}


class RanksFailed(CommlensError):
    """A function that a test ran on several ranks raised, died or hung. ``rank`` is the rank to
    look at; None: no rank can be named.
    """

    slug = "ranks-failed"

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class MissingDependency(CommlensError):
    """A feature needs a package that is not installed. The message gives the pip command."""

    slug = "missing-dependency"

    @classmethod
    def torch(cls, feature: str, error: ImportError | None = None) -> MissingDependency:
        """Return the error for a feature that needs torch; ``error`` is from the failed import, if
        there was one.
        """
        reason = "is not installed" if error is None else f"cannot be imported ({error})"
        return cls(f"{feature} needs torch, which {reason}: pip install torch")


def require_torch(feature: str) -> None:
    """Raise a MissingDependency if torch, which the feature needs, is not installed. torch is not
    imported.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency.torch(feature)


@contextlib.contextmanager
def needs_torch(feature: str) -> Iterator[None]:
    """Import torch inside this context, for a feature that needs it. A failed import of commlens
    itself is a bug, not a missing package, and is raised unchanged.

    Raises:
        MissingDependency: another import failed.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "commlens":
            raise
        raise MissingDependency.torch(feature, error) from None


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """``" Did you mean abort?"``; empty if none of the words is similar."""
    import difflib

    close = difflib.get_close_matches(word, list(words), n=1)
    return f" Did you mean {close[0]}?" if close else ""
