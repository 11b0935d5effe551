"""Deferred verification: boxes that fill up in any order and at any pace, and the reports on them."""

from __future__ import annotations

import zlib

import pytest
from live_boxes import ANY_SOURCE, CONCURRENT, ENTERED, Node, all_reduce, recv, send, tensor

from commlens.blackbox.layout import PHASE, PHASE_CLOSED
from commlens.model.collective import CollectiveArgs
from commlens.model.verdict import Verdict
from commlens.watch.mismatches import signatures
from commlens.watch.mismatches.channel_progress import MAX_PENDING, ChannelProgress


def gather(*shape: int) -> CollectiveArgs:
    return CollectiveArgs("all_gather", "_allgather_base_", (tensor(*shape),), (tensor(99),))


def test_ranks_that_agree() -> None:
    node = Node(4)
    for step in range(20):
        node.all(all_reduce(8, 4), step=step)
        node.all(gather(5), step=step, line=90)
        assert node.look() == []
    assert node.settle() == []
    assert node.verification.records == 160
    assert node.verification.gaps == ""
    assert node.reporter.final_lines() == []


def test_a_shape_mismatch_is_reported_once_all_ranks_have_issued() -> None:
    node = Node(4)
    node.all(all_reduce(8))
    for rank in (0, 2, 3):
        node.ranks[rank].issue(all_reduce(9 if rank == 2 else 8))
    assert node.look() == [], "rank 1 may show who is the odd one"
    node.ranks[1].issue(all_reduce(8))
    (verdict,) = node.look(after=1.1)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("mismatch/shape", [2], [0, 1, 3])
    assert verdict.source == "train.py:81"
    assert "float32[9]" in verdict.summary
    assert node.said[0][1], "it may end the job"


def test_a_mismatch_is_reported_even_if_another_rank_never_issues() -> None:
    node = Node(4)
    for rank in (0, 1, 3):
        node.ranks[rank].issue(all_reduce(9 if rank == 3 else 8))
    assert node.look() == []
    (verdict,) = node.look(after=1.1)
    assert (verdict.kind, verdict.culprits) == ("mismatch/shape", []), (
        "rank 2 might have sided with rank 3"
    )


@pytest.mark.parametrize("last", range(4))
@pytest.mark.parametrize("reads_first", [True, False])
def test_a_report_waits_until_the_collective_has_ended_and_its_reduce_op_is_read(
    last: int, reads_first: bool
) -> None:
    """Whether a look falls between the last rank's arrival and these moments is chance: it changes
    no word.
    """
    node = Node(4)
    indices = {rank.rank: rank.issue(all_reduce(9 if rank.rank == 2 else 8)) for rank in node.ranks}
    for first in (reads_first, not reads_first):
        for rank in [each for each in node.ranks if each.rank != last] + [node.ranks[last]]:
            assert node.look(after=0.05) == []
            if first:
                rank.beat()
            else:
                rank.box.complete(indices[rank.rank])
    (verdict,) = node.look(after=0.05)
    assert verdict.culprits == [2]
    assert verdict.explanation.endswith("Nothing hung, but the result is wrong.")
    assert verdict.explanation.count(" SUM at ") == 2
    assert node.settle() == []


def test_a_report_does_not_wait_for_long() -> None:
    node = Node(4)
    for rank in node.ranks:
        rank.issue(all_reduce(9 if rank.rank == 2 else 8))
    assert [verdict.culprits for _ in range(12) for verdict in node.look(after=0.1)] == [[2]]


def test_once_a_rank_has_died_no_rank_is_waited_for() -> None:
    node = Node(5)
    for rank in (0, 1, 2, 3):
        node.ranks[rank].issue(all_reduce(9 if rank == 3 else 8), ranks=range(5))
    node.members[3].alive = False
    (verdict,) = node.look()
    assert verdict.culprits == [3]


def fail(node: Node, rank: int, index: int, *, number: int) -> None:
    """The recorder's note that an op was refused before it was issued."""
    box = node.ranks[rank].box
    slot = box.slot(index)
    box.outcome(index, 2, 1)
    if not number:
        box.data[slot + 48 : slot + 56] = bytes(8)
        box.data[slot + 96 : slot + 100] = zlib.crc32(bytes(box.data[slot : slot + 96])).to_bytes(
            4, "little"
        )


