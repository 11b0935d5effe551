"""Add to causes that were found what else is known of them: which part of torch.compile issued the
collective, how many ranks have reached ``init_process_group``, which nodes are lost, whether NCCL's
RAS service agrees, and which place (host, switch, rack, rail, GPU) all affected ranks share. The
five parts do not depend on each other.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from commlens.diagnosis.causes.context import Context, source_of
from commlens.diagnosis.index.nodes import Whereabouts, whereabouts
from commlens.diagnosis.select.communicators import hashes_of
from commlens.model.cause import (
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
)
from commlens.model.collective import Collective, FrameKind, Stack
from commlens.model.grouping import grouped
from commlens.model.health import RasCommunicator, RasRank, RasReport
from commlens.model.ranklog import RankLog, StoreSeen

# --- torch.compile


_COMPILER_CODE: Final[Sequence[tuple[CompilerPart, str, str]]] = (
    ("guards", "torch/_dynamo/eval_frame.py", "guard_collectives_hook"),
    ("sizes", "torch/_dynamo/output_graph.py", ""),
    ("partitioner", "torch/_functorch/partitioners.py", ""),
    ("autotuning", "torch/_inductor/distributed_autotune.py", ""),
    ("autotuning", "torch/_inductor/select_algorithm.py", ""),
    ("group", "torch/_dynamo/distributed.py", ""),
)
"""The part of the compiler for which a file of torch, or one function of it, issues collectives.
The code that a compiled graph runs is left out: its collectives are the program's own."""


def add_compiler(context: Context) -> None:
    """Add to each root cause the compiler's collective in which one of its ranks waits."""
    calls = {node.rank: block.op for node, block in context.graph.blocks.items()}
    parts = {
        rank: part for rank, op in calls.items() if (part := _compiler_part(op.stack)) is not None
    }
    for case in context.cases if parts else ():
        ranks = [*case.cause.culprits, *case.cause.victims]
        rank = next((rank for rank in ranks if rank in parts), None)
        if rank is not None and case.cause.root_cause:
            case.cause.compiler = _compiler_call(calls, parts, rank)


def _compiler_call(
    calls: dict[int, Collective], parts: dict[int, CompilerPart], rank: int
) -> CompilerCall:
    """Return the collective of the compiler in which a rank waits, with all ranks that wait in the
    same one.
    """
    op, part = calls[rank], parts[rank]
    same = sorted(other for other in parts if parts[other] == part and calls[other].op == op.op)
    return CompilerCall(part, op.op, same, set(same) == calls.keys(), source_of(op))


def _compiler_part(stack: Stack) -> CompilerPart | None:
    """Return the part of the compiler that issued a collective; None if the program issued it."""
    before_user_code = itertools.takewhile(lambda frame: frame.kind is not FrameKind.USER, stack)
    found = (
        part
        for (part, file, function), frame in itertools.product(_COMPILER_CODE, before_user_code)
        if frame.file.endswith(file) and function in ("", frame.function)
    )
    return next(found, None)


# --- init_process_group


def add_init_meetings(context: Context) -> None:
    """Add to the causes in ``init_process_group`` which ranks have called it."""
    views = context.job.views.values()
    for case in context.cases:
        op = case.op
        if op is None or op.op != "init_process_group":
            continue
        ranks = op.channel.group.all_ranks
        came = {
            view.rank: view.log.observation.store
            for view in views
            for setup in view.log.setups
            if (setup.op, setup.sequence_number) == (op.op, op.sequence_number)
            and view.rank in ranks
        }
        add_init_meeting(case.cause, ranks, came, again=op.sequence_number > 1)


