"""The reference of all commands and their options, from the parsers themselves."""

from __future__ import annotations

import re
from pathlib import Path

from commlens.commands import PURPOSES, help_text
from commlens.commands.completion import whole_parser

DOCS = Path(__file__).parents[1]
WIDTH = 90


def page_of(command: str) -> str:
    """Return the page that explains a command: the one whose first line names it."""
    pages = sorted(DOCS.glob("*.md"))
    return next(
        page.name
        for page in pages
        if re.search(rf"\bcommlens {command}\b", page.read_text().partition("\n")[0])
    )


def commands_page() -> str:
    """Return ``commlens --help``, and under a heading for each command what ``commlens COMMAND
    --help`` prints.
    """
    import os

    os.environ["COLUMNS"] = str(WIDTH)
    parsers = next(action for action in whole_parser()._actions if action.dest == "command").choices
    assert isinstance(parsers, dict)
    parts = ["\n```console\n$ commlens --help\n" + help_text() + "\n```\n"]
    for purpose, entries in PURPOSES:
        parts.append(f"## {purpose}\n")
        for entry in entries:
            help_of = parsers[entry.name].format_help().rstrip()
            parts.append(
                f"### commlens {entry.name}\n\n{entry.help}"
                f" [More]({page_of(entry.name)}).\n\n```text\n{help_of}\n```\n"
            )
    return "\n".join(parts)