def test_an_op_that_the_backend_refused_is_compared_with_no_other() -> None:
    node = Node(2)
    node.all(all_reduce(8))
    for rank in node.ranks:
        rank.beat()
    index = node.ranks[0].issue(CollectiveArgs("broadcast", "broadcast_", (tensor(8),), root=99))
    node.ranks[1].issue(all_reduce(8))
    node.look()  # it is seen before the backend has refused it
    fail(node, 0, index, number=0)
    assert node.settle() == [], "rank 0 does something else for a while"
    node.ranks[0].issue(all_reduce(8), number=2)
    assert node.settle() == []
    node.ranks[0].issue(all_reduce(9), number=3)
    node.ranks[1].issue(all_reduce(8))
    assert [verdict.kind for verdict in node.settle()] == ["mismatch/shape"]


def test_the_sequence_number_of_a_refused_op_is_used_again() -> None:
    node = Node(2)
    index = node.ranks[0].issue(all_reduce(8))
    assert node.look() == []
    fail(node, 0, index, number=1)
    node.ranks[0].issue(all_reduce(4), number=1)
    node.ranks[1].issue(all_reduce(4))
    assert node.settle() == []
    node.all(all_reduce(4))
    node.ranks[0].issue(all_reduce(9), number=3)
    node.ranks[1].issue(all_reduce(8))
    assert [verdict.kind for verdict in node.settle()] == ["mismatch/shape"]


def test_a_reduce_op_is_compared_once_it_is_recorded() -> None:
    node = Node(4)
    for rank in node.ranks:
        rank.issue(all_reduce(8, op="MAX" if rank.rank == 1 else "SUM"))
    assert node.look() == [], "nobody has read the reduce ops yet"
    for rank in node.ranks[:3]:
        rank.beat()
    assert node.look() == [], "that of rank 3 may show who is the odd one"
    node.ranks[3].beat()
    (verdict,) = node.look(after=1.1)
    assert (verdict.kind, verdict.culprits) == ("mismatch/reduce-op", [1])
    assert node.settle() == []


def test_a_reduce_op_that_is_never_recorded_does_not_block_a_report() -> None:
    node = Node(4)
    for rank in node.ranks:
        rank.issue(all_reduce(8, op="MAX" if rank.rank == 1 else "SUM"))
        if rank.rank != 3:
            rank.beat()
    node.look()
    for rank in node.ranks[:3]:
        rank.beat()
    assert node.look() == []
    (verdict,) = node.look(after=1.1)
    assert (verdict.kind, verdict.culprits) == ("mismatch/reduce-op", [1])


def test_the_same_mismatch_in_every_step_is_reported_once_and_counted() -> None:
    node = Node(4)
    for step in range(30):
        for rank in node.ranks:
            rank.issue(all_reduce(8, op="MAX" if rank.rank == 1 else "SUM"), step=step)
            rank.issue(all_reduce(step + 1, op="MAX" if rank.rank == 1 else "SUM"), step=step)
            rank.beat()
        node.look(after=0.6)
    assert [verdict.kind for verdict, _ in node.said] == ["mismatch/reduce-op"]
    node.settle()
    (line,) = node.reporter.final_lines()
    assert line == "rank 1 disagreed (mismatch/reduce-op, first in all_reduce #1) 60 times in all."


def test_of_two_ranks_the_odd_one_is_found_by_its_history_and_reported_once() -> None:
    node = Node(2)
    for step in range(40):
        for rank in node.ranks:
            odd = rank.rank == 1 and step >= 10
            for shape in (8, 16):
                rank.issue(
                    all_reduce(shape, op="MAX" if odd else "SUM"),
                    ranks=(0, 1),
                    line=80 + shape,
                    step=step,
                )
                rank.box.complete(rank.box.index)
            rank.beat()
        node.look(after=0.6)
    node.settle()
    assert [(verdict.kind, verdict.culprits) for verdict, _ in node.said] == [
        ("mismatch/reduce-op", [1])
    ]
    assert not node.reporter.has_reported(Verdict())
    node.ranks[0].issue(all_reduce(8), ranks=(0, 1))
    node.ranks[1].issue(all_reduce(9), ranks=(0, 1))
    assert [verdict.kind for verdict in node.settle()] == ["mismatch/shape"]