def add_init_meeting(
    cause: Cause,
    ranks: Sequence[int],
    came: Mapping[int, StoreSeen | None],
    *,
    again: bool = False,
) -> None:
    """Add to a cause which ranks have called ``init_process_group``. If all have, but no process
    listens at the store's address, no rank is to blame.

    Args:
        cause: of ranks that wait in ``init_process_group``.
        ranks: those that must call it; the first one makes the store, unless the launcher does.
        came: the ranks that have called it, each with the store as seen from its host.
        again: these processes called it before.
    """
    maker = next(iter(ranks), 0)
    stores = [store for store in came.values() if store is not None]
    # as its maker's host sees it, else as a host does on which a process listens there
    store = came.get(maker) or max(stores, key=lambda seen: seen.listens, default=None)
    cause.init = InitMeeting(
        len(ranks),
        sorted(came),
        [rank for rank in ranks if rank not in came],
        maker,
        store.address if store is not None else "",
        store.listens if store is not None else None,
        any(each.agent for each in stores),
        again,
    )
    # The maker's host has looked, or the launcher makes the store: then nobody will listen there.
    if (
        isinstance(cause, StuckInside)
        and cause.init.listens is False
        and not cause.init.missing
        and (cause.init.agent or came.get(maker) is not None)
    ):
        cause.kind, cause.root_cause, cause.state = "stuck-inside", True, "nobody-listens"
        cause.blamed_by, cause.confidence, cause.certain = "nobody", "high", True


# --- lost nodes


def name_lost_nodes(context: Context, lost: Sequence[LostNode]) -> None:
    """Name the lost nodes in the causes found so far. Do not blame the ranks of a node that is only
    silent: they may still run.
    """
    vanished = [node for node in lost if node.vanished]
    silent = [node for node in lost if not node.vanished]
    for case in context.cases:
        cause = case.cause
        if cause.kind == "dead":
            _name_nodes(cause, cause.culprits, vanished)
        elif cause.kind == "missing" and case.op is not None and not case.op.is_store_wait:
            ranks = case.op.channel.group.all_ranks
            cause.confidence = "low" if _name_nodes(cause, ranks, silent) else cause.confidence
            if cause.lost_nodes and cause.culprits:
                cause.culprits, cause.blamed_by = [], "unknown"


def _name_nodes(cause: Cause, ranks: Sequence[int], nodes: Sequence[LostNode]) -> bool:
    """Name in a cause those of the nodes that run some of these ranks, provided that all culprits
    run on them. Return whether the cause names a node.
    """
    found = [node for node in nodes if not set(ranks).isdisjoint(node.ranks)]
    ranks_on_found = {rank for node in found for rank in node.ranks}
    if found and ranks_on_found.issuperset(cause.culprits):
        cause.lost_nodes = found
    return bool(cause.lost_nodes)


# --- NCCL's RAS service


def add_ras_witnesses(context: Context) -> None:
    """Add to each root cause whether RAS agrees with it."""
    reports = [node.health.ras for node in context.job.nodes if node.health.ras is not None]
    logs = [view.log for view in context.job.views.values()]
    for case in context.cases:
        if case.cause.root_cause:
            add_ras_witness(case.cause, reports, logs)


def add_ras_witness(
    cause: Cause, reports: Iterable[RasReport], logs: Sequence[RankLog], *, any_group: bool = False
) -> None:
    """Add to a cause whether RAS agrees with it. RAS says nothing about the cause if no
    communicator is known to be that of the cause's group.

    Args:
        cause: stays as it is, unless its ranks wait for others or are stuck in a collective.
        reports: the answers of RAS.
        logs: of all ranks.
        any_group: if the cause names no group, use any communicator of the job.
    """
    if not isinstance(cause, (StuckInside, Missing)):
        return
    communicators = [each for report in reports if report.answered for each in report.communicators]
    rank_by_pid = _rank_by_pid(logs)
    groups = [wait.group.ranks for wait in cause.waits if wait.group is not None]
    if any_group and not groups:
        groups = [_ranks_of(each, rank_by_pid) for each in communicators]
    pids = {log.rank: log.pid for log in logs if log.pid}
    communicator = _communicator_of(groups, communicators, pids, hashes_of(groups, logs))
    if communicator is not None:
        behind = _known_ranks(communicator.behind, rank_by_pid)
        silent = _known_ranks(communicator.silent, rank_by_pid)
        says = _opinion_of_ras(cause, communicator, behind, silent)
        cause.ras = RasWitness(says, communicator.op, behind, silent)
        if says == "disagrees" and cause.confidence == "medium":
            cause.confidence = "low"


