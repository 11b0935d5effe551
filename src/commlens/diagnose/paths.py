"""Files in, verdict out: the public function ``commlens.diagnose``."""

from __future__ import annotations

import os
from collections.abc import Iterable

from commlens.errors import EvidenceError
from commlens.formats.dumps import read_evidence
from commlens.model.verdict import Verdict


def diagnose_paths(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Verdict:
    """Say what is wrong with a job, from its dumps or black boxes.

    Args:
        paths: a dump's folder, black boxes, or several of them in any order.

    Raises:
        CommandError: a path does not exist or cannot be read.
        EvidenceError: nothing in it could be read as a black box.
    """
    from commlens.diagnose import diagnose

    several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    evidence = read_evidence([os.fspath(path) for path in several])
    if not evidence.logs:
        found = " ".join(evidence.problems) or f"There is no black box in {', '.join(map(str, several)) or 'nothing'}."
        raise EvidenceError(f"There is nothing to diagnose. {found}")
    return diagnose(evidence.logs, problems=evidence.problems)