def test_another_aspect_is_another_disagreement() -> None:
    node = Node(4)
    for rank in node.ranks:
        rank.issue(all_reduce(8, op="MAX" if rank.rank == 1 else "SUM"))
    node.settle()
    for rank in node.ranks:
        rank.issue(all_reduce(8, dtype="float64" if rank.rank == 2 else "float32"))
    node.settle()
    assert [(verdict.kind, verdict.culprits) for verdict, _ in node.said] == [
        ("mismatch/reduce-op", [1]),
        ("mismatch/dtype", [2]),
    ]


def test_the_number_of_reports_is_limited() -> None:
    node = Node(2, capacity=2000)
    for i in range(40):
        for rank in node.ranks:
            rank.issue(all_reduce(8 + rank.rank), ranks=(0, 1), group=str(i), line=100 + i)
        node.look(after=1.5)
    assert len(node.said) == 8


# --- pace


def test_a_wrapped_ring_buffer_leaves_a_gap_and_no_report() -> None:
    node = Node(2)
    node.all(all_reduce(8), ranks=(0, 1))
    node.look()
    for i in range(200):
        node.all(all_reduce(8 + i % 3), ranks=(0, 1))
    assert node.settle() == []
    assert node.verification.missed == 2 * (200 - 64)
    node.ranks[0].issue(all_reduce(8), ranks=(0, 1))
    node.ranks[1].issue(all_reduce(7), ranks=(0, 1))
    (verdict,) = node.settle()
    assert verdict.kind == "mismatch/shape"
    assert any("came too fast to be compared" in line for line in node.reporter.final_lines())


def test_the_records_of_a_rank_far_ahead_are_not_kept_forever() -> None:
    node = Node(2, capacity=512)
    root = CollectiveArgs("broadcast", "broadcast_", (tensor(8),), root=0)
    for _ in range(40):
        for _ in range(256):
            node.ranks[0].issue(root, ranks=(0, 1))
        node.look()
    (progress,) = node.verification.comparison._channels.values()
    assert len(progress.first_issue) <= MAX_PENDING + 1
    for _ in range(40 * 256):
        node.ranks[1].issue(root, ranks=(0, 1))
        if node.ranks[1].box.index % 256 == 0:
            assert node.look() == []
    assert len(progress.first_issue) <= 1
    assert "more than 4096 behind" in node.verification.gaps


def test_ever_changing_shapes_are_not_kept_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "CACHE_SIZE", 50)
    node = Node(2)
    for i in range(400):
        node.all(all_reduce(i + 1), ranks=(0, 1))
        if i % 10 == 0:
            assert node.look() == []
    table = node.verification.comparison.signatures
    assert len(table.signatures) <= 101
    assert len(table._ids) <= 51


def test_a_mismatch_of_overwritten_records_is_reported_without_lines() -> None:
    node = Node(2)
    node.ranks[0].issue(all_reduce(8), ranks=(0, 1))
    node.ranks[1].issue(all_reduce(9), ranks=(0, 1))
    node.verification.poll(0.0)  # seen, and then the ring is lapped before anybody asks
    for _ in range(80):
        node.all(all_reduce(8), ranks=(0, 1))
    (verdict,) = node.look()
    assert verdict.kind == "mismatch/shape"
    assert "float32[9]" in verdict.summary
    assert "overwritten since" in verdict.explanation


def test_the_cpu_budget_polls_less_often_then_reads_fewer_records() -> None:
    node = Node(2, capacity=2000)
    seconds = iter(x * 0.1 for x in range(100))
    node.verification._clock = lambda: next(seconds)
    for _ in range(1500):
        node.all(all_reduce(8), ranks=(0, 1))
    node.look()
    assert node.verification.budget.interval_s == 0.5
    assert node.verification.budget.records_per_rank < 1500
    for _ in range(1500):
        node.all(all_reduce(8), ranks=(0, 1))
    assert node.look(after=0.6) == []
    assert node.verification.missed > 0
    assert "came too fast" in node.verification.gaps


