"""The notes on calls that make groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from new_boxes import new_box

pytest.importorskip("torch")

from commlens.blackbox.reader import read_box
from commlens.capture.recorder import Recorder
from commlens.capture.setups import Setups
from commlens.model.collective import State
from commlens.tap.groups import Groups


@pytest.fixture
def setups(tmp_path: Path) -> Setups:
    return Setups(Recorder(new_box(tmp_path), Groups()), 4)


def test_a_call_inside_another_one_is_not_noted(setups: Setups) -> None:
    setups.init_began(4, "gloo", None)
    setups.init_ended(False)
    setups.group_began("3", "undefined", [0, 1], "gloo", None)
    setups.group_began("", "", (), "gloo", None)
    setups.ended(False)
    (_, made) = read_box(setups._writer.path).setups
    assert (made.op, made.sequence_number, made.channel.group.ranks) == ("new_group", 3, (0, 1))
    assert made.in_flight
    setups.ended(False)
    assert not read_box(setups._writer.path).setups[-1].in_flight


def test_a_call_too_large_to_note_does_not_let_the_one_before_seem_under_way(
    setups: Setups,
) -> None:
    setups.init_began(4, "gloo", None)
    setups.init_ended(False)
    setups.group_began("1", "x" * 70_000, [0, 1], "gloo", None)
    (before,) = read_box(setups._writer.path).setups
    assert before.op == "init_process_group" and not before.in_flight
    setups.ended(raised=True)
    (before,) = read_box(setups._writer.path).setups
    assert before.state is State.COMPLETED
