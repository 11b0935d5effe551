"""Options that select ranks, groups and files, the same for every verb that reads dumps."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from commlens.text import parse_ranks

if TYPE_CHECKING:
    from commlens.model.collective import Channel


def add_selection(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare ``--ranks``, ``--group`` and ``--prefix``."""
    parser.add_argument(
        "--ranks",
        type=ranks,
        metavar="RANKS",
        help="use only these ranks, such as 0-7,12 or 0-56:8",
    )
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME",
        help=(
            "use only this process group, given by name, description or mesh dimension; may be"
            " repeated"
        ),
    )
    parser.add_argument(
        "--prefix",
        default="",
        metavar="TEXT",
        help="read only files whose names begin with TEXT followed by the rank",
    )


def ranks(text: str) -> frozenset[int]:
    """Parse ``"0-7,12"`` for argparse."""
    try:
        found = frozenset(parse_ranks(text))
    except ValueError:
        found = frozenset()
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a set of ranks such as 0-7,12")
    return found


def group_names(channels: Iterable[Channel]) -> set[str]:
    """Return the groups' names, for an error message."""
    return {
        (
            one.group.label
            if one.group.label == one.group.name
            else f"{one.group.label} ({one.group.name})"
        )
        for one in channels
    }