# --- what is compared with what


def test_ranks_of_other_nodes_are_not_waited_for() -> None:
    node = Node(2, world_size=8)
    node.ranks[0].issue(all_reduce(8), ranks=range(8))
    node.ranks[1].issue(all_reduce(9), ranks=range(8))
    (verdict,) = [*node.look(), *node.look(after=1.1)]
    assert (verdict.kind, verdict.culprits) == ("mismatch/shape", []), (
        "of two, nobody is the odd one"
    )
    node.ranks[0].issue(all_reduce(8), ranks=(0, 4), group="dp")
    node.ranks[1].issue(all_reduce(5), ranks=(1, 5), group="dp")
    assert node.settle() == []


def test_groups_incarnations_and_devices_are_distinguished() -> None:
    node = Node(2)
    for options in (
        {"group": "a"},
        {"group": "a", "inc": 1},
        {"group": "a", "device": "cuda"},
        {"group": "b"},
    ):
        first, second = (
            (all_reduce(8), all_reduce(9)) if options.get("inc") else (all_reduce(8), all_reduce(8))
        )
        node.ranks[0].issue(first, ranks=(0, 1), **options)  # type: ignore[arg-type]
        node.ranks[1].issue(second, ranks=(0, 1), **options)  # type: ignore[arg-type]
    (verdict,) = [*node.look(), *node.look(after=1.1)]
    assert verdict.kind == "mismatch/shape"
    assert node.verification.times(next(iter(node.reporter._reported.values()))[1]) == 1


def test_a_recreated_group_starts_at_sequence_number_1() -> None:
    node = Node(2)
    for _ in range(3):
        node.all(all_reduce(8), ranks=(0, 1))
    for rank in node.ranks:
        rank.issue(all_reduce(4), ranks=(0, 1), number=1)
        rank.issue(all_reduce(5), ranks=(0, 1), number=2)
    assert node.settle() == []


def test_the_order_of_several_threads_is_not_blamed() -> None:
    node = Node(2)
    node.all(all_reduce(8), ranks=(0, 1), flags=ENTERED | CONCURRENT)
    node.ranks[0].issue(all_reduce(8), ranks=(0, 1))
    node.ranks[1].issue(all_reduce(9), ranks=(0, 1))
    assert node.settle() == []


def test_coalesced_groups_are_compared_member_by_member() -> None:
    node = Node(4)
    for rank in node.ranks:
        rank.coalesce(all_reduce(4), all_reduce(5), number=1, coalescing=1)
    assert node.settle() == []
    for rank in node.ranks:
        rank.coalesce(all_reduce(4), all_reduce(6 if rank.rank == 2 else 5), number=2, coalescing=2)
    (verdict,) = node.settle()
    assert (verdict.kind, verdict.culprits) == ("mismatch/shape", [2])


def test_reduce_ops_inside_coalesced_groups() -> None:
    node = Node(4)
    for rank in node.ranks:
        rank.coalesce(
            all_reduce(4),
            all_reduce(5, op="MIN" if rank.rank == 1 else "SUM"),
            number=1,
            coalescing=1,
        )
    (verdict,) = node.settle()
    assert (verdict.kind, verdict.culprits) == ("mismatch/reduce-op", [1])


def test_the_splits_of_every_two_ranks_must_match() -> None:
    def exchange(sends: tuple[int, ...], receives: tuple[int, ...]) -> CollectiveArgs:
        total = (sum(sends),), (sum(receives),)
        return CollectiveArgs(
            "all_to_all",
            "alltoall_base_",
            (tensor(*total[0]),),
            (tensor(*total[1]),),
            None,
            None,
            sends,
            receives,
        )

    node = Node(3)
    right = [
        exchange((1, 2, 3), (1, 4, 7)),
        exchange((4, 5, 6), (2, 5, 8)),
        exchange((7, 8, 9), (3, 6, 9)),
    ]
    for rank, asked in zip(node.ranks, right, strict=True):
        rank.issue(asked, ranks=(0, 1, 2))
    assert node.settle() == []
    wrong = [right[0], right[1], exchange((7, 8, 9), (3, 5, 9))]
    for rank, asked in zip(node.ranks, wrong, strict=True):
        rank.issue(asked, ranks=(0, 1, 2))
    (verdict,) = node.settle()
    assert verdict.kind == "mismatch/splits"


