"""Several ranks on one GPU, over real NCCL."""

from __future__ import annotations


def one_gpu_for_all(rank: int) -> dict[str, str]:
    """Return the variables with which NCCL lets several ranks use one GPU: each claims to be
    another host, and they talk over loopback.
    """
    return {
        "NCCL_HOSTID": f"host-of-rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
    }
