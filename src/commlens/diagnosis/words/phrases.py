"""Phrases about ranks, processes, waits and collectives that several kinds of findings share.

Each turns data into a part of a sentence: ``exit_words(exit, [2, 3])`` is ``"died of SIGKILL"``,
and ``ranks_phrase([2, 3])`` before it, of :mod:`commlens.text`, its subject. A docstring shows the
result; ``capital`` and the full stop are the caller's where it has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from commlens.diagnosis.align.call_paths import Path, parting_paths
from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.graph.wait_graph import Edge
from commlens.diagnosis.index.activity import Activity, Sign, SignKind
from commlens.diagnosis.index.process_exit import ProcessExit
from commlens.diagnosis.words.finding import Words
from commlens.model.cause import Cause, Recomputed, Rounds
from commlens.model.collective import Channel, Collective, Stack, State
from commlens.model.grouping import grouped
from commlens.text import (
    args_phrase,
    capital,
    count,
    duration,
    format_ranks,
    frame_phrase,
    group_label,
    joined,
    message_phrase,
    number_named,
    op_phrase,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
    sentence,
    size,
    verb,
)

# --- what a process did, or does

_ONE = (0,)  # some single rank, for a verb in the singular


def exit_words(end: ProcessExit, ranks: Sequence[int] = _ONE) -> str:
    """Return what a process did: ``"died of SIGKILL"``, ``"exited with status 3"``, ``"raised
    ValueError: ..."``.

    Args:
        end: how it ended.
        ranks: that ended so, which is the subject of the verb.
    """
    signal = end.signal or "a signal"
    was, its = verb(ranks, "was", "were"), verb(ranks, "its", "their")
    gone = verb(ranks, "is gone; how it", "are gone; how they")
    exited = f"{was} killed by {end.signal}" if end.signal else f"exited with status {end.status}"
    while_exiting = f" while {verb(ranks, 'it was', 'they were')} exiting" * end.was_exiting
    error = "a DistributedOperationException" if end.refused else end.error
    after = f" after {error}" if error else ""
    left = f" after {verb(ranks, 'it had', 'they had')} destroyed {its} last process group"
    left *= end.was_exiting
    words: dict[str, str] = {
        "runs": verb(ranks, "runs", "run"),
        "shuts-down": f"{verb(ranks, 'is', 'are')} shutting down",
        "finished": "finished",
        "is-gone": f"{gone} ended was not observed",
        "raised": f"raised {'DistributedOperationException' if end.refused else end.error}",
        "interrupted": f"{was} interrupted",
        "perhaps-interrupted": (
            f"{was} interrupted: by SIGINT, or {its} program raised KeyboardInterrupt"
        ),
        "out-of-memory": f"{was} killed by the kernel's OOM killer ({signal})",
        "ended-by-signal": f"{was} ended by {signal}",
        "aborted-by-watchdog": (
            f"{was} aborted by NCCL's watchdog ({signal}), which gave up waiting for a collective"
        ),
        "died": f"died of {signal}{while_exiting}{after}",
        "ended": f"ended{after}{left}",
        "failed": f"failed{after}{left}",
        "exited": f"{exited}{after}{left}",
    }
    return words[end.how]


def activity_words(doing: Activity, ranks: Sequence[int] = _ONE) -> str:
    """Return what ranks do: ``"has been in train.py:57 load_batch for 31 s"``.

    Args:
        doing: what all of them do.
        ranks: the subject of the verb.
    """
    where = frame_phrase(doing.frame)
    inside = f" in {where}" if where else ""
    since = f" for {duration(doing.for_ns)}" if doing.for_ns else ""
    is_, has = verb(ranks, "is", "are"), verb(ranks, "has", "have")
    the_last = verb(ranks, "its last process group", "their last process groups")
    quotas = verb(ranks, "its cgroup's quota", "their cgroups' quotas")
    words: dict[str, str] = {
        "runs": _running(doing, ranks, inside, since),
        "serves": f"{has} been waiting in an event loop{inside and f' ({where})'}{since}",
        "left": f"{has} destroyed {the_last}{f' and {is_}' if inside else ''}{inside}",
        "not-initialised": f"{has} not called init_process_group yet",
        "expected-slow": f"{is_} in a block marked as slow ({doing.expecting})",
        "uninterruptible": f"{is_} in uninterruptible I/O{inside}{since}",
        "throttled": f"{is_} starved of CPU by {quotas}{inside}",
        "holds-gil": f"{verb(ranks, 'holds', 'hold')} the GIL{inside}{since}",
        "stopped": f"{is_} stopped (by SIGSTOP or a debugger)",
        "debugged": f"{is_} stopped by a debugger",
        "shuts-down": f"{has} finished and {is_} shutting down",
        "finished": f"{has} finished",
        "ended": exit_words(doing.exit, ranks) if doing.exit is not None else "ended",
        "in-another-group": f"{has} been in a collective of another group{since}",
        "was-ended": f"{verb(ranks, 'was', 'were')}{inside or ' elsewhere'}",
    }
    return words[doing.state]


def _running(doing: Activity, ranks: Sequence[int], inside: str, since: str) -> str:
    """``"has been compiling in train.py:57 step for 31 s"``"""
    is_ = verb(ranks, "is", "are")
    if doing.stack.why == "initialising":
        return f"{is_} still initialising{inside}{since}"
    been = verb(ranks, "has been", "have been") if since else is_
    if doing.stack.why == "compilation":
        return f"{been} compiling{inside}{since}"
    return f"{been}{inside or ' outside any collective'}{since}"


def sign_words(signs: Sequence[Sign]) -> list[str]:
    """``["its stack does not move", "it uses no CPU"]``."""
    return [_SIGNS[sign.kind](sign) for sign in signs]


def _used_cpu(sign: Sign) -> str:
    return f"it used {sign.amount:.1f} s of CPU in {sign.window_s:.0f} s"


def _for_so_long(seconds: float) -> str:
    """Return how much longer a sleep lasts; nothing of the short ones in which a thread polls."""
    return f" for {duration(round(seconds * 1e9))} more" if seconds >= _LONG_SLEEP_S else ""


_SIGNS: Mapping[SignKind, Callable[[Sign], str]] = {
    "announced-exit": lambda _: "its process announced its exit",
    "exit-status-0": lambda _: "its process ended with status 0, without its exit handlers",
    "process-state": lambda sign: f"its process is in state {sign.about}",
    "others-have-not-run": lambda _: "its other threads have not run since",
    "quota-used": lambda sign: f"its CPU quota was used up {sign.amount:.0%} of the time",
    "exit": lambda sign: exit_words(sign.exit) if sign.exit is not None else "ended",
    "active-before": lambda sign: f"it was active {duration(sign.amount * 1e9)} before",
    "waited-for-memory": lambda sign: (
        f"its cgroup waited for memory {sign.amount:.0f} % of the time"
    ),
    "unsent-bytes": lambda sign: (
        f"its TCP connections hold {size(sign.amount)} that the other side does not take"
    ),
    "on-stack": lambda sign: f"{frame_phrase(sign.frame)} is on its stack",
    "in-init": lambda _: "it has not returned from init_process_group",
    "stack-moves": lambda _: "its stack moves",
    "stack-still": lambda _: "its stack does not move",
    "used-cpu": _used_cpu,
    "spins": lambda sign: f"{_used_cpu(sign)}, as a thread does that waits for a device",
    "waits-for-core": lambda _: "it waits for a core",
    "no-cpu": lambda _: "it uses no CPU",
    "waits-for": lambda sign: sign.about + _for_so_long(sign.amount),
    "lost-child": lambda sign: sign.about,
    "child-used-cpu": lambda sign: f"its child processes used {sign.amount:.1f} s of CPU",
    "child-waits-for-core": lambda _: "a child process waits for a core",
    "net-bytes": lambda sign: f"it sent or received {size(sign.amount)} in {sign.window_s:.0f} s",
    "io-bytes": lambda sign: f"it read or wrote {size(sign.amount)} in {sign.window_s:.0f} s",
}


def completion_unknown(channel: Channel) -> str:
    """Return why it is unknown whether the collectives of a channel completed."""
    match channel.completion:
        case "plugin":
            return (
                "NCCL's plugin told only which calls were made. With the setting nccl_profiler:"
                " kernels, it also tells which have ended."
            )
        case "hooks":
            return (
                "they are in a CUDA graph, or commlens recorded without its native engine while"
                " torch's own recorder was off (TORCH_FR_BUFFER_SIZE=0)."
            )
        case "unknown":
            return (
                f"the backend {channel.group.backend} does not report when a collective completes."
            )
    return (
        "torch's own recorder is off (TORCH_FR_BUFFER_SIZE=0, or a torch before 2.8),"
        " TORCH_NCCL_BLOCKING_WAIT hides the collectives from it, or they are in a CUDA graph."
    )


# --- ranks, and their waits

_LONG_SLEEP_S = 10.0
_WAITS_MAX = 3  # collectives in which ranks wait
_EXITS_MAX = 4  # ranks whose exits a finding lists


def name(context: Context, rank: int) -> str:
    """``"rank 2 (host n03, pid 4121)"``."""
    log = context.job.views[rank].log
    about = [f"host {log.host}"] if log.host else []
    about += [f"pid {log.pid}"] if log.pid else []
    return f"{rank_phrase(rank)}" + (f" ({', '.join(about)})" if about else "")


def last(context: Context, rank: int) -> str:
    """``"its last collective, all_reduce #40 of group dp [0-3], completed"``."""
    view = context.job.views[rank]
    op = view.last_op
    if op is None and view.is_log and view.dump is not None and not view.dump.status:
        return "its log tells no collective"
    if op is None:
        return (
            "it never issued a collective"
            if not context.job.foreign
            else "it has nothing in flight"
        )
    completed = "completed" if not view.is_log else "was issued"
    states = {State.COMPLETED: completed, State.FAILED: "failed", State.UNKNOWN: "was issued"}
    return f"its last collective, {op_phrase(op)}, {states.get(op.state, 'is in flight')}"


def how_long_they_wait(context: Context, edges: Sequence[Edge]) -> str:
    """``"Ranks 0-1,3 have been waiting for 31 s at train.py:81 step, float32[1048576] SUM."``;
    lines that differ are listed.
    """
    # A rank decodes its reduce ops some time after it issues them. Where it has not yet, it is that
    # of the others, so that one line is not listed twice.
    reduce_ops = {(edge.op.op, edge.op.args.reduce_op) for edge in edges if edge.op.args.reduce_op}
    known = dict(reduce_ops) if len(reduce_ops) == 1 else {}
    by_line = grouped(
        (
            (
                frame_phrase(edge.op.source),
                args_phrase(edge.op, known.get(edge.op.op)),
                edge.op.state is State.FAILED,
            ),
            edge.rank,
        )
        for edge in edges
    )
    all_args = {args for _, args, _ in by_line}
    shared = all_args.pop() if len(all_args) == 1 else ""
    parts = []
    for (line, args, failed), ranks in sorted(
        by_line.items(), key=lambda item: (-number_named(item[1]), item[1])
    )[:3]:
        waited = context.longest_of(edges, ranks)
        length = (
            f" for {duration(waited)}" if waited >= max(context.job.stalled_after_ns, 1) else ""
        )
        about = (f" at {line}" if line else "") + (f", {args}" if args != shared else "")
        did = "waited" if failed else f"{verb(ranks, 'has', 'have')} been waiting"
        if context.job.foreseen and not failed:
            did = verb(ranks, "waits", "wait")
        parts.append(f"{ranks_phrase(ranks)} {did}{length}{about}{', until it failed' * failed}")
    return prose(
        capital("; ".join(parts)) + (f", {shared}." if shared else "."),
        _hosts(context, edges),
    )


def waits_and_blocked(context: Context, edges: Sequence[Edge], blocked: Iterable[int]) -> str:
    """Return how long ranks wait, and which ranks wait behind them: "Ranks 0-3 have been waiting
    for 31 s at train.py:81 step. Ranks 4-7 wait behind them."
    """
    waiting = sorted({edge.rank for edge in edges})
    return prose(how_long_they_wait(context, edges), blocked_behind(waiting, blocked))


def _hosts(context: Context, edges: Sequence[Edge]) -> str:
    """``"Their hosts ran ahead: rank 0 stands at train.py:90 log, rank 2 at train.py:57
    load_batch."``; empty if none did.
    """
    by_line: dict[str, list[int]] = defaultdict(list)
    ahead = {
        edge.rank: edge.op
        for edge in edges
        # a library's call that has not returned holds its host
        if edge.op.channel.runs_ahead and (not edge.op.channel.library or edge.op.returned_ns)
    }
    for rank, op in ahead.items():
        stack = context.job.views[rank].log.main_stack
        frame = stack.source if stack is not None else None
        is_older = stack is not None and 0 < stack.taken_ns < op.announced_ns
        if frame is not None and frame != op.source and not is_older:
            by_line[frame_phrase(frame)].append(rank)
    if not by_line:
        return ""
    lines = sorted(by_line.items(), key=lambda item: (-number_named(item[1]), item[1]))[:3]
    if len(lines) == 1:
        line, ranks = lines[0]
        return (
            f"The {verb(ranks, 'host', 'hosts')} of {ranks_phrase(ranks)} ran ahead and"
            f" {verb(ranks, 'stands', 'stand')} at {line}."
        )
    (line, ranks), *others = lines
    said = [
        f"{ranks_and_verb(ranks, 'stands', 'stand')} at {line}",
        *(f"{ranks_phrase(ranks)} at {line}" for line, ranks in others),
    ]
    return f"The hosts ran ahead: {', '.join(said)}."


def aborted(context: Context, ranks: Iterable[int]) -> list[str]:
    """Return a sentence about those of some ranks that NCCL's watchdog aborted; none if there
    are none.
    """
    views = context.job.views
    gone = [rank for rank in sorted(ranks) if rank in views and views[rank].exit.gave_up]
    if not gone:
        return []
    return [f"{capital(ended_like_the_first(context, gone))}."]


def ended_like_the_first(context: Context, ranks: Sequence[int]) -> str:
    """``"ranks 1-3 were ended by SIGTERM"``."""
    return f"{ranks_phrase(ranks)} {exit_words(context.job.views[ranks[0]].exit, ranks)}"


def exits_alike(context: Context, ranks: Iterable[int]) -> list[str]:
    """``["ranks 0-1 died of SIGABRT", ...]``: ranks that ended in the same way share a phrase."""
    by_text = grouped((exit_words(context.job.views[rank].exit), rank) for rank in ranks)
    return [f"{ranks_phrase(alike)} {text}" for text, alike in by_text.items()]


def exits(context: Context, ranks: Sequence[int]) -> list[str]:
    """``["rank 1 exited with status 3.", ...]``, for the first few ranks."""
    return [
        sentence(f"{rank_phrase(rank)} {exit_words(context.job.views[rank].exit)}")
        for rank in ranks[:_EXITS_MAX]
    ]


def blocked_behind(ranks: Sequence[int], blocked: Iterable[int]) -> str:
    """``"Ranks 4-7 wait behind them."``, for the blocked ranks that are not among ``ranks``;
    empty if there are none.
    """
    more = sorted(set(blocked) - set(ranks))
    return (
        f"{capital(ranks_and_verb(more, 'waits', 'wait'))} behind {verb(ranks, 'it', 'them')}."
        if more
        else ""
    )


def where_they_wait(edges: Sequence[Edge], singular: str, plural: str) -> str:
    """``"ranks 0,3 wait for it in all_reduce #7 of group tp [0-3], rank 5 in recv #1 from rank
    2"``: each rank in its own collective.

    Args:
        edges: the waits. Groups of one name share a phrase, and so do messages of one number to
            several peers.
        singular: the verb for one rank: "waits for it".
        plural: the verb for several.
    """
    by_name = grouped(
        ((op.op, op.sequence_number, op.channel.group.label, edge.is_from_any), edge)
        for edge in edges
        for op in [edge.op]
    )
    parts: list[str] = []
    for of_name in sorted(
        by_name.values(), key=lambda some: (-number_named(edge.rank for edge in some), some[0].rank)
    ):
        ranks = sorted({edge.rank for edge in of_name})
        said = f"{ranks_and_verb(ranks, singular, plural)}" if not parts else ranks_phrase(ranks)
        parts.append(f"{said} in {collective_phrase([edge.op for edge in of_name])}")
    more = (
        [f"others in {count(len(parts) - _WAITS_MAX, 'more collective')}"]
        if len(parts) > _WAITS_MAX
        else []
    )
    return ", ".join([*parts[:_WAITS_MAX], *more])


def collective_phrase(ops: Sequence[Collective]) -> str:
    """``"all_reduce #7 of group tp [0-3]"``, for groups of one name ``"... of 4 groups named tp"``;
    ``"send #3 to ranks 4-5"``.
    """
    op, groups = ops[0], {op.channel.key for op in ops}
    if op.is_point_to_point:
        return message_phrase(op, {op.peer for op in ops if op.peer is not None})
    return (
        op_phrase(op)
        if len(groups) == 1
        else f"{op_phrase(op, group=False)} of {len(groups)} groups named {op.channel.group.label}"
    )


# --- how far ranks came at a line


def rounds_told(rounds: Rounds | None) -> list[str]:
    """``["At train.py:20 step, the last recv of rank 2 is #10, of ranks 0-1,3 #9."]``; empty if no
    rounds decided.
    """
    if rounds is None:
        return []
    told = ", of ".join(
        f"{ranks_phrase(at.ranks)}{' is' * (i == 0)} #{at.number}"
        for i, at in enumerate(rounds.last)
    )
    return [f"At {rounds.line}, the last {rounds.op} of {told}."]


def steps_at(rounds: Rounds | None) -> list[str]:
    """``["After 13 optimizer steps, ranks 1-2 went on to train.py:30 main."]``; empty if they did
    not, or if steps are not counted.
    """
    if rounds is None or not rounds.went_on or not rounds.steps:
        return []
    behind = ranks_phrase(min(rounds.last, key=lambda at: at.number).ranks)
    steps = count(rounds.steps, "optimizer step")
    return [f"After {steps}, {behind} went on to {rounds.went_on}."]


def issued_again(again: Recomputed) -> str:
    """``"rank 1 receives from rank 0 a second time at train.py:13, in the recomputation of
    activation checkpointing; rank 0 sent once"``.
    """
    message, peer = again.message, again.message.peer
    does, other = ("sends to", "received") if message.op == "send" else ("receives from", "sent")
    number = message.sequence_number
    nth = {2: "second", 3: "third"}.get(number, f"{number}th")
    times = {0: "never", 1: "once", 2: "twice"}.get(again.issued, f"{again.issued} times")
    return (
        f"{rank_phrase(again.rank)} {does} {rank_phrase(peer)} a {nth} time"
        f"{f' at {again.source}' if again.source else ''}, in the recomputation of activation"
        f" checkpointing; {rank_phrase(peer)} {other} {times}"
    )


# --- torch.compile

COMPILER = {
    "guards": "its guards exchange between ranks whether they hold",
    "sizes": "it exchanges sizes between ranks as it compiles",
    "partitioner": "its ranks agree on the values that backward needs",
    "autotuning": "its ranks share the choice of kernels",
    "group": "it makes a group to exchange sizes and guards between ranks",
}


def with_compiler(words: Words, cause: Cause) -> Words:
    """Return the words of a finding with a sentence about a collective of torch.compile's own."""
    call = cause.compiler
    if call is None:
        return words
    where = f", at {call.source}" if call.source else ""
    called = f"; this time only {ranks_phrase(call.ranks)} called the compiled function{where}"
    called *= not call.all_waiting
    told = f"torch.compile issued {call.op} itself: {COMPILER[call.part]}{called}."
    return words._replace(explanation=prose(words.explanation, told))


