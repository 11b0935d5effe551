"""What NCCL itself prints with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL, compared across ranks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest

import commlens
from commlens.formats.torch_log import read_torch_log
from commlens.formats.torch_log.nccl_lines import NcclLines, NcclPlace

STEP = ("AllReduce", "AllGather")


def head(rank: int) -> str:
    return f"hopper01:{19000 + rank}:{19060 + rank} [{rank}] NCCL INFO"


def made(rank: int, size: int, comm: int = 0, name: str = "", place: int | None = None) -> str:
    own = f"comm 0x55e290bd3{comm}{rank}0 rank {rank if place is None else place}"
    return (
        f"{head(rank)} {own} nranks {size} cudaDev {rank} busId 1000 commId {name} - Init"
        " COMPLETE\n"
        if name
        else (
            f"{head(rank)} {own} nRanks {size} nNodes 1 localRanks {size} localRank {rank}"
            " MNNVL 0\n"
        )
    )


def call(rank: int, number: int, op: str, comm: int = 0) -> str:
    return (
        f"{head(rank)} {op}: opCount {number:x} sendbuff 0x7fdf541ff800 recvbuff 0x7fdf541ff800"
        f" count 2097152 datatype 7 op 0 root 0 comm 0x55e290bd3{comm}{rank}0 [nranks=4] stream"
        " 0x55e29067e430\n"
    )


def log(folder: Path, ops: Sequence[Sequence[str]], first: int = 16) -> commlens.Verdict:
    """Diagnose the log of ranks that issued these ops."""
    lines = [made(rank, len(ops)) for rank in range(len(ops))]
    for place in range(max(map(len, ops))):
        lines += [
            call(rank, first + place, own[place])
            for rank, own in enumerate(ops)
            if place < len(own)
        ]
    (folder / "nccl.log").write_text("".join(lines))
    return commlens.diagnose(folder / "nccl.log")


@pytest.mark.parametrize("first", [0, 9, 16])
def test_a_rank_that_is_behind(tmp_path: Path, first: int) -> None:
    """The lines count operations in hexadecimal, from 0 on."""
    verdict = log(tmp_path, [STEP * 4, STEP * 3, STEP * 4, STEP * 4], first)
    assert (verdict.kind, verdict.culprits, verdict.victims, verdict.confidence) == (
        "missing",
        [1],
        [0, 2, 3],
        "low",
    )
    assert verdict.collective is not None and verdict.collective.sequence_number == first + 7
    assert (
        "its last collective, all_gather" in verdict.explanation
        and "was issued" in verdict.explanation
    )


def test_a_rank_that_leaves_a_collective_out_and_goes_on(tmp_path: Path) -> None:
    verdict = log(tmp_path, [STEP * 4, [*STEP * 2, STEP[1], *STEP], STEP * 4, STEP * 4])
    assert (verdict.kind, verdict.culprits) == ("mismatch/op", [1])
    assert verdict.collective is not None and verdict.collective.sequence_number == 16 + 5


@pytest.mark.parametrize("ranks", [4, 2])
def test_ranks_that_issued_the_same_show_no_fault(tmp_path: Path, ranks: int) -> None:
    assert (verdict := log(tmp_path, [STEP * 4] * ranks)).kind == "undetermined", verdict


def test_one_rank_alone_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    (tmp_path / "nccl.log").write_text(
        made(0, 4) + "".join(call(0, number, "AllReduce") for number in range(5))
    )
    verdict = commlens.diagnose(tmp_path / "nccl.log")
    assert (verdict.kind, verdict.culprits) == ("undetermined", [])


@pytest.mark.parametrize("named", [True, False])
def test_smaller_communicators_are_compared_where_their_id_tells_them_apart(
    tmp_path: Path, named: bool
) -> None:
    lines = [made(rank, 4, 0, "0xabc" if named else "") for rank in range(4)]
    lines += [made(rank, 2, 1, f"0xde{rank // 2}" if named else "", rank % 2) for rank in range(4)]
    lines += [
        call(rank, number, "AllReduce", 1)
        for number in range(3)
        for rank in range(4)
        if (rank, number) != (3, 2)
    ]
    (tmp_path / "nccl.log").write_text("".join(lines))
    verdict = commlens.diagnose(tmp_path / "nccl.log")
    assert (verdict.kind, verdict.culprits, verdict.victims) == (
        ("missing", [3], [2]) if named else ("undetermined", [], [])
    )


def test_counts_that_messages_change_are_not_compared(tmp_path: Path) -> None:
    lines = [made(rank, 2) for rank in range(2)] + [
        call(0, 0, "Send"),
        *(call(0, number, "AllReduce") for number in (1, 2)),
    ]
    (tmp_path / "nccl.log").write_text(
        "".join([*lines, call(1, 0, "AllReduce"), call(1, 1, "AllGather")])
    )
    assert commlens.diagnose(tmp_path / "nccl.log").culprits == []


def test_where_ranks_run() -> None:
    """Two hosts with two GPUs and two adapters; rank 2 uses both adapters."""
    lines = NcclLines()
    for rank in range(4):
        host, gpu = divmod(rank, 2)
        start = f"n{host}:{100 + rank}:{200 + rank} [{gpu}] NCCL INFO"
        used = [gpu, gpu] if rank != 2 else [0, 1]
        for line in (
            f"{start} NET/IB : Using [0]mlx5_2:1/IB [1]mlx5_10:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
            f"{start} comm 0x55e290bd30 rank {rank} nRanks 4 nNodes 2 localRanks 2 localRank {gpu}",
            *(
                f"{start} Channel 0{number}/0 : {rank}[{gpu}] -> 1[1] [send] via NET/IB/{nic}/GDRDMA"
                for number, nic in enumerate(used)
            ),
        ):
            lines.add(line)
    nics = ("mlx5_2", "mlx5_10")
    assert lines.places() == {
        0: NcclPlace("n0", 0, "mlx5_2", nics),
        1: NcclPlace("n0", 1, "mlx5_10", nics),
        2: NcclPlace("n1", 0, "", nics),
        3: NcclPlace("n1", 1, "mlx5_10", nics),
    }


def test_the_rail_of_a_rank_in_a_log() -> None:
    lines = [
        f"n{rank // 2}:{100 + rank}:{200 + rank} [{rank % 2}] NCCL INFO {text}\n"
        for rank in range(4)
        for text in (
            "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>",
            f"comm 0x55e290bd30 rank {rank} nRanks 4 nNodes 2 localRanks 2 localRank {rank % 2}",
            f"Channel 00/0 : {rank}[{rank % 2}] -> 0[0] [send] via NET/IB/{rank % 2}",
        )
    ]
    told = read_torch_log(io.BytesIO("".join(lines).encode()), "nccl.log")
    assert [(one.rank, one.host, one.place.rail if one.place else None) for one in told] == [
        (0, "n0", "0"),
        (1, "n0", "1"),
        (2, "n1", "0"),
        (3, "n1", "1"),
    ]


TRUNCATED = (
    "NET/Socket : peer 10.1.0.5<59210> message truncated : receiving 524288 bytes instead of 65536."
    " If you believe your socket network is in a healthy state, there may be a mismatch"
)


def truncated(*, prefixes: bool, calls: bool, made_: bool) -> str:
    """The log of two ranks, of which rank 1 receives more than it expects in its fourth call."""
    said = (
        "torch.distributed.DistBackendError: NCCL error in: /p/NCCLUtils.cpp:77, {}, NCCL version"
    )
    lines = [made(one, 2) for one in range(2) if made_]
    for number in range(4 if calls else 0):
        lines += [call(one, number, "Broadcast") for one in range(2)]
        if number == 3:
            lines[-2] = lines[-2].replace("count 2097152", "count 4")
    lines = [line.replace("[nranks=4]", "[nranks=2]") for line in lines]
    lines.append(f"{head(1).replace('NCCL INFO', 'net_socket.cc:493 NCCL WARN')} {TRUNCATED}\n")
    if prefixes:
        lines = [f"[rank{int('19001:' in line)}]: {line}" for line in lines]
    for one, error, last in (
        (
            0,
            "remote process exited or there was a network error",
            "connection closed by remote peer",
        ),
        (1, "invalid usage (run with NCCL_DEBUG=WARN for details)", TRUNCATED),
    ):
        frames = ["Traceback (most recent call last):", '  File "/w/train.py", line 14, in main']
        told = [*frames, f"{said.format(error)} 2.20.5", "Last error:", last]
        lines += [f"[rank{one}]: {line}\n" for line in told]
    return "".join(lines)


@pytest.mark.parametrize(
    ("prefixes", "made_"), [(False, True), (True, False), (False, False)], ids=str
)
def test_both_sides_of_a_truncated_message(tmp_path: Path, prefixes: bool, made_: bool) -> None:
    """Of two processes whose communicator is not seen made, the last error tells one."""
    (tmp_path / "a.log").write_text(truncated(prefixes=prefixes, calls=True, made_=made_))
    verdict = commlens.diagnose(tmp_path / "a.log")
    assert (verdict.kind, verdict.culprits, len(verdict.findings)) == ("mismatch/shape", [], 1)
    assert verdict.cause.number == 4 and verdict.cause.ended_by_it == [1]
    assert [(one.ranks, one.arguments.tensors[0].shape) for one in verdict.cause.issued] == [
        ([0], (4,)),
        ([1], (2097152,)),
    ]


def test_a_truncated_message_alone_does_not_tell_which_side_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(truncated(prefixes=False, calls=False, made_=False))
    verdict = commlens.diagnose(tmp_path / "a.log")
    assert (verdict.kind, verdict.culprits, verdict.cause.report) == ("mismatch/shape", [], "sizes")
    assert "524288 bytes where it expects 65536" in verdict.summary
    assert "NCCL_PROTO" in verdict.summary
