"""Word the next step that each kind of finding recommends, and what to do with the job.

Each ``..._step`` function returns a clause in the imperative, which the report shows after
``NEXT``: for ranks that load data, :func:`missing_step` returns "look at load_batch (train.py:57)
on rank 2, and at the storage and the workers of its data loader".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from commlens.diagnosis.align.alignment import RecordMismatch
from commlens.diagnosis.align.call_paths import Path, branch_in_one_function, parting_paths
from commlens.diagnosis.align.routine import Loop
from commlens.diagnosis.index.activity import Activity
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.index.process_exit import CRASHES
from commlens.diagnosis.words.error_steps import known_step
from commlens.matching.errors import worker_end
from commlens.model.cause import Recomputed, Rounds
from commlens.model.collective import Collective, Frame
from commlens.model.verdict import Action, Because, Do
from commlens.text import (
    frame_phrase,
    joined,
    key_phrase,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

_HOSTS_MAX = 4
_DO: Final[Mapping[Do, str]] = MappingProxyType(
    {
        "retry": "start it again",
        "exclude-node": "start it again without {nodes}",
        "stop": "do not start it again unchanged",
        "wait": "wait",
        "unknown": "",
    }
)
_BECAUSE: Final[Mapping[Because, str]] = MappingProxyType(
    {
        "hardware": "a part of the node broke",
        "node-lost": "the node does not answer any more",
        "storage": "a file server does not answer",
        "data": "a rank was reading or writing data, which may pass",
        "preempted": "the scheduler took a node away",
        "time-limit": "its time limit was over",
        "connection": "a connection was lost",
        "stale-address": "an address of an earlier start was used",
        "stuck": "a collective did not complete, and nothing shows why",
        "crashed": "a process crashed, once so far",
        "killed": "a process was killed from outside",
        "working": "ranks still work",
        "program": "each attempt will meet this fault of the program",
        "exception": "each attempt will meet this exception",
        "memory": "each attempt will need as much memory",
        "settings": "settings of the job or of a node are at fault",
        "cancelled": "it was cancelled",
        "not-known": "",
    }
)


# --- ranks that do not come


def lines_of(ops: Iterable[Collective]) -> list[str]:
    """Return the different lines that issued some ops, as far as they are known."""
    return list(dict.fromkeys(frame_phrase(op.source) for op in ops if op.source is not None))


def missing_step(
    doing: Activity, ranks: Sequence[int], op: Collective | None = None, *, ended: bool = False
) -> str:
    """Recommend a step for ranks that do not arrive in ``op``. If they have ``ended``, no stack can
    be taken any more.
    """
    subject = ranks_phrase(ranks)
    if doing.why == "finished" and op is not None and (op.is_setup or op.is_store_wait):
        return _branch_step(ranks, op)
    if doing.state == "in-another-group":
        return (
            f"find the branch in which {subject} {verb(ranks, 'comes', 'come')} to that collective"
            f" without {op.op if op is not None else 'this one'}, and the other ranks of that"
            " group, of which no line tells"
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
    if doing.why in steps and not _is_guess(doing):
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


def _is_guess(doing: Activity) -> bool:
    """Return whether only the name of a function tells what ranks do."""
    if doing.why == "initialising":
        return doing.frame is None
    return doing.stack.by_name and doing.why in ("data-loading", "checkpoint-io")


def _branch_step(ranks: Sequence[int], op: Collective) -> str:
    """Recommend a step for ranks that finished without a call that makes a group, or without
    writing a key.
    """
    subject = ranks_phrase(ranks)
    if op.is_setup:
        return (
            f"look at the output of {subject}, and for the branch in which"
            f" {verb(ranks, 'it ends', 'they end')} without {op.op}"
        )
    return (
        f"look for the branch in which {subject} {verb(ranks, 'ends', 'end')} without"
        f" {'writing' if op.is_for_key else 'making'} the {key_phrase(op)}"
    )


def rounds_step(rounds: Rounds) -> str:
    """Recommend a step for ranks that came to a line more often than others, which went on."""
    least, most = sorted(rounds.last, key=lambda at: at.number)[:: len(rounds.last) - 1]
    return (
        f"find out why {ranks_phrase(most.ranks)} came to {rounds.line} more often than"
        f" {ranks_phrase(least.ranks)}, which went on to {rounds.went_on}: uneven data (Join, or"
        " drop the last batches), or a branch"
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
    if len(ended) == len(came):
        return f"find the branch in which {without}, or {alone}"
    # the minority is the odd side
    return f"find the branch in which {without if len(ended) < len(came) else alone}"


def midway_step(loop: Loop, culprits: Sequence[int]) -> str:
    """Recommend a step for ranks that ended inside of what they repeat."""
    last, coming = loop.round[loop.more - 1], loop.next
    return (
        f"find out why {ranks_and_verb(culprits, 'ends', 'end')} after {last.op}{at(last)},"
        f" without the {coming.op}{at(coming)} that followed before"
    )


def at(op: Collective) -> str:
    """``" at train.py:57 step"``; empty if the line is unknown."""
    return f" at {frame_phrase(op.source)}" if op.source is not None else ""


# --- ranks inside of a collective


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
        f"compare the {aspects} that these ranks pass to {op.op}{at(op)} (run under `commlens"
        " launch`, which records and compares them)"
    )


def not_started_step(op: Collective, ranks: Sequence[int]) -> str:
    """Recommend a step for ranks whose device has not begun a collective that they enqueued."""
    devices = verb(ranks, "its device", "their devices")
    return (
        f"look at the work that {ranks_phrase(ranks)} gave {devices} before {op.op}{at(op)}: "
        "a kernel that does not end, or a wait for another stream (py-spy dump, cuda-gdb)"
    )


def left_behind_step(op: Collective, ranks: Sequence[int]) -> str:
    """Recommend a step for ranks that do not come out of a collective that completed on others."""
    subject = ranks_phrase(ranks)
    output = f"the output of {verb(ranks, 'its', 'their')} {verb(ranks, 'process', 'processes')}"
    if not _on_devices(op):
        return f"look at {output} on {subject}, and at C++ stacks (py-spy dump --native)"
    return f"look at the GPU of {subject} (dmesg for Xid errors, nvidia-smi -q), and at {output}"


# --- ranks that disagree


def tie_step(ops: Sequence[Collective]) -> str:
    """Recommend a step for sides that disagree, with an op of each."""
    lines = lines_of(ops)
    paths = parting_paths(ops[0].stack, ops[1].stack) if len(ops) == 2 else None
    if (
        paths is not None
        and all(path.place for path in paths)
        # their callers tell more than the lines alone, as of two calls of one helper
        and any(path.with_caller != path.place for path in paths)
    ):
        here, there = (path.with_caller for path in paths)
        return f"find out why one side comes to {here}, and the other to {there}"
    if len(lines) > 1:
        return f"find out why the sides come to different lines: {joined(lines[:3])}"
    if len(ops) == 1 or _are_exchanges(ops):
        line = "".join(f" at {line}" for line in lines)
        differs = "splits" if ops[0].op == "all_to_all" else "groups"
        return step_without_tensors(ops[0].op, line) or (
            f"compare the {differs} that these ranks pass to {ops[0].op}{line}"
        )
    if not lines:
        return (
            "find the branch, or the input, in which these ranks part: no record tells their lines;"
            " `commlens launch` records them, or torch's Flight Recorder (TORCH_FR_BUFFER_SIZE)"
        )
    return f"find out why the ranks reach {lines[0]} with different calls"


def _are_exchanges(ops: Iterable[Collective]) -> bool:
    return {op.op for op in ops} == {"all_to_all"}


def raised_step(raised: Collective, ranks: Sequence[int]) -> str:
    """Recommend a step for ranks whose call raised an error, after which their program went on."""
    return (
        f"find out why {raised.op}{at(raised)} raises on {ranks_phrase(ranks)}, and let the program"
        " end there, or go on in the same way on all ranks"
    )


def mismatch_step(mismatch: RecordMismatch, paths: tuple[Path, Path]) -> str:
    """Recommend a step for ranks that disagree. ``paths`` are those on which the first culprit and
    the others part.
    """
    first, usual = mismatch.own, mismatch.usual
    culprits, shift = ranks_phrase(mismatch.culprits), mismatch.shift
    mine, theirs = (f" at {path.with_caller}" if path.place else "" for path in paths)
    left_out = shift.skipped if shift is not None and shift.by > 0 else usual
    if mismatch.departure and left_out is not None:
        extra, skipped = f"issued an extra {first.op}{mine}", f"skipped {left_out.op}{theirs}"
        did = {"skipped": skipped, "extra": extra, "either": f"{skipped}, or {extra}"}
        return f"find the branch in which {culprits} {did[mismatch.departure]}"
    if mismatch.astray is not None:
        return _astray_step(mismatch)
    if mismatch.blamed_by == "arguments":
        fit = "splits whose sums are the tensors' sizes in the first dimension"
        return f"pass {fit} to {first.op}{mine} on {culprits}"
    if usual is None:
        return f"compare the collectives that {culprits} issue{mine}"
    if paths[0].place == paths[1].place and usual.source is not None:
        op_differs = mismatch.answer is None or mismatch.answer.aspect == "op"
        differs = "issues a different collective" if op_differs else "passes different arguments"
        return f"find out why {paths[1].place} {differs} on {culprits} than on the others"
    if mismatch.pair is None:
        return parting_step(mismatch.culprits, first, usual, paths)
    here, there = _ends_of(paths, first, usual)
    return f"compare {here} on {culprits} with {there} on the others"


def _ends_of(paths: tuple[Path, Path], first: Collective, usual: Collective) -> tuple[str, str]:
    """Return the places where two paths part: lines, or ops where no line is known."""
    return paths[0].with_caller or first.op, paths[1].with_caller or usual.op


def parting_step(
    ranks: Sequence[int],
    first: Collective,
    usual: Collective,
    paths: tuple[Path, Path],
    others: Sequence[int] = (),
) -> str:
    """Recommend to look at the place where the paths of ranks part from those of others.

    Args:
        ranks: those to blame.
        first: a collective of theirs.
        usual: of the others.
        paths: to both, from where they part.
        others: those ranks; none: all others.
    """
    here, there = _ends_of(paths, first, usual)
    subject, they = ranks_phrase(ranks), ranks_phrase(others) if others else "the others"
    other = (
        f"{',' * (', ' in here)} where {they} {'comes' if len(others) == 1 else 'come'} to {there}"
    )
    if here == there:
        return f"compare the arguments that {subject} and {they} pass to {usual.op}{at(usual)}"
    if branch_in_one_function(first.stack, usual.stack):
        return f"find the branch that takes {subject} to {here}{other}"
    comes = verb(ranks, "comes", "come")
    return f"find out why {subject} {comes} to {here}{other}"


def _astray_step(mismatch: RecordMismatch) -> str:
    """Recommend a step for a send and a receive that never meet."""
    (sender, send), (receiver, recv) = mismatch.ops.items()
    out, into = (frame_phrase(op.source) or op.op for op in (send, recv))
    if (send.peer, recv.peer) == (receiver, sender):
        return (
            f"use the same tag at {out} on {rank_phrase(sender)} and at {into} on"
            f" {rank_phrase(receiver)}"
        )
    if sender in mismatch.culprits:
        return f"correct the destination at {out} on {rank_phrase(sender)}"
    return f"correct the source rank at {into} on {rank_phrase(receiver)}"


def left_out(op: Collective, usual: Collective) -> bool:
    """Return whether a rank left a message out: a send that it used to issue in place of ``op``, or
    a receive before a collective.
    """
    return usual.op == "send" or (usual.op == "recv" and not op.is_point_to_point)


# --- ranks that wait for each other


def recomputed_step(again: Recomputed) -> str:
    """Recommend a step for a message that activation checkpointing issues again."""
    sends = again.message.op == "send"
    return (
        f"keep the {'send' if sends else 'receive'}{f' at {again.source}' if again.source else ''}"
        " out of the function that activation checkpointing runs again, or let"
        f" {rank_phrase(again.message.peer)} {'receive' if sends else 'send'} again, too"
    )


def cycle_step(culprits: Sequence[int], op: Collective, usual: Collective | None) -> str:
    """Recommend a step for ranks that wait for each other."""
    where = at(op)
    if usual is not None and left_out(op, usual):
        message = "send" if usual.op == "send" else "receive"
        return f"find out why {rank_phrase(culprits[0])} skipped its {message}{at(usual)}"
    if op.op == "recv":
        return f"find out which send should match the receive{where} on {rank_phrase(culprits[0])}"
    return (
        "make all ranks use these groups in the same order: look at"
        f" {ranks_phrase(culprits)}{where}"
    )


def receives_step(ranks: Sequence[int], ops: Sequence[Collective]) -> str:
    """Recommend a step for ranks that all receive from each other and none sends, or all send."""
    did, other = ("sends", "receive") if ops[0].op == "send" else ("receives", "send")
    lines = joined(lines_of(ops)[:3])
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
        f"{other} it on {rank_phrase(op.peer)} before {stands_in.op}{at(stands_in)}, or"
        f" {do} it on"
        f" {rank_phrase(rank)} after that: compare the numbers of messages{at(op)}"
    )


# --- processes that ended


_OUTSIDE: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "SIGHUP": (
            "The system sends SIGHUP to the programs of a terminal or an ssh session that goes"
            " away.",
            "start the job so that it outlives its terminal: with nohup or setsid, in tmux, or by a"
            " scheduler",
        ),
        "SIGINT": (
            "Ctrl-C in the job's terminal sends SIGINT.",
            "find out who interrupted the job: Ctrl-C in its terminal, or a program that sent"
            " SIGINT",
        ),
    }
)
"""The usual reason for a signal that ended a whole job, and the next step."""
_OTHER_SIGNAL: Final = (
    "",
    "look at the scheduler's log (preemption, time limit), or for the sender of the signal",
)


def outside_cause(signal: str) -> str:
    """Tell the usual reason for a signal that ended a whole job; empty if it has no usual one."""
    return _OUTSIDE.get(signal, _OTHER_SIGNAL)[0]


def outside_step(signal: str) -> str:
    """Recommend a step for a job that a signal ended."""
    return _OUTSIDE.get(signal, _OTHER_SIGNAL)[1]


def _exception_step(view: RankView, line: str) -> str:
    """Recommend a step for a rank that raised an error of which nothing more is known."""
    rank, ended = rank_phrase(view.rank), worker_end(view.log.exception)
    if not ended:
        return f"look at {line} on {rank}" if line else f"look at {rank}'s traceback"
    memory = (
        "memory is the usual reason (dmesg, the limits of the job, /dev/shm); "
        if "Killed" in ended or "Bus" in ended
        else ""
    )
    return (
        f"find out why a data loader's worker of {rank} {ended.replace('is', 'was', 1)}:"
        f" {memory}num_workers=0 shows its own error"
    )


def death_step(view: RankView, frame: Frame | None) -> str:
    """Recommend a step for a process that died."""
    end, rank, line = view.exit, f"{rank_phrase(view.rank)}", frame_phrase(frame)
    after = f", after {line}" if line else ""
    if end.why == "out-of-memory":
        return f"give {rank} more memory, or use less: the kernel killed it (dmesg)"
    if end.why == "exception":
        return known_step(view.log.told_error, view.log.host) or _exception_step(view, line)
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
        where = f" ({line})" * bool(line)
        # else it is known that its memory was not the reason
        kernel = "dmesg and " if view.log.observation.oom_killed is None else ""
        return (
            f"look at {kernel}the scheduler's log for the sender of the signal, and at the last"
            f" lines of {rank}'s output{where}"
        )
    return f"look at {rank}'s output{after}"


# --- calls that pass no tensors

_GROUPS: Final = "the ranks, the backend and the order of the groups"
_KEYS: Final = "find the rank that is to write the key that they wait for with {op}{at}"
_OBJECTS: Final = (
    "compare the group and the number of calls with which these ranks come to {op}{at}: its objects"
    " may differ"
)
_SENT_OBJECTS: Final = (
    "compare the group, the source rank and the length of the list that these ranks pass to"
    " {op}{at}: its objects may differ"
)
_BARRIER: Final = (
    "compare how often, and in which groups, these ranks come to {op}{at}: it has no other argument"
)
_ADDRESS: Final = (
    "compare the address, the world size and the backend that these ranks pass to {op}{at}"
    " (init_method, MASTER_ADDR, MASTER_PORT, WORLD_SIZE)"
)
_STEPS_OF_CALLS: Final[Mapping[str, str]] = {
    "init_process_group": _ADDRESS,
    "rendezvous": _ADDRESS,
    **dict.fromkeys(
        ("new_group", "new_subgroups", "new_subgroups_by_enumeration"),
        f"compare {_GROUPS} that all ranks make up to {{op}}{{at}}",
    ),
    "split_group": (
        "compare split_ranks, and the order of the calls, on all ranks of the parent group up to"
        " {op}{at}"
    ),
    "init_device_mesh": (
        "compare the shape and the names of the mesh that these ranks pass to {op}{at}"
    ),
    "destroy_process_group": (
        "look for collectives that these ranks, or others, had not finished before {op}{at}"
    ),
    "barrier": _BARRIER,
    "monitored_barrier": (
        f"{_BARRIER} but its timeout, after which rank 0 names the ranks that it does not hear from"
    ),
    "all_gather_object": _OBJECTS,
    "gather_object": _OBJECTS,
    "broadcast_object_list": _SENT_OBJECTS,
    "scatter_object_list": _SENT_OBJECTS,
    "send_object_list": _SENT_OBJECTS,
    "recv_object_list": _SENT_OBJECTS,
    **dict.fromkeys(("store.get", "store.wait", "store.multi_get", "store.queue_pop"), _KEYS),
}


def step_without_tensors(op: str, at: str) -> str:
    """Recommend a step for ranks that do not come out of a call; empty if it passes tensors.

    Args:
        op: the call.
        at: its line, as in ``" at train.py:57 step"``; may be empty.
    """
    return _STEPS_OF_CALLS.get(op, "").format(op=op, at=at)


def action_phrase(action: Action) -> str:
    """Return what to do in a clause, with the reason; empty if the evidence does not decide."""
    do = _DO[action.do].format(nodes=joined(action.nodes) or "the node that broke")
    if not do:
        return ""
    why = _BECAUSE[action.because]
    if action.attempts > 1:
        why = f"{action.attempts} attempts in a row ended with this fault"
    return f"{do}: {why}" if why else do