def _rank_by_pid(logs: Sequence[RankLog]) -> dict[int, int]:
    """Return the ranks by pid, without the pids that several ranks have."""
    pids = Counter(log.pid for log in logs)
    return {log.pid: log.rank for log in logs if log.pid and pids[log.pid] == 1}


def _ranks_of(communicator: RasCommunicator, rank_by_pid: Mapping[int, int]) -> list[int]:
    """Return the ranks of a communicator; an empty list if one of its processes is unknown."""
    ranks = [rank_by_pid.get(pid, -1) for pid in communicator.pids]
    return ranks if -1 not in ranks else []


def _communicator_of(
    groups: Sequence[Sequence[int]],
    communicators: Iterable[RasCommunicator],
    pids: Mapping[int, int],
    hashes: Collection[str],
) -> RasCommunicator | None:
    """Return the communicator of one of the groups, by its hash if NCCL told that, else by its
    processes; of several, one in which RAS sees a problem.
    """
    matching = [
        each
        for each in communicators
        if each.name.removeprefix("0x").lstrip("0") in hashes
        or any(_is_communicator_of(group, each, pids) for group in groups)
    ]
    faulty = [each for each in matching if each.apart or each.silent]
    return next(iter(faulty or matching), None)


def _is_communicator_of(
    group: Sequence[int], communicator: RasCommunicator, pids: Mapping[int, int]
) -> bool:
    """Return whether a communicator consists of the processes of a group, in the same order.

    Jobs on one node share RAS's default port, so the answer may be about another job. One process
    with another pid than the rank shows that, even if some pids are equal by chance.

    Args:
        group: the global ranks.
        communicator: as RAS describes it: all its processes, or only those in trouble.
        pids: the pids of the job's ranks, as far as they are known.
    """
    in_trouble = [(rank.rank, rank.pid) for rank in (*communicator.behind, *communicator.silent)]
    members = list(enumerate(communicator.pids)) if communicator.pids else in_trouble
    size_fits = communicator.size in (0, len(group))
    if not size_fits or any(position >= len(group) for position, _ in members):
        return False
    both_known = [
        (pid, pids[group[position]]) for position, pid in members if pid and group[position] in pids
    ]
    return bool(both_known) and all(theirs == ours for theirs, ours in both_known)


def _known_ranks(processes: Sequence[RasRank], rank_by_pid: Mapping[int, int]) -> list[int]:
    return sorted(rank_by_pid[each.pid] for each in processes if each.pid in rank_by_pid)


def _opinion_of_ras(
    cause: StuckInside | Missing,
    communicator: RasCommunicator,
    behind: list[int],
    silent: list[int],
) -> RasSays:
    if isinstance(cause, StuckInside):
        return "disagrees" if communicator.apart else "agrees"
    if not communicator.apart and not silent:
        return "silent"
    return "disagrees" if {*behind, *silent}.isdisjoint(cause.culprits) else "agrees"


# --- the place that all affected ranks share


_PLACE_KINDS: Final[Sequence[PlaceKind]] = ("host", "leaf", "rack", "rail", "gpu")
"""In the order in which they are tried."""

_KINDS_ABOVE_HOSTS: Final[Collection[PlaceKind]] = ("leaf", "rack")


class Affected(NamedTuple):
    """The ranks that a fault affects, and those that were examined and are well."""

    bad: Collection[int]
    good: Collection[int]
    by_node: bool = False  # the fault is a node's, so all its ranks are affected


def add_shared_places(context: Context) -> None:
    """Add to each root cause the place that its ranks share."""
    if context.job.stands_for:
        return  # some ranks have no log, so their places are unknown
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


def affected_by(cause: Dead | StuckInside, alive: Collection[int]) -> Affected:
    """Return the ranks that a cause affects, and those that it could affect but does not.

    Args:
        cause: what was found.
        alive: the ranks that were seen running.
    """
    if isinstance(cause, Dead):
        return Affected(cause.ranks, [rank for rank in alive if rank not in cause.ranks])
    bad = _ranks_that_differ(cause)
    by_node = any(each.explains and not each.own for each in cause.hardware)
    return Affected(bad, set(cause.ranks) - set(bad), by_node)