# --- sentences


def prose(*sentences: str) -> str:
    """Join the sentences that are not empty."""
    return " ".join(filter(None, sentences))


def first_line(error: str) -> str:
    """Return the first line of an error, short and without its full stop."""
    return error.strip().partition("\n")[0][:160].rstrip(". ") or "an error without a message"


# --- the sides of a tie

_SIDES_SHOWN = 4
UNDECIDED = "Neither a majority nor their routine tells which side is at fault."


def kind_phrase(op: Collective) -> str:
    """``"all_reduce of group dp"``: of any group with this label; ``"recv from rank 1"``."""
    if op.is_point_to_point:
        return f"{op.op} {'to' if op.op == 'send' else 'from'} {rank_phrase(op.peer)}"
    if op.is_setup or op.is_store_wait:
        return op_phrase(op)
    label = group_label(op.channel.group, "")
    return f"{op.op} of {f'group {label}' if label else 'the default group'}"


def describe_sides(sides: Sequence[Sequence[int]], ops: Mapping[int, Collective]) -> str:
    """``"Ranks 0-3 issue all_reduce of the default group at train.py:20 step (float32[4] SUM);
    ranks 4-7 issue ..."``.

    A sentence about several ranks holds for each: ranks of a side whose lines or arguments differ
    get parts of their own. Of two sides, the call paths are given from where they part.
    """
    paths = _paths_of(sides, ops)
    at_lines = [
        ranks_and_line
        for ranks in sides
        for ranks_and_line in ranks_by_text(
            ranks, lambda rank: _at_line(ops[rank], paths.get(ops[rank].stack))
        )
    ]
    parts = [
        f"{ranks_and_verb(ranks, 'issues', 'issue')}"
        f" {kinds_phrase([ops[rank] for rank in ranks])}{where}"
        for ranks, where in at_lines[:_SIDES_SHOWN]
    ]
    more = [rank for ranks, _ in at_lines[_SIDES_SHOWN:] for rank in ranks]
    return capital("; ".join(parts)) + (f"; {ranks_phrase(more)} issue others." if more else ".")


