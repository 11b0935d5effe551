"""The addresses of stores, and their names as seen from several hosts."""

from __future__ import annotations

import pytest

from commlens.model.collective import (
    Channel,
    Collective,
    CollectiveArgs,
    HandMade,
    ProcessGroup,
    State,
)
from commlens.model.ranklog import RankLog
from commlens.model.store_identity import identity_of, joined_runs, parse_address, seen_from


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:29600/weight_sync/a:7", "localhost", "29600"),
        ("tcp://n1:29500?timeout=5", "n1", "29500"),
        ("tcp://[::1]:29500", "[::1]", "29500"),
        ("::1:29600", "::1", "29600"),
        ("file:///tmp/store:1", "", ""),
        ("/tmp/store:1", "", ""),
        ("env://", "", ""),
        ("", "", ""),
        (None, "", ""),
    ],
)
def test_addresses(text: str | None, host: str, port: str) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    ("store", "seen"),
    [
        ("localhost:29600/a", "n1:29600/a"),
        ("n2:29600/a", "n2:29600/a"),
        ("/shared/store", "/shared/store"),
        ("", ""),
    ],
)
def test_localhost_is_another_host_for_each(store: str, seen: str) -> None:
    log = RankLog(0, 1, host="n1")
    assert seen_from(log, store) == seen
    assert identity_of(log, HandMade(0, 2, store)).store == seen
    assert seen_from(RankLog(0, 1), store) == store, "the host is not known"


def in_group(member: int, size: int, store: str) -> list[RankLog]:
    group = ProcessGroup("", (), hand_made=HandMade(member, size, store))
    args = CollectiveArgs("new_group", "new_group")
    made = Collective(1, Channel(group, "cpu"), 1, args, State.ISSUED, 1)
    return [RankLog(0, 1, host="n1", setups=[made])]


def test_groups_of_one_store_join_runs_only_if_both_lack_members() -> None:
    """Members may have been told different sizes or prefixes; independent jobs share a store."""
    pair = {"a": in_group(0, 2, "s:7/a"), "b": in_group(1, 2, "s:7/a")}
    other = {"c": in_group(0, 2, "s:7/c"), "d": in_group(1, 2, "s:7/c")}
    lacking = {"e": in_group(0, 3, "s:7/e"), "f": in_group(1, 2, "s:7/f")}
    elsewhere = {"g": in_group(0, 3, "t:7/e")}
    runs = pair | other | lacking | elsewhere
    for joined in (pair, other, lacking, elsewhere):
        assert joined_runs(runs, next(iter(joined))) == joined.keys()
