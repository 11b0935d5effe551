"""The rules of a backend that decide how far each rank gets."""

from __future__ import annotations

from typing import Final, NamedTuple


class Rules(NamedTuple):
    """When calls of a backend wait for other ranks.

    A rule that is not certain is the one by which fewer ranks wait: a deadlock is one of every run.
    """

    backend: str
    meets_by_tag: bool
    """A receive takes the first message with its tag; otherwise the first message."""
    groups_meet: bool
    """``new_group`` returns when all members have called it."""
    runs_in_order: bool
    """A group's ops run one after another, and so do the messages between two ranks, both ways.
    Those of a batch run together.
    """


RULES: Final = {
    # Tried on torch 2.13.0: a send of any size, even of 4 bytes, ends only when the other rank
    # receives it.
    "gloo": Rules("gloo", meets_by_tag=True, groups_meet=True, runs_in_order=False),
    # docs/nccl.md. Groups are made at their first collective.
    "nccl": Rules("nccl", meets_by_tag=False, groups_meet=False, runs_in_order=True),
}
