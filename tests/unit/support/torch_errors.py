"""Errors as torch words them."""

from __future__ import annotations


def tensor(size: int, dtype: str) -> str:
    return (
        f"TensorShape=[{size}], TensorDtypes={dtype}, TensorDeviceTypes=TensorOptions(dtype=float"
        " (default), device=cuda)"
    )


def detail(
    own: int,
    other: int,
    mine: str = "BROADCAST",
    theirs: str = "REDUCE",
    tensors: tuple[str, str] = ("", ""),
) -> str:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL, as torch 2.6 words it."""
    first = (
        "CollectiveFingerPrint(SequenceNumber=152517,"
        f" OpType={mine}{tensors[0] and ', '}{tensors[0]})"
    )
    second = f"CollectiveFingerPrint(SequenceNumber=152518{tensors[1] and ', '}OpType={theirs}{tensors[1] and ', '}{tensors[1]})"
    return (
        f"RuntimeError: Detected mismatch between collectives on ranks. Rank {own} is running"
        f" collective: {first}, but Rank {other} is running collective: {second}.Collectives differ"
        " in the following aspects: \t Sequence number: 152517vs 152518"
    )


def ddp(own: int, mine: int, other: int, theirs: int) -> str:
    return (
        f"RuntimeError: DDP expects same model across all ranks, but Rank {own} has {mine} params, "
        f"while rank {other} has inconsistent {theirs} params."
    )
