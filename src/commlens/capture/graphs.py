"""The collectives in CUDA graphs: captured once, and replayed without passing the tap."""

from __future__ import annotations

import collections
import weakref
from typing import Any

from commlens.blackbox import layout as L
from commlens.blackbox.writer import BoxWriter
from commlens.model.ops import GRAPH_REPLAY
from commlens.tap.groups import LiveChannel, numbers

DEVICE = "graph"
"""The device type of a group's channel on which replays are counted."""


class Graphs:
    """The groups that each graph communicates in, and the records of its replays."""

    def __init__(self, writer: BoxWriter) -> None:
        self._writer = writer
        self._captured: collections.Counter[LiveChannel] = collections.Counter()
        self._channels: weakref.WeakKeyDictionary[Any, dict[LiveChannel, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._numbers: dict[LiveChannel, Any] = {}
        self._blobs: dict[tuple[LiveChannel, int], tuple[int, int]] = {}

    def captured(self, channel: LiveChannel) -> None:
        """Note that a collective was captured."""
        self._captured[channel] += 1

    def ends(self, graph: Any) -> None:
        """Note that the capture of a graph has ended: it contains what was captured since the last
        one.
        """
        if self._captured:
            self._channels[graph] = dict(self._captured)
            self._captured.clear()

    def replayed(self, graph: Any, now: int, thread: int, step: int, stack: int) -> None:
        """Write a record for each group in which a graph communicates."""
        for channel, count in self._channels.get(graph, {}).items():
            if channel not in self._numbers:
                self._numbers[channel] = numbers()
            group, asked = self._described(channel, count)
            record = L.Record(
                self._writer.next_index(),
                now,
                group,
                asked,
                stack,
                sequence_number=self._numbers[channel](),
                step=step,
                thread=thread,
                flags=L.FLAG_ENTERED,
            )
            offset = self._writer.announce(record)
            self._writer.mark(offset, L.RETURNED, record.record_index, now)
            self._writer.mark_outcome(offset, record.record_index, L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN)

    def _described(self, channel: LiveChannel, count: int) -> tuple[int, int]:
        """Return the positions of the blobs of the group and of a replay of so many collectives."""
        known = self._blobs.get((channel, count), (0, 0))
        if min(known) <= self._writer.side_floor:
            asked = {
                "k": "asked",
                "op": GRAPH_REPLAY,
                "dop": f"{GRAPH_REPLAY} of {count}",
                "in": [],
                "out": [],
            }
            group = {**channel.describe(), "device": DEVICE, "ahead": True}
            known = self._blobs[channel, count] = (
                self._writer.add_blob(group),
                self._writer.add_blob(asked),
            )
        return known
