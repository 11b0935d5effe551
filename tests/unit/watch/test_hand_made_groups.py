"""Where worlds meet that share a group made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from met_worlds import STORE, log_of

from commlens.model.collective import QUEUE
from commlens.watch import hand_made_groups
from commlens.watch.nodes.beat import ByHand
from commlens.watch.nodes.meeting_places import Folder, Store


def test_worlds_meet_only_where_members_are_out_of_sight(tmp_path: Path) -> None:
    def places(*groups: ByHand, where: str = "auto") -> list[Any]:
        return hand_made_groups.places_to_meet(groups, where, "host0")

    whole = ByHand(STORE, 2, 0, (0, 1))
    assert places() == places(whole) == []
    assert places(ByHand(STORE, 2, 0, (0,)), ByHand(STORE, 2, 0, (1,))) == []
    part = ByHand("10.0.0.1:29600/other", 2, 1, (1,))
    theirs = Store("10.0.0.1", 29600, within="commlens/worlds/")
    assert places(whole, part) == [theirs]
    assert places(part, ByHand("host0:1/a", 2, 0, (1,)), ByHand("host0:1/b", 3, 0, (1,))) == [
        theirs,
        Store("localhost", 1, within="commlens/worlds/"),
    ]
    logs = [log_of(0, "host0", "h:1/late"), log_of(0, "host0", "h:1/early")]
    logs[0].setups[0].announced_ns = 5
    assert [each.store for each in hand_made_groups.by_hand(logs, ())] == ["h:1/early", "h:1/late"]
    queue = log_of(0, "host0", "host0/psm_1")
    queue.setups[0].channel = msgspec.structs.replace(queue.setups[0].channel, device=QUEUE)
    assert hand_made_groups.by_hand([queue], ()) == []
    by_file = ByHand("/tmp/store", 2, 0, (1,))
    assert places(by_file) == []
    (folder,) = places(by_file, where=str(tmp_path))
    assert isinstance(folder, Folder) and folder.path.parent == tmp_path
