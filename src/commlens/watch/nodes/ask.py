"""What the watchers of a job's other nodes say about their ranks, in the job's store, asked without
taking part.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from commlens.dumps.clocks import correct_clocks
from commlens.model.ranklog import RankLog
from commlens.text import duration, ranks_and_verb, ranks_phrase
from commlens.watch.nodes import remote_evidence
from commlens.watch.nodes.beat import Beat, decoded, key
from commlens.watch.nodes.looks import LOOK, Look
from commlens.watch.nodes.meeting_places import Client, Store, places
from commlens.watch.roster import Member, Roster
from commlens.watch.snapshot import one_run

_MOST: Final = 4096  # values that are read, those of the nodes that came last
# a watcher at rest asks the store once a second, and looks for less than one
_ANSWERS_S: Final = 3.0
_POLL_S: Final = 0.1
_WAITS_S: Final = 2.0  # a shorter wait is part of a step
_PATIENCE_S: Final = 8.0  # with a store that is busy: it looks up each client's name in DNS


class OtherNodes(NamedTuple):
    """What is known of the other nodes of a job."""

    logs: Sequence[RankLog] = ()  # of the ranks whose node answered
    lines: Sequence[str] = ()  # about the nodes that did not, in sentences

    def join(self, logs: Sequence[RankLog]) -> list[RankLog]:
        """Return this node's logs and the others', with all clocks as on one node."""
        joined = sorted(one_run([*logs, *self.logs]), key=lambda log: log.rank)
        correct_clocks(joined)
        return joined


class Said(NamedTuple):
    """What the nodes' watchers have said in the store."""

    beats: Sequence[Beat] = ()  # their last values, this node's included
    # the answers of those that looked at their ranks, by slot
    looks: Mapping[int, Look] = MappingProxyType({})
    problem: str = ""  # a sentence: why the store could not be asked


def has_other_nodes(logs: Sequence[RankLog]) -> bool:
    """Return whether the job has more ranks than these of this node."""
    return any(log.world_size > len(logs) for log in logs)


def look_at_other_nodes(job_dir: Path) -> OtherNodes:
    """Ask the other nodes' watchers what their ranks are doing. Takes about a second, three if a
    node does not answer, at most twelve.

    Args:
        job_dir: the folder of the job's black boxes on this node.
    """
    with contextlib.closing(Roster([job_dir])) as roster:
        roster.refresh()
        roster.poll()
        members = roster.current()
        here = [member.rank for member in members]
        said = read_beats(members, looks=True)
    answered = [
        remote_evidence.unpack(said.looks[beat.slot].evidence, beat.host)
        for beat in said.beats
        if beat.slot in said.looks
    ]
    lines = [problem for node in answered for problem in node.problems] + (
        [said.problem] if said.problem else []
    )
    lines += other_node_lines([beat for beat in said.beats if beat.slot not in said.looks], here)
    return OtherNodes(
        [log for node in answered for log in node.logs if log.rank not in here], lines
    )


def read_beats(members: Sequence[Member], *, looks: bool = False) -> Said:
    """Return what the nodes' watchers have said; nothing if there is one node, or no watcher, or no
    store.

    Args:
        members: this node's ranks.
        looks: ask the other nodes to look at their ranks.
    """
    store = next((place for place in places(members, None) if isinstance(place, Store)), None)
    found: dict[int, Look] = {}
    beats: list[Beat] = []
    if store is None:
        return Said()
    problem = ""
    try:
        with contextlib.closing(store.open(lambda waited_s: waited_s < _PATIENCE_S)) as client:
            if not client.existing([key("nodes")]):
                return Said()
            counter = client.add(key("nodes"), LOOK if looks else 0)
            beats = _newest_beats(client, counter % LOOK)
            problem = _unread(beats, counter % LOOK)
            here = {member.rank for member in members}
            asked = {
                beat.slot
                for beat in beats
                if looks and not beat.finished and not set(beat.ranks) & here
            }
            end = time.monotonic() + _ANSWERS_S
            while asked - found.keys() and time.monotonic() < end:
                time.sleep(_POLL_S)
                found |= _answers(client, asked - found.keys(), counter // LOOK)
    except OSError as error:  # what was read so far is returned
        problem = f"Not all is known of the other nodes: {store} {_why(error)}."
    return Said(beats, found, problem)


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"has not answered for {_PATIENCE_S:.0f} s"
    if isinstance(error, ConnectionRefusedError):
        return "refuses connections"
    return f"cannot be asked: {error}"


def _newest_beats(client: Client, count: int) -> list[Beat]:
    slots = range(max(0, count - _MOST), count)
    values = client.get(client.existing([key("node", slot) for slot in slots]))
    beats: list[Beat] = []
    for beat in sorted(filter(None, map(decoded, values)), key=lambda one: one.slot):
        # A node draws a new slot when its workers are restarted.
        beats = [*(former for former in beats if not set(former.ranks) & set(beat.ranks)), beat]
    return beats


def _unread(beats: Sequence[Beat], count: int) -> str:
    """Return a sentence if the values of ranks were not read, because there are too many nodes."""
    size = max((beat.world_size for beat in beats), default=0)
    missing = set(range(size)).difference(*(beat.ranks for beat in beats))
    if count <= _MOST or not missing:
        return ""
    return (
        f"Nothing is known of {ranks_phrase(missing)}: only the {_MOST:,} nodes that came last were"
        " asked."
    )


def _answers(client: Client, slots: Iterable[int], number: int) -> dict[int, Look]:
    there = client.existing([key("look", slot) for slot in sorted(slots)])
    found: dict[int, Look] = {}
    for name, value in zip(there, client.get(there), strict=True):
        with contextlib.suppress(msgspec.DecodeError):
            look = msgspec.msgpack.decode(value, type=Look)
            if look.number >= number:
                found[int(name.rpartition("/")[2])] = look
    return found


def other_node_lines(beats: Sequence[Beat], here: Sequence[int]) -> list[str]:
    """Return one sentence for each node other than this one: its ranks, how long the longest of
    them has waited, which of them died.

    Args:
        beats: of all nodes.
        here: this node's ranks.
    """
    lines: list[str] = []
    for beat in sorted(beats, key=lambda one: one.order):
        if not beat.ranks or set(beat.ranks) & set(here):
            continue
        if beat.dead:
            state = ranks_and_verb(beat.dead, "has died", "have died")
        elif beat.finished:
            state = "finished"
        elif beat.wait_s >= _WAITS_S:
            state = f"the longest wait is {duration(beat.wait_s * 1e9)}"
        else:
            state = "no rank waits for long"
        lines.append(f"{ranks_phrase(beat.ranks)} on {beat.host}: {state}.")
    return lines
