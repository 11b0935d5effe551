"""Where a process is in its message queues."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from commlens.tap import message_queues
from commlens.tap.library_adapters import ADAPTERS
from past_torch import SITE, adapted


def test_both_ends_know_their_place(tmp_path: Path) -> None:
    with adapted(ADAPTERS, SITE) as patched:
        patched.setenv("PAST_TORCH_DIR", str(tmp_path))
        module = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
        writer = module.MessageQueue(1, 1, [1], 1024, 2, "psm_1")
        reader = module.MessageQueue.create_from_handle((1, 1024, 2, "psm_1", [1]), 1)
        writer.enqueue("a")
        writer.enqueue("b")
        with pytest.raises(TimeoutError):
            writer.enqueue("c", timeout=0.0)
        assert reader.dequeue(timeout=1.0) == "a"
        ends = [message_queues.queue_of(end) for end in (writer, reader)]
        assert [(end.membership.member, end.done, end.op, end.holds) for end in ends if end] == [
            (0, 2, "", 2),
            (1, 1, "", 2),
        ]
        assert len({end.membership[1:] for end in ends if end}) == 1
        reader.dequeue()
        waiting = threading.Thread(target=reader.dequeue, kwargs={"timeout": 20.0}, daemon=True)
        waiting.start()
        while not (ends[1] and ends[1].op):
            threading.Event().wait(0.01)
        assert ends[1].thread == waiting.ident
        writer.enqueue("c")
        waiting.join(20)
        assert (ends[1].done, ends[1].op) == (3, "")


@pytest.mark.parametrize(
    "end", [SimpleNamespace(), SimpleNamespace(buffer=None, _is_writer=True)], ids=str
)
def test_another_queue_goes_on_unseen(end: Any) -> None:
    class End:
        def enqueue(self, obj: Any) -> Any:
            return obj

    other = End()
    vars(other).update(vars(end))
    method = message_queues.noting(End.enqueue, "enqueue")
    assert method(other, 3) == 3
    assert message_queues.queue_of(other) is None


def test_a_queue_that_nothing_can_refer_to_goes_on_unseen() -> None:
    class End:
        __slots__ = ()

        def enqueue(self, obj: Any) -> Any:
            return obj

    assert message_queues.noting(End.enqueue, "enqueue")(End(), 3) == 3
