"""Tests of src/commlens/check/judge.py: the verdict on the sequences of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sequences import Player, play

from commlens.check.branches import BranchLine, Moment
from commlens.check.judge import judge
from commlens.check.sequence import FileLookup, Guess, Unseen
from commlens.model.collective import Frame
from commlens.model.hazard import Hazard
from commlens.model.verdict import Verdict


def verdict_on(world_size: int, program: Callable[[Player], None], backend: str = "") -> Verdict:
    return judge(play(world_size, program), backend=backend).verdict


def one_other_op(rank: Player) -> None:
    rank.collective()
    rank.collective("all_gather" if rank.rank == 1 else "all_reduce", reduce_op=None)


def one_more(rank: Player) -> None:
    for _ in range(2 if rank.rank else 1):
        rank.collective()


def both_receive(rank: Player) -> None:
    rank.recv(1 - rank.rank)
    rank.send(1 - rank.rank)


def other_reduce_op(rank: Player) -> None:
    rank.collective(reduce_op="MAX" if rank.rank == 2 else "SUM")


def one_raises(rank: Player) -> None:
    if rank.rank == 2:
        rank.raises("ValueError: bad sample")
    else:
        rank.collective()


def group_of_others(rank: Player) -> None:
    rank.new_group("1", *((0, 2) if rank.rank == 1 else (0, 1, 2)))


def takes_a_message_of_another(rank: Player) -> None:
    if rank.rank == 0:
        rank.recv(None)
        rank.recv(1)
    else:
        rank.send(0)


@pytest.mark.parametrize(
    ("world_size", "program", "kind", "culprits"),
    [
        (3, one_other_op, "mismatch/op", [1]),
        (3, one_more, "missing", [0]),
        (2, both_receive, "cycle", []),
        (3, other_reduce_op, "mismatch/reduce-op", [2]),
        (3, one_raises, "dead", [2]),
        (3, group_of_others, "mismatch/group", [1]),
        (3, takes_a_message_of_another, "mismatch/p2p", [0]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault(
    world_size: int, program: Callable[[Player], None], kind: str, culprits: list[int]
) -> None:
    verdict = verdict_on(world_size, program)
    assert verdict.is_fault
    assert (verdict.kind, verdict.culprits) == (kind, culprits)


def legal(rank: Player) -> None:
    rank.collective()
    rank.collective("broadcast", root=0)
    rank.batch(("send", 1 - rank.rank), ("recv", 1 - rank.rank))


def test_nothing_is_wrong() -> None:
    verdict = verdict_on(2, legal)
    assert verdict.kind == "healthy" and not verdict.findings
    assert verdict.summary == "no mismatch or deadlock in 2 ranks on gloo"


def test_steps_are_counted() -> None:
    sequences = play(2, legal)
    for sequence in sequences.values():
        sequence.steps, sequence.cut_off = 2, True
    verdict = judge(sequences).verdict
    assert verdict.summary == "no mismatch or deadlock in 2 steps of 2 ranks on gloo"


def test_the_backend_is_the_one_that_the_program_asks_for() -> None:
    sequences = play(2, legal)
    sequences[0].backend = "cpu:gloo,cuda:nccl"
    assert judge(sequences).verdict.summary.endswith(" on nccl")
    assert judge(sequences, backend="gloo").verdict.summary.endswith(" on gloo")


def started_sends(rank: Player) -> None:
    send = rank.send(1 - rank.rank, wait=False)
    rank.recv(1 - rank.rank)
    rank.wait(send)


def test_what_would_hang_on_the_other_backend_only() -> None:
    verdict = verdict_on(2, started_sends)
    assert not verdict.is_fault
    assert "nccl" in verdict.explanation
    assert verdict_on(2, started_sends, "nccl").is_fault


def test_nothing_waited_for_a_time() -> None:
    text = str(verdict_on(3, one_more)) + str(verdict_on(2, both_receive))
    assert " ms" not in text and " s." not in text and "pid" not in text


GUESS = Guess("object", (Frame("/home/me/train.py", 3, "main"),))


def test_a_fault_after_a_guess_is_not_proven() -> None:
    sequences = play(3, one_more)
    sequences[1].guesses = [GUESS]
    verdict = judge(sequences).verdict
    assert verdict.kind == "undetermined" and not verdict.culprits
    assert "train.py:3" in verdict.explanation


def test_the_advice_begins_with_the_guess() -> None:
    sequences = play(3, one_more)
    advice = judge(sequences).verdict.next_step
    sequences[1].guesses = [GUESS, GUESS]
    assert judge(sequences).verdict.next_step == (
        f"first check whether the guess at train.py:3 main is right; if so, {advice}"
    )
    sequences[1].guesses += [Guess("poll", (Frame("/home/me/train.py", 4, "main"),))]
    assert judge(sequences).verdict.next_step == (
        "first check whether the guesses at train.py:3 main and train.py:4 main are right; if so,"
        f" {advice}"
    )


def test_a_guess_after_a_rank_waits_for_ever_does_not_matter() -> None:
    sequences = play(3, one_more)
    first = judge(sequences).verdict
    for rank in first.victims or [0]:
        sequences[rank].guesses = [Guess("object", GUESS.stack, after=1000)]
    assert judge(sequences).verdict.kind == first.kind != "undetermined"


@pytest.mark.parametrize(("after", "is_fault"), [(0, False), (1, True)])
def test_a_guess_after_the_call_at_which_ranks_differ_does_not_matter(
    after: int, is_fault: bool
) -> None:
    sequences = play(3, other_reduce_op)
    for sequence in sequences.values():
        sequence.guesses = [Guess("object", GUESS.stack, after)]
    assert judge(sequences).verdict.is_fault is is_fault


def test_what_is_not_seen_is_not_proven() -> None:
    sequences = play(2, legal)
    frame = Frame("/home/me/train.py", 3, "main")
    for sequence in sequences.values():
        sequence.unseen = [Unseen("group", frame, "3 ranks")]
    verdict = judge(sequences).verdict
    assert verdict.kind == "undetermined" and verdict.confidence == "low"
    assert "train.py:3" in verdict.summary
    (reason,) = verdict.missing_evidence
    assert "a group of 3 ranks by hand" in reason


def waits_for_a_key_of_another_program(rank: Player) -> None:
    rank.collective()
    rank.store("store.wait", "sync/0/2")


def test_ranks_that_wait_for_ever_are_no_proof_if_no_fault_is_found() -> None:
    sequences = play(2, waits_for_a_key_of_another_program)
    checked = judge(sequences)
    assert checked.outcome.stuck == [0, 1]
    assert checked.verdict.kind == "undetermined", checked.verdict
    (reason,) = checked.verdict.missing_evidence
    assert "store.wait at train.py:2" in reason


def test_what_is_not_seen_excuses_no_fault() -> None:
    sequences = play(3, one_other_op)
    sequences[1].unseen = [Unseen("store", None, "127.0.0.1:29600")]
    assert judge(sequences).verdict.kind == "mismatch/op"


def test_a_guess_limits_what_is_proven() -> None:
    sequences = play(2, legal)
    sequences[1].guesses = [GUESS, GUESS]
    verdict = judge(sequences).verdict
    assert verdict.kind == "healthy"
    assert len(verdict.missing_evidence) == 1 and "train.py:3" in verdict.missing_evidence[0]


def test_a_run_that_took_too_long_proves_nothing() -> None:
    sequences = play(3, one_more)
    sequences[0].problem = "its run stood in train.py:9 load after 300 s"
    verdict = judge(sequences).verdict
    assert verdict.kind == "undetermined"
    assert any("train.py:9" in text for text in verdict.missing_evidence)


def test_a_fault_of_other_ranks_is_proven_all_the_same() -> None:
    sequences = play(3, one_other_op)
    sequences[2].problem = "its run stood in train.py:9 load after 300 s"
    assert judge(sequences).verdict.kind == "mismatch/op"


@pytest.mark.parametrize("cut_off", [False, True], ids=["to the end", "by --steps"])
def test_hazards_are_no_fault(cut_off: bool) -> None:
    sequences = play(2, legal)
    for sequence in sequences.values():
        sequence.cut_off = cut_off
    stack = (
        Frame("/torch/distributed/distributed_c10d.py", 1, "isend"),
        Frame("/home/me/train.py", 4, "main"),
    )
    sequences[0].hazards = [Hazard("never-waited", 1, stack)]
    verdict = judge(sequences).verdict
    assert not verdict.is_fault
    assert [finding.kind for finding in verdict.findings] == ["hazard"]


def swaps(rank: Player) -> None:
    for step in range(12):
        for line in (20, 10) if (rank.rank, step) == (1, 9) else (10, 20):
            rank.line = line
            rank.collective()


def one_broadcast_less(rank: Player) -> None:
    for _ in range(4 if rank.rank == 1 else 5):
        rank.line = 10
        rank.collective("broadcast", root=0, reduce_op=None)


@pytest.mark.parametrize(
    ("program", "culprits", "summary"),
    [
        (swaps, [1], "in another order than the others"),
        (one_broadcast_less, [1], "rank 1 issued 1 collective fewer than the others"),
    ],
)
def test_what_is_wrong_in_a_program_that_ends_is_a_latent_fault(
    program: Callable[[Player], None], culprits: list[int], summary: str
) -> None:
    verdict = verdict_on(3, program)
    assert not verdict.is_fault
    assert [(each.kind, each.culprits) for each in verdict.findings] == [("hazard", culprits)]
    assert summary in verdict.findings[0].summary


def test_a_rank_that_steps_end_may_issue_the_rest_later() -> None:
    sequences = play(3, one_broadcast_less)
    for sequence in sequences.values():
        sequence.cut_off = True
    assert not judge(sequences).verdict.findings


def test_a_swap_is_not_told_if_ranks_decide_by_what_is_not_known() -> None:
    sequences = play(3, swaps)
    sequences[1].guesses = [GUESS]
    assert not judge(sequences).verdict.findings


@pytest.mark.parametrize(
    ("decisions", "is_fault"),
    [
        ([], True),
        ([BranchLine(Frame("train.py", 9, "main"), "truth", alike=True, taken=(False,))], False),
        (
            [BranchLine(Frame("train.py", 9, "main"), "truth", taken=(False,), forced=True)],
            True,
        ),
    ],
    ids=["no decision", "of a value that is not known", "as --branch says"],
)
def test_an_exception_after_a_decision_by_an_unknown_value_is_not_proven(
    decisions: list[BranchLine], is_fault: bool
) -> None:
    sequences = play(3, one_raises)
    sequences[2].decisions = decisions
    verdict = judge(sequences).verdict
    assert verdict.is_fault is is_fault
    assert (verdict.kind == "undetermined") is not is_fault
    assert ("train.py:9" in verdict.explanation) is not is_fault


def leaves_a_loop(rank: Player) -> None:
    if rank.rank == 0:
        rank.collective("all_gather", reduce_op=None)
    else:
        rank.collective()
        rank.collective()


@pytest.mark.parametrize(("moments", "is_fault"), [((0, 1), False), ((1, 2), True)])
def test_ranks_that_ask_at_different_moments_prove_nothing_if_they_came_so_far(
    moments: tuple[int, int], is_fault: bool
) -> None:
    sequences = play(3, leaves_a_loop)
    for rank, sequence in sequences.items():
        number = moments[rank > 0]
        decision = BranchLine(
            Frame("train.py", 9, "main"),
            "truth",
            alike=True,
            taken=(True,),
            asked=(Moment(number, number),),
        )
        sequence.decisions = [decision]
    assert judge(sequences).verdict.is_fault is is_fault


def one_misses_a_file(rank: Player) -> None:
    if rank.rank == 2:
        rank.raises("FileNotFoundError: [Errno 2] No such file or directory: 'part1.pt'")
        rank.sequence.misses = "file"
    else:
        rank.collective()


def test_a_file_that_is_not_there_may_be_written_by_others() -> None:
    verdict = verdict_on(3, one_misses_a_file)
    assert verdict.kind == "undetermined"
    assert "file" in verdict.explanation


def test_a_fault_is_not_proven_if_ranks_wrote_files_for_others() -> None:
    sequences = play(3, one_more)
    for rank, sequence in sequences.items():
        look = FileLookup(rank > 0, Frame("/home/me/train.py", 5, "main"))
        sequence.file_lookups = {"/last.pt": look}
    verdict = judge(sequences).verdict
    assert verdict.kind == "undetermined"
    assert "train.py:5" in verdict.explanation