# --- messages


def test_messages_of_several_tags_may_be_received_in_another_order() -> None:
    node = Node(2)
    for tag in (1, 2, 3):
        node.ranks[0].issue(send(tag), ranks=(0, 1), peer=1, tag=tag)
    for tag in (3, 1, 2):
        node.ranks[1].issue(recv(tag), ranks=(0, 1), peer=0, tag=tag)
    assert node.settle() == []
    node.ranks[1].issue(recv(9), ranks=(0, 1), peer=0, tag=2)
    node.ranks[0].issue(send(8), ranks=(0, 1), peer=1, tag=2)
    (verdict,) = node.settle()
    assert verdict.kind == "mismatch/p2p"
    assert "float32[9]" in verdict.summary


def test_nccl_ignores_tags() -> None:
    node = Node(2)
    for tag in (1, 2):
        node.ranks[0].issue(send(4), ranks=(0, 1), peer=1, tag=tag, backend="nccl", device="cuda")
    for tag in (2, 1):
        node.ranks[1].issue(recv(4), ranks=(0, 1), peer=0, tag=tag, backend="nccl", device="cuda")
    assert node.settle() == []


def test_after_a_receive_from_any_source_messages_are_not_compared() -> None:
    node = Node(2)
    node.ranks[1].issue(recv(4), ranks=(0, 1), flags=ENTERED | ANY_SOURCE)
    node.ranks[1].issue(recv(5), ranks=(0, 1), peer=0)
    node.ranks[0].issue(send(4), ranks=(0, 1), peer=1)
    node.ranks[0].issue(send(5), ranks=(0, 1), peer=1)
    assert node.settle() == []


def test_messages_after_a_gap_are_paired_by_sequence_number() -> None:
    node = Node(2)
    for i in range(100):
        node.ranks[0].issue(send(i + 1), ranks=(0, 1), peer=1)
    node.look()
    for i in range(100):
        node.ranks[1].issue(recv(i + 1), ranks=(0, 1), peer=0)
        if i % 20 == 0:
            node.look()
    assert node.settle() == []
    node.ranks[0].issue(send(7), ranks=(0, 1), peer=1)
    node.ranks[1].issue(recv(8), ranks=(0, 1), peer=0)
    (verdict,) = node.settle()
    assert verdict.kind == "mismatch/p2p"


def test_a_message_whose_records_are_overwritten_has_its_number_among_all_tags() -> None:
    node = Node(3)
    sender, receiver, _ = node.ranks
    for tag in (1, 2, 3, 4):
        sender.issue(send(tag), ranks=(0, 1, 2), peer=1, tag=tag)
        receiver.issue(recv(9 if tag == 3 else tag), ranks=(0, 1, 2), peer=0, tag=tag)
    node.verification.poll(0.0)
    # what the rings hold now has lower numbers, but is no message between the two
    for rank in node.ranks[:2]:
        rank.issue(send(1), ranks=(0, 1, 2), peer=2)
        for _ in range(63):
            rank.issue(all_reduce(8), ranks=(0, 1, 2))
    (verdict,) = node.look()
    assert verdict.summary.startswith("ranks disagree in message #3 of the default group [0-2]: ")


def test_messages_are_trimmed_once_in_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(2)
    for tag in (1, 2) * 10:
        node.ranks[0].issue(send(tag), ranks=(0, 1), peer=1, tag=tag)
        node.ranks[1].issue(recv(tag), ranks=(0, 1), peer=0, tag=tag)
    trimmed = []
    monkeypatch.setattr(ChannelProgress, "trim", lambda self: trimmed.append(self) or 0)
    assert node.look() == []
    assert len(trimmed) == 4, "both tags, by the sender and by the receiver"


# --- ranks out of step


def program(node: Node, skips: int | None, steps: int, at: int = 20, pace: float = 0.5) -> None:
    """Two collectives of the same shape in every step, from two lines; one rank may skip one."""
    for step in range(steps):
        for rank in node.ranks:
            for line in (81, 82):
                if not (rank.rank == skips and step == at and line == 81):
                    rank.issue(all_reduce(8), line=line, step=step)
            rank.beat()
        node.look(after=pace)


