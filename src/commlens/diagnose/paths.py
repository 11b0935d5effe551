"""Files in, verdict out: what ``commlens.diagnose(paths)`` and ``commlens diagnose PATH ...`` do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from commlens.diagnose import diagnose
from commlens.errors import EvidenceError
from commlens.formats.dumps import read_evidence
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict


class Examined(NamedTuple):
    """A verdict, and what was around the fault: what its page is made of."""

    verdict: Verdict
    logs: Sequence[RankLog]


_TOLD = 10  # problems named when nothing could be read


def diagnose_paths(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, stalled_after_s: float = 1.0) -> Verdict:
    """Say what is wrong with a job, from its dumps or black boxes.

    Args:
        paths: a dump's folder or a black box, or several of them in any order.
        stalled_after_s: a collective in flight for less than this in a process that runs is not stuck.

    Raises:
        CommandError: a path does not exist or cannot be read.
        EvidenceError: nothing in it could be read as a black box.
    """
    return examine_paths(paths, stalled_after_s=stalled_after_s).verdict


def examine_paths(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, stalled_after_s: float = 1.0) -> Examined:
    """The same as :func:`diagnose_paths`, with what the verdict was made of."""
    several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    evidence = read_evidence([os.fspath(path) for path in several])
    if not evidence.logs:
        raise EvidenceError(_nothing(evidence.problems))
    return Examined(diagnose(evidence.logs, problems=evidence.problems, stalled_after_s=stalled_after_s), evidence.logs)


def _nothing(problems: Sequence[str]) -> str:
    told = "".join(f"\n  - {text}" for text in problems[:_TOLD])
    more = f"\n  - and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
    return f"Nothing here can be diagnosed: there is no readable black box.{told}{more}"
