"""The report of a benchmark: tables for people, figures for machines, and the goals that the
figures decide.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS: dict[bool | None, str] = {True: "met", False: "**not met**", None: "lost in the noise"}
"""The words for a goal that is met, missed or undecided."""


@dataclasses.dataclass
class Goal:
    """A goal of the design, and what was measured."""

    goal: str
    measured: str
    met: bool | None  # None: the noise is larger than what is to be decided


@dataclasses.dataclass
class Report:
    """The report of one benchmark."""

    title: str
    about: str  # what was measured and how, in sentences
    command: str
    markdown: str = ""  # its tables
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    goals: list[Goal] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)  # in sentences

    def table(self, heading: str, columns: list[str], rows: list[list[str]]) -> None:
        """Add a table."""
        above = f"\n{heading}\n" if heading else ""
        self.markdown += f"{above}\n{markdown_table(columns, rows)}\n"

    def as_json(self) -> dict[str, Any]:
        """Return the figures."""
        return {"machine": machine(), **dataclasses.asdict(self)}


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run fewer rounds, only to see whether it works: no figures to quote",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, aligned: str = "---"
) -> str:
    """Return a table in Markdown; ``aligned`` is ``"---:"`` for columns that end at the right."""
    lines = [
        f"| {' | '.join(columns)} |",
        f"|{f'{aligned}|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines)


def counts_table(counts: Mapping[str, Counter[str]], columns: Sequence[str]) -> str:
    """Return a table of how many jobs with each fault had each outcome, and of all."""
    lines = [
        f"| fault | jobs | {' | '.join(columns)} |",
        "|---|---:|" + "---:|" * len(columns),
    ]
    for name in sorted(counts):
        cells = " | ".join(str(counts[name][column] or "") for column in columns)
        lines.append(f"| {name} | {counts[name].total()} | {cells} |")
    total = sum(counts.values(), Counter())
    cells = " | ".join(str(total[column]) for column in columns)
    lines.append(f"| **all** | {total.total()} | {cells} |")
    return "\n".join(lines)


def write_section(page: Path, name: str, text: str) -> None:
    """Replace the part of a page between ``<!-- name -->`` and ``<!-- end of name -->``."""
    whole = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, after = whole.partition(begin)[0], whole.partition(end)[2]
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def finish(report: Report, given: argparse.Namespace) -> None:
    """Print the report, and write it if ``--json`` is given."""
    print(f"# {report.title}\n\n{report.about}\n{machine()}\n{report.markdown}")
    for sentence in report.left_out:
        print(sentence)
    for goal in report.goals:
        print(f"{WORDS[goal.met].strip('*')}: {goal.goal}: {goal.measured}")
    if given.json:
        given.json.write_text(json.dumps(report.as_json(), indent=1), encoding="utf-8")


def command() -> str:
    """Return the command line of this benchmark."""
    options = [
        word
        for at, word in enumerate(sys.argv[1:], 1)
        if word != "--json" and sys.argv[at - 1] != "--json"
    ]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *options])


def machine() -> str:
    """Return the machine and versions that the figures hold for, in one line."""
    import torch

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, torch"
        f" {torch.__version__}, load {load}"
    )


def us(value: float) -> str:
    """Return microseconds with as many digits as are significant."""
    return (
        f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )


def between(pair: tuple[float, float], digits: int = 2) -> str:
    """Return two quartiles in words."""
    return f"{pair[0]:.{digits}f} to {pair[1]:.{digits}f}"
