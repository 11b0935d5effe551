"""Words about what to do after errors whose text decides it."""

from __future__ import annotations

from typing import Final

from commlens.matching.known_errors import ErrorKind, known_error, peer_host

_STEPS: Final[dict[ErrorKind, str]] = {
    "shared-gpu": (
        "give each rank a GPU of its own: call torch.cuda.set_device(local_rank) before the first"
        " collective, and check that CUDA_VISIBLE_DEVICES shows as many GPUs on each node as it has"
        " ranks"
    ),
    "no-such-gpu": (
        "start at most as many ranks on a node as it shows GPUs: check --nproc-per-node,"
        " CUDA_VISIBLE_DEVICES and what the scheduler granted"
    ),
    "device-assert": (
        "look in that rank's batch for an index out of range, as such an assertion usually is: a"
        " token beyond the embedding's size, a label beyond the number of classes; its output"
        " names the assertion, and CUDA_LAUNCH_BLOCKING=1 shows the line, for CUDA tells the error"
        " of a kernel late"
    ),
    "bad-kernel": (
        "run that rank's data with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer: CUDA tells"
        " the error of a kernel late, so the line that raised it may be another one"
    ),
    "shared-memory": (
        "make /dev/shm larger (docker run --shm-size or --ipc=host, in Kubernetes a volume of"
        " medium Memory): its space is used up (df -h /dev/shm)"
    ),
    "port-taken": (
        "end the process that still listens on the port (ss -ltnp), often an earlier job, or take"
        " another port: MASTER_PORT, --master-port, or torchrun --standalone"
    ),
    "not-all-joined": (
        "find the ranks that were not started or reach another address: {} of the world size joined"
    ),
    "store-unreachable": (
        "check that rank 0 runs on the host that MASTER_ADDR names, that it listens on the port of"
        " MASTER_PORT, and that no firewall is between: {} does not answer"
    ),
    "store-lost": (
        "look at the output of the node that hosts the rendezvous (--rdzv-endpoint): its process"
        " ended, or the network to it broke"
    ),
    "rendezvous": (
        "check that all nodes start the launcher, with the same --rdzv-id, --rdzv-endpoint and"
        " --nnodes, and that each of them reaches the endpoint; then look at the output of the node"
        " that did not come or left first"
    ),
    "no-interface": (
        "let NCCL_SOCKET_IFNAME name a network interface of the node that is up (ip addr), or unset"
        " it"
    ),
    "old-driver": (
        "compare the driver's version on all nodes (nvidia-smi): on this one it is older than the"
        " CUDA version of torch needs"
    ),
    "fabric-manager": (
        "start NVIDIA's fabric manager on that node (systemctl status nvidia-fabricmanager), in the"
        " version of the driver: GPUs with NVSwitch need it"
    ),
    "network-link": (
        "check the InfiniBand link{} (ibstat, the switch, counters of the port): its packets were"
        " not acknowledged; and whether the ranks there had ended before"
    ),
    "versions": (
        "compare NCCL's version on all nodes (the lines NCCL version with NCCL_DEBUG=INFO): their"
        " messages differ in length"
    ),
    "unused-parameters": (
        "let all parameters take part in the loss of each step, or pass"
        " find_unused_parameters=True to DDP"
    ),
}


def known_step(text: str | None) -> str:
    """Recommend a step for an error whose text decides it; empty for any other error."""
    known = known_error(text)
    if known is None:
        return ""
    if known.kind == "network-link":
        host = peer_host(text)
        return _STEPS[known.kind].format(f" to {host}" if host else "")
    return _STEPS[known.kind].format(known.detail)


def peer_step(text: str | None) -> str:
    """Recommend a step for an error that names the host of a peer that ended; empty if none is
    named.
    """
    host = peer_host(text)
    return f"look at the output of the ranks on {host} for the first error" if host else ""
