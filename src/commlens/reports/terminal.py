"""The verdict on a terminal: the answer first, then what supports it, then what could not be known."""

from __future__ import annotations

import io
import sys
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from commlens.model.verdict import Finding, Verdict
from commlens.text import ranks_phrase

_WIDEST = 120  # longer lines are hard to read
_MOST_FINDINGS = 5
_MOST_SENTENCES = 6
_STYLES = {"healthy": "bold green", "waiting": "bold yellow"}


def print_verdict(verdict: Verdict, file: IO[str] | None = None, width: int | None = None, colour: bool | None = None) -> None:
    """Print a verdict.

    Args:
        verdict: what to print.
        file: where to; standard output by default.
        width: columns; those of the terminal by default, 80 where there is none, at most 120.
        colour: whether to use colour; by default where the file is a terminal that wants it.
    """
    out = file if file is not None else sys.stdout
    console = Console(file=out, width=width, force_terminal=colour, no_color=colour is False, highlight=False, emoji=False, markup=False)
    if width is None:
        console.width = min(console.width, _WIDEST)
    with console.capture() as text:
        for part in _parts(verdict):
            console.print(part)
    # The columns are filled up with blanks, which only a terminal hides.
    out.write(text.get() if console.is_terminal else "".join(f"{line.rstrip()}\n" for line in text.get().splitlines()))


def render(verdict: Verdict, width: int = 80) -> str:
    """The same as plain text, for logs and tests."""
    out = io.StringIO()
    print_verdict(verdict, out, width, colour=False)
    return out.getvalue()


def _parts(verdict: Verdict) -> list[RenderableType]:
    style = _STYLES.get(verdict.kind, "bold red")
    rows = [("VERDICT", _sentence(verdict.summary), style)]
    if verdict.explanation:
        rows.append(("WHY", verdict.explanation, ""))
    if verdict.next_step:
        rows.append(("NEXT", _sentence(verdict.next_step, capital=False), ""))
    parts: list[RenderableType] = [_block(rows)]
    first = verdict.findings[0] if verdict.findings else None
    if first is not None:
        details = _details(first)
        if details is not None:
            parts += ["", details]
        others = verdict.findings[1:]
        if others:
            parts += ["", _others(others)]
    if verdict.missing_evidence:
        parts += ["", _list("Not known", verdict.missing_evidence, most=8)]
    if verdict.looked_at:
        parts += ["", Text(f"Looked at {verdict.looked_at}." + _sure(verdict), style="dim")]
    return parts


def _block(rows: list[tuple[str, str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text, style in rows:
        table.add_row(Text(label, style=style or "bold"), Text(text))
    return table


def _details(finding: Finding) -> RenderableType | None:
    """Evidence that the first lines do not hold already."""
    said = finding.summary + " " + finding.explanation
    sentences = [text for text in finding.evidence if text.rstrip(".") not in said]
    return _list("Evidence", sentences) if sentences else None


def _others(findings: list[Finding]) -> RenderableType:
    roots = [finding for finding in findings if finding.root_cause]
    rest = [finding for finding in findings if not finding.root_cause]
    parts: list[RenderableType] = []
    if roots:
        parts.append(Text("Also wrong, independently", style="bold"))
        parts += [_bullet(_with_place(finding)) for finding in roots[:_MOST_FINDINGS]]
        if len(roots) > _MOST_FINDINGS:
            parts.append(_bullet(f"{len(roots) - _MOST_FINDINGS} more; --json lists them all."))
    if rest:
        parts.append(Text("Besides" if not roots else "And", style="bold"))
        parts += [_bullet(_with_place(finding)) for finding in rest[:_MOST_FINDINGS]]
        if len(rest) > _MOST_FINDINGS:
            parts.append(_bullet(f"{len(rest) - _MOST_FINDINGS} more; --json lists them all."))
    return Group(*parts)


def _with_place(finding: Finding) -> str:
    blocked = f" It holds up {ranks_phrase(finding.victims)}." if finding.root_cause and finding.victims else ""
    place = f" ({finding.source})" if finding.source and finding.source not in finding.summary else ""
    return _sentence(finding.summary + place) + blocked


def _list(title: str, sentences: list[str], most: int = _MOST_SENTENCES) -> RenderableType:
    shown = [_bullet(_sentence(text)) for text in sentences[:most]]
    if len(sentences) > most:
        shown.append(_bullet(f"{len(sentences) - most} more; --json lists them all."))
    return Group(Text(title, style="bold"), *shown)


def _bullet(text: str) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("-", Text(text))
    return Padding(table, (0, 0, 0, 2))


def _sure(verdict: Verdict) -> str:
    if verdict.confidence == "high" or not verdict.findings:
        return ""
    more = verdict.findings[0].would_raise_confidence
    return f" Confidence: {verdict.confidence}." + (f" {more}" if more else "")


def _sentence(text: str, *, capital: bool = False) -> str:
    """With a full stop. Not capitalised: a sentence may start with "rank 2" or a file's name."""
    text = text.strip()
    if capital:
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."
