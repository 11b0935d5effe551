"""The next step that each kind of finding recommends."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.align.alignment import Mismatch
from commlens.diagnosis.align.call_paths import Path, branch_in_one_function
from commlens.diagnosis.align.routine import Loop
from commlens.diagnosis.index.activity import Activity
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.index.process_exit import CRASHES
from commlens.diagnosis.words.known_errors import known_step
from commlens.matching.error_claims import worker_end
from commlens.model.collective import Collective, Frame
from commlens.text import (
    frame_phrase,
    joined,
    key_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

_HOSTS_MAX = 4


def missing_step(
    doing: Activity, ranks: Sequence[int], op: Collective | None = None, *, ended: bool = False
) -> str:
    """Recommend a step for ranks that do not arrive in ``op``. If they have ``ended``, no stack can
    be taken any more.
    """
    subject = ranks_phrase(ranks)
    if doing.why == "finished" and op is not None and op.is_setup:
        return (
            f"look at the output of {subject}, and for the branch in which"
            f" {verb(ranks, 'it ends', 'they end')} without {op.op}"
        )
    if doing.why == "finished" and op is not None and op.is_store_wait:
        return (
            f"look for the branch in which {subject} {verb(ranks, 'ends', 'end')} without writing"
            f" the {key_phrase(op)}"
        )
    where = (
        f"{doing.frame.function} ({doing.frame.where})"
        if doing.frame is not None
        else "the running code"
    )
    steps = {
        "data-loading": (
            f"look at {where} on {subject}, and at the storage and the workers of its data loader"
        ),
        "checkpoint-io": f"look at {where} on {subject}, and at the file system that it writes to",
        "stopped": (
            f"detach the debugger from {subject}"
            if doing.state == "debugged"
            else (
                f"resume {subject} (kill -CONT) and find out what stopped"
                f" {verb(ranks, 'it', 'them')}"
            )
        ),
        "holding-gil": (
            f"look at {where} on {subject}: the C code called there should release the GIL"
        ),
        "throttled": f"give {subject} more CPU: its cgroup's quota (cpu.max) starves it",
        "uninterruptible-io": (
            f"look at the storage of {subject}'s host: the kernel waits for it (dmesg, mount)"
        ),
        "memory-pressure": f"give {subject} more memory: its cgroup is short of it",
        "finished": (
            f"make {subject} run as many iterations as the others (uneven data: Join, or drop the"
            " last batches)"
            if op is None or set(ranks) != set(op.channel.group.ranks)
            else (
                "make all ranks run as many iterations (uneven data: Join, or drop the last"
                " batches)"
            )
        ),
        "initialising": (
            f"find out why {subject} {verb(ranks, 'has', 'have')} not returned from {where}"
        ),
    }
    told = (
        doing.frame is not None
        if doing.why == "initialising"
        else not (doing.stack.by_name and doing.why in ("data-loading", "checkpoint-io"))
    )
    if doing.why in steps and told:
        return steps[doing.why]
    if doing.frame is not None:
        return f"look at {where} on {subject}"
    if ended:
        return (
            f"look at the last lines of the output of {subject}; in the next run, take a stack"
            " (py-spy dump) before the job ends"
        )
    return (
        f"take a stack of {subject} (py-spy dump): it shows what holds"
        f" {verb(ranks, 'it', 'them')} up"
    )


def ended_step(op: Collective, ended: Sequence[int], came: Sequence[int], path: str = "") -> str:
    """Recommend a step for ranks that finished without a collective, whose line the other ranks had
    not reached before.

    Args:
        op: the collective.
        ended: ranks that finished.
        came: ranks that issued it.
        path: of the collective, if more than its line is known.
    """
    path = path or frame_phrase(op.source)
    where = f" at {path}" if path else ""
    without = f"{ranks_phrase(ended)} {verb(ended, 'ends', 'end')} without {op.op}{where}"
    alone = f"{ranks_phrase(came)} alone {verb(came, 'issues', 'issue')} {op.op}{where}"
    sides = {1: without, -1: alone}.get(
        (len(ended) < len(came)) - (len(ended) > len(came)), f"{without}, or {alone}"
    )
    return f"find the branch in which {sides}"


def midway_step(loop: Loop, culprits: Sequence[int]) -> str:
    """Recommend a step for ranks that ended inside of what they repeat."""
    last, coming = loop.round[loop.more - 1], loop.next
    return (
        f"find out why {ranks_and_verb(culprits, 'ends', 'end')} after {last.op}{_at(last)},"
        f" without the {coming.op}{_at(coming)} that followed before"
    )


def _at(op: Collective) -> str:
    """``" at train.py:57 step"``; empty if the line is unknown."""
    return f" at {frame_phrase(op.source)}" if op.source is not None else ""


def stuck_step(op: Collective, views: Sequence[RankView]) -> str:
    """Recommend a step for ranks that are inside of a collective that makes no progress."""
    hosts = {view.log.host for view in views}
    backend = op.channel.group.backend
    if "" in hosts or len(hosts) > 1:
        logs = (
            "NCCL_DEBUG=INFO, "
            if "ccl" in backend
            else ""
            if backend
            else "NCCL_DEBUG=INFO or GLOO logs, "
        )
        between = (
            f"between {', '.join(sorted(hosts))}"
            if 1 < len(hosts) <= _HOSTS_MAX and "" not in hosts
            else "between these ranks"
        )
        return f"look at the network and the drivers {between} ({logs}dmesg, link counters)"
    if not _on_devices(op):
        stacks = "C++ stacks of these ranks (py-spy dump --native)"
        when = (
            f"in the next run, take {stacks} while they hang"
            if any(view.exit.ended for view in views)
            else f"take {stacks}"
        )
        return f"{when}: they share a host, so no network is between them"
    return (
        "look at the devices and drivers of these ranks (NCCL_DEBUG=INFO, dmesg, nvidia-smi -q):"
        " they share a host"
    )


def _on_devices(op: Collective) -> bool:
    """Return whether a collective runs on accelerators. The calls that make groups have no device
    of their own.
    """
    return (
        op.channel.device != "cpu"
        and "gloo" not in op.channel.group.backend
        and not (op.is_setup or op.is_store_wait)
    )


def compare_step(op: Collective, aspects: str) -> str:
    """Recommend a step for ranks that may disagree on a collective: their records do not tell these
    aspects of it.
    """
    return (
        f"compare the {aspects} that these ranks pass to {op.op}{_at(op)} (run under `commlens"
        " launch`, which records and compares them)"
    )


def not_started_step(op: Collective, ranks: Sequence[int]) -> str:
    """Recommend a step for ranks whose device has not begun a collective that they enqueued."""
    devices = verb(ranks, "its device", "their devices")
    return (
        f"look at the work that {ranks_phrase(ranks)} gave {devices} before {op.op}{_at(op)}: "
        "a kernel that does not end, or a wait for another stream (py-spy dump, cuda-gdb)"
    )


def left_behind_step(op: Collective, ranks: Sequence[int]) -> str:
    """Recommend a step for ranks that do not come out of a collective that completed on others."""
    subject = ranks_phrase(ranks)
    output = f"the output of {verb(ranks, 'its', 'their')} {verb(ranks, 'process', 'processes')}"
    if not _on_devices(op):
        return f"look at {output} on {subject}, and at C++ stacks (py-spy dump --native)"
    return f"look at the GPU of {subject} (dmesg for Xid errors, nvidia-smi -q), and at {output}"


def mismatch_step(
    mismatch: Mismatch, first: Collective, usual: Collective | None, paths: tuple[Path, Path]
) -> str:
    """Recommend a step for ranks that disagree. ``paths`` are those on which the first culprit and
    the others part.
    """
    culprits, shift = ranks_phrase(mismatch.culprits), mismatch.shift
    mine, theirs = (f" at {path.with_caller}" if path.place else "" for path in paths)
    skipped = shift.skipped if shift is not None and shift.by > 0 else usual
    if mismatch.departure and skipped is not None:
        extra = f"issued an extra {first.op}{mine}"
        did = {
            "skipped": f"skipped {skipped.op}{theirs}",
            "extra": extra,
            "either": f"skipped {skipped.op}{theirs}, or {extra}",
        }
        return f"find the branch in which {culprits} {did[mismatch.departure]}"
    if mismatch.astray is not None and mismatch.pair is not None:
        return _astray_step(mismatch, *mismatch.pair)
    if mismatch.blamed_by == "arguments":
        fit = "splits whose sums are the tensors' sizes in the first dimension"
        return f"pass {fit} to {first.op}{mine} on {culprits}"
    if usual is None:
        return f"compare the collectives that {culprits} issue{mine}"
    if paths[0].place == paths[1].place and usual.source is not None:
        op_differs = mismatch.answer is None or mismatch.answer.aspect == "op"
        differs = "issues a different collective" if op_differs else "passes different arguments"
        return f"find out why {paths[1].place} {differs} on {culprits} than on the others"
    here, there = paths[0].with_caller or first.op, paths[1].with_caller or usual.op
    if mismatch.pair is not None:
        return f"compare {here} on {culprits} with {there} on the others"
    if branch_in_one_function(first.stack, usual.stack):
        return f"find the branch that takes {culprits} to {here} where the others come to {there}"
    comes = verb(mismatch.culprits, "comes", "come")
    return f"find out why {culprits} {comes} to {here} where the others come to {there}"


def _astray_step(mismatch: Mismatch, send: Collective, recv: Collective) -> str:
    sender, receiver = mismatch.ops
    out, into = (frame_phrase(op.source) or op.op for op in (send, recv))
    if (send.peer, recv.peer) == (receiver, sender):
        return f"use the same tag at {out} on rank {sender} and at {into} on rank {receiver}"
    if sender in mismatch.culprits:
        return f"correct the destination at {out} on rank {sender}"
    return f"correct the source rank at {into} on rank {receiver}"


def left_out(op: Collective, usual: Collective) -> bool:
    """Return whether a rank left a message out: a send that it used to issue in place of ``op``, or
    a receive before a collective.
    """
    return usual.op == "send" or (usual.op == "recv" and not op.is_point_to_point)


def cycle_step(culprits: Sequence[int], op: Collective, usual: Collective | None) -> str:
    """Recommend a step for ranks that wait for each other."""
    where = _at(op)
    if usual is not None and left_out(op, usual):
        message = "send" if usual.op == "send" else "receive"
        return f"find out why rank {culprits[0]} skipped its {message}{_at(usual)}"
    if op.op == "recv":
        return f"find out which send should match the receive{where} on rank {culprits[0]}"
    return (
        "make all ranks use these groups in the same order: look at"
        f" {ranks_phrase(culprits)}{where}"
    )


def receives_step(ranks: Sequence[int], ops: Sequence[Collective]) -> str:
    """Recommend a step for ranks that all receive from each other and none sends, or all send."""
    did, other = ("sends", "receive") if ops[0].op == "send" else ("receives", "send")
    lines = joined(
        list(dict.fromkeys(frame_phrase(op.source) for op in ops if op.source is not None))[:3]
    )
    return (
        f"make one of {ranks_phrase(ranks)} {other} before it"
        f" {did}{f': all of them {did[:-1]}, at {lines}' if lines else ''}"
    )


def unmet_step(op: Collective, rank: int, stands_in: Collective) -> str:
    """Recommend a step for a message whose other side comes only after a collective that its rank
    has not reached.
    """
    do, other = ("send", "receive") if op.op == "send" else ("receive", "send")
    return (
        f"{other} it on rank {op.peer} before {stands_in.op}{_at(stands_in)}, or {do} it on rank"
        f" {rank} after that: compare the numbers of messages{_at(op)}"
    )


def outside_cause(signal: str) -> str:
    """Tell the usual reason for a signal that ended a whole job; empty if it has no usual one."""
    causes = {
        "SIGHUP": (
            "The system sends SIGHUP to the programs of a terminal or an ssh session that goes"
            " away."
        ),
        "SIGINT": "Ctrl-C in the job's terminal sends SIGINT.",
    }
    return causes.get(signal, "")


def outside_step(signal: str) -> str:
    """Recommend a step for a job that a signal ended."""
    steps = {
        "SIGHUP": (
            "start the job so that it outlives its terminal: with nohup or setsid, in tmux, or by a"
            " scheduler"
        ),
        "SIGINT": (
            "find out who interrupted the job: Ctrl-C in its terminal, or a program that sent"
            " SIGINT"
        ),
    }
    return steps.get(
        signal,
        "look at the scheduler's log (preemption, time limit), or for the sender of the signal",
    )


def death_step(view: RankView, frame: Frame | None) -> str:
    """Recommend a step for a process that died."""
    end, rank, line = view.exit, f"rank {view.rank}", frame_phrase(frame)
    after = f", after {line}" if line else ""
    if end.why == "out-of-memory":
        return f"give {rank} more memory, or use less: the kernel killed it (dmesg)"
    if end.why == "exception" and (step := known_step(view.log.exception)):
        return step
    if end.why == "exception" and (ended := worker_end(view.log.exception)):
        memory = (
            "memory is the usual reason (dmesg, the limits of the job, /dev/shm); "
            if "Killed" in ended or "Bus" in ended
            else ""
        )
        return (
            f"find out why a data loader's worker of {rank} {ended.replace('is', 'was', 1)}:"
            f" {memory}num_workers=0 shows its own error"
        )
    if end.why == "exception":
        return f"look at {line} on {rank}" if line else f"look at {rank}'s traceback"
    if end.why == "killed" and end.signal in CRASHES:
        if view.log.closed and not view.log.left:
            return (
                "call destroy_process_group at the end of the program: without it, threads of the"
                f" process groups can crash {rank} on exit"
            )
        return (
            f"look at the output of {rank} before it"
            f" {'aborted' if end.signal == 'SIGABRT' else 'crashed'}{after}"
        )
    if end.why == "killed" and end.signal == "SIGKILL" and view.log.observation.oom_killed is None:
        limits = "the memory limits of its cgroup and scheduler"
        return (
            f"look for the OOM killer in dmesg and at {limits}, for memory is the usual reason;"
            f" then at {rank}'s last lines{after}"
        )
    if end.why == "killed":
        where = f" ({line})" if line else ""
        # else it is known that its memory was not the reason
        kernel = "dmesg and " if view.log.observation.oom_killed is None else ""
        return (
            f"look at {kernel}the scheduler's log for the sender of the signal, and at the last"
            f" lines of {rank}'s output{where}"
        )
    return f"look at {rank}'s output{after}"
