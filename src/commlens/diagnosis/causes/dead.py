"""Processes that ended by themselves, and not because a peer had.

Say rank 2 raised ValueError and rank 3 a second later "connection closed by peer": rank 2 alone is
a cause. If ranks 0-7 raised the same error with other numbers in it, they share one cause. A rank
is *gone* if its process has ended and nobody saw how. Where no process ended by itself,
:func:`find_ended` tells how those that failed did. At the end of the module: a launcher that a
signal stops.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from commlens.diagnosis.align.alignment import RecordMismatch
from commlens.diagnosis.causes.context import Case, Context, most_waited, processes_of, waits_of
from commlens.diagnosis.graph.wait_graph import Edge, WaitNode
from commlens.diagnosis.index.job_index import RankView
from commlens.matching.error_texts import distance_to_cause, refused_address
from commlens.model.cause import Confidence, Dead, DeathDoubt, Ended
from commlens.model.collective import Collective, Frame
from commlens.model.sender import Sender

_ERROR_MAX = 4000
_SAME_MOMENT_NS = 1_000_000_000
# in which the same error differs between ranks: a rank, a size, an address, a segment's name
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|/dev/shm/\S+|\d+")


_CONFIDENCE: Mapping[DeathDoubt | None, Confidence] = {
    None: "high",
    "unobserved": "medium",
    "first-unknown": "low",
    "perhaps-aborted": "low",
    "unspecific": "low",
}


UNDECIDED: Final = ("first-unknown", "perhaps-aborted", "unspecific")
"""The doubts that keep a rank from being blamed."""


def find_deaths(
    context: Context, sinks: dict[int, WaitNode], *, told: frozenset[int] = frozenset()
) -> None:
    """Find the ranks that ended. Those that did so in the same way, but for the numbers in their
    errors, are one cause.

    A rank that ended later, and not with an exception, may have ended because of the first one.

    Args:
        context: the evidence.
        sinks: the nodes of ranks that died.
        told: ranks whose end another cause explains.
    """
    views, alike = context.job.views, _ended_alike(context, sinks, told)
    groups = [_keep_the_first(context, ranks, sinks) for ranks in alike]
    ended = [(min(views[rank].exit.at_ns for rank in ranks), ranks) for ranks in groups]
    first = min((moment for moment, _ in ended if moment), default=0)
    for moment, ranks in sorted(ended, key=lambda each: (each[0] or 1 << 62, each[1])):
        # An exception in user code is a cause of its own; a later signal or exit may follow from
        # the first end.
        is_later = bool(first) and moment > first + _SAME_MOMENT_NS
        follows = is_later and views[ranks[0]].exit.why != "exception"
        nodes = [sinks[rank] for rank in ranks if rank in sinks]
        _add_death(context, ranks, nodes, moment, root_cause=not follows)


def _ended_alike(
    context: Context, sinks: Mapping[int, WaitNode], told: frozenset[int]
) -> Iterable[list[int]]:
    """Return the ranks that ended by themselves, those that ended in the same way together: with
    the same signal, status or error, but for its numbers, and at the same line.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for rank, view in sorted(context.job.views.items()):
        end = view.exit
        by_itself = end.kind == "own" or (
            end.kind == "gone" and _is_missed(context, sinks.get(rank))
        )
        if by_itself and rank not in told and not is_absorbed(context, rank):
            error, line = _NUMBER.sub("#", end.error), end.source.where if end.source else ""
            way = (end.why, end.how, end.signal or end.status, end.was_exiting, error, line)
            groups[way].append(rank)
    return groups.values()


def is_absorbed(context: Context, rank: int) -> bool:
    """Return whether a death follows from a mismatch: gloo aborts the process whose tensor has the
    wrong size.
    """
    if not context.job.views[rank].exit.suggests_mismatch:
        return False
    return any(
        mismatch.may_cause_later_faults
        and rank in mismatch.channel.group.ranks
        and _reached(context, rank, mismatch)
        for mismatch in context.mismatches
    )


