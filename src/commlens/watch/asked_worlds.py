"""The worlds on other nodes that share a group made by hand with a job here, for commands: their
watchers are asked where they meet.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from commlens.config import AUTO
from commlens.dumps.clocks import correct_clocks
from commlens.model.ranklog import RankLog
from commlens.processes import process
from commlens.watch.hand_made_groups import OFF, by_hand, has_name, name_of, places_to_meet
from commlens.watch.meeting_worlds import without_replaced
from commlens.watch.nodes.beat import LAST, key
from commlens.watch.nodes.meeting_places import Place
from commlens.watch.nodes.remote_evidence import HEAD_RECORDS, unpack_world
from commlens.watch.other_nodes import (
    AskedNodes,
    OtherNodes,
    asked_in,
    has_other_nodes,
    look_at_other_nodes,
    reason,
)
from commlens.watch.other_worlds import join_runs, logs_of_other_worlds, with_near_processes

_ANSWERS_S: Final = 7.0  # worlds meet less often than nodes do, and first ask their own nodes


class Everywhere(NamedTuple):
    """What is known of a job, its other nodes, and the worlds that share a group with it."""

    logs: list[RankLog]
    elsewhere: OtherNodes
    others_here: Mapping[Path, Sequence[RankLog]]  # the logs of other worlds here, by folder


def look_everywhere(job_dir: Path, logs: Sequence[RankLog], where: str) -> Everywhere:
    """Ask the other nodes of a job, then the worlds on other nodes that share a group with it.

    Args:
        job_dir: the folder of the job's black boxes on this node.
        logs: of its ranks here.
        where: the setting ``meet``.
    """
    nodes = look_at_other_nodes(job_dir) if has_other_nodes(logs) else OtherNodes()
    logs = nodes.join(logs)
    others = logs_of_other_worlds(logs, [job_dir])
    found = ask_worlds(nodes, {job_dir: logs, **others}, where)
    joined = join_everywhere(logs, others.values(), found)
    return Everywhere(with_near_processes(joined), found, others)


def join_everywhere(
    logs: Sequence[RankLog], others_here: Iterable[Sequence[RankLog]], elsewhere: OtherNodes
) -> list[RankLog]:
    """Return the logs of a job and of the worlds that share a group with it, as one job.

    Args:
        logs: of all the job's nodes.
        others_here: the logs of other worlds on this node.
        elsewhere: the answers of other nodes.
    """
    joined = join_runs([logs, *others_here], elsewhere.worlds)
    if elsewhere.worlds:
        correct_clocks(joined)
    return joined


def ask_worlds(nodes: OtherNodes, runs: Mapping[Path, Sequence[RankLog]], where: str) -> OtherNodes:
    """Ask the worlds on other nodes that share a group with one of these. Costs nothing if all
    members of their groups are among them.

    Args:
        nodes: the answers of the job's own nodes, to which those of the worlds are added.
        runs: the logs of each world that is known here, by the folder of its black boxes.
        where: the setting ``meet``; if it is ``auto``, that of a rank counts.
    """
    logs, host = [*chain.from_iterable(runs.values())], os.uname().nodename
    groups = by_hand(logs)
    if groups and where == AUTO:
        environs = (process.environment(log.pid) for log in logs if log.host == host)
        given = (environ.get("COMMLENS_MEET", "") for environ in environs)
        where = next(filter(None, given), AUTO)
    names = {name_of(host, folder) for folder in runs}
    for place in places_to_meet(groups, where, host) if where != OFF else ():
        worlds, lines = _ask(place, names)
        nodes = nodes._replace(worlds=[*nodes.worlds, *worlds], lines=[*nodes.lines, *lines])
    return nodes


def _ask(place: Place, names: set[int]) -> tuple[list[list[RankLog]], list[str]]:
    """Return the logs of the worlds that meet in a place, without those with these names, and what
    is missing, in sentences.
    """
    try:
        with asked_in(place) as client:
            nodes = AskedNodes(client, [], _ANSWERS_S)
            others = [beat for beat in nodes.beats if not has_name(beat, names)]
            live = {beat.slot: beat for beat in others if not beat.finished}
            found, silent = nodes.gather(
                lambda slot, content: unpack_world(content, nodes.host(slot)),
                of=sorted(live),
                records=HEAD_RECORDS,
            )
            left = [b.slot for b in others if b.finished and b.answered == LAST.id]
            last = client.get([key("evidence", slot) for slot in left])
    except OSError as error:
        return [], [
            "The worlds on other nodes that share a group made by hand with this one cannot be"
            f" asked: {place} {reason(error)}. Run the same command there."
        ]
    answers = zip(left, last, strict=True)
    found |= {slot: unpack_world(content, nodes.host(slot)) for slot, content in answers}
    found = without_replaced(found, live.keys())
    return [logs for logs, _ in found.values()], [
        *chain.from_iterable(problems for _, problems in found.values()),
        *(
            f"A world that {beat.host} reports for may share a group made by hand with this one,"
            f" and did not answer: run the same command on {beat.host}."
            for beat in silent
        ),
    ]
