"""Text logs of a job of two nodes, ``a`` with ranks 0 to 3 and ``b`` with ranks 4 to 7, in the form
that torchrun 2.8, torch, NCCL 2.27, Slurm 22 and the kernel write them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

Files = dict[str, str]  # text by name

HOSTS = {rank: "ab"[rank // 4] for rank in range(8)}
_API = "1130 10:00:06.100000 4711 torch/distributed/elastic/multiprocessing/api.py"
_RAISED_BY = "torch.distributed.elastic.multiprocessing"
NCCL_FAILED = (
    "NCCL error: remote process exited or there was a network error, NCCL version 2.27.3\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
    " prematurely.\nLast error:\n"
)
CUDA_ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace"
    " below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def write(folder: Path, files: Files) -> Path:
    """Write the logs into a folder, and return it."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def traceback(rank: int, error: str) -> str:
    """Return a traceback of the program, with the prefix that torch's excepthook writes."""
    lines = [
        "Traceback (most recent call last):",
        '  File "/work/train.py", line 90, in <module>',
        "    main()",
        '  File "/work/train.py", line 40, in main',
        "    step()",
        *error.splitlines(),
    ]
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


def summary(ranks: Iterable[int], code: int = 1, *, host: str = "") -> str:
    """Return torchrun's last words, the first rank's failure being the root cause."""
    first, *others = [_item(number, rank, code, host) for number, rank in enumerate(ranks)]
    return (
        f"E{_API}:882] failed (exitcode: {code}) local_rank: 0 (pid: 4712) of binary: python\n"
        'Traceback (most recent call last):\n  File "/opt/bin/torchrun", line 8, in <module>\n'
        f"    sys.exit(main())\n{_RAISED_BY}.errors.ChildFailedError: \n{'=' * 60}\n"
        f"train.py FAILED\n{'-' * 60}\nFailures:\n"
        f"{''.join(others) or '  <NO_OTHER_FAILURES>'}\n"
        f"{'-' * 60}\nRoot Cause (first observed failure):\n{first}{'=' * 60}\n"
    )


def _item(number: int, rank: int, code: int, host: str) -> str:
    pid = 4712 + rank
    how = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    if code < 0:
        how = f"Signal {-code} ({signal.Signals(-code).name}) received by PID {pid}"
    return (
        f"[{number}]:\n  time      : 2026-11-30_10:00:06\n  host      : {host or HOSTS[rank]}\n"
        f"  rank      : {rank} (local_rank: {rank % 4})\n  exitcode  : {code} (pid: {pid})\n"
        f"  error_file: <N/A>\n  traceback : {how}\n"
    )


def raised(ranks: Iterable[int], error: str, *, on_peers: bool = False) -> Files:
    """Return the logs of a job in which these ranks raised an exception.

    Args:
        ranks: that raised it.
        error: its last line, with ``{rank}`` where the ranks differ.
        on_peers: the ranks of the other node tell that a peer ended.
    """
    ranks = list(ranks)
    files = {}
    for host in sorted({HOSTS[rank] for rank in ranks}):
        here = [rank for rank in ranks if HOSTS[rank] == host]
        texts = [traceback(rank, error.replace("{rank}", str(rank))) for rank in here]
        files[f"{host}.log"] = "".join(texts) + summary(here)
    if on_peers:
        host = "b" if "a.log" in files else "a"
        files[f"{host}.log"] = after_a_peer(host, "socketPollConnect: Connection reset by peer")
    return files


def after_a_peer(host: str, last_error: str) -> str:
    """Return the log of a node whose ranks all lost a peer, according to NCCL."""
    ranks = [rank for rank in HOSTS if HOSTS[rank] == host]
    texts = [
        f"{host}:{4712 + rank}:{4812 + rank} [{rank % 4}] transport/net.cc:1 NCCL WARN {last_error}\n"
        f"[rank{rank}]:[E1130 10:00:07.1 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg)"
        f" Rank {rank}] Process group watchdog thread terminated with exception:"
        f" {NCCL_FAILED}{last_error}\n"
        for rank in ranks
    ]
    return "".join(texts) + summary(ranks, -6)


def broken_connections() -> Files:
    """Return the logs of a job whose InfiniBand connections broke on every rank."""
    text = (
        "NET/IB: Got completion from peer 10.0.0.2<53908> with status=12 opcode=129 len=1048576"
        " vendor err 129 (Recv) localGid ::ffff:10.0.6.3 remoteGids::ffff:10.0.6.5 hca mlx5_10"
    )
    return {f"{host}.log": after_a_peer(host, text) for host in "ab"}


def crashed(rank: int, code: int, *, host: str = "", then: str = "") -> Files:
    """Return the log of a job of which a rank died of a signal."""
    return {"job.log": summary([rank], code, host=host) + then}


def with_xid(files: Files, host: str, number: int, said: str) -> Files:
    """Return the logs with a line of the kernel at the end of a node's."""
    line = f"[1207200.1] NVRM: Xid (PCI:0000:4f:00): {number}, pid=4717, name=python, {said}\n"
    return {**files, f"{host}.log": files.get(f"{host}.log", "") + line}


def slurm(why: str, *, step_only: bool = False) -> Files:
    """Return the output of a job that Slurm ends; ``why`` is the end of its line."""
    line = f"slurmstepd: error: *** STEP 4242.0 ON b CANCELLED AT 2026-11-30T10:00:05{why} ***\n"
    of_job = "" if step_only else line.replace("STEP 4242.0", "JOB 4242")
    last = "srun: error: b: task 1: Terminated\n"
    return {"slurm-4242.out": f"step 812 loss 2.30\n{of_job}{line}{ended_by(15)}{last}"}


def ended_by(number: int, *, interrupted: Iterable[int] = ()) -> str:
    """Return the words of torchrun that a signal ends, and of the ranks that Ctrl-C interrupts."""
    return (
        f"W{_API}:725] Received {number} death signal, shutting down workers\n"
        f"W{_API}:908] Sending process 4712 closing signal SIGTERM\n"
        + "".join(traceback(rank, "KeyboardInterrupt") for rank in interrupted)
        + 'Traceback (most recent call last):\n  File "/opt/bin/torchrun", line 8, in <module>\n'
        f"{_RAISED_BY}.api.SignalException: Process 4711 got signal: {number}\n"
    )


def store_gone() -> Files:
    """Return the log of a job whose ranks do not reach the store any more; rank 0 is silent."""
    return {
        "job.log": "".join(
            f"[rank{rank}]:[W1130 10:00:05.359561055 TCPStore.cpp:125] [c10d] recvValue failed on"
            " SocketImpl(fd=76, addr=[b]:60950, remote=[a]:29500): Connection reset by peer\n"
            f"[rank{rank}]:[W1130 10:00:05.364561055 ProcessGroupNCCL.cpp:1771] [PG ID 0 PG GUID"
            f' 0(default_pg) Rank {rank}] Failed to check the "should dump" flag on TCPStore,'
            " (maybe TCPStore server has shut down too early), with error: Connection reset by"
            " peer\n"
            for rank in range(1, 8)
        )
    }
