"""The first op with which the values of ranks part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commlens.model.numbers import OpLog, OpPlace, OpRun
from commlens.numbers.divergence import Divergence, SharedTensor, find_divergence, first_other_op

RANKS = (0, 1, 2)
WEIGHT = ("parameter", "weight")
SHARED = [SharedTensor(WEIGHT, RANKS, 1)]


def op(
    name: str,
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    weight: int | None = None,
    argument: str = "",
) -> OpRun:
    writes = ((*WEIGHT, weight),) if weight is not None else ()
    return OpRun(name, (argument,), tuple(inputs), tuple(outputs), writes, 0)


def divergence(
    common: Sequence[OpRun],
    odd: Mapping[int, Sequence[OpRun]],
    shared: Sequence[SharedTensor] = SHARED,
) -> Divergence | None:
    """What is found if all ranks run these ops, but for the odd ones."""
    place = OpPlace("layers.0", False, "train.py:9", "all_reduce at train.py:7")
    return find_divergence(
        {rank: OpLog((place,), tuple(odd.get(rank, common))) for rank in RANKS}, shared
    )


def test_ranks_that_compute_from_different_data_have_nothing_in_common() -> None:
    own = {rank: [op("mm", [rank], [10 + rank])] for rank in RANKS}
    assert divergence([], own) is None


def test_the_same_inputs_and_other_outputs() -> None:
    before = op("relu", [4], [5])
    found = divergence([before, op("mm", [5, 6], [7])], {2: [before, op("mm", [5, 6], [8])]})
    assert found is not None
    assert (found.departure, found.key, found.position) == (
        "other-result",
        ("op-output", "mm"),
        1,
    )
    assert (found.sides, found.hashes) == ([[0, 1], [2]], [7, 8])
    assert found.ops[1].module == "layers.0"
    assert found.ops[1].after == "all_reduce at train.py:7"


def test_an_op_that_changes_its_mind_on_one_rank_proves_nothing() -> None:
    twice = [op("mm", [5], [7]), op("mm", [5], [8])]
    assert divergence([op("mm", [5], [7])], {2: twice}) is None


def test_other_arguments_or_other_random_numbers_are_other_inputs() -> None:
    assert divergence([op("mul", [5], [7], argument="2")], {1: [op("mul", [5], [8])]}) is None
    assert divergence([op("rand", [5, 50], [7])], {1: [op("rand", [5, 51], [8])]}) is None


def test_the_first_of_several() -> None:
    ops = [op("a", [1], [2]), op("b", [2], [3]), op("c", [2], [4])]
    odd = [op("a", [1], [2]), op("b", [2], [30]), op("c", [2], [40])]
    found = divergence(ops, {0: odd})
    assert found is not None
    assert (found.key[1], found.sides) == ("b", [[1, 2], [0]])


def test_an_op_that_only_one_rank_runs_on_a_tensor_that_was_alike() -> None:
    update = op("add_", [2], [3], weight=3)
    found = divergence([update], {1: [op("xor_", [1], [9], weight=9), update]})
    assert found is not None
    assert (found.departure, found.key, found.sides) == ("other-op", WEIGHT, [[0, 2], [1]])
    assert [side.op for side in found.ops] == ["add_", "xor_"]


def test_an_op_that_one_rank_leaves_out() -> None:
    found = divergence([op("add_", [2], [3], weight=3)], {1: []})
    assert found is not None
    assert (found.departure, found.sides) == ("other-op", [[0, 2], [1]])
    assert [side.op for side in found.ops] == ["add_", None]


def test_a_change_without_an_op() -> None:
    update = op("add_", [2], [3], weight=3)
    found = divergence([update], {1: [op("", [], [], weight=9), update]})
    assert found is not None
    assert (found.departure, found.sides) == ("changed-outside", [[0, 2], [1]])


def test_another_learning_rate() -> None:
    ops = [op("add_", [1, 2], [3], weight=3, argument="0.1")]
    found = divergence(ops, {0: [op("add_", [1, 2], [4], weight=4, argument="0.2")]})
    assert found is not None
    assert found.departure == "other-arguments"
    assert [side.arguments for side in found.ops] == [["0.1"], ["0.2"]]


def test_an_input_that_differs_and_the_op_that_made_it() -> None:
    ops = [op("mm", [20], [2]), op("add_", [1, 2], [3], weight=3)]
    odd = [op("mm", [21], [5]), op("mul_", [5], [6]), op("add_", [1, 6], [4], weight=4)]
    found = divergence(ops, {2: odd})
    assert found is not None
    assert (found.departure, found.sides) == ("other-inputs", [[0, 1], [2]])
    assert [side.op for side in found.origins] == ["mm", "mul_"]


def test_the_ops_of_the_optimizer_are_passed_over() -> None:
    optimizer = [op("lerp_", [7, 20], [8]), op("add_", [1, 8], [3], weight=3)]
    odd = [op("lerp_", [7, 21], [9]), op("add_", [1, 9], [4], weight=4)]
    found = divergence([op("mm", [40], [20]), *optimizer], {2: [op("mm", [41], [21]), *odd]})
    assert found is not None
    assert [side.op for side in found.origins] == ["mm", "mm"]


def test_a_write_of_the_same_bytes_is_no_change() -> None:
    update = op("add_", [2], [3], weight=3)
    assert divergence([update], {1: [op("copy_", [1], [1], weight=1), update]}) is None


def test_replicas_of_another_shard_have_the_same_name() -> None:
    shared = [SharedTensor(WEIGHT, (0, 1), 1), SharedTensor(WEIGHT, (2, 3), 5)]
    place = OpPlace()
    logs = {
        rank: OpLog((place,), (op("add_", [7], [8], weight=5 if rank < 2 else 1),))
        for rank in range(4)
    }
    assert find_divergence(logs, shared) is None
    odd = OpLog((place,), (op("add_", [8], [9], weight=6),))
    found = find_divergence({**logs, 3: odd}, shared)
    assert found is not None
    assert found.sides == [[2], [3]]


def test_the_first_op_that_not_all_ranks_run() -> None:
    place = OpPlace(source="train.py:9")
    same, other = op("a", [1], [2]), op("b", [1], [2])
    logs = {0: OpLog((place,), (same, other)), 1: OpLog((place,), (same,))}
    assert [(side.ranks, side.op) for side in first_other_op(logs)] == [([0], "b"), ([1], None)]
    assert first_other_op({0: logs[0], 1: logs[0]}) == []
