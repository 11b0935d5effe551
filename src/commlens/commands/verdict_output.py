"""Options and output that verbs which show a verdict have in common."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from commlens.reports.json_report import print_json

if TYPE_CHECKING:
    from commlens.diagnosis.examine import ExaminedJob
    from commlens.model.verdict import Verdict


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json``."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the verdict as JSON (schema commlens.verdict/2)",
    )


def add_html(parser: argparse.ArgumentParser, about: str) -> None:
    """Declare ``--html``. Its help ends with ``about``, a clause about the page."""
    parser.add_argument(
        "-o",
        "--html",
        type=Path,
        metavar="FILE",
        help=f"also write the verdict as an HTML page, {about}",
    )


def show_verdict(verdict: Verdict, *, as_json: bool) -> None:
    """Print a verdict on the terminal or, with ``--json``, as JSON."""
    if as_json:
        print_json(verdict)
        return
    from commlens.reports.terminal import print_verdict

    print_verdict(verdict)


def write_page(file: Path, examined: ExaminedJob, *, has_times: bool = True) -> None:
    """Write the page of ``--html``, and print its name; ``has_times`` as in
    :func:`~commlens.reports.verdict_page.verdict_page`.
    """
    from commlens.atomic_write import write_whole
    from commlens.reports.verdict_page import verdict_html

    write_whole(file, verdict_html(examined, has_times=has_times))
    print(f"commlens: Wrote {file}: open it in a browser.", file=sys.stderr)
