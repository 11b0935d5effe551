"""The rules that ranks' collectives must agree by."""

from __future__ import annotations

import pytest
from builders import asked, spec
from comparing import odd_one
from hypothesis import given
from hypothesis import strategies as st

from commlens.matching.answer import Agree, Disagree, Severity, Unknown
from commlens.matching.collectives import compare_coalesced, compare_collectives
from commlens.model.collective import CollectiveArgs, TensorSpec
from commlens.model.ops import WIRE_OPS

A = asked("all_reduce", spec((4, 5)), reduce_op="SUM")


@pytest.mark.parametrize(
    ("usual", "odd", "aspect", "severity"),
    [
        (A, asked("barrier"), "op", Severity.ILLEGAL),
        (A, asked("all_reduce", spec((4, 4)), reduce_op="SUM"), "shape", Severity.ILLEGAL),
        (A, asked("all_reduce", spec((5, 4)), reduce_op="SUM"), "shape", Severity.SUSPICIOUS),
        (
            A,
            asked("all_reduce", spec((4, 5), "float16"), reduce_op="SUM"),
            "dtype",
            Severity.ILLEGAL,
        ),
        (
            A,
            asked("all_reduce", spec((4, 5), device="cuda"), reduce_op="SUM"),
            "device",
            Severity.ILLEGAL,
        ),
        (A, asked("all_reduce", spec((4, 5)), reduce_op="MAX"), "reduce-op", Severity.SUSPICIOUS),
        (
            A,
            asked("all_reduce", spec((4, 5), memory_order=(1, 0)), reduce_op="SUM"),
            "layout",
            Severity.SUSPICIOUS,
        ),
        (
            A,
            asked("all_reduce", spec((4, 5), layout="sparse_coo"), reduce_op="SUM"),
            "layout",
            Severity.ILLEGAL,
        ),
        (
            asked("broadcast", spec(3), root=0),
            asked("broadcast", spec(3), root=1),
            "root",
            Severity.ILLEGAL,
        ),
        (
            asked("reduce", spec(3), root=0, reduce_op="SUM"),
            asked("reduce", spec(3), root=1, reduce_op="SUM"),
            "root",
            Severity.ILLEGAL,
        ),
        (
            asked("broadcast", spec((1, 5)), root=0),
            asked("broadcast", spec((1, 2, 5)), root=0),
            "shape",
            Severity.ILLEGAL,
        ),
        (
            asked("all_gather", spec(3), outputs=(spec(12),)),
            asked("all_gather", spec(2), outputs=(spec(8),)),
            "shape",
            Severity.ILLEGAL,
        ),
    ],
)
def test_the_odd_one_is_named(
    usual: CollectiveArgs, odd: CollectiveArgs, aspect: str, severity: Severity
) -> None:
    answer = odd_one(usual, odd)
    assert isinstance(answer, Disagree)
    assert (answer.aspect, answer.severity, answer.minority, answer.tie) == (
        aspect,
        severity,
        (2,),
        False,
    )
    assert "rank 2" in answer.detail
    assert "ranks 0-1,3" in answer.detail


@pytest.mark.parametrize(
    ("usual", "other"),
    [
        (asked("barrier"), asked("barrier", spec(1, device="cuda"))),
        *[
            (CollectiveArgs(op, op), CollectiveArgs(op, op))
            for op in ("init_process_group", "new_group", "split_group", "init_device_mesh")
        ],
        (A, asked("all_reduce", spec((4, 5, 1)), reduce_op="SUM")),
        (A, asked("all_reduce", spec(20), reduce_op="SUM")),
        (asked("all_reduce", spec(4, "complex64")), asked("all_reduce", spec((4, 2), "float32"))),
        # a list of outputs and one tensor match on the wire
        (
            asked("all_gather", spec(3), outputs=(spec(3),) * 4),
            asked("all_gather", spec(3), outputs=(spec(12),)),
        ),
        (
            asked("reduce_scatter", *(spec(3),) * 4, reduce_op="SUM"),
            asked("reduce_scatter", spec(12), reduce_op="SUM"),
        ),
        # lists on the root only
        (
            asked("scatter", outputs=(spec(3),), root=2),
            asked("scatter", *(spec(3),) * 4, outputs=(spec(3),), root=2),
        ),
        (
            asked("gather", spec(3), root=2),
            asked("gather", spec(3), outputs=(spec(3),) * 4, root=2),
        ),
        (
            asked("reduce", spec(3), root=2, asynchronous=True),
            asked("reduce", spec(3), root=2, asynchronous=None),
        ),
    ],
)
def test_corresponding_arguments_agree(usual: CollectiveArgs, other: CollectiveArgs) -> None:
    assert not isinstance(odd_one(usual, other), Disagree)


