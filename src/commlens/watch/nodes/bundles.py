"""The beats of 32 neighbouring nodes as one value, so that the node that reports for a thousand
nodes reads a few dozen values.

Slots 0 to 31 are one group, 32 to 63 the next. The node with the lowest slot of a group reads the
beats of the others, and stores all of them, compressed, under ``bundle/GROUP``. If it is lost or
slow, its bundle stops changing, and the node that reports reads the beats of the group itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from commlens.model.grouping import grouped
from commlens.watch.nodes.beat import inflated, key
from commlens.watch.nodes.meeting_places import Client, stored

GROUP: Final = 32  # slots
BUNDLES_ABOVE: Final = 128
"""With so many nodes or fewer, the node that reports reads each value."""
STALE_S: Final = 2.0
"""With nodes that look once a second, a bundle that has not changed for so long is not read."""
_FEW: Final = 4  # with fewer beats wanted of a group, a bundle costs more than these


class _Bundle(msgspec.Struct, array_like=True):
    number: int  # of the bundles that the node has stored, this one included
    values: dict[int, bytes]  # by slot


class _Seen(NamedTuple):
    number: int  # of the bundle
    changed: float  # time.monotonic()


def bundled_by(slot: int, count: int) -> list[int]:
    """Return the other slots whose values the node with this slot stores with its own.

    Args:
        slot: of the node.
        count: how many nodes ever drew a number.
    """
    if count <= BUNDLES_ABOVE or slot % GROUP:
        return []
    return list(range(slot + 1, min(slot + GROUP, count)))


def store_bundle(client: Client, slot: int, own: bytes, others: Iterable[int], number: int) -> None:
    """Read the values of other nodes, and store them with this node's own.

    Args:
        client: of the meeting place.
        slot: of this node.
        own: its value.
        others: their slots.
        number: of the bundle; it rises.
    """
    values = {slot: own, **stored(client, "node", others)}
    packed = msgspec.msgpack.encode(_Bundle(number, values))
    client.set(key("bundle", slot // GROUP), zlib.compress(packed, 6))


class Bundles:
    """Reads the values of many nodes."""

    def __init__(self) -> None:
        self.stale_s = STALE_S
        """A bundle that has not changed for so long is not read."""
        self._seen: dict[int, _Seen] = {}  # by group

    def read(
        self, client: Client, slots: Iterable[int], now: float, direct: Collection[int] = ()
    ) -> list[bytes]:
        """Return the values of those of these nodes that have stored one.

        Args:
            client: of the meeting place.
            slots: of the nodes.
            now: ``time.monotonic()``.
            direct: slots whose bundled value would come too late, because the node has a request to
                answer: their own values are read.
        """
        wanted = grouped((slot // GROUP, slot) for slot in slots)
        groups = [group for group, some in wanted.items() if len(some) >= _FEW]
        found: dict[int, bytes] = {}
        for group, content in stored(client, "bundle", groups).items():
            values = self._fresh(group, content, now)
            found |= {
                slot: values[slot]
                for slot in wanted[group]
                if slot in values and slot not in direct
            }
        left = [slot for some in wanted.values() for slot in some if slot not in found]
        return [*found.values(), *stored(client, "node", left).values()]

    def _fresh(self, group: int, content: bytes, now: float) -> Mapping[int, bytes]:
        """Return the values of a bundle; none if it is damaged, or has not changed for long."""
        bundle = inflated(content, _Bundle)
        if bundle is None:
            return {}
        seen = self._seen.get(group)
        if seen is None or seen.number != bundle.number:
            self._seen[group] = _Seen(bundle.number, now)
        elif now - seen.changed > self.stale_s:
            return {}
        return bundle.values