def ranks_by_text(ranks: Iterable[int], said: Callable[[int], str]) -> list[tuple[list[int], str]]:
    """Return each text with the ranks of which it is said; most ranks first."""
    same = grouped((said(rank), rank) for rank in sorted(ranks))
    return sorted(((of, text) for text, of in same.items()), key=lambda one: (-len(one[0]), one[0]))


def kinds_phrase(ops: Sequence[Collective]) -> str:
    """``"all_reduce of group dp"``; ``"all_reduce of their groups 1 [0,2] and 2 [1,3]"`` where the
    groups have no name in common.
    """
    peers = {op.peer for op in ops if op.peer is not None}
    if ops[0].is_point_to_point and len(peers) > 1:
        return f"{ops[0].op} {'to' if ops[0].op == 'send' else 'from'} {ranks_phrase(peers)}"
    groups = {op.channel.key: op.channel.group for op in ops}
    if len({group_label(group, "") for group in groups.values()}) == 1 or ops[0].is_point_to_point:
        return kind_phrase(ops[0])
    names = [
        f"{group_label(group, 'the default group')} [{format_ranks(group.all_ranks)}]"
        for group in groups.values()
    ]
    return f"{ops[0].op} of their groups {joined(names[:_SIDES_SHOWN])}" + (
        f" and {len(names) - _SIDES_SHOWN} more" * (len(names) > _SIDES_SHOWN)
    )


