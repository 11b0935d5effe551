"""Tests of src/commlens/tap/made_groups.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from commlens.tap.made_groups import MANY, MadeGroups, ManyGroups


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeGroups]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield MadeGroups()
    dist.destroy_process_group()


def test_many_groups_of_one_line(made: MadeGroups) -> None:
    for _ in range(MANY - 2):  # the default group has the same rank
        dist.new_group([0])
        made.note("line", [0])
    made.note("another line", [0])
    made.note("line", [0])
    assert list(made.many()) == []
    dist.new_group([0])
    made.note("line", [0])
    assert list(made.many()) == [ManyGroups("line", MANY, "[0]")]


def test_groups_that_are_destroyed_are_not_many(made: MadeGroups) -> None:
    for _ in range(MANY + 1):
        group = dist.new_group([0])
        made.note("line", [0])
        dist.destroy_process_group(group)
    assert list(made.many()) == []