def _reached(context: Context, rank: int, mismatch: RecordMismatch) -> bool:
    """Return whether a rank came to a mismatch and may have died of it: it did not if no rank hangs
    because of the mismatch (it is silent), and this one completed the op.
    """
    if mismatch.pair is not None:
        return rank in mismatch.ops
    track = context.job.views[rank].tracks.get(mismatch.key)
    return (
        track is not None
        and track.last >= mismatch.number
        and not (mismatch.silent and track.completed >= mismatch.number)
    )


def _is_missed(context: Context, node: WaitNode | None) -> bool:
    """Return whether others wait for a rank that is gone: a rank that lives, or one that has ended
    in a collective to which this one never came. Otherwise, it may have ended well: nobody saw how.
    """
    views = context.job.views
    if node is None:
        return False
    tracks = views[node.rank].tracks

    def came_to(op: Collective) -> bool:
        track = tracks.get(op.channel.key)
        # messages are numbered by pair, so a channel's last number does not tell
        return not op.is_point_to_point and track is not None and track.last >= op.sequence_number

    return any(
        not views[edge.rank].exit.ended or not came_to(edge.op)
        for edge in context.graph.edges_into(node)
    )


def _keep_the_first(context: Context, ranks: list[int], sinks: Mapping[int, WaitNode]) -> list[int]:
    """Of ranks that are gone, drop those that were probably ended because others had ended: the
    order in which they ended is unknown.

    A refusal that a rank raised before says which rank had ended by then. While a rank lives, one
    that waited for another did not end first. If all have ended, one that waited may have been
    killed like any other: only its last sign of life tells.
    """
    views = context.job.views
    if views[ranks[0]].exit.kind != "gone":
        return ranks
    named = sorted(_ended_before_refusals(context).intersection(ranks))
    if not all(view.exit.ended for view in views.values()):
        return named or _without_waiting(context, ranks, sinks) or ranks
    # Any rank that is gone may be the first one, also one for which nobody waits. All are alike, so
    # this is their only group, and no error or mismatch explains their ends.
    gone = sorted(rank for rank, view in views.items() if view.exit.kind == "gone")
    return named or _ended_first(context, gone) or gone


def _ended_before_refusals(context: Context) -> set[int]:
    """Return the ranks that had ended, according to a refusal by strict verification."""
    refusals = [view.log.refusal for view in context.job.views.values()]
    dead = [each for each in refusals if each is not None and each.kind == "dead"]
    return {rank for each in dead for rank in each.absent}


def _without_waiting(
    context: Context, ranks: list[int], sinks: Mapping[int, WaitNode]
) -> list[int]:
    """Return those of these ranks that do not wait for another one of them."""
    nodes = [sinks[rank] for rank in ranks if rank in sinks]
    waiting = {edge.rank for edge in context.graph.edges_into_all(nodes)}
    return [rank for rank in ranks if rank not in waiting]


def _ended_first(context: Context, gone: list[int]) -> list[int]:
    """Return the rank whose last sign of life is clearly the oldest; none if there is no such
    rank.
    """
    beats = sorted((context.job.views[rank].log.heartbeat_ns, rank) for rank in gone)
    if len(beats) < 2 or not beats[0][0] or beats[0][0] >= beats[1][0] - _SAME_MOMENT_NS:
        return []
    return [beats[0][1]]


def _add_death(
    context: Context, ranks: list[int], nodes: list[WaitNode], moment: int, *, root_cause: bool
) -> None:
    view = context.job.views[ranks[0]]
    edges = context.graph.edges_into_all(nodes)
    blocked = context.blocked_by(nodes)
    # did not end by themselves, or it is unknown how
    peers = sorted(
        rank
        for rank, view in context.job.views.items()
        if view.exit.kind in ("peer", "terminated", "gone") and rank not in ranks
    )
    doubt = _doubt(context, ranks, edges)
    undecided = doubt in UNDECIDED
    victims = {*blocked, *peers}
    cause = Dead(
        kind="dead",
        why=view.exit.why,
        root_cause=root_cause,
        culprits=[] if undecided else list(ranks),
        blamed_by="undecided" if undecided else "exit",
        victims=sorted(victims | {*ranks} if undecided else victims - {*ranks}),
        confidence=_CONFIDENCE[doubt],
        ranks=ranks,
        processes=processes_of(context, ranks),
        waits=waits_of(context, edges),
        awaited=[node.rank for node in nodes],
        ended_by_it=peers,
        signal=view.exit.signal,
        error=view.log.told_error[:_ERROR_MAX] if view.exit.error else "",
        status=view.exit.status,
        doubt=doubt,
    )
    op = most_waited(context, edges).op if edges else view.last_op
    frame = view.exit.source or _last_line(view)
    context.cases.append(Case(cause, op, frame, edges, blocked, order=(moment,)))