def _ranks_that_differ(cause: StuckInside) -> Collection[int]:
    """Return the ranks of a collective that differ from its other ranks: the culprits, else those
    with the same fault of hardware, else those that have not completed it.
    """
    if cause.culprits:
        return cause.culprits
    first = cause.hardware[0] if cause.hardware else None
    if first is not None and first.explains:
        same = [each for each in cause.hardware if each.event.what == first.event.what]
        return {rank for each in same for rank in each.ranks} & set(cause.ranks)
    return set(cause.ranks) - set(cause.completed_on) if cause.completed_on else []


def shared_place(affected: Affected, where: Mapping[int, Whereabouts]) -> SharedPlace | None:
    """Return the smallest place in which all affected ranks run and no other rank; None if there is
    no such place, or if the place of an affected rank is unknown.

    Args:
        affected: the ranks; fewer than two share no place.
        where: where the ranks run.
    """
    bad = sorted(set(affected.bad))
    good = sorted(set(affected.good) - set(bad))
    kinds = _PLACE_KINDS[1:] if affected.by_node else _PLACE_KINDS
    found = (_shared_place_of(kind, bad, good, where) for kind in kinds) if len(bad) > 1 else ()
    return next((place for place in found if place is not None), None)


def _shared_place_of(
    kind: PlaceKind, bad: Sequence[int], good: Sequence[int], where: Mapping[int, Whereabouts]
) -> SharedPlace | None:
    """Return the place of this kind in which all bad ranks run and no good one; None if there is no
    such place.
    """
    bad_names = {_place_name(where, rank, kind) for rank in bad}
    name = next(iter(bad_names))
    good_ranks = [rank for rank in good if _place_name(where, rank, kind)]
    if len(bad_names) > 1 or not name or not good_ranks:
        return None
    if any(_place_name(where, rank, kind) == name for rank in good_ranks):
        return None
    if kind in _KINDS_ABOVE_HOSTS and len({where[rank].host for rank in bad}) < 2:
        return None  # only one host: nothing shows that its leaf or rack matters
    nics = {where[rank].nic for rank in bad}
    nic = next(iter(nics)) if kind == "rail" and len(nics) == 1 else ""
    chance = _chance(kind, [*bad, *good_ranks], bad, where)
    return SharedPlace(kind, name, list(bad), len(good_ranks), round(chance, 4), nic)


def _place_name(where: Mapping[int, Whereabouts], rank: int, kind: PlaceKind) -> str:
    """Return the name of a rank's place of this kind; an empty string if it is unknown."""
    return str(getattr(where.get(rank, Whereabouts()), kind))


def _chance(
    kind: PlaceKind, ranks: Sequence[int], bad: Sequence[int], where: Mapping[int, Whereabouts]
) -> float:
    """Return the probability that as many ranks as the bad ones, drawn at random, are exactly the
    ranks of one place of this kind. If no host has both good and bad ranks, hosts are drawn.

    Of 32 ranks on 4 hosts of 8 GPUs, the 4 ranks on rail 3 are bad: of the 35,960 sets of 4 ranks,
    8 are a rail, so the chance is 0.0002.
    """
    host_of = {rank: _place_name(where, rank, "host") for rank in ranks}
    hosts, of_bad = {*host_of.values()}, {host_of[rank] for rank in bad}
    of_good = {host_of[rank] for rank in {*ranks} - {*bad}}
    draw_hosts = kind in _KINDS_ABOVE_HOSTS and of_bad.isdisjoint(of_good)
    drawn = host_of if draw_hosts else {rank: rank for rank in ranks}
    places = grouped({(_place_name(where, rank, kind), drawn[rank]) for rank in ranks})
    size = len(places[_place_name(where, bad[0], kind)])
    places_of_size = sum(len(each) == size for each in places.values())
    return places_of_size / math.comb(len(hosts) if draw_hosts else len(ranks), size)
