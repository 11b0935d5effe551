"""Render a verdict as text for ``print``, and as an HTML fragment for notebooks, which is escaped
and has no script.

The argument is a :class:`commlens.model.verdict.Verdict`, untyped here so that the two modules do
not import each other.
"""

from __future__ import annotations

from html import escape
from typing import Any

from commlens.model.wrapping import fill

_COLOURS = {"healthy": "#1a7f37", "waiting": "#9a6700", "undetermined": "#9a6700"}
_MOST = 8  # sentences of each list


def verdict_html(verdict: Any) -> str:
    """Return the answer, the cause and the next step, with evidence and unknowns in collapsible
    sections.
    """
    colour = _COLOURS.get(verdict.kind, "#cf222e")
    rows = [
        ("Verdict", _sentence(verdict.summary)),
        ("Why", verdict.explanation),
        ("Next", _sentence(verdict.next_step)),
    ]
    cells = "".join(
        f'<tr><th style="text-align:left;vertical-align:top;padding-right:1em">{label}</th>'
        f'<td style="text-align:left;white-space:normal">{escape(text)}</td></tr>'
        for label, text in rows
        if text
    )
    parts = [_details(title, sentences) for title, sentences in _sections(verdict)]
    unsure = verdict.findings and verdict.confidence != "high"
    doubt = verdict.findings[0].would_raise_confidence if unsure else None
    sure = f"{verdict.confidence}. {doubt}" if doubt else f"{verdict.confidence}."
    looked = (
        f"<small>Looked at {escape(verdict.looked_at)}. Confidence: {escape(sure)}</small>"
        if verdict.looked_at
        else ""
    )
    return (
        '<div style="border-left:4px solid'
        f' {colour};padding-left:1em"><table>{cells}</table>{"".join(parts)}{looked}</div>'
    )


def verdict_text(verdict: Any) -> str:
    """Return a verdict as lines of up to 80 characters."""
    rows = [
        ("VERDICT", _sentence(verdict.summary)),
        ("WHY", verdict.explanation),
        ("NEXT", verdict.next_step and _sentence(verdict.next_step)),
    ]
    lines = [fill(text, 80, first=f"{label:<9}", indent=" " * 9) for label, text in rows if text]
    for title, sentences in _sections(verdict):
        if sentences:
            lines += [
                "",
                title,
                *(
                    fill(_sentence(text), 80, first="  - ", indent="    ")
                    for text in sentences[:_MOST]
                ),
            ]
    return "\n".join(
        [*lines, "", f"Looked at {verdict.looked_at}."] if verdict.looked_at else lines
    )


def _sections(verdict: Any) -> list[tuple[str, list[str]]]:
    # a program's hazards stand beside what the verdict is about
    hazards = [finding for finding in verdict.findings if finding.kind == "hazard"]
    findings = [finding for finding in verdict.findings if finding.kind != "hazard"]
    return [
        ("Evidence", findings[0].evidence if findings else []),
        ("Also found", [_with_ranks(finding) for finding in findings[1:]]),
        ("Latent faults", [_with_ranks(finding) for finding in hazards]),
        ("Not known", verdict.missing_evidence),
    ]


def _details(title: str, sentences: list[str]) -> str:
    if not sentences:
        return ""
    shown = [
        *sentences[:_MOST],
        *([f"{len(sentences) - _MOST} more"] if len(sentences) > _MOST else []),
    ]
    items = "".join(f"<li>{escape(_sentence(text))}</li>" for text in shown)
    return f"<details><summary>{title} ({len(sentences)})</summary><ul>{items}</ul></details>"


def _with_ranks(finding: Any) -> str:
    return str(finding.summary) + (
        f" ({finding.source})" if finding.source and finding.source not in finding.summary else ""
    )


def _sentence(text: str) -> str:
    text = text.strip()
    return text if not text or text.endswith((".", "!", "?", ":")) else f"{text}."
