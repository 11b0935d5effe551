"""Rank and host from the names of files and folders."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlens.dumps.sources.rank_from_name import RANK_MAX, parse_name, parse_names


@pytest.mark.parametrize(
    ("name", "rank", "host"),
    [
        ("nccl_trace_rank_3", 3, ""),
        ("/tmp/nccl_trace_rank_3", 3, ""),
        ("comm_lib_trace_rank_12", 12, ""),
        ("_dump_9", 9, ""),
        ("_dump_9.pickle.gz", 9, ""),
        ("host42_rank_7.pickle", 7, "host42"),
        ("rank_7.host42.cluster.local.json", 7, "host42.cluster.local"),
        ("nccl_trace_node17_rank_3", 3, "node17"),
        ("rank00012.json", 12, ""),
        ("rank=4.json", 4, ""),
        ("RANK-4.JSON", 4, ""),
        ("[rank7].log", 7, ""),
        ("r12.log", 12, ""),
        ("trace.3", 3, ""),
        ("12", 12, ""),
        ("7.json", 7, ""),
        ("dumps.tar.gz!n03/rank_7", 7, "n03"),
        ("s3://bucket/job42/nccl_trace_rank_5", 5, ""),
        ("worker-1/rank-5.json", 5, "worker-1"),
        ("ip-10-0-1-5/fr_rank_3", 3, "ip-10-0-1-5"),
        ("10.0.1.5/fr_rank_3", 3, "10.0.1.5"),
        ("h100-17/nccl_trace_rank_8", 8, "h100-17"),
        ("rank_3/dump.pkl", 3, ""),
        ("rank3/stderr.log", 3, ""),
        ("torchelastic_x/attempt_0/5/stdout.log", 5, ""),
        ("2026-11-22/nccl_trace_rank_3", 3, ""),
        ("trace-20261122T072100-7.json.gz", 7, ""),
        ("dump_3_1732245600.json", 3, ""),
        ("nccl_trace_rank_3_1732245600", 3, ""),
        ("global_rank_12_local_rank_4.pkl", 12, ""),
        ("node_rank0_rank5.json", 5, ""),
        ("group_rank_0_rank_5", 5, ""),
        ("local.rank.3_global.rank.9", 9, ""),
        ("00003-of-00008.pkl", 3, ""),
        ("README.md", -1, ""),
        ("fault_injection.log", -1, ""),
        ("rank99999999999999999999", -1, ""),
        ("", -1, ""),
    ],
)
def test_one_name(name: str, rank: int, host: str) -> None:
    found = parse_name(name)
    assert (found.rank, found.host, found.note) == (rank, host, "")


@pytest.mark.parametrize(
    ("name", "node", "local_rank"),
    [
        ("node-3/gpu2/dump.pkl", 3, 2),
        ("node2/local_rank_5.json", 2, 5),
        ("worker-1/cuda:0", 1, 0),
        ("GPU3.json", -1, 3),
        ("node.rank.1_local.rank.3", 1, 3),
    ],
)
def test_a_number_on_its_node_is_no_rank(name: str, node: int, local_rank: int) -> None:
    found = parse_name(name)
    assert (found.rank, found.node, found.local_rank) == (-1, node, local_rank)


def test_a_prefix_says_where_the_rank_is() -> None:
    assert parse_name("d/run7-of-hell-12-3", prefix="run7-of-hell-").rank == 12
    assert parse_name("d/run7_rank_3", prefix="other").rank == 3
    assert not parse_name("p99999999999", prefix="p").sure


@pytest.mark.parametrize(
    ("name", "rank", "words"),
    [
        ("run2-dump.3.281", 281, "several numbers"),
        ("rank_3/rank_5.pkl", 5, "rank 3 in a folder's name"),
    ],
)
def test_what_can_be_read_in_several_ways_is_said(name: str, rank: int, words: str) -> None:
    found = parse_name(name)
    assert found.rank == rank
    assert words in found.note


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["dump.3.28123", "dump.4.28122", "dump.0.28120"], [3, 4, 0]),
        (["run2-trace-0", "run2-trace-1", "run2-trace-2"], [0, 1, 2]),
        (["a.1.7", "a.0.9"], [1, 0]),
        ([f"node-{node}/gpu{gpu}/x.pkl" for node in (9, 10) for gpu in (0, 1)], [0, 1, 2, 3]),
        ([f"{host}/gpu{gpu}" for host in ("alpha", "beta") for gpu in (0, 1)], [0, 1, 2, 3]),
        (["gpu0.json", "gpu3.json"], [0, 3]),
        (["host1_1700000000_gpu0.json", "host1_1700000001_gpu1.json"], [0, 1]),
        (["node0_pid100_gpu0", "node0_pid101_gpu1"], [0, 1]),
        (["20240101-120001_gpu0", "20240101-120002_gpu1"], [0, 1]),
        (["alpha_pid7_gpu0", "beta_pid9_gpu0", "alpha_pid8_gpu1"], [0, 2, 1]),
        (["1" * 5000 + "-of-4"], [4]),
        ([f"{part}-of-4.pkl" for part in (1, 2, 3, 4)], [0, 1, 2, 3]),
        ([f"{part}-of-4.pkl" for part in (0, 1, 2, 3)], [0, 1, 2, 3]),
        (["99999999999-of-99999999999.pkl"], [-1]),
    ],
)
def test_all_names_together_say_more(names: list[str], ranks: list[int]) -> None:
    assert [found.rank for found in parse_names(names)] == ranks


def test_ranks_counted_up_from_nodes_are_said_to_be_assumed() -> None:
    assert "are assumed" in parse_names(["node0/gpu0", "node1/gpu0"])[1].note


@settings(deadline=None)
@given(
    st.lists(
        st.text(max_size=60) | st.from_regex(r"[a-z_/.-]{0,12}[0-9]{0,9}[a-z_/.-]{0,8}[0-9]{0,9}"),
        max_size=6,
    )
)
def test_any_names(names: list[str]) -> None:
    for found in parse_names(names):
        assert -1 <= found.rank <= RANK_MAX * 1000
