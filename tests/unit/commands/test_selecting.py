"""The options that select ranks and groups."""

from __future__ import annotations

import argparse

import pytest

from commlens.commands.selecting import add_selection, group_names, ranks
from commlens.model.collective import Channel, ProcessGroup


def test_ranks() -> None:
    assert ranks("0-2,12") == {0, 1, 2, 12}
    for wrong in ("", "a", "3-1", "-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a set of ranks"):
            ranks(wrong)


def test_groups_may_be_repeated() -> None:
    parser = argparse.ArgumentParser()
    add_selection(parser)
    given = parser.parse_args(["--group", "dp", "--group", "tp"])
    assert (given.group, given.ranks, given.prefix) == (["dp", "tp"], None, "")


def test_a_groups_name_follows_its_label() -> None:
    groups = [ProcessGroup("3", (0, 1), "mesh_dp", mesh_dim="dp"), ProcessGroup("4", (0, 1), "4")]
    assert group_names(Channel(group, "cpu") for group in groups) == {"dp (3)", "4"}