def _paths_of(sides: Sequence[Sequence[int]], ops: Mapping[int, Collective]) -> dict[Stack, Path]:
    """Return the call paths of two sides, from where they part, by the stacks of their first ranks;
    nothing if they do not part.
    """
    if len(sides) != 2:
        return {}
    first, second = (ops[min(ranks)].stack for ranks in sides)
    paths = parting_paths(first, second)
    return dict(zip((first, second), paths, strict=True)) if paths is not None else {}


def _at_line(op: Collective, path: Path | None) -> str:
    """``" at train.py:20 step (float32[4] SUM)"``"""
    args, line = args_phrase(op), path.phrase if path is not None else frame_phrase(op.source)
    return f"{f' at {line}' if line else ''}{f' ({args})' if args else ''}"


def separation(context: Context, sides: Sequence[Sequence[int]]) -> str:
    """``"The sides follow the hosts: ranks 0-3 are on n1 and ranks 4-7 are on n2."`` Also by which
    groups, halves or parity they differ; empty if by none.
    """
    if len(sides) < 2:
        return ""
    views = context.job.views
    side_of = {rank: number for number, ranks in enumerate(sides) for rank in ranks}
    ranks = sorted(side_of)
    hosts = {rank: views[rank].log.host for rank in ranks if rank in views}
    if all(hosts.values()) and _separate(side_of, hosts):
        names = [f"{ranks_and_verb(of, 'is', 'are')} on {_hosts_of(hosts, of)}" for of in sides]
        return f"The sides follow the hosts: {joined(names)}."
    if len(ranks) < 4 or len(sides) > 2:
        return ""
    lower = {*ranks[: len(sides[side_of[ranks[0]]])]}
    ways: list[tuple[str, Mapping[int, object]]] = [
        *_ways_of_groups(context, side_of),
        (
            "One side has the lower ranks, the other the higher ones.",
            {rank: rank in lower for rank in ranks},
        ),
        (
            "One side has the even ranks, the other the odd ones.",
            {rank: rank % 2 for rank in ranks},
        ),
    ]
    return next((said for said, values in ways if _separate(side_of, values)), "")


