"""Decide whether a change of hardware explains why ranks stopped, slowed down or died.

Say ranks 0-7 are stuck in a collective since 10:00:05. At 10:00:03 the kernel of node n03 logged
that the GPU of rank 7 fell off the bus (Xid 79): that explains it, and rank 7 is to blame. That
many corrected memory errors were counted on n01 does not, but is kept as a possible coincidence.

A change counts if it fits in time and in place: the rank's own GPU or an interface that the job
uses, and no collective that was issued later has completed. A change that most parts have explains
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.index.nodes import Node, nodes_of
from commlens.model.cause import (
    Cause,
    Dead,
    Hardware,
    Missing,
    Straggler,
    StuckInside,
    Wait,
    Why,
)
from commlens.model.collective import State
from commlens.model.grouping import grouped
from commlens.model.health import Fault, HealthEvent, NodeHealth, What
from commlens.model.ranklog import RankLog
from commlens.model.xids import xid

_S: Final = 1_000_000_000
_BEFORE_S: Final = 600.0  # a change that was so long before a fault has nothing to do with it
_NEAR_S: Final = 60.0  # one that explains a fault was not longer before it
_AFTER_S: Final[Mapping[Fault, float]] = {"storage": 300.0, "host-memory": 60.0}
"""How long after a fault its cause may be logged: the kernel reports a server of files, or a task
that hangs, only after minutes.
"""
_SOON_S: Final = 5.0  # the same for the other causes
_SWAPPED_BYTES: Final = 64 << 20  # of a rank's memory, at least, if swapping slows it down
_WENT_ON_S: Final = 1.0
"""A collective that was issued so long after a change, and completed, was not stopped by it."""

_GPU: Final[frozenset[What]] = frozenset(
    {
        "xid",
        "gpu-gone",
        "gpu-reset",
        "ecc-uncorrected",
        "ecc-corrected",
        "rows-remapped",
        "gpu-throttled",
    }
)
_PCIE: Final[frozenset[What]] = frozenset({"pcie-error", "pcie-error-corrected", "pcie-width-fell"})
_GPU_BROKE: Final[frozenset[What]] = frozenset(
    {"xid", "gpu-gone", "gpu-reset", "ecc-uncorrected", "pcie-error", "nvswitch-error"}
)
_ENDS: Final[frozenset[What]] = frozenset({"link-up", "nfs-back"})
_COUNTED: Final[frozenset[What]] = frozenset(
    {
        "errors-rose",
        "drops-rose",
        "retransmits-rose",
        "rate-fell",
        "ecc-corrected",
        "pcie-error-corrected",
        "memory-error-corrected",
        "gpu-throttled",
        "cpu-throttled",
        "memory-pressure",
        "io-pressure",
        "swapping",
    }
)
"""Changes that count as evidence only if other parts do not have them."""

_EXPLAINS: Final[Mapping[type[Cause], frozenset[What]]] = {
    StuckInside: _GPU_BROKE | {"link-down", "adapter-error", "errors-rose", "rate-fell"},
    Missing: _GPU_BROKE
    | {
        "nfs-silent",
        "io-error",
        "hung-task",
        "io-pressure",
        "oom-kill",
        "memory-pressure",
        "swapping",
    },
    Dead: _GPU_BROKE | {"oom-kill", "memory-error", "machine-check"},
}
"""The changes that can have an effect of this kind."""

_SLOWS: Final[frozenset[What]] = frozenset(
    {
        "gpu-throttled",
        "cpu-throttled",
        "pcie-width-fell",
        "errors-rose",
        "rate-fell",
        "retransmits-rose",
        "memory-pressure",
        "io-pressure",
        "swapping",
        "ecc-corrected",
    }
)
"""The changes that can make a rank slow."""

_WAITING: Final[frozenset[Why]] = frozenset(
    {
        "data-loading",
        "checkpoint-io",
        "initialising",
        "uninterruptible-io",
        "memory-pressure",
        "unknown",
    }
)
"""The activities of a rank that may wait for storage or memory."""

_ORDER: Final[Sequence[Fault]] = (
    "gpu-fault",
    "gpu-memory",
    "network-down",
    "pcie",
    "storage",
    "host-memory",
    "network-errors",
    "thermal",
    "clock",
)
"""Of several that explain a fault, the first is named as the cause."""


class _PartUsers(NamedTuple):
    """The ranks that use a part of a node."""

    ranks: list[int]
    alone: bool  # they use it alone, and the node's other ranks use parts of their own
    certain: bool  # False: perhaps only another job uses it


def add_hardware(context: Context) -> None:
    """Add to each root cause the changes of hardware at that time. Where ranks are stuck in a
    collective and the processes show no reason, one that explains it becomes the reason.
    """
    nodes = context.job.nodes
    if not nodes:
        return
    for case in context.cases:
        cause = case.cause
        if cause.root_cause and isinstance(cause, (StuckInside, Missing, Dead)):
            began_ns = _began_ns(context, cause)
            ranks = frozenset(cause.ranks)
            changes = _changes_with_users(nodes, spans_nodes=_spans_nodes(context, ranks))
            fitting = (
                _fitting(context, cause, began_ns, *each)
                for each in changes
                if began_ns and not ranks.isdisjoint(each[2].ranks)
            )
            cause.hardware = _sorted(_merge_changes(filter(None, fitting)))
            _decide(cause)


def add_hardware_of_slow(cause: Straggler, logs: Sequence[RankLog]) -> None:
    """Add to the cause of a slow job the changes of hardware that only the slow ranks have. They
    are the reason unless the processes show another one.
    """
    nodes = nodes_of({log.rank: log for log in logs})
    now_ns = max((node.health.taken_ns for node in nodes), default=0)
    cause.hardware = hardware_of_slow(nodes, cause.culprits, now_ns)
    if cause.hardware and cause.held_back is None:
        cause.why = cause.hardware[0].event.fault


def add_hardware_seen(cause: Cause, healths: Sequence[NodeHealth], *, spans_nodes: bool) -> None:
    """Add the present faults of hardware to a cause that was seen from outside, without records.

    It is unknown when the ranks stopped. So a fault that is over explains nothing. Neither does a
    counter that rises during the look, because it may always do so.

    Args:
        cause: the cause.
        healths: of the nodes that were looked at.
        spans_nodes: whether the job has ranks on more than one node.
    """
    if not isinstance(cause, (StuckInside, Missing, Dead)) or not cause.root_cause:
        return
    nodes = [Node(each, {place.rank: place for place in each.ranks}) for each in healths]
    seen = (
        _hardware_change(cause, *each)
        for each in _changes_with_users(nodes, spans_nodes=spans_nodes)
    )
    cause.hardware = _sorted(_merge_changes(filter(None, seen)))
    _decide(cause)
    if cause.blamed_by == "hardware" and cause.confidence == "low":
        cause.confidence = "medium"


def _hardware_change(
    cause: StuckInside | Missing | Dead, node: Node, event: HealthEvent, users: _PartUsers
) -> Hardware | None:
    """Return a change as evidence for a cause of unknown time; None if none of its ranks use the
    part, or if it is long ago and over.
    """
    if not set(cause.ranks) & set(users.ranks):
        return None
    before_s = (node.health.taken_ns - event.first_ns) / _S
    is_recent = before_s <= _BEFORE_S
    lasts = _lasts(node, users, event, is_recent=is_recent)
    if not lasts and not is_recent:
        return None
    explains = lasts and users.certain and _can_explain(cause, users, event)
    ranks = sorted(users.ranks)
    return Hardware(
        node.health.host, ranks, event, round(before_s, 3), explains, users.alone, before="look"
    )


def _lasts(node: Node, users: _PartUsers, event: HealthEvent, *, is_recent: bool) -> bool:
    """Return whether the effect of an event lasts: the part did not recover, or cannot.

    After an error long ago, a GPU that the driver still lists may have gone on.
    """
    if event.what in ("link-down", "nfs-silent"):
        return not event.over and not (event.what == "nfs-silent" and event.since_ns)
    gpus = node.health.values.get("gpu", {})
    if not is_recent and event.part in gpus:
        return False
    if event.what == "xid":  # the process that the driver names cannot go on either
        return users.alone and (bool(event.pid) or xid(event.number).effect == "stops")
    return users.alone and event.what in _GPU_BROKE


def hardware_of_slow(nodes: Sequence[Node], ranks: Collection[int], now_ns: int) -> list[Hardware]:
    """Return the changes of hardware that slow these ranks and no others, the likeliest first.

    Args:
        nodes: those whose hardware is known.
        ranks: the slow ones.
        now_ns: when they were seen to be slow, Unix ns.
    """
    found = [
        Hardware(
            node.health.host, users.ranks, event, (now_ns - event.first_ns) / _S, True, users.alone
        )
        for node, event, users in _changes_with_users(nodes, spans_nodes=len(nodes) > 1)
        if event.what in _SLOWS
        and users.certain
        and set(users.ranks) <= set(ranks)
        and _is_present(node, event, now_ns)
    ]
    return _sorted(found)


def _is_present(node: Node, event: HealthEvent, now_ns: int) -> bool:
    """Return whether a change is new, or the changed value has stayed the same since."""
    if 0 <= now_ns - event.at_ns <= _BEFORE_S * _S:
        return True
    values = (source.get(event.part, {}) for source in node.health.values.values())
    return any(event.name in each and each[event.name] == event.after for each in values)


# --- when a fault began


def _began_ns(context: Context, cause: StuckInside | Missing | Dead) -> int:
    """Return when a fault began, Unix ns; 0 if that is not known."""
    if isinstance(cause, Dead):
        ended = [context.job.views[rank].exit.at_ns for rank in cause.ranks]
        return min((at_ns for at_ns in ended if at_ns), default=0)
    announced = _announced(context, cause.waits)
    # when the last rank came to the collective, or the first one waited for a rank
    return (max if isinstance(cause, StuckInside) else min)(announced, default=0)


def _announced(context: Context, waits: Sequence[Wait]) -> list[int]:
    """Return when each rank announced the collective that it waits in, Unix ns."""
    return [
        op.announced_ns
        for wait in waits
        for rank in wait.ranks
        for op in context.job.views[rank].log.collectives
        if op.op == wait.collective.op
        and op.sequence_number == wait.collective.sequence_number
        and (wait.group is None or op.channel.group.name == wait.group.name)
    ]


# --- changes that fit


def _changes_everywhere(nodes: Sequence[Node]) -> set[What]:
    """Return the changes of counters that most of the comparable parts of the job have."""
    used_parts = {
        (event.what, (node.health.host, event.part))
        for node in nodes
        for event in node.health.events
        if event.what in _COUNTED and _users_of_part(node, event, spans_nodes=True) is not None
    }
    by_change = grouped(used_parts)
    return {what for what, parts in by_change.items() if _are_most(nodes, what, len(parts))}


def _are_most(nodes: Sequence[Node], what: What, found: int) -> bool:
    """Return whether as many parts are more than half of the job's: of its GPUs, its network
    interfaces or its nodes.
    """
    if what in _GPU or what in _PCIE:
        comparable = sum(len(node.places) for node in nodes)
    elif what in ("errors-rose", "drops-rose", "rate-fell"):
        comparable = sum(len(node.health.networks) for node in nodes)
    else:
        comparable = len(nodes)
    return comparable > 1 and found > comparable / 2


def _users_of_part(node: Node, event: HealthEvent, *, spans_nodes: bool) -> _PartUsers | None:
    """Return the ranks that use the part in which an event happened; None if the job does not use
    it.
    """
    named = [rank for rank, place in node.places.items() if event.pid and place.pid == event.pid]
    if named:
        return _PartUsers(named, alone=True, certain=True)
    if event.part in node.health.networks or event.fault.startswith("network"):
        return _users_of_network(node, event.part) if spans_nodes else None
    if event.what in _GPU or event.what in _PCIE:
        return _users_of_gpu(node, event)
    if event.what == "swapping":  # perhaps only other processes' memory is in swap space
        ours = [rank for rank, at in node.places.items() if at.swapped_bytes >= _SWAPPED_BYTES]
        return _PartUsers(sorted(ours), len(ours) < len(node.places), True) if ours else None
    return _PartUsers(sorted(node.places), alone=False, certain=True)


def _users_of_network(node: Node, part: str) -> _PartUsers | None:
    """Return the node's ranks, if the job uses this interface, or may use it."""
    known = node.health.networks
    if known and part not in (*known, "tcp"):
        return None
    return _PartUsers(sorted(node.places), alone=False, certain=bool(known))


