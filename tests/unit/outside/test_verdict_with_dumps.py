"""Torch's own dumps beside the stacks."""

from __future__ import annotations

import pickle

from flight_recorder_dumps import dump, entry
from goldens import hold
from seen_ranks import call, sample, stay

from commlens.model.cause import CollectiveRef, Missing
from commlens.model.verdict import Verdict
from commlens.outside.sample import HostSamples
from commlens.outside.verdict import judge, judge_with_dumps
from commlens.processes.pyspy import SeenFrame


def test_sequence_numbers_in_torch_dumps_decide_what_stacks_cannot():
    """All ranks wait at one line; rank 2's dump shows that it has not issued the last collective."""

    def rank_dump(last: int) -> bytes:
        waits = {"state": "scheduled", "time_discovered_completed_ns": None, "retired": False}
        return pickle.dumps(
            dump([entry(number, **(waits if number == 5 else {})) for number in range(last + 1)]),
            protocol=2,
        )

    samples = [sample(rank, call("all_reduce", 81)) for rank in range(4)]
    samples[0].log_lines = ["NCCL WARN"]
    files = {f"torch_dump_rank_{rank}": rank_dump(4 if rank == 2 else 5) for rank in range(4)}
    host = HostSamples(
        "n1",
        samples,
        4,
        [0, 1, 2, 3],
        dumps=files,
        window_s=2.5,
    )
    found = judge_with_dumps([host])
    assert (found.kind, found.culprits) == ("missing", [2])
    hold("outside/with-dumps-of-torch", found)
    assert [(one.root_cause, one.cause.root_cause) for one in found.findings if one.cause] == [
        (True, True),
        (False, False),
    ]
    assert judge([host]).culprits == []
    broken = HostSamples("n1", samples, 4, [0, 1, 2, 3], dumps={"torch_dump_rank_0": b"nothing"})
    assert "could not be read" in " ".join(judge_with_dumps([broken]).missing_evidence)


def test_stacks_show_where_the_rank_is_that_the_dumps_name():
    """The dumps tell that rank 2 never issued the last collective, its stack what it does."""
    waits = {"state": "scheduled", "time_discovered_completed_ns": None, "retired": False}

    def rank_dump(rank: int) -> bytes:
        last = 4 if rank == 2 else 5
        entries = [entry(number, **(waits if number == 5 else {})) for number in range(last + 1)]
        return pickle.dumps(dump(entries), protocol=2)

    files = {f"torch_dump_rank_{rank}": rank_dump(rank) for rank in range(4)}

    def verdict_of(*stacks: list[SeenFrame]) -> Verdict:
        samples = [sample(rank, frames) for rank, frames in enumerate(stacks)]
        return judge_with_dumps([HostSamples("n1", samples, 4, [0, 1, 2, 3], dumps=files)])

    waiting, loading = call("all_reduce", 81), stay("load_batch", 40)
    found = verdict_of(waiting, waiting, loading, waiting)
    hold("outside/with-dumps-and-stacks", found)
    assert isinstance(found.cause, Missing)
    assert (found.culprits, found.collective) == ([2], CollectiveRef("all_reduce", 6))
    assert (found.why, found.source) == ("data-loading", "train.py:40")
    assert (found.cause.activity.observed, found.cause.doubt) == (True, None)

    elsewhere = verdict_of(waiting, loading, waiting, waiting)
    assert (elsewhere.culprits, elsewhere.why, elsewhere.source) == ([2], "unknown", None)