def _separate(side_of: Mapping[int, int], values: Mapping[int, object]) -> bool:
    """Return whether values tell sides apart: ranks with the same value are on the same side, and
    there are several values.
    """
    pairs = {(values[rank], side) for rank, side in side_of.items() if rank in values}
    return 1 < len({value for value, _ in pairs}) == len(pairs)


def _ways_of_groups(
    context: Context, ranks: Collection[int]
) -> Iterator[tuple[str, Mapping[int, object]]]:
    """Yield sentences with the values by rank of which each is true: for each label of groups that
    all these ranks are in, the rank's place in its group, then the group.
    """
    places: dict[str, dict[int, int]] = defaultdict(dict)  # by label of the groups
    groups: dict[str, dict[int, int]] = defaultdict(dict)
    for number, channel in enumerate(context.job.channels.values()):
        if 1 < len(channel.group.ranks) < context.job.size:
            for place, rank in enumerate(channel.group.ranks):
                places[channel.group.label][rank] = place
                groups[channel.group.label][rank] = number
    for label in sorted(places):
        if places[label].keys() >= set(ranks):
            yield f"The sides follow the ranks' places in the groups {label}.", places[label]
            yield f"The sides follow the groups {label}.", groups[label]


def _hosts_of(hosts: Mapping[int, str], side: Iterable[int]) -> str:
    names = sorted({hosts[rank] for rank in side if rank in hosts})
    return joined(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
