"""Receives from any source take messages that are paired with them."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, recv, send

from commlens.diagnosis.align.alignment import pair_with_any_source
from commlens.diagnosis.index.log_index import index_logs


def test_a_receive_from_any_source_is_paired_with_the_message_that_it_took() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        if rank == 0:
            for peer in (None, 1, 2):
                yield recv(job.world, peer, line=10)
        else:
            for _ in range(3 - rank):
                yield send(job.world, 0, line=20)

    job = Job(3).run(program)
    indexed = index_logs(job.logs(), 5.0)
    receiver, sender = indexed.views[0], indexed.views[1]
    pairs = pair_with_any_source(sender, receiver, next(iter(indexed.channels)))
    assert [(send.index, taker.index) for send, taker in pairs if send and taker] == [
        (1, 1),
        (2, 2),
    ]
