"""Golden files hold the words of whole verdicts, each in one place: the verdict as ``commlens
diagnose`` prints it, what to do with the job, and its causes as data. Tests assert facts, and leave the words to these.

``make goldens`` writes the files anew; read the difference in review.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path

import msgspec

from commlens.diagnosis.action import action_of
from commlens.model.cause import Cause
from commlens.model.verdict import Verdict
from commlens.reports.terminal import render

FOLDER = Path(__file__).parents[1] / "diagnosis/golden"
WRITES = bool(os.environ.get("COMMLENS_TEST_WRITE_GOLDENS"))  # no test sees this variable


def golden_text(verdict: Verdict) -> str:
    """Return what the golden file of a verdict contains."""
    others = [finding.cause for finding in verdict.findings if finding.cause is not verdict.cause]
    causes = [verdict.cause, *others]
    action = action_of(verdict)
    do = f"\naction: {json.dumps(msgspec.to_builtins(action))}\n" if action is not None else ""
    return (
        render(verdict)
        + do
        + "".join(f"\n{_facts(cause)}" for cause in causes if cause is not None)
    )


def _facts(cause: Cause) -> str:
    """Return one line for each fact that is not empty, zero or false. Pythons sum up floats
    differently, which shows in their last digits.
    """
    exact = msgspec.json.encode(cause)
    facts = json.loads(exact, parse_float=lambda digits: float(f"{float(digits):.12g}"))
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in facts.items() if value)


def hold(name: str, verdict: Verdict) -> None:
    """Compare a verdict with the golden file of that name."""
    path = FOLDER / f"{name}.txt"
    text = golden_text(verdict)
    if WRITES:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    held = path.read_text(encoding="utf-8") if path.exists() else ""
    difference = "\n".join(
        difflib.unified_diff(held.splitlines(), text.splitlines(), str(path), "now", lineterm="")
    )
    assert not difference, f"{difference}\nIf the new words are better: make goldens"