def _users_of_gpu(node: Node, event: HealthEvent) -> _PartUsers | None:
    """Return the ranks that compute on the GPU of an event. Where the driver does not tell which
    rank computes where, any rank of the node may; but not at the address of another PCIe device.
    """
    here = sorted(node.places)
    owners = [rank for rank, place in node.places.items() if place.gpu == event.part]
    if owners:
        return _PartUsers(owners, alone=len(owners) < len(here) or len(here) == 1, certain=True)
    may_be_ours = event.what in _GPU and not node.gpus_known
    return _PartUsers(here, alone=False, certain=False) if may_be_ours else None


def _changes_with_users(
    nodes: Sequence[Node], *, spans_nodes: bool
) -> Iterator[tuple[Node, HealthEvent, _PartUsers]]:
    """Yield each change that did not happen everywhere: its node, the change, and the ranks that
    use the part.
    """
    everywhere = _changes_everywhere(nodes)
    for node in nodes:
        for event in node.health.events:
            if event.what in everywhere or event.what in _ENDS:
                continue
            users = _users_of_part(node, event, spans_nodes=spans_nodes)
            if users is not None:
                yield node, event, users


def _spans_nodes(context: Context, ranks: Collection[int]) -> bool:
    """Return whether these ranks run on more than one node."""
    views = context.job.views
    of_nodes = sum(any(rank in node.places for rank in ranks) for node in context.job.nodes)
    return of_nodes > 1 or len({views[rank].log.host for rank in ranks if rank in views}) > 1


