"""What else is known of a cause: a collective of torch.compile's own, how far the ranks have come
in ``init_process_group``, lost nodes, what NCCL's RAS service says, and the place that all affected
ranks share.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from commlens.diagnosis.causes.context import Case, Context, group_of, source_of
from commlens.diagnosis.index.nodes import Whereabouts, whereabouts
from commlens.model.cause import (
    AnyCause,
    Cause,
    CompilerCall,
    CompilerPart,
    Dead,
    InitMeeting,
    LostNode,
    Missing,
    PlaceKind,
    RasSays,
    RasWitness,
    SharedPlace,
    StuckInside,
    Wait,
)
from commlens.model.collective import Collective, FrameKind, Stack
from commlens.model.health import RasCommunicator, RasRank, RasReport
from commlens.model.ranklog import RankLog, StoreSeen


class _Code(NamedTuple):
    """A file of torch, or a function of it, that issues collectives for a part of the compiler."""

    part: CompilerPart
    file: str
    function: str = ""


_CODE = (
    _Code("guards", "torch/_dynamo/eval_frame.py", "guard_collectives_hook"),
    _Code("sizes", "torch/_dynamo/output_graph.py"),
    _Code("partitioner", "torch/_functorch/partitioners.py"),
    _Code("autotuning", "torch/_inductor/distributed_autotune.py"),
    _Code("autotuning", "torch/_inductor/select_algorithm.py"),
    _Code("group", "torch/_dynamo/distributed.py"),
)
"""Code that a compiled graph runs is not among them: its collectives are those of the program."""


def add_compiler(context: Context) -> None:
    """Add to each root cause which ranks stand in a collective of the compiler, if its ranks do."""
    calls = {node.rank: block.op for node, block in context.graph.blocks.items()}
    parts = {rank: part for rank, op in calls.items() if (part := _part(op.stack)) is not None}
    for case in context.cases if parts else ():
        ranks = [*case.cause.culprits, *case.cause.victims]
        rank = next((rank for rank in ranks if rank in parts), None)
        if rank is not None and case.cause.root_cause:
            case.cause.compiler = _call(calls, parts, rank)


def _call(calls: dict[int, Collective], parts: dict[int, CompilerPart], rank: int) -> CompilerCall:
    op, part = calls[rank], parts[rank]
    alike = sorted(one for one in parts if parts[one] == part and calls[one].op == op.op)
    return CompilerCall(part, op.op, alike, set(alike) == calls.keys(), source_of(op))


def _part(stack: Stack) -> CompilerPart | None:
    own = list(itertools.takewhile(lambda frame: frame.kind is not FrameKind.USER, stack))
    found = (
        place.part
        for place, frame in itertools.product(_CODE, own)
        if frame.file.endswith(place.file) and place.function in ("", frame.function)
    )
    return next(found, None)


def add_init_meetings(context: Context) -> None:
    """Add to the causes in ``init_process_group`` how far the ranks have come there."""
    views = context.job.views.values()
    for case in context.cases:
        op = case.op
        if op is None or op.op != "init_process_group":
            continue
        came = {
            view.rank: view.log.observation.store
            for view in views
            for other in view.log.setups
            if (other.op, other.sequence_number) == (op.op, op.sequence_number)
        }
        add_init_meeting(case.cause, len(op.channel.group.all_ranks), came)


def add_init_meeting(cause: Cause, size: int, came: Mapping[int, StoreSeen | None]) -> None:
    """Add to a cause how far the ranks have come. If all of them have, and nobody listens where
    they meet, no rank is to blame.

    Args:
        cause: of ranks that wait in ``init_process_group``.
        size: ranks that are to come.
        came: the ranks that have, each with what its host shows of the address.
    """
    stores = [store for store in came.values() if store is not None]
    store = came.get(0) or next(
        (each for each in stores if each.listens), stores[0] if stores else None
    )
    cause.init = InitMeeting(
        size,
        sorted(came),
        store.address if store is not None else "",
        store.listens if store is not None else None,
        any(each.agent for each in stores),
    )
    if (
        isinstance(cause, StuckInside)
        and cause.init.listens is False
        and len(came) == size
        and (cause.init.agent or came.get(0) is not None)
    ):
        cause.kind, cause.root_cause, cause.state = "stuck-inside", True, "nobody-listens"
        cause.blamed_by, cause.confidence, cause.certain = "nobody", "high", True


def name_lost_nodes(context: Context, lost: Sequence[LostNode]) -> None:
    """Name the lost nodes in the causes found so far, and blame no rank of a node that is only
    silent: its ranks may still run.
    """
    vanished = [node for node in lost if node.vanished]
    silent = [node for node in lost if not node.vanished]
    for case in context.cases:
        cause = case.cause
        if cause.kind == "dead":
            _name(cause, cause.culprits, vanished)
        elif cause.kind == "missing" and _name(cause, _awaited(case), silent):
            if cause.culprits:
                cause.culprits, cause.blamed_by = [], "unknown"
            cause.confidence = "low"


def _name(cause: Cause, ranks: Sequence[int], nodes: Sequence[LostNode]) -> bool:
    """Name the nodes on which some of these ranks run, if all culprits run on them."""
    found = [node for node in nodes if not set(ranks).isdisjoint(node.ranks)]
    on_them = {rank for node in found for rank in node.ranks}
    if found and on_them.issuperset(cause.culprits):
        cause.lost_nodes = found
    return bool(cause.lost_nodes)


def _awaited(case: Case[Any]) -> Sequence[int]:
    group = group_of(case.op) if case.op is not None else None
    return group.ranks if group is not None else ()


def add_ras(context: Context) -> None:
    """Add what RAS says about the group of each root cause, as far as its processes show which of
    the communicators that is.
    """
    reports = [node.health.ras for node in context.job.nodes if node.health.ras is not None]
    logs = [view.log for view in context.job.views.values()]
    for case in context.cases:
        if case.cause.root_cause:
            ask_witness(case.cause, reports, logs)


def ask_witness(
    cause: Cause, reports: Iterable[RasReport], logs: Sequence[RankLog], *, any_group: bool = False
) -> None:
    """Add to a cause what RAS says about its group.

    Args:
        cause: what was found.
        reports: the answers of RAS.
        logs: of all ranks.
        any_group: where the ranks of the group are not known, any communicator of the job counts.
    """
    if not isinstance(cause, (StuckInside, Missing)):
        return
    communicators = [each for report in reports if report.answered for each in report.communicators]
    by_pid = _by_pid(logs)
    groups = _groups(cause.waits)
    if any_group and not groups:
        groups = [_ranks_of(each, by_pid) for each in communicators]
    about = _about(communicators, groups, {log.rank: log.pid for log in logs if log.pid})
    if about is not None:
        behind = _ranks(about.behind, by_pid)
        silent = _ranks(about.silent, by_pid)
        cause.ras = RasWitness(_says(cause, about, behind, silent), about.op, behind, silent)
        if cause.ras.says == "disagrees" and cause.confidence == "medium":
            cause.confidence = "low"


def _by_pid(logs: Sequence[RankLog]) -> dict[int, int]:
    """Return the rank of each process whose pid no other rank has."""
    pids = Counter(log.pid for log in logs)
    return {log.pid: log.rank for log in logs if log.pid and pids[log.pid] == 1}


def _ranks_of(each: RasCommunicator, by_pid: Mapping[int, int]) -> list[int]:
    """Return the ranks of a communicator; none if one of its processes is not known."""
    ranks = [by_pid.get(pid, -1) for pid in each.pids]
    return ranks if -1 not in ranks else []


def _groups(waits: Sequence[Wait]) -> list[list[int]]:
    return [wait.group.ranks for wait in waits if wait.group is not None]


def _about(
    communicators: Iterable[RasCommunicator],
    groups: Sequence[Sequence[int]],
    pids: Mapping[int, int],
) -> RasCommunicator | None:
    """Return the communicator of one of the groups; of several, one in which RAS sees a problem."""
    same = [each for each in communicators if any(_is_of(each, group, pids) for group in groups)]
    wrong = [each for each in same if each.apart or each.silent]
    return next(iter(wrong or same), None)


def _is_of(each: RasCommunicator, group: Sequence[int], pids: Mapping[int, int]) -> bool:
    """Return whether a communicator is of a group: its processes are, in the same order.

    Jobs on one node share RAS's default port, so the answer may be another job's. A process that is
    not the rank's shows that, even if others have the same pids on another node.

    Args:
        each: the communicator.
        group: the global ranks.
        pids: of the job's ranks, as far as they are known.
    """
    named = [(rank.rank, rank.pid) for rank in (*each.behind, *each.silent)]
    told = list(enumerate(each.pids)) if each.pids else named
    if any(place >= len(group) for place, _ in told) or each.size not in (0, len(group)):
        return False
    known = [(pid, pids[group[place]]) for place, pid in told if pid and group[place] in pids]
    return bool(known) and all(pid == own for pid, own in known)


def _ranks(named: Sequence[RasRank], by_pid: Mapping[int, int]) -> list[int]:
    return sorted(by_pid[each.pid] for each in named if each.pid in by_pid)


def _says(
    cause: StuckInside | Missing, about: RasCommunicator, behind: list[int], silent: list[int]
) -> RasSays:
    if isinstance(cause, StuckInside):
        return "disagrees" if about.apart else "agrees"
    if not about.apart and not silent:
        return "silent"
    blamed = set(cause.culprits)
    return "agrees" if blamed & {*behind, *silent} else "disagrees"


_KINDS: Final[Sequence[PlaceKind]] = ("host", "leaf", "rack", "rail", "gpu")
"""The first that fits is named."""

_OF_HOSTS: Final[Collection[PlaceKind]] = ("leaf", "rack")


class Affected(NamedTuple):
    """The ranks that a fault affects, and those that were examined and are well."""

    bad: Collection[int]
    good: Collection[int]
    by_node: bool = False  # all ranks of a node count, because of what happened there


def add_shared_places(context: Context) -> None:
    """Add to each root cause the place that its ranks share.

    Where ranks stand for others, which have no log, the places of these are not known.
    """
    if context.job.stands_for:
        return
    logs = {rank: view.log for rank, view in context.job.views.items()}
    dead = {
        rank
        for case in context.cases
        if isinstance(case.cause, Dead)
        for rank in (*case.cause.ranks, *case.cause.ended_by_it)
    }
    where: dict[int, Whereabouts] | None = None
    for case in context.cases:
        cause = case.cause
        if not case.cause.root_cause or not isinstance(cause, (Dead, StuckInside)):
            continue
        affected = affected_by(cause, set(logs) - dead)
        if len(affected.bad) > 1 and affected.good:
            where = where or whereabouts(logs, context.job.nodes, context.job.inventory)
            cause.place = shared_place(affected, where)


def affected_by(cause: AnyCause, alive: Collection[int]) -> Affected:
    """Return the ranks that a cause affects, and those that it does not although it could.

    Args:
        cause: what was found.
        alive: the ranks that run, as far as was seen.
    """
    match cause:
        case Dead():
            return Affected(cause.ranks, [rank for rank in alive if rank not in cause.ranks])
        case StuckInside():
            bad = _stuck(cause)
            by_node = any(each.explains and not each.own for each in cause.hardware)
            return Affected(bad, set(cause.ranks) - set(bad), by_node)
    return Affected([], [])


def _stuck(cause: StuckInside) -> Collection[int]:
    """Return the ranks of a collective that differ from the others of it."""
    if cause.culprits:
        return cause.culprits
    first = cause.hardware[0] if cause.hardware else None
    if first is not None and first.explains:
        same = [each for each in cause.hardware if each.event.what == first.event.what]
        return {rank for each in same for rank in each.ranks} & set(cause.ranks)
    return set(cause.ranks) - set(cause.completed_on) if cause.completed_on else []


def shared_place(affected: Affected, where: Mapping[int, Whereabouts]) -> SharedPlace | None:
    """Return the smallest place that all affected ranks share and none of the others; None if there
    is none, or one of the affected ranks may be elsewhere.

    Args:
        affected: two ranks or more, and others.
        where: where the ranks run.
    """
    bad = sorted(set(affected.bad))
    good = sorted(set(affected.good) - set(bad))
    kinds = _KINDS[1:] if affected.by_node else _KINDS
    found = (_shared(kind, bad, good, where) for kind in kinds) if len(bad) > 1 else ()
    return next((place for place in found if place is not None), None)


def _shared(
    kind: PlaceKind, bad: Sequence[int], good: Sequence[int], where: Mapping[int, Whereabouts]
) -> SharedPlace | None:
    """Return the place of this kind."""
    ours = {_named(where, rank, kind) for rank in bad}
    name = next(iter(ours))
    theirs = [rank for rank in good if _named(where, rank, kind)]
    if len(ours) > 1 or not name or not theirs:
        return None
    if any(_named(where, rank, kind) == name for rank in theirs):
        return None
    if kind in _OF_HOSTS and len({where[rank].host for rank in bad}) < 2:
        return None  # the only host there
    nics = {where[rank].nic for rank in bad}
    nic = next(iter(nics)) if kind == "rail" and len(nics) == 1 else ""
    chance = _chance(kind, [*bad, *theirs], bad, where)
    return SharedPlace(kind, name, list(bad), len(theirs), round(chance, 4), nic)


def _named(where: Mapping[int, Whereabouts], rank: int, kind: PlaceKind) -> str:
    return str(getattr(where.get(rank, Whereabouts()), kind))


def _chance(
    kind: PlaceKind, ranks: Sequence[int], bad: Sequence[int], where: Mapping[int, Whereabouts]
) -> float:
    """Return how likely it is that as many ranks, or hosts where whole hosts are affected, make up
    one such place, whichever of them are affected.
    """
    affected = set(bad)
    places: dict[str, set[object]] = defaultdict(set)
    hosts: dict[str, set[bool]] = defaultdict(set)
    for rank in ranks:
        hosts[_named(where, rank, "host")].add(rank in affected)
    whole = kind in _OF_HOSTS and all(len(each) == 1 for each in hosts.values())
    for rank in ranks:
        places[_named(where, rank, kind)].add(_named(where, rank, "host") if whole else rank)
    units = len(hosts) if whole else len(ranks)
    size = len(places[_named(where, bad[0], kind)])
    as_large = sum(len(each) == size for each in places.values())
    return as_large / math.comb(units, size)
