"""Options that choose a part of what dumps hold, the same for every verb that takes dumps."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from commlens.text import parse_ranks

if TYPE_CHECKING:
    from commlens.model.collective import Channel


def add_selection(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare ``--ranks``, ``--group`` and ``--prefix``."""
    parser.add_argument("--ranks", type=ranks, metavar="RANKS", help="only these ranks: 0-7,12 or 0-56:8")
    parser.add_argument(
        "--group", action="append", default=[], metavar="NAME",
        help="only this process group, by its name, description or mesh dimension; may be given several times",
    )  # fmt: skip
    parser.add_argument("--prefix", default="", metavar="TEXT", help="take only files whose name begins so, and read the rank after it")


def ranks(text: str) -> frozenset[int]:
    """``"0-7,12"`` as argparse wants it."""
    try:
        found = frozenset(parse_ranks(text))
    except ValueError:
        found = frozenset()
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a set of ranks like 0-7,12")
    return found


def group_names(channels: Iterable[Channel]) -> set[str]:
    """What groups are called, for an error that lists them."""
    return {one.group.label if one.group.label == one.group.name else f"{one.group.label} ({one.group.name})" for one in channels}