def _fitting(
    context: Context,
    cause: StuckInside | Missing | Dead,
    began_ns: int,
    node: Node,
    event: HealthEvent,
    users: _PartUsers,
) -> Hardware | None:
    """Return a change if it fits a fault."""
    after_s = _AFTER_S.get(event.fault, _SOON_S)
    early_s = (began_ns - event.at_ns) / _S  # before the fault, at least
    if early_s > _BEFORE_S or (event.first_ns - began_ns) / _S > after_s:
        return None
    if _went_on(context, users.ranks, event):
        return None
    explains = users.certain and early_s <= _NEAR_S and _can_explain(cause, users, event)
    before_s = (began_ns - event.first_ns) / _S
    ranks = sorted(users.ranks)
    return Hardware(node.health.host, ranks, event, round(before_s, 3), explains, users.alone)


def _can_explain(
    cause: StuckInside | Missing | Dead, users: _PartUsers, event: HealthEvent
) -> bool:
    """Return whether an event can have such an effect."""
    return (
        event.what in _EXPLAINS[type(cause)]
        and not (event.what == "xid" and xid(event.number).effect == "sign")
        and _fits_cause(cause, users, event)
    )


def _fits_cause(cause: StuckInside | Missing | Dead, users: _PartUsers, event: HealthEvent) -> bool:
    """Return whether ranks did what an event of this kind can explain.

    Storage and memory belong to the whole node. So one that does not arrive was held up by them
    only if it waits for something. One that died was killed for memory only if the kernel says so
    of its own process; and for bad memory only if it got the signal that the kernel sends to a
    process that reads such memory, and the kernel names no other process.
    """
    if event.fault not in ("storage", "host-memory"):
        return True
    if isinstance(cause, Missing):
        return cause.activity.why in _WAITING
    if isinstance(cause, Dead) and event.what != "oom-kill":
        return cause.signal == "SIGBUS" and (users.alone or not event.pid)
    return users.alone


