"""The README's table of figures: what people use today, and commlens, from the results of ``make
bench``.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- make bench writes this -->\n", "<!-- end -->\n"


def write(figures: dict[str, Any]) -> None:
    """Put the table into the README."""
    README.write_text(with_table(README.read_text(encoding="utf-8"), figures), encoding="utf-8")


def with_table(readme: str, figures: dict[str, Any]) -> str:
    """Return the README with this table in the place of its own."""
    return re.sub(
        f"{BEGIN}.*?{END}", lambda _: BEGIN + table(figures) + END, readme, flags=re.DOTALL
    )


def table(figures: dict[str, Any]) -> str:
    """Return the table, from the content of results/performance.json."""
    rows = {
        name: figures[name]["rows"]
        for name in ("diagnose_score", "diagnose_cost", "record_cost", "step_time", "verify_cost")
    }
    score = {
        tool: Counter(row[tool] for row in rows["diagnose_score"] if tool in row)
        for tool in ("torchfrtrace", "commlens")
    }
    right = {tool: f"{found['right']} of {sum(found.values())}" for tool, found in score.items()}
    largest = max(
        (row for row in rows["diagnose_cost"] if "torchfrtrace" in row),
        key=lambda row: row["ranks"],
    )
    read = {
        tool: f"{largest[tool]['cpu_s']:.1f} s of CPU, {largest[tool]['peak_mb']:,.0f} MB"
        for tool in ("torchfrtrace", "commlens")
    }
    gloo = {
        row["mode"]: row
        for row in rows["record_cost"]
        if (row["backend"], row["case"]) == ("gloo x1", "all_reduce")
    }
    added = {mode: f"{row['added_cpu_us']:.0f} us" for mode, row in gloo.items()}
    small = [
        row for row in rows["verify_cost"] if (row["ranks"], row["case"]) == (2, "all_reduce 4 B")
    ]
    verified = {row["mode"]: f"{row['ratio']:.1f} times as long" for row in small}
    traced, theirs = (
        _ratios(rows["step_time"], mode) for mode in ("traced", "torch CommDebugMode")
    )
    watched = _ratios([row for row in rows["step_time"] if row["alone"]], "recorded and watched")
    recorder, detail = added["torch's recorder"], verified["TORCH_DISTRIBUTED_DEBUG=DETAIL"]
    lines = [
        (
            "find the rank that stopped a job",
            f"torchfrtrace: right for {right['torchfrtrace']} generated jobs",
            f"right for {right['commlens']}",
        ),
        (
            f"read the dumps of {largest['ranks']} ranks",
            f"torchfrtrace: {read['torchfrtrace']}",
            read["commlens"],
        ),
        (
            "record an `all_reduce`",
            f"Flight Recorder: {recorder}",
            (
                f"{added['native engine']} with the [native engine](docs/native.md),"
                f" {added['Python engine']} without it"
            ),
        ),
        (
            "record and watch a training step",
            "",
            f"{watched} times as long, which is within the noise",
        ),
        (
            "refuse a bad `all_reduce` in time",
            f"`TORCH_DISTRIBUTED_DEBUG=DETAIL`: {detail}",
            f"{verified['verified, native engine']}, with the native engine",
        ),
        (
            "see what a step communicates",
            f"CommDebugMode: {theirs} times as long",
            f"{traced} times as long",
        ),
    ]
    return (
        "\n".join(
            [
                "| | today | commlens |",
                "|---|---|---|",
                *(f"| {' | '.join(line)} |" for line in lines),
            ]
        )
        + "\n"
    )


def _ratios(rows: list[dict[str, Any]], mode: str) -> str:
    ratios = [row["ratio"] for row in rows if row["mode"] == mode]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"
