"""Libraries that communicate past torch's dispatcher, and what is recorded of them."""

from __future__ import annotations

import pytest

from commlens.model.bypass import SECOND_NCCL, Bypass, Recorded, bypasses_of, libraries_in
from commlens.model.collective import Channel, Collective, CollectiveArgs, ProcessGroup, State
from commlens.model.nccl import NcclRecord
from commlens.model.ranklog import Observation, RankLog

SITE = "/env/lib/python3.12/site-packages"


def mapped(*files: str) -> list[bytes]:
    return [
        f"7f3a00000000-7f3a00021000 r-xp 00000000 08:01 42    {file}\n".encode() for file in files
    ]


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (f"{SITE}/deep_ep_cpp.cpython-312-x86_64-linux-gnu.so", "deep_ep"),
        (f"{SITE}/nvidia/nvshmem/lib/nvshmem_bootstrap_uid.so.3.0.0", "nvshmem"),
        (f"{SITE}/nvshmem/bindings/nvshmem.cpython-312-x86_64-linux-gnu.so", "nvshmem"),
        (f"{SITE}/vllm/_C.abi3.so", "vllm"),
        (f"{SITE}/sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel"),
        (f"{SITE}/cupy_backends/cuda/libs/nccl.cpython-312-x86_64-linux-gnu.so", "cupy"),
        (f"{SITE}/mpi4py/MPI.cpython-312-x86_64-linux-gnu.so", "mpi4py"),
        (f"{SITE}/mooncake/engine.cpython-312-x86_64-linux-gnu.so", "mooncake"),
        ("/usr/lib/libmscclpp.so.0", "mscclpp"),
    ],
)
def test_a_mapped_file_tells_of_its_library(file: str, library: str) -> None:
    assert libraries_in(mapped("/usr/bin/python3.12", file, file)) == [library]


def test_torch_itself_tells_of_none() -> None:
    files = [
        f"{SITE}/torch/lib/libtorch_nvshmem.so",
        f"{SITE}/nvidia/nvshmem/lib/libnvshmem_host.so.3",
        f"{SITE}/nvidia/nccl/lib/libnccl.so.2",
        f"{SITE}/nvidia/nccl/lib/libnccl.so.2",
        "[stack]",
    ]
    assert libraries_in(mapped(*files)) == []
    assert libraries_in(mapped(*files, "/opt/nccl/lib/libnccl.so.2")) == [SECOND_NCCL]


def call(number: int, device: str = "deep_ep", op: str = "dispatch") -> Collective:
    channel = Channel(ProcessGroup("3", (0, 1)), device)
    return Collective(number, channel, number, CollectiveArgs(op, op), State.COMPLETED, 1)


def test_what_is_recorded() -> None:
    logs = [
        RankLog(
            rank,
            4,
            collectives=[call(1203 + rank), call(1204 + rank)] if rank < 2 else [],
            adapters={"deep_ep": "applied"} if rank < 3 else {"deep_ep": "other-version"},
            observation=Observation(libraries=["deep_ep", "mpi4py"]),
        )
        for rank in range(4)
    ]
    assert bypasses_of(logs) == [
        Bypass("deep_ep", (0, 1), True, "calls", (1204, 1205)),
        Bypass("deep_ep", (2,), True, "no-call"),
        Bypass("deep_ep", (3,), True, "other-version"),
        Bypass("mpi4py", (0, 1, 2, 3), True, "never"),
    ]


def test_nothing_is_said_of_nothing() -> None:
    of_torch = call(7, "cpu", "all_reduce")
    assert bypasses_of([RankLog(0, 1, collectives=[of_torch], adapters={"ray": "applied"})]) == []


def test_a_library_in_python_is_known_by_its_calls() -> None:
    log = RankLog(0, 1, collectives=[call(2, "ray", "all_reduce")])
    assert bypasses_of([log]) == [Bypass("ray", (0,), False, "calls", (2, 2))]


@pytest.mark.parametrize(
    ("nccl", "recorded"),
    [
        (None, "never"),
        (NcclRecord(7, 1), "by-plugin"),
        (NcclRecord(7, 1, is_other_nccl=True), "never"),
    ],
)
def test_nccls_plugin_records_the_libraries_that_call_nccl(
    nccl: NcclRecord | None, recorded: Recorded
) -> None:
    log = RankLog(0, 1, nccl=nccl, observation=Observation(libraries=["cupy", "mpi4py"]))
    assert bypasses_of([log]) == [
        Bypass("cupy", (0,), True, recorded),
        Bypass("mpi4py", (0,), True, "never"),
    ]
