"""The verdict on a terminal: the answer first, then the evidence, then what could not be
determined.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import IO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from commlens.diagnosis.words.whole_job import left_no_record
from commlens.model.cause import AnyCause, Unrecorded
from commlens.model.verdict import Finding, Verdict
from commlens.model.wrapping import unbroken
from commlens.reports.console import bullet, print_parts
from commlens.text import naming_worlds, ranks_phrase, sentence

_MOST_FINDINGS = 5
_MOST_EVIDENCE = 6
_MOST_UNKNOWN = 8
_STYLES = {"healthy": "bold green", "waiting": "bold yellow", "undetermined": "bold yellow"}


def print_verdict(
    verdict: Verdict,
    file: IO[str] | None = None,
    width: int | None = None,
    colour: bool | None = None,
) -> None:
    """Print a verdict. The other arguments are those of
    :func:`commlens.reports.console.console`.
    """
    with naming_worlds(verdict.worlds):
        print_parts(_parts(verdict), file, width, colour)


def render(verdict: Verdict, width: int = 80, *, colour: bool = False) -> str:
    """Return the verdict as text."""
    out = io.StringIO()
    print_verdict(verdict, out, width, colour=colour)
    return out.getvalue()


def _parts(verdict: Verdict) -> list[RenderableType]:
    parts: list[RenderableType] = [_answer(verdict)]
    hazards = [finding for finding in verdict.findings if finding.kind == "hazard"]
    if findings := [finding for finding in verdict.findings if finding.kind != "hazard"]:
        first, *others = findings
        parts += _list("Evidence", _evidence(first), _MOST_EVIDENCE)
        roots = [_with_source(finding) for finding in others if finding.root_cause]
        rest = [_with_source(finding) for finding in others if not finding.root_cause]
        parts += _list("Also wrong, independently", roots, _MOST_FINDINGS)
        parts += _list("Also found", rest, _MOST_FINDINGS)
    parts += _list("Latent faults", [finding.summary for finding in hazards], _MOST_FINDINGS)
    told = _told_of_records(verdict.cause)
    unknown = [text for text in verdict.missing_evidence if text != told]
    parts += _list("Not known", unknown, _MOST_UNKNOWN)
    if verdict.looked_at:
        parts += ["", Text(f"Looked at {verdict.looked_at}." + _confidence(verdict), style="dim")]
    return parts


def _evidence(finding: Finding) -> list[str]:
    """Return the evidence that the answer does not give yet."""
    shown = finding.summary + " " + finding.explanation
    return [text for text in finding.evidence if text.rstrip(".") not in shown]


def _told_of_records(cause: AnyCause | None) -> str:
    """Return the sentence about missing records that the summary holds, too; empty if there is
    none.
    """
    if not isinstance(cause, Unrecorded) or cause.reason != "left-nothing" or cause.lost_nodes:
        return ""
    return left_no_record(cause.ranks, cause.job_size)


def _answer(verdict: Verdict) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(
        Text("VERDICT", style=_STYLES.get(verdict.kind, "bold red")),
        Text(unbroken(sentence(verdict.summary))),
    )
    if verdict.explanation:
        table.add_row(Text("WHY", style="bold"), Text(unbroken(verdict.explanation)))
    if verdict.next_step:
        table.add_row(Text("NEXT", style="bold"), Text(unbroken(sentence(verdict.next_step))))
    return table


def _list(title: str, sentences: Sequence[str], most: int) -> list[RenderableType]:
    if not sentences:
        return []
    shown = [bullet(sentence(text)) for text in sentences[:most]]
    if len(sentences) > most:
        shown.append(bullet(f"{len(sentences) - most} more; --json lists them all."))
    return ["", Group(Text(title, style="bold"), *shown)]


def _with_source(finding: Finding) -> str:
    source = (
        f" ({finding.source})" if finding.source and finding.source not in finding.summary else ""
    )
    blocked = (
        f" It holds up {ranks_phrase(finding.victims)}."
        if finding.root_cause and finding.victims
        else ""
    )
    return sentence(finding.summary + source) + blocked


def _confidence(verdict: Verdict) -> str:
    if verdict.confidence == "high" or not verdict.findings:
        return ""
    more = verdict.findings[0].would_raise_confidence
    return f" Confidence: {verdict.confidence}." + (f" {more}" if more else "")
