"""What the recorder's names of operations mean."""

from __future__ import annotations

import pytest

from commlens.formats.flight_recorder.names import parse_ranks, read_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nccl:all_reduce", ("all_reduce", "nccl", "cuda")),
        ("nccl2:all_to_all_single", ("all_to_all", "nccl", "cuda")),
        ("nccl-lazy:all_gather_single", ("all_gather", "nccl", "cuda")),
        ("nccl:ALLGATHER_coalesced", ("coalesced", "nccl", "cuda")),
        ("nccl:all_gather_into_tensor_coalesced", ("all_gather", "nccl", "cuda")),
        ("nccl:all_reduce_barrier", ("barrier", "nccl", "cuda")),
        ("gloo:recv 3<-?", ("recv", "gloo", "cpu")),
        ("xccl:send 3->11", ("send", "xccl", "xpu")),
        ("all_reduce", ("all_reduce", "", "")),
    ],
)
def test_names(name, expected):
    found = read_name(name)
    assert (found.op, found.backend, found.device) == expected


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("[0, 1, 5]", (0, 1, 5)),
        ("[]", ()),
        ("0, 1", ()),
        ("[0, one]", ()),
        ("[0, -1]", ()),
        ("[0, 123456789012345, 5]", ()),
        ("[0" + 100_000 * " ", ()),
        ("[" + 50_000 * "1, " + "]", ()),
    ],
)
def test_a_list_of_ranks_is_read_as_a_whole_or_not_at_all(
    text: str, ranks: tuple[int, ...]
) -> None:
    assert parse_ranks(text) == ranks
