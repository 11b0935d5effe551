"""The next step that an error's text alone decides: after "Address already in use", to end the
process that still listens on the port, or to take another port.

``matching.errors`` finds the kind of error in a text, with the address or number that it names;
here is the step for each kind.
"""

from __future__ import annotations

from typing import Final

from commlens.matching.errors import ErrorKind, StoreReason, known_error, peer_host

_STEPS_OF_ERRORS: Final[dict[ErrorKind, str]] = {
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
        "start NVIDIA's fabric manager{host} (systemctl status nvidia-fabricmanager), in the"
        " version of the driver: GPUs with NVSwitch need it"
    ),
    "network-link": (
        "check the InfiniBand link{} (ibstat, the switch, counters of the port): its packets were"
        " not acknowledged; and whether the ranks there had ended before"
    ),
    "locked-memory": (
        "raise the limit of locked memory{host} (ulimit -l unlimited, in a container --ulimit"
        " memlock=-1): InfiniBand pins the memory that it registers; a new limit counts for the"
        " processes of the next login or restarted service (slurmd, docker)"
    ),
    "gpu-direct": (
        "let the adapters{host} read the GPUs' memory (load nvidia_peermem, or let NCCL use"
        " dma-buf); NCCL_NET_GDR_LEVEL=LOC, which goes without that, confirms it"
    ),
    "nvls": (
        "set NCCL_NVLS_ENABLE=0 to confirm that NVLink SHARP (NVLS) is the reason; then look at the"
        " fabric manager{host} (systemctl status nvidia-fabricmanager, Fabric in nvidia-smi -q):"
        " after its restart, the GPUs need a reset"
    ),
    "peer-access": (
        "set NCCL_P2P_DISABLE=1 to confirm that access between GPUs is the reason; then check that"
        " the ranks{host} see each other's GPUs and share IPC and PID namespaces (docker"
        " --ipc=host --pid=host), and that IOMMU and ACS are off (nvidia-smi topo -p2p r)"
    ),
    "gpu-memory": (
        "leave more of the GPU's memory free{host} (nvidia-smi lists the processes that use it):"
        " NCCL allocates its buffers beside torch's, at the first collective of each group; smaller"
        " batches, or NCCL_BUFFSIZE, help"
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

_OF_STORE: Final[dict[StoreReason | None, str]] = {
    "unknown-name": (
        "look up the name in {} on the node that could not connect (getent hosts NAME): it is not"
        " known there; give {setting} a name or an address that all nodes know, in"
        " Kubernetes that of a service whose pod has started"
    ),
    "refused": (
        "look at {host_of_store}: {} refuses connections, so no process listens on that port; it"
        " has not started yet, has ended, or listens on another one ({setting})"
    ),
    None: (
        "check that {host_of_store} runs on the host that {setting} names, that it listens on that"
        " port, and that no firewall is between: {} does not answer"
    ),
}


def known_step(text: str | None, host: str = "") -> str:
    """Recommend a step for an error whose text decides it, on this host; empty for any other."""
    known = known_error(text)
    if known is None:
        return ""
    detail, peer = known.detail, peer_host(text)
    if known.kind == "store-unreachable" and (known.reason is not None or known.of_launcher):
        return _OF_STORE[known.reason].format(
            detail,
            setting="--rdzv-endpoint" if known.of_launcher else "MASTER_ADDR or --rdzv-endpoint",
            host_of_store=f"{'rank 0 or ' * (not known.of_launcher)}the first node's launcher",
        )
    if known.kind == "network-link":
        detail = f" to {peer}" if peer else ""
    return _STEPS_OF_ERRORS[known.kind].format(detail, host=f" on {host}" if host else "")


def peer_step(text: str | None) -> str:
    """Recommend a step for an error that names the host of a peer that ended; empty if none is
    named.
    """
    host = peer_host(text)
    return f"look at the output of the ranks on {host} for the first error" if host else ""
