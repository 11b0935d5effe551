"""The verdict that a rank hands over when the tensors of ranks differ: a file in the job's folder,
which the watcher takes. The rank logs a verdict that nobody takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from commlens.blackbox import job_dirs
from commlens.model.verdict import Verdict

_MOST: Final = 50  # findings in one verdict
_NAME: Final = f"{job_dirs.NUMBERS_VERDICT}*"


def take_verdict(folders: Iterable[Path]) -> Verdict | None:
    """Return a verdict that was handed over, and remove its file; None if there is none."""
    for path in (path for folder in folders for path in folder.glob(_NAME)):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            content = path.read_bytes()
            path.unlink()  # of two that read it, one reports it
            return msgspec.json.decode(content.removeprefix(job_dirs.NUMBERS_HEAD), type=Verdict)
    return None


def together(former: Verdict | None, verdict: Verdict) -> Verdict:
    """Return a verdict on all tensors that were found to differ so far: the first ones may be why
    the others do.
    """
    if former is None or former.kind != "diverged":
        return verdict
    findings = [*former.findings, *verdict.findings][:_MOST]
    return Verdict.from_findings(findings, looked_at=former.looked_at)
