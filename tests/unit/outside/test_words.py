"""What was found from outside, in words."""

from __future__ import annotations

import pytest
from seen_ranks import call, frame, sample, seen_on, stay

from commlens.model.verdict import Finding
from commlens.outside.causes import find_causes, none_waits
from commlens.outside.sample import HostSamples, RankSample
from commlens.outside.seen import SeenJob
from commlens.outside.words import describe, describe_none_waits
from commlens.processes.pyspy import SeenFrame

WAITS = call("all_reduce", 81)
AT = "all_reduce of the default group at train.py:81 step"


@pytest.mark.parametrize(
    ("frames", "summary"),
    [
        pytest.param(
            [WAITS, WAITS, stay("load_batch", 57)],
            f"rank 2 is in train.py:57 load_batch; ranks 0-1 wait in {AT}",
            id="outside",
        ),
        pytest.param(
            [WAITS, WAITS, WAITS, stay("load", 57), stay("load", 57)],
            f"ranks 3-4 are in train.py:57 load; ranks 0-2 wait in {AT}",
            id="several outside",
        ),
        pytest.param(
            [WAITS, WAITS, [frame("backward", 9, "/x/torch/autograd/graph.py"), frame("f", 2)]],
            f"rank 2 is in train.py:2 f; ranks 0-1 wait in {AT}",
            id="not a call that waits",
        ),
        pytest.param(
            [WAITS, WAITS, call("all_reduce", 81, step=7)],
            f"rank 2 is in step 7, the others in step 6; ranks 0-2 wait in {AT}",
            id="another round",
        ),
        pytest.param(
            [WAITS, WAITS],
            f"ranks 0-1 wait in {AT}, and none has left it within 2.5 s",
            id="inside",
        ),
    ],
)
def test_the_summary(frames: list[list[SeenFrame]], summary: str) -> None:
    job = SeenJob(seen_on(*frames))
    assert describe(job, find_causes(job)[0]).summary == summary


def test_a_stopped_rank_has_its_line() -> None:
    samples = [sample(0, WAITS), sample(1, WAITS, state="T")]
    job = SeenJob([HostSamples("n1", samples, 2)])
    (found,) = find_causes(job)
    assert describe(job, found).summary.startswith(
        "rank 1 is stopped (by SIGSTOP or a debugger) at train.py:81 step; rank 0 waits in"
    )


def test_the_words_about_several_ranks_are_plural() -> None:
    waits = [sample(rank, WAITS) for rank in range(2)]
    stopped = [sample(rank, WAITS, state="T") for rank in (2, 3)]
    works = [sample(rank, stay("evaluate", 57), cpu_s=2.4) for rank in (2, 3)]

    def of(samples: list[RankSample]) -> Finding:
        job = SeenJob([HostSamples("n1", samples, 4, [0, 1, 2, 3])])
        (found,) = find_causes(job)
        return describe(job, found)

    dead = of(waits)
    assert dead.explanation.startswith("Their launcher's environment says that they should run")
    assert dead.next_step.endswith("whether the kernel ended them for their memory")
    assert dead.would_raise_confidence == "Nobody saw how they ended."
    said = of([*waits, *stopped])
    assert said.next_step == (
        "find out who stopped them; `kill -CONT` with their pids lets them run"
    )
    assert said.explanation.startswith(
        "Ranks 2-3 are in no collective. Rank 2: its process is in state T. "
    )
    assert of([*waits, *works]).would_raise_confidence == ("They work, so they may still arrive.")


@pytest.mark.parametrize(
    ("moved", "world", "summary"),
    [
        ([True, True], 2, "nothing is wrong: the job moves (step 6)"),
        ([True, True], 4, "nothing is wrong in what was seen: ranks 0-1 move (step 6)"),
        ([True, None], 2, "nothing is wrong: no rank waits for another, and rank 0 moves (step 6)"),
        ([None, None], 2, "no rank waits for another, and none moved within 30 s (step 6)"),
    ],
)
def test_no_rank_waits(moved: list[bool | None], world: int, summary: str) -> None:
    samples = [sample(rank, WAITS, moved=each) for rank, each in enumerate(moved)]
    job = SeenJob([HostSamples("n1", samples, world, window_s=30.0)])
    assert describe_none_waits(job, none_waits(job)).summary == summary
