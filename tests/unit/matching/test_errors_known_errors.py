"""Errors whose text decides what to do."""

from __future__ import annotations

import pytest

from commlens.matching.errors import is_own_error, known_error, peer_host

NCCL = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, {}, NCCL version 2.21"
IB = (
    "NET/IB : Got completion from peer 10.1.0.6<41023> with {} opcode=0 len=0 vendor err 129 (Send)"
)


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        (
            f"{NCCL.format('invalid usage')}\nLast error:\nDuplicate GPU detected : rank 1 and rank"
            " 0 both on CUDA device 34000",
            "shared-gpu",
            "",
        ),
        ("RuntimeError: CUDA error: invalid device ordinal", "no-such-gpu", ""),
        ("CUDA error: device-side assert triggered", "device-assert", ""),
        ("CUDA error: an illegal memory access was encountered", "bad-kernel", ""),
        (
            f"{NCCL.format('unhandled system error')}\nLast error:\nError while creating shared"
            " memory segment /dev/shm/nccl-wWkVpg (size 9637888), error: No space left on device",
            "shared-memory",
            "",
        ),
        ("DataLoader worker (pid 4502) is killed by signal: Bus error. ", "shared-memory", ""),
        ("... port: 29500, code: -98, name: EADDRINUSE, message: address", "port-taken", ""),
        ("waiting for clients. 3/4 clients joined.", "not-all-joined", "3/4"),
        (
            "The client socket has timed out after 600000ms while trying to connect to (n0, 29500)",
            "store-unreachable",
            "(n0, 29500)",
        ),
        (
            "The client socket has failed to connect to [n0]:29500 (errno: 111",
            "store-unreachable",
            "[n0]:29500",
        ),
        (
            "The client socket has failed to connect to any network address of (n0, 29500).",
            "store-unreachable",
            "(n0, 29500)",
        ),
        (
            "The IPv6 network addresses of (n0, 29500) cannot be retrieved (gai error: -2",
            "store-unreachable",
            "(n0, 29500)",
        ),
        ("RendezvousConnectionError: The connection to the C10d store has", "store-lost", ""),
        ("(world_size=8, num_workers_joined=7, timeout=0:30:00)", "not-all-joined", "7/8"),
        ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "rendezvous", ""),
        ("Last error:\nBootstrap : no socket interface found", "no-interface", ""),
        ("Cuda failure 35 'CUDA driver version is insufficient for CUDA", "old-driver", ""),
        ("cudaGetDeviceCount() Error 802: system not yet initialized", "fabric-manager", ""),
        (IB.format("status=12"), "network-link", ""),
        (IB.format("status=IBV_WC_RETRY_EXC_ERR(12)"), "network-link", ""),
        ("Message truncated : received 72 bytes instead of 64", "versions", ""),
        ("Expected to have finished reduction in the prior iteration b", "unused-parameters", ""),
    ],
)
def test_the_text_decides_what_to_do(text: str, kind: str, detail: str) -> None:
    known = known_error(text)
    assert known is not None and (known.kind, known.detail) == (kind, detail)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "ValueError: bad sample",
        "OSError: [Errno 28] No space left on device: '/scratch/ckpt'",
        IB.format("status=5"),
    ],
)
def test_any_other_text_decides_nothing(text: str | None) -> None:
    assert known_error(text) is None
    assert not is_own_error(text)


def test_a_full_dev_shm_is_no_peers_fault_though_nccl_calls_it_a_system_error() -> None:
    said = "ncclSystemError: ... \nLast error:\nshm /dev/shm/nccl-x: No space left on device"
    assert is_own_error(said)
    assert not is_own_error("ncclRemoteError: Connection closed by remote peer n1<5>")


def test_an_error_of_nccl_names_the_host_of_the_peer() -> None:
    assert peer_host("socketProgress: Connection closed by remote peer n1.cluster<51234>") == (
        "n1.cluster"
    )
    assert peer_host(IB.format("status=12")) == "10.1.0.6"
    assert peer_host("ValueError: peer <1>") == ""
