"""Where the reports of ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from commlens.dumps.save import discard_job
from commlens.numbers.meeting import JobStore, Meeting, SharedMemory

Meet = Callable[[int], Meeting]


@pytest.fixture(params=["memory", "file-store", "hash-store"])
def meet(request: pytest.FixtureRequest, tmp_path: Path) -> Meet:
    """Returns the meeting as one rank sees it."""
    if request.param == "memory":
        return lambda rank: SharedMemory(tmp_path, rank, 2)
    if request.param == "file-store":
        return lambda _: JobStore(dist.FileStore(str(tmp_path / "store"), -1))
    store = dist.HashStore()
    return lambda _: JobStore(store)


def test_reports_are_taken_once(meet: Meet) -> None:
    reader, writer = meet(0), meet(1)
    assert reader.take() == []
    writer.post(b"one")
    writer.post(b"two")
    reader.post(b"own")
    assert sorted(reader.take()) == [b"one", b"own", b"two"]
    assert reader.take() == []
    writer.post(b"three")
    assert reader.take() == [b"three"]


def test_values_are_kept_until_they_are_discarded(meet: Meet) -> None:
    one, other = meet(0), meet(1)
    assert one.value("table.1") is None
    one.keep("table.1", b"first")
    other.keep("table.1", b"second")
    assert other.value("table.1") == b"first"
    one.discard(["table.1", "table.2"])
    assert other.value("table.1") is None


def test_the_files_go_with_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    meeting = SharedMemory(folder, 3)
    meeting.post(b"report")
    meeting.keep("answer.1", b"answer")
    assert len(list(folder.iterdir())) == 2
    discard_job(folder)
    assert not folder.exists()