def test_sparse_tensors_must_have_the_same_dense_shape() -> None:
    one = asked("all_reduce", spec((10, 10), layout="sparse_coo"), reduce_op="SUM")
    assert odd_one(one, one) == Agree()
    answer = odd_one(one, asked("all_reduce", spec((10, 11), layout="sparse_coo"), reduce_op="SUM"))
    assert isinstance(answer, Disagree)
    assert answer.aspect == "shape"


def test_uneven_lists_are_legal_if_all_ranks_expect_them() -> None:
    outputs = (spec(1), spec(2), spec(3))
    good = {r: asked("all_gather", spec(r + 1), outputs=outputs) for r in range(3)}
    assert compare_collectives(good, range(3)) == Agree()
    bad = {**good, 1: asked("all_gather", spec(2), outputs=(spec(1), spec(2), spec(4)))}
    assert isinstance(compare_collectives(bad, range(3)), Disagree)


@pytest.mark.parametrize("missing", [{"reduce_op": None}, {"inputs": ()}])
def test_missing_evidence_is_unknown(missing: dict[str, object]) -> None:
    import msgspec

    answer = odd_one(A, msgspec.structs.replace(A, **missing))
    assert isinstance(answer, Unknown)
    assert answer.aspects


def test_a_tie_has_no_minority() -> None:
    answer = compare_collectives({0: A, 1: asked("all_reduce", spec(3), reduce_op="SUM")})
    assert isinstance(answer, Disagree)
    assert answer.tie
    assert answer.minority == ()


def test_coalesced_members_agree_one_by_one() -> None:
    b = asked("all_reduce", spec(7), reduce_op="SUM")
    assert compare_coalesced({0: [A, b], 1: [A, b], 2: [A, b]}) == Agree()
    swapped = compare_coalesced({0: [A, b], 1: [b, A], 2: [A, b]})
    assert isinstance(swapped, Disagree)
    assert swapped.minority == (1,)
    fewer = compare_coalesced({0: [A, b], 1: [A], 2: [A, b]})
    assert isinstance(fewer, Disagree)
    assert (fewer.aspect, fewer.minority) == ("op", (1,))


def test_coalesced_tensors_in_another_order_are_suspicious() -> None:
    in_order, swapped = (
        asked("all_reduce", spec(2), spec(5), reduce_op="SUM"),
        asked("all_reduce", spec(5), spec(2), reduce_op="SUM"),
    )
    flat = asked("all_reduce", spec(7), reduce_op="SUM")
    answer = compare_collectives({0: in_order, 1: swapped, 2: in_order})
    assert isinstance(answer, Disagree)
    assert (answer.aspect, answer.severity, answer.minority) == ("shape", Severity.SUSPICIOUS, (1,))
    assert not isinstance(compare_collectives({0: in_order, 1: flat}), Disagree), (
        "the same elements, flat"
    )


tensors = st.builds(
    TensorSpec,
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from(["float32", "int64"]),
    st.sampled_from(["cpu", "cuda"]),
)
asks = st.builds(
    CollectiveArgs,
    st.sampled_from(sorted(set(WIRE_OPS.values()))),
    st.just("x"),
    st.lists(tensors, max_size=3).map(tuple),
    st.lists(tensors, max_size=3).map(tuple),
    st.sampled_from([None, "SUM", "MAX"]),
    st.sampled_from([None, 0, 1]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)


@given(st.dictionaries(st.integers(0, 3), asks, max_size=4))
def test_the_answer_does_not_depend_on_the_order_of_ranks(
    evidence: dict[int, CollectiveArgs],
) -> None:
    answer = compare_collectives(evidence, range(4))
    assert answer == compare_collectives(dict(reversed(evidence.items())), range(4))
    if isinstance(answer, Disagree):
        assert set(answer.minority) < set(evidence)


@given(asks, st.integers(2, 4))
def test_equal_arguments_agree_unless_their_own_splits_conflict(
    one: CollectiveArgs, size: int
) -> None:
    answer = compare_collectives(dict.fromkeys(range(size), one), range(size))
    assert not isinstance(answer, Disagree) or answer.aspect == "splits"


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_without_splits_sizes_of_uneven_collectives_are_not_compared(op: str) -> None:
    args = {0: asked(op, spec(3), outputs=(spec(3), spec(4))), 1: asked(op, spec(4))}
    assert compare_collectives(args, range(2), splits_known=False) == Unknown(("root", "shape"))


def test_a_dtype_that_a_source_does_not_tell_is_not_compared() -> None:
    args = asked("all_gather", spec(3, "unknown"), outputs=(spec(6, "unknown"),))
    assert compare_collectives({0: args, 1: args}, range(2)) == Unknown(("dtype",))
