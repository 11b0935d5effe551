"""A folder in which nodes meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlens.watch.nodes.beat import QUESTION
from commlens.watch.nodes.meeting_places import FolderClient


def test_a_folder_offers_the_same_calls(tmp_path: Path):
    one, other = (FolderClient(tmp_path / "shared") for _ in range(2))
    one.set("commlens/2/a", b"\0one\xff")
    one.set("commlens/2/a", b"two")
    assert other.existing_keys(["commlens/2/never", "commlens/2/a"]) == ["commlens/2/a"]
    assert other.get(["commlens/2/a"]) == [b"two"]
    counts = [
        one.add("commlens/2/n", 0),
        one.add("commlens/2/n", 1),
        other.add("commlens/2/n", 1),
        one.add("commlens/2/n", 0),
    ]
    assert counts == [0, 1, 2, 2]
    assert one.existing_keys(["commlens/2/n", "commlens/2/m"]) == ["commlens/2/n"]
    assert other.add("commlens/2/n", QUESTION) == one.add("commlens/2/n", 0) == QUESTION + 2
    assert one.add("commlens/2/n", QUESTION) == 2 * QUESTION + 2
    (tmp_path / "shared" / "mine").touch()
    with pytest.raises(OSError, match="not empty"):
        other.remove()
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["mine"]
