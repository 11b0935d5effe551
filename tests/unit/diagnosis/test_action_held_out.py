"""Actions for causes that were written down before the table of actions was read: the logs, and the
incidents of hardware, that a person who is paged meets. Sources: reports on GitHub, NVIDIA's table
of Xids.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import Die, Job, Stay, training
from incidents import PER_NODE, RANKS, Incident, Scene, tell
from launcher_logs import (
    CUDA_ADVICE,
    Files,
    after_a_peer,
    broken_connections,
    crashed,
    ended_by,
    raised,
    slurm,
    store_gone,
    summary,
    traceback,
    with_xid,
    write,
)

import commlens
from commlens.diagnosis.action import action_of, attempt_of, with_attempts
from commlens.diagnosis.examine import diagnose_logs
from commlens.model.collective import State
from commlens.model.ranklog import End, Observation

OF_B = range(4, 8)
ALL = range(8)
LAUNCHERS_END = "srun: error: n1: task 0: Exited with exit code 1\n"
OOM_EVENT = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=4242.0. Some of the step tasks\n"
)
NO_DRIVER = "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."
OTHER_DRIVER = (
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported"
    " display driver / cuda driver combination"
)
HUB = "for url: https://huggingface.co/timm/vit/resolve/main/model.safetensors"
REFUSED_HUB = f"huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests {HUB}"


def out_of_gpu_memory(own: str, others: str = "") -> str:
    return (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 572.00 MiB. GPU 1 has a total"
        f" capacity of 79.15 GiB of which 321.31 MiB is free. {others}Including non-PyTorch memory,"
        f" this process has {own} memory in use. Of the allocated memory 2.04 GiB is allocated by"
        " PyTorch, and 321.37 MiB is reserved by PyTorch but unallocated."
    )


def of_cuda(said: str) -> str:
    return f"torch.AcceleratorError: CUDA error: {said}{CUDA_ADVICE}"


ILLEGAL = of_cuda("an illegal memory access was encountered")
UNCORRECTABLE = of_cuda("uncorrectable ECC error encountered")
CHAINED = (
    traceback(0, REFUSED_HUB)
    + "[rank0]: \n[rank0]: The above exception was the direct cause of the following exception:\n"
    + "[rank0]: \n"
    + traceback(0, "RuntimeError: cannot load allenai/c4")
    + summary([0])
)

LOGS: dict[str, tuple[Files, str]] = {
    # it passes
    "network lost": (broken_connections(), "retry"),
    "store gone": (store_gone(), "unknown retry"),
    "preempted": (slurm(" DUE TO PREEMPTION"), "retry"),
    "time limit": (slurm(" DUE TO TIME LIMIT"), "retry"),
    "cancelled by hand": (slurm("", step_only=True), "unknown stop"),
    "cancelled by hand, with launchers": (
        {"slurm.out": slurm("")["slurm-4242.out"] + LAUNCHERS_END},
        "stop",
    ),
    "launchers fail, and the job is cancelled": (
        {"slurm.out": LAUNCHERS_END + slurm("")["slurm-4242.out"]},
        "unknown",
    ),
    "pod ended by SIGTERM": ({"pod.log": ended_by(15)}, "retry unknown"),
    "Ctrl-C": ({"job.log": ended_by(2, interrupted=range(4))}, "unknown stop"),
    "not all joined": (
        raised([0], "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined."),
        "retry unknown",
    ),
    "port in use": (
        raised([0], "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
        "retry unknown",
    ),
    "hub down": (raised([0], f"requests.exceptions.HTTPError: 503 Server Error: Service Temporarily Unavailable {HUB}"), "retry"),
    "hub limits the rate": (raised([0], REFUSED_HUB), "retry"),
    "hub limits the rate, as the cause": ({"a.log": CHAINED}, "retry"),
    "hub unreachable": (raised([0], "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files."), "retry"),
    "object store slows down": (raised([0], "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation"), "retry"),
    "tracker does not answer": (raised([0], "wandb.errors.errors.CommError: Run initialization has timed out after 90.0 sec."), "retry"),
    "Lustre fails once": (raised([3], "OSError: [Errno 5] Input/output error: '/lustre/ckpt/rank3.pt'"), "retry"),
    "no route": ({"b.log": after_a_peer("b", "socketPollConnect: Connect to 10.0.0.9<42719> returned 113(No route to host)")}, "unknown retry"),
    "GPU full of another job": (raised([5], out_of_gpu_memory("3.40 GiB", "Process 1374765 has 74.12 GiB memory in use. ")), "retry exclude-node unknown"),
    "crashed once": (crashed(3, -11), "retry unknown"),
    "device says nothing": (raised([5], "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "unknown retry"),
    # a node is at fault
    "Xid 79": (with_xid(raised([5], of_cuda("unspecified launch failure")), "b", 79, "GPU has fallen off the bus."), "exclude-node"),
    "Xid 94": (with_xid(raised([5], UNCORRECTABLE), "b", 94, "Contained: SM (0x1)."), "retry exclude-node"),
    "Xid 48": (with_xid(raised([5], UNCORRECTABLE), "b", 48, "An uncorrectable double bit error (DBE)"), "exclude-node"),
    "Xid 119": (with_xid(raised([6], of_cuda("unknown error")), "b", 119, "Timeout after 6s of waiting for RPC response from GPU2 GSP!"), "exclude-node"),
    "Xid 74": (with_xid(raised([5], of_cuda("uncorrectable NVLink error detected during the execution")), "b", 74, "NVLink: fatal error detected on link 6"), "exclude-node"),
    "ECC without a kernel's line": (raised([5], UNCORRECTABLE), "exclude-node"),
    "old driver on one node": (raised(OF_B, NO_DRIVER, on_peers=True), "exclude-node"),
    "other driver on one node": (raised(OF_B, OTHER_DRIVER, on_peers=True), "exclude-node"),
    "no GPU on one node": (raised(OF_B, "RuntimeError: No CUDA GPUs are available", on_peers=True), "exclude-node"),
    "node failed": (slurm(" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"), "exclude-node retry"),
    # data or packages of one node
    "no data on one node": (raised(OF_B, "FileNotFoundError: [Errno 2] No such file or directory: '/scratch/{rank}.bin'"), "exclude-node stop unknown"),
    "no package on one node": (raised(OF_B, "ModuleNotFoundError: No module named 'flash_attn'"), "exclude-node stop unknown"),
    "no library on one node": (raised(OF_B, "ImportError: libcudnn.so.9: cannot open shared object file"), "exclude-node stop unknown"),
    "read-only disk": (raised([5], "OSError: [Errno 30] Read-only file system: '/scratch/x'"), "exclude-node stop unknown"),
    # the program or its settings are at fault
    "node's memory": (crashed(5, -9, then=OOM_EVENT), "stop"),
    "GPU's memory": (raised([5], out_of_gpu_memory("78.46 GiB")), "stop"),
    "Xid 63 and an assertion": (with_xid(raised([1], "AssertionError: expected 16 heads"), "a", 63, "Row Remapper: New row marked for remapping"), "stop"),
    "Xid 79 elsewhere and a KeyError": (with_xid(raised([1], "KeyError: 'labels'"), "b", 79, "GPU has fallen off the bus."), "stop"),
    "Xid 79 and errors on both nodes": (with_xid(raised([1, 5], ILLEGAL), "b", 79, "GPU has fallen off the bus."), "unknown stop"),
    "Xid 13": (with_xid(raised([5], ILLEGAL), "b", 13, "Graphics Exception: ESR 0x505730=0x0"), "stop unknown retry"),
    "Xid 31": (with_xid(raised([5], ILLEGAL), "b", 31, "MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_2 faulted"), "stop unknown retry"),
    "disk full": (raised([0], "OSError: [Errno 28] No space left on device: '/ckpt/step812/shard0.pt'"), "stop"),
    "quota": (raised([0], "OSError: [Errno 122] Disk quota exceeded: '/home/me/x.pt'"), "stop"),
    "too many files": (raised([3], "OSError: [Errno 24] Too many open files: '/data/shard-0031.tar'"), "stop"),
    "assertion": (raised([2], "AssertionError: bad batch", on_peers=True), "stop"),
    "NaN guard": (raised(ALL, "FloatingPointError: loss is nan at step 812"), "stop"),
    "no package": (raised(ALL, "ModuleNotFoundError: No module named 'flash_attn'"), "stop"),
    "no GPU on any node": (raised(ALL, "RuntimeError: No CUDA GPUs are available"), "stop"),
    "bad checkpoint": (raised(ALL, "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"), "stop"),
    "access denied": (raised([0], "botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the PutObject operation"), "stop"),
    "sizes differ": (raised([0, 1], "RuntimeError: [enforce fail at /gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 64 vs 32"), "stop"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_logs(name: str, tmp_path: Path) -> None:
    files, right = LOGS[name]
    action = commlens.diagnose(write(tmp_path / "job", files)).action
    assert action is not None
    assert action.do in right.split()
    if action.do == "exclude-node" and name != "node failed":  # its line does not name the node
        assert action.nodes == ["b"]


HELD = "Fatal Python error: Segmentation fault\n\n"


@pytest.mark.parametrize(
    ("attempts", "right"),
    [
        ([crashed(5, -11), crashed(6, -11)], "exclude-node stop unknown"),
        ([crashed(5, -11, host="b"), crashed(5, -11, host="c")], "stop unknown"),
        ([{"rank5.log": HELD}] * 3, "stop"),
        ([LOGS["node's memory"][0]] * 2, "stop"),
        ([LOGS["GPU full of another job"][0]] * 2, "stop exclude-node"),
        ([LOGS["Xid 31"][0]] * 2, "stop"),
        ([LOGS["not all joined"][0]] * 2, "stop"),
        ([LOGS["port in use"][0]] * 2, "stop"),
        ([LOGS["network lost"][0]] * 3, "stop exclude-node"),
        ([LOGS["preempted"][0]] * 3, "retry"),
    ],
)
def test_attempts(attempts: list[Files], right: str, tmp_path: Path) -> None:
    """A fault of the program is not retried for ever; preemption is."""
    before = []
    for number, files in enumerate(attempts):
        verdict = commlens.diagnose(write(tmp_path / f"attempt-{'abc'[number]}", files))
        verdict.action = with_attempts(verdict, before)
        before.insert(0, attempt_of(verdict, is_short=True))
    assert verdict.action is not None
    assert verdict.action.do in right.split()


# --- incidents of hardware

NFS = "nfs: server fs1 not responding, still trying"
DISK = "blk_update_request: I/O error, dev nvme0n1, sector 2048 op 0x0:(READ) flags 0x0"


def happen(scene: Scene, what: int | str) -> None:
    """The GPU of rank 2 reports an Xid, or the kernel of its node writes a line."""
    if isinstance(what, int):
        scene.xid(1, 0, what, before_s=1.0, rank=-1 if what == 63 else 2)
    else:
        scene.log(1, what, before_s=-20 if what == NFS else 1.0)


@pytest.mark.parametrize(
    ("ends", "what", "right"),
    [
        ("stuck", 79, "exclude-node"),
        ("SIGSEGV", 79, "exclude-node"),
        (of_cuda("unspecified launch failure"), 79, "exclude-node"),
        (UNCORRECTABLE, 94, "retry exclude-node"),
        ("stuck", 94, "retry exclude-node"),
        ("stuck", 95, "exclude-node"),
        (UNCORRECTABLE, 48, "exclude-node"),
        ("SIGABRT", 48, "exclude-node"),
        ("AssertionError: expected 16 heads", 63, "stop"),
        ("stuck", 63, "retry unknown"),
        ("stuck", 64, "exclude-node retry unknown"),
        (ILLEGAL, 13, "stop unknown retry"),
        ("stuck", 13, "retry unknown"),
        (ILLEGAL, 31, "stop unknown retry"),
        ("SIGSEGV", 43, "retry unknown"),
        ("stuck", 74, "exclude-node retry"),
        ("stuck", 119, "exclude-node"),
        ("loads", NFS, "wait"),
        ("loads", DISK, "exclude-node retry"),
    ],
)
def test_incidents(ends: str, what: int | str, right: str, tmp_path: Path) -> None:
    def fault(job: Job, rank: int, step: int) -> Iterator[object] | None:
        if (rank, step) != (2, 5) or ends == "stuck":
            return None
        if ends == "loads":
            return iter([Stay(12, "load_batch")])
        if ends.startswith("SIG"):
            return iter([Die(Observation(End.KILLED, signal=ends), line=12)])
        return iter([Die(Observation(End.FAILED), ends, line=12)])

    logs = Job(RANKS).run(training(fault)).logs()
    for log in logs:
        log.host = f"n{log.rank // PER_NODE}"
        log.local_rank = log.rank % PER_NODE
        if ends == "stuck":
            del log.collectives[11:]
            log.issued = 11
            last = log.collectives[-1]
            last.state, last.done_ns, last.wait_ended_ns = State.ISSUED, 0, 0
            log.closed = False
            log.observation = Observation(End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False)
    stalled_ns = logs[2].observation.ended_ns or min(
        log.collectives[-1].announced_ns for log in logs if log.rank != 2
    )
    incident = Incident("held out", "stuck", lambda scene: happen(scene, what))
    tell(incident, logs, stalled_ns, max(log.captured_ns for log in logs), tmp_path)
    verdict = diagnose_logs(logs)
    action = action_of(verdict, hosts={log.rank: log.host for log in logs})
    assert action is not None
    assert action.do in right.split()
    if action.do == "exclude-node":
        assert action.nodes == ["n1"]
