"""What the watchers of a job's other nodes publish in the job's store, read without taking part."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from commlens.text import duration, ranks_and_verb, ranks_phrase
from commlens.watch.beat import Beat, decoded
from commlens.watch.meeting_places import Store, places
from commlens.watch.nodes import key
from commlens.watch.roster import Member, Roster
from commlens.watch.store_client import StoreClient

_MOST: Final = 4096  # nodes
_WAITS_S: Final = 2.0  # a shorter wait is part of a step


def read_beats(members: Sequence[Member], *, timeout_s: float = 1.0) -> list[Beat]:
    """Return the last values of the nodes' watchers, this node's included; none if there is one node, or no watcher, or no store.

    Args:
        members: this node's ranks.
        timeout_s: for each answer of the store.
    """
    store = next((place for place in places(members, None) if isinstance(place, Store)), None)
    if store is None:
        return []
    try:
        client = StoreClient(store.host, store.port, timeout_s=timeout_s)
    except OSError:
        return []
    try:
        if not client.existing([key("nodes")]):
            return []
        count = min(_MOST, client.add(key("nodes"), 0))
        values = client.get(client.existing([key("node", slot) for slot in range(count)]))
    except (OSError, EOFError, ValueError):
        return []
    finally:
        client.close()
    beats: list[Beat] = []
    for beat in sorted(filter(None, map(decoded, values)), key=lambda one: one.slot):
        # A node draws a new slot when its workers are restarted.
        beats = [*(former for former in beats if not set(former.ranks) & set(beat.ranks)), beat]
    return beats


def lines_of_other_nodes(job_dir: Path) -> list[str]:
    """Return what :func:`other_node_lines` says about a job on this node, given its folder of black boxes."""
    with contextlib.closing(Roster([job_dir])) as roster:
        roster.refresh()
        roster.poll()
        members = roster.current()
        return other_node_lines(read_beats(members), [member.rank for member in members])


def other_node_lines(beats: Sequence[Beat], here: Sequence[int]) -> list[str]:
    """Return one sentence for each node other than this one: its ranks, how long the longest of them has waited, which of them died.

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
