"""What to do next, for each kind of finding."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.activity import Doing
from commlens.diagnosis.alignment import Trouble
from commlens.diagnosis.index import View
from commlens.model.collective import Collective, Frame
from commlens.text import frame_phrase, ranks_phrase


def missing_step(what: Doing, ranks: Sequence[int]) -> str:
    """For a rank that does not come."""
    who = ranks_phrase(ranks)
    where = f"{what.frame.function} ({what.frame.where})" if what.frame is not None else "what it does"
    steps = {
        "data-loading": f"look at {where} on {who}: the storage or the data loader's workers do not deliver",
        "checkpoint-io": f"look at {where} on {who}, and at the file system that it writes to",
        "stopped": f"continue {who} (kill -CONT) and find out who stopped it",
        "holding-gil": f"look at {where} on {who}: the C code called there should release Python's lock",
        "throttled": f"give {who} more CPU: its cgroup's quota (cpu.max) starves it",
        "uninterruptible-io": f"look at the storage of {who}'s host: the kernel waits for it (dmesg, mount)",
        "memory-pressure": f"give {who} more memory: its cgroup is short of it",
        "finished": f"make {who} run as many iterations as the others (uneven data: Join, or drop the last batches)",
        "initialising": f"look at why {who} does not come out of {where}",
    }
    if what.why in steps:
        return steps[what.why]
    if what.frame is not None:
        return f"look at {where} on {who}"
    return f"take a stack of {who} (py-spy dump): it shows what keeps {'it' if len(ranks) == 1 else 'them'}"


def mismatch_step(trouble: Trouble, first: Collective, usual: Collective | None) -> str:
    """For ranks that disagree."""
    culprits = ranks_phrase(trouble.culprits)
    if trouble.shift is not None or trouble.habit:
        expected = trouble.shift.skipped if trouble.shift is not None and trouble.shift.by > 0 else usual
        where = f" at {frame_phrase(expected.source)}" if expected is not None and expected.source is not None else ""
        return f"find the branch by which {culprits} left out {expected.op if expected else 'it'}{where}"
    mine = frame_phrase(first.source) or "the line"
    if usual is None:
        return f"compare what {culprits} issue at {mine}"
    theirs = frame_phrase(usual.source) or "that"
    if theirs == mine:
        return f"find out why {mine} gets something else on {culprits} than on the others"
    return f"compare {mine} on {culprits} with {theirs} on the others"


def cycle_step(culprits: Sequence[int], op: Collective | None, usual: Collective | None) -> str:
    """For ranks that wait for each other."""
    where = f" at {frame_phrase(op.source)}" if op is not None and op.source is not None else ""
    if usual is not None and usual.op == "send":
        return f"find out why rank {culprits[0]} left out its send at {frame_phrase(usual.source)}"
    if op is not None and op.op == "recv":
        return f"find out which send should meet the receive{where} on rank {culprits[0]}"
    return f"make all ranks use these groups in the same order: look at {ranks_phrase(culprits)}{where}"


def death_step(view: View, frame: Frame | None) -> str:
    """For a process that died."""
    fate = view.fate
    if fate.why == "out-of-memory":
        return f"give rank {view.rank} more memory, or use less: the kernel killed it (dmesg)"
    if fate.why == "exception":
        return f"look at {frame_phrase(frame)} on rank {view.rank}" if frame is not None else f"look at rank {view.rank}'s traceback"
    if fate.why == "killed" and fate.says_disagreement:
        return f"look at what rank {view.rank} printed before it aborted" + (f", after {frame_phrase(frame)}" if frame is not None else "")
    if fate.why == "killed":
        return f"look into dmesg and the scheduler's log for who sent it, and at rank {view.rank}'s last lines" + (
            f" ({frame_phrase(frame)})" if frame is not None else ""
        )
    return f"look at rank {view.rank}'s output" + (f", after {frame_phrase(frame)}" if frame is not None else "")