def _doubt(context: Context, ranks: list[int], edges: list[Edge]) -> DeathDoubt | None:
    """Return what limits the confidence that these ranks ended by themselves."""
    views = context.job.views
    if _may_be_aborted(context, views[ranks[0]]):
        return "perhaps-aborted"
    if _may_follow(context, ranks):
        return "unspecific"
    if views[ranks[0]].exit.kind != "gone":
        return None
    # Ranks come to init_process_group at any time: who waits there may have ended first.
    starting = bool(edges) and all(edge.op.is_setup for edge in edges)
    if (len(ranks) > 1 or starting) and all(view.exit.ended for view in views.values()):
        return "first-unknown"
    return "unobserved"


def _may_be_aborted(context: Context, view: RankView) -> bool:
    """Return whether a launcher's message that a rank aborted is all that is known of it: then
    others may be the cause.
    """
    bare = view.dump is not None and not view.history and not view.log.exception
    return bare and view.exit.signal == "SIGABRT" and context.job.size > 1


def _may_follow(context: Context, ranks: list[int]) -> bool:
    """Return whether the error of these ranks may follow from another's, as far as it does not say.

    It does not follow if one rank alone has such an error, and those of others speak of a peer:
    then it is the nearest to the cause.
    """
    if not (context.job.only_logs and context.job.views[ranks[0]].exit.unspecific):
        return False
    others = [view.exit for view in context.job.views.values() if view.rank not in ranks]
    is_only_one = len(ranks) == 1 and not any(end.unspecific for end in others)
    is_nearest = is_only_one and any(end.kind == "peer" for end in others)
    return not is_nearest


def _last_line(view: RankView) -> Frame | None:
    """Return the line where a rank was last seen: in its stack if that is newer than its last
    collective, else the collective's.
    """
    stack = view.log.current_stack
    if stack is not None and stack.source is not None:
        return stack.source
    return view.last_op.source if view.last_op is not None else None


# --- processes that failed, but not by themselves


def find_kept_addresses(context: Context) -> None:
    """Find ranks that gloo refused at an address that the store kept from an earlier start of the
    job: the restarted rank 1 was refused at 10.0.0.2:29500, which the former rank 0 had written.

    A rank listens before it writes its address to the store. So a refusal says that the process
    there has ended. If none of this start had, it is one of an earlier start.
    """
    views = context.job.views
    refused = {
        rank: address
        for rank, view in sorted(views.items())
        if view.log.setups
        and view.log.setups[-1].op == "init_process_group"
        and (view.log.restart or view.log.setups[-1].sequence_number > 1)
        and (address := refused_address(view.log.exception))
    }
    if not refused or any(
        view.exit.ended and view.exit.kind not in ("peer", "terminated") for view in views.values()
    ):
        return
    ranks = list(refused)
    first = min(ranks, key=lambda rank: (views[rank].exit.at_ns or 1 << 62, rank))
    log = views[first].log
    cause = Ended(
        kind="dead",
        why="exception",
        root_cause=True,
        blamed_by="nobody",
        victims=sorted(rank for rank, view in views.items() if view.exit.failed),
        confidence="high" if not context.job.no_record else "medium",
        ranks=ranks,
        first=first,
        processes=processes_of(context, ranks),
        how="kept-address",
        addresses=sorted(set(refused.values())),
        restarts=log.restart,
    )
    op = log.setups[-1]
    context.cases.append(Case(cause, op, op.source, weight=len(views), order=(0,)))