def _went_on(context: Context, ranks: Sequence[int], event: HealthEvent) -> bool:
    """Return whether the event did not stop one of these ranks: it completed a collective that it
    issued after the event.
    """
    since_ns = event.at_ns + int(_WENT_ON_S * _S)
    views = [context.job.views[rank] for rank in ranks if rank in context.job.views]
    return any(_completed_after(context, view, event, since_ns) for view in views)


def _completed_after(context: Context, view: RankView, event: HealthEvent, since_ns: int) -> bool:
    over_network = event.fault.startswith("network")
    return any(
        op.state is State.COMPLETED
        and op.announced_ns > since_ns
        and (not over_network or _spans_nodes(context, op.channel.group.ranks))
        for op in reversed(view.log.collectives[-64:])
    )


def _merge_changes(found: Iterable[Hardware]) -> list[Hardware]:
    """Return the changes. Several of one kind in one place become one: one that explains the fault,
    or else the earliest.
    """
    by_place = grouped(
        ((one.node, one.event.part, one.event.what, one.event.number), one) for one in found
    )
    return [
        msgspec.structs.replace(
            max(alike, key=lambda each: (each.explains, each.before_s)), times=len(alike)
        )
        for alike in by_place.values()
    ]


def _sorted(found: Collection[Hardware]) -> list[Hardware]:
    """Sort changes, the likeliest cause first."""
    return sorted(
        found,
        key=lambda each: (
            not each.explains,
            _ORDER.index(each.event.fault),
            abs(each.before_s),
            each.node,
            each.event.part,
        ),
    )


# --- the decision


def _decide(cause: StuckInside | Missing | Dead) -> None:
    """If ranks are stuck in a collective without another known reason, make the hardware the
    reason, and blame the ranks that cannot go on.
    """
    explaining = [each for each in cause.hardware if each.explains]
    if not explaining or not isinstance(cause, StuckInside) or cause.why != "in-collective":
        return
    fault = explaining[0].event.fault
    cause.why = fault
    broken = sorted({rank for each in explaining if _is_broken(each, fault) for rank in each.ranks})
    if broken and not cause.culprits:
        cause.culprits = [rank for rank in broken if rank in cause.ranks]
        cause.blamed_by = "hardware"
        cause.victims = sorted({*cause.victims, *cause.ranks} - set(cause.culprits))


def _is_broken(each: Hardware, fault: Fault) -> bool:
    """Return whether a part cannot work any more: that is more than a coincidence."""
    event = each.event
    if event.fault != fault:
        return False
    if event.what == "link-down":
        return not event.over
    if event.what == "xid":
        return each.own and xid(event.number).effect == "stops"
    return each.own and event.what in _GPU_BROKE
