"""What is said of hardware."""

from __future__ import annotations

import pytest

from commlens.diagnosis.fold.alike import Alike, AlikeRanks, say_of_all
from commlens.diagnosis.words.finding import Words, finding_of
from commlens.diagnosis.words.hardware import add_hardware, place_sentence
from commlens.model.cause import Dead, Hardware, SharedPlace, Straggler
from commlens.model.health import HealthEvent
from commlens.model.verdict import Verdict
from commlens.text import naming_alike

NEIGHBOUR_KILLED = HealthEvent(
    what="oom-kill", fault="host-memory", part="memory", at_ns=10**18, pid=77, name="stress"
)


GPU_STOPPED = HealthEvent(what="xid", fault="gpu-fault", part="gpu0", at_ns=10**18, number=43)


def died(ranks: list[int], there: list[int]) -> Dead:
    return Dead(
        kind="dead",
        why="killed",
        root_cause=True,
        blamed_by="exit",
        confidence="medium",
        culprits=ranks,
        victims=[0, 1],
        ranks=ranks,
        processes=["own"],
        waits=[],
        hardware=[Hardware("n0", there, NEIGHBOUR_KILLED, 1.0, False)],
    )


def test_the_ranks_of_a_node_are_those_that_run_there() -> None:
    """Ranks 0 and 1 stand for the ranks from 8 on, which run elsewhere."""
    alike = AlikeRanks([Alike(frozenset({0, 1}), frozenset(range(8, 16)))])
    cause = died([2], [0, 1, 2])
    with naming_alike(alike.with_alike):
        words = add_hardware(Words("rank 2 died"), cause)
    assert "(ranks 0-2 are there)" in words.evidence[0]
    verdict = Verdict.from_findings([finding_of(cause, words)])
    say_of_all(verdict, alike)
    assert isinstance(verdict.cause, Dead)
    assert verdict.cause.hardware[0].ranks == [0, 1, 2]
    assert verdict.victims == [0, 1, *range(8, 16)]


def test_all_that_happened_near_a_straggler_is_told() -> None:
    cause = Straggler(
        kind="straggler", why="gpu-fault", root_cause=True, culprits=[1], victims=[0],
        blamed_by="nobody", confidence="high", cost=0.3, step_s=0.1, steps=50,
        hardware=[
            Hardware("n0", [1], GPU_STOPPED, 0.3, True),
            Hardware("n0", [0, 1], NEIGHBOUR_KILLED, 1.0, False),
        ],
    )  # fmt: skip
    words = add_hardware(Words("rank 1 makes the job slow", "All wait."), cause)
    assert words.explanation.startswith("All wait. On n0, GPU gpu0 reported Xid 43")
    assert len(words.evidence) == 1 and "stress" in words.evidence[0]


@pytest.mark.parametrize("finds_kernel", [True, False])
def test_how_to_find_a_failed_kernel_is_told_once(finds_kernel: bool) -> None:
    """An Xid of the program's own fault adds what the error's step does not tell."""
    cause = died([1], [1])
    cause.why = "exception"
    cause.hardware = [Hardware("n0", [1], GPU_STOPPED, 0.3, True)]
    step = "run it with CUDA_LAUNCH_BLOCKING=1"
    words = add_hardware(Words("died", next_step=step, finds_kernel=finds_kernel), cause)
    assert words.next_step.count("CUDA_LAUNCH_BLOCKING") == (1 if finds_kernel else 2)
    assert words.next_step.endswith("; if it only happens on this GPU, test n0")


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (
            SharedPlace("rail", "3", [3, 11, 19, 27], 28, 0.0002, "mlx5_3"),
            "Ranks 3-27:8 are all on rail 3 (mlx5_3), and none of the other 28 ranks is.",
        ),
        (
            SharedPlace("host", "n1", [2, 3], 2, 0.3333),
            "Ranks 2-3 are both on n1, and none of the other 2 ranks is; that may be a"
            " coincidence.",
        ),
        (
            SharedPlace("leaf", "leaf-1", [0, 1, 2], 1, 0.01),
            "Ranks 0-2 are all on the switch leaf-1, and the other rank is not.",
        ),
        (
            SharedPlace("rack", "r2", [0, 1, 2], 9, 0.01),
            "Ranks 0-2 are all in the rack r2, and none of the other 9 ranks is.",
        ),
        (
            SharedPlace("gpu", "5", [5, 13], 14, 0.05),
            "Ranks 5,13 are both on GPU 5 of their hosts, and none of the other 14 ranks is.",
        ),
    ],
)
def test_what_ranks_share(place: SharedPlace, sentence: str) -> None:
    assert place_sentence(place) == sentence