def find_ended(context: Context) -> None:
    """Find processes that failed without a known cause."""
    views = context.job.views
    failed = sorted(
        rank for rank, view in views.items() if view.exit.failed and view.exit.kind != "gone"
    )
    if not failed or any(case.cause.kind == "dead" for case in context.cases):
        return
    peers = [rank for rank in failed if views[rank].exit.kind == "peer"]
    stopped = [rank for rank in failed if views[rank].exit.kind == "terminated"]
    if peers:
        _add_after_a_peer(context, peers, failed)
    elif stopped:
        _add_stopped(context, stopped)


def _add_after_a_peer(context: Context, peers: list[int], failed: list[int]) -> None:
    views = context.job.views
    first = min(
        peers,
        key=lambda rank: (
            views[rank].exit.at_ns or 1 << 62,
            distance_to_cause(views[rank].log.exception),
            rank,
        ),
    )
    silent = _silent_ranks(context) if context.job.only_logs else []
    suspects = silent if len(silent) == 1 else []
    cause = Ended(
        kind="dead",
        why="exception",
        root_cause=True,
        culprits=suspects,
        blamed_by="absence" if suspects else "unknown",
        victims=failed,
        confidence="low",
        ranks=peers,
        first=first,
        processes=processes_of(context, peers),
        how="after-a-peer",
        silent=silent,
        error=views[first].log.told_error[:_ERROR_MAX],
    )
    context.cases.append(Case(cause, views[first].last_op, views[first].exit.source))


def _silent_ranks(context: Context) -> list[int]:
    """Return the ranks that no line names."""
    told = context.job.views.values()
    without = [view.rank for view in told if view.dump is not None and view.dump.tells_nothing]
    return sorted([*context.job.no_record, *without])


def _add_stopped(context: Context, stopped: list[int]) -> None:
    """Add ranks that were ended from outside: if one is gone, torchrun ends the others."""
    views = context.job.views
    gone = sorted(rank for rank, view in views.items() if view.exit.kind == "gone")
    ranks, end = gone or stopped, views[stopped[0]].exit
    cause = Ended(
        kind="dead",
        why="unknown" if gone else "killed",
        root_cause=True,
        culprits=gone if len(gone) == 1 else [],
        blamed_by="exit" if len(gone) == 1 else "undecided" if gone else "nobody",
        victims=stopped,
        confidence="medium",
        ranks=ranks,
        first=ranks[0],
        processes=processes_of(context, ranks),
        how="unobserved" if gone else "from-outside",
        signal="SIGINT" if end.how == "interrupted" else end.signal or None,
    )
    context.cases.append(Case(cause, views[ranks[0]].last_op))


# --- a launcher that a signal stopped: whether that is worth a line, and the sender of the signal

StoppedBy = Literal["unknown", "system", "process"]
"""The sender of the signal.

``unknown``: nobody saw it, or a terminal that went away. ``system``: probably a scheduler: root, or
a process outside the container. ``process``: any other one, which is named.
"""


@dataclass(frozen=True)
class Stopped:
    """A launcher that ends its job because it received a signal."""

    signal: str  # "SIGTERM"
    sender: Sender | None  # None if it is not known
    by: StoppedBy


def find_stop(signal: str, sender: Sender | None = None, *, parent: int = 0) -> Stopped | None:
    """Find why a launcher ends its job; None for the signals that a person sends from the job's
    terminal.

    Args:
        signal: such as ``"SIGTERM"``.
        sender: None if it is not known.
        parent: the pid of the process that started the launcher. It may pass Ctrl-C on.
    """
    by_a_process = sender is not None and not sender.is_kernel and sender.pid != parent
    if signal not in ("SIGHUP", "SIGTERM") and not by_a_process:
        return None
    if sender is None or signal == "SIGHUP":
        return Stopped(signal, sender, "unknown")
    is_system = not sender.pid or (sender.uid == 0 and not sender.is_own_user)
    return Stopped(signal, sender, "system" if signal == "SIGTERM" and is_system else "process")