@pytest.mark.parametrize("pace", [0.05, 0.25, 0.5])
def test_a_rank_that_skipped_a_collective_of_the_same_shape_is_warned_of(pace: float) -> None:
    node = Node(4, capacity=256)
    program(node, 2, 20 + int(10 / pace) if pace < 0.2 else 60, pace=pace)
    ((verdict, may_abort),) = node.said
    assert (verdict.kind, verdict.why, verdict.culprits) == ("missing", "skipped", [2])
    assert not may_abort, "a warning, never more"
    assert verdict.confidence == "medium"
    assert verdict.source == "train.py:82"


@pytest.mark.parametrize("size", [2, 4])
def test_two_collectives_of_the_same_shape_that_were_swapped_once_are_warned_of(size: int) -> None:
    node = Node(size, capacity=256)
    for step in range(40):
        for rank in node.ranks:
            lines = (82, 81) if (rank.rank, step) == (1, 20) else (81, 82)
            for line in (80, *lines, 83):
                rank.issue(
                    all_reduce(8), ranks=range(size), line=line + 100 * (rank.rank == 0), step=step
                )
        node.look(after=0.5)
    ((verdict, may_abort),) = node.said
    assert (verdict.kind, verdict.culprits, may_abort) == ("mismatch/op", [1], False)
    assert "#82 to #83" in verdict.summary
    assert "train.py:82" in verdict.summary


def test_lines_that_a_rank_chooses_by_its_data_are_no_swap() -> None:
    node = Node(2, capacity=512)
    for step in range(80):
        for rank in node.ranks:
            for _ in range(2):
                rank.issue(
                    all_reduce(8),
                    ranks=(0, 1),
                    line=81 + (hash((step, rank.rank, _)) % 3 == 0),
                    step=step,
                )
        node.look(after=0.5)
    assert node.said == []


def test_lines_that_differ_by_rank_are_no_shift() -> None:
    node = Node(4, capacity=256)
    for step in range(60):
        for rank in node.ranks:
            rank.issue(all_reduce(8), line=81 if rank.rank == 0 else 82, step=step)
            if step % 7 == 3:
                rank.issue(all_reduce(8), line=90 + (step + rank.rank) % 3, step=step)
            rank.beat()
        node.look(after=0.5)
    assert node.said == []


# --- with strict verification


def test_collectives_that_strict_verification_holds_back_are_left_to_it() -> None:
    node = Node(2)
    for rank in node.ranks:
        rank.issue(all_reduce(8 + rank.rank), ranks=(0, 1), flags=0)
    assert node.settle() == []


@pytest.mark.parametrize("how", ["closed", "killed"])
@pytest.mark.parametrize("looked", ["never", "before the last round", "within the last round"])
def test_all_reduce_ops_of_a_rank_that_has_ended_are_read_at_once(how: str, looked: str) -> None:
    """The watchdog thread's round begins with a heartbeat and reads the reduce ops after it. A look
    may fall anywhere, and no heartbeat follows the last round.
    """
    node = Node(2)
    for _ in range(5):
        for rank in node.ranks:
            rank.issue(all_reduce(8, op="MAX" if rank.rank else "SUM"))
    if looked != "never":
        node.look()
    for rank in node.ranks:
        rank.begin_round()
    if looked == "within the last round":
        node.look()
    for rank, member in zip(node.ranks, node.members, strict=True):
        rank.read_reduce_ops()
        if how == "closed":
            rank.box.word(PHASE, PHASE_CLOSED)
        else:
            member.alive = False
    said = node.look(after=1.1) + node.look(after=1.1)
    assert [verdict.kind for verdict in said] == ["mismatch/reduce-op"]
    assert node.reporter.final_lines()[0].endswith("5 times in all.")


def test_records_of_the_last_moment_are_counted_too() -> None:
    node = Node(2)
    for number in range(1, 4):
        for rank in node.ranks:
            rank.issue(all_reduce(9 if rank.rank else 8))
        if number < 3:
            node.look(after=1.2)
    node.reporter.read_rest()
    assert node.reporter.final_lines()[0].endswith("3 times in all.")
