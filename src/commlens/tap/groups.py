"""Process groups and their channels, as the recorder needs them on the hot path.

This is the one module that reads torch's private bookkeeping of groups
(``distributed_c10d._world``). Tried on torch 2.6.0, 2.13.0 and 2.15.0. If it is not as expected,
only the name and size of a group are known.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from commlens.model.ops import matches_by_tag
from commlens.tap import backends
from commlens.tap.hand_made import Membership, hand_made
from commlens.text import format_ranks

_MANY = 1 << 62


class _SettableNumbers:
    """1, 2, 3, ... as a sequence: its iterator can be set back, unlike that of a range (from Python
    3.12 on).
    """

    __getitem__ = range(1, _MANY).__getitem__


def numbers() -> Callable[[], int]:
    """Return a counter that counts 1, 2, 3, ... and that threads may share."""
    return iter(_SettableNumbers()).__next__


def give_back(numbers: Callable[[], int], number: int) -> bool:
    """Give an unused ``number`` back, so that the counter returns it again. False if another thread
    has drawn since.
    """
    drawn: Any = getattr(numbers, "__self__", None)
    if drawn is None:
        return True  # the backend has not counted it
    if drawn.__reduce__()[2] != number:  # how many were drawn
        return False
    drawn.__setstate__(number - 1)
    return True


def _number_of_backend(group: LiveGroup, device: str) -> Callable[[], int]:
    """Return a function that reads the newest collective's number from the backend; -1 from a
    backend that does not count.

    gloo and NCCL count a group's collectives in C++, on all ranks alike. gloo counts messages, too,
    which not all ranks send.
    """
    of_type = torch.device(device)

    def number() -> int:
        process_group = group.ref()
        try:
            return int(process_group._get_backend(of_type)._get_sequence_number_for_group())  # type: ignore[union-attr]
        except Exception:
            return -1

    return number


class LiveChannel:
    """One group on one device type, with its sequence numbers."""

    __slots__ = (
        "backend",
        "backend_number",
        "blob",
        "busy",
        "device",
        "group",
        "matches_tags",
        "next_number",
        "pairs",
        "runs_ahead",
    )

    def __init__(self, group: LiveGroup, device: str) -> None:
        self.group = group
        self.device = device
        self.blob = 0  # position of its description in the side table
        self.busy = 0  # native id of the thread that is issuing on it right now
        self.backend_number = _number_of_backend(group, device)
        self.next_number = numbers()
        self.pairs: dict[tuple[int, str], Callable[[], int]] = {}
        self.backend = group.behaviour(device)
        # Whether a synchronous call returns before the op is done. Then no Work is kept, since it
        # would keep tensors alive.
        self.runs_ahead = self.backend.runs_ahead
        self.matches_tags = matches_by_tag(group.backend(device))

    def pair(self, peer: int, op: str) -> Callable[[], int]:
        """Return the counter of point-to-point ops with one peer in one direction."""
        counter = self.pairs.get((peer, op))
        if counter is None:
            # setdefault: two threads that come here at once must get the same counter
            counter = self.pairs.setdefault((peer, op), numbers())
        return counter

    def describe(self) -> dict[str, Any]:
        """Return the content of the group's blob, as docs/protocol.md defines it."""
        group = self.group
        return {
            "k": "group",
            "name": group.name,
            "desc": group.description,
            "ranks": format_ranks(group.ranks),
            "backend": group.backend(self.device),
            "device": self.device,
            "mesh_dim": group.mesh_dim,
            "inc": group.incarnation,
            "ahead": self.runs_ahead,
            "completion": self.backend.completion,
            "hand": None if group.hand_made is None else group.hand_made._asdict(),
        }


class LiveGroup:
    """A process group of this process.

    Of a group that the program made by hand, ``ranks`` is empty: its global ranks are unknown.
    """

    __slots__ = (
        "channels",
        "description",
        "hand_made",
        "incarnation",
        "mesh_dim",
        "name",
        "ranks",
        "ref",
        "size",
    )

    def __init__(self, process_group: Any, incarnation: int, mesh_dims: dict[str, str]) -> None:
        # A weak reference: a group must die when the user destroys it, and its id may be reused.
        self.ref = weakref.ref(process_group)
        self.name = _name(process_group)
        description = str(getattr(process_group, "group_desc", "") or "")
        # torch's word for none
        self.description = "" if description == "undefined" else description
        self.incarnation = incarnation
        self.ranks, self.hand_made = _members(process_group)
        self.size = int(process_group.size())
        mesh_dim = (
            self.description.removeprefix("mesh_") if self.description.startswith("mesh_") else None
        )
        self.mesh_dim = mesh_dims.get(self.name, None if mesh_dim == "default" else mesh_dim)
        self.channels: dict[str, LiveChannel] = {}

    def channel(self, device: str) -> LiveChannel:
        """Return the group's channel for a device type."""
        found = self.channels.get(device)
        if found is None:
            found = self.channels.setdefault(device, LiveChannel(self, device))
        return found

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks; of a group that was made by hand, the ranks in the group."""
        return self.ranks or tuple(range(self.size))

    def global_rank(self, group_rank: int) -> int:
        """Return the global rank of a member; the same number if it is out of range or nothing maps
        it.
        """
        return self.ranks[group_rank] if 0 <= group_rank < len(self.ranks) else group_rank

    def behaviour(self, device: str) -> backends.Backend:
        """Return how the backend for a device type behaves."""
        process_group = self.ref()
        return (
            backends.Backend(device != "cpu")
            if process_group is None
            else backends.backend_of(process_group, device)
        )

    def backend(self, device: str) -> str:
        """Return the name of the backend for a device type."""
        process_group = self.ref()
        if process_group is None:
            return ""
        try:
            return str(process_group._get_backend(torch.device(device)).name())
        except Exception:
            try:
                return str(process_group.name())
            except Exception:
                return ""


def _name(process_group: Any) -> str:
    """Return torch's name of a group; empty if it has none, which is no error in torch 2.13."""
    try:
        return str(process_group.group_name)
    except RuntimeError:
        return ""


def _members(process_group: Any) -> tuple[tuple[int, ...], Membership | None]:
    """Return the global ranks of a group, or what is known of one that was made by hand."""
    try:
        by_hand = hand_made(process_group, c10d._world)
        if by_hand is not None:
            return (), by_hand
        mapping = c10d._world.pg_group_ranks[process_group]
        return tuple(rank for rank, _ in sorted(mapping.items(), key=lambda item: item[1])), None
    except Exception:
        return tuple(range(process_group.size())), None


def is_coalescing(process_group: Any) -> bool:
    """Return whether the program collects collectives of this group, to issue them together."""
    return process_group in c10d._world.pg_coalesce_state


def unique_name(process_group: Any) -> str:
    """Return a name that all ranks give this group and no other one; "" for the default group."""
    if process_group is c10d._world.default_pg:
        return ""
    group = LiveGroup(process_group, 0, {})
    return f"{group.description} ({group.name})" if group.description else group.name


def global_ranks(process_group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group by rank in the group; empty if they are unknown."""
    return _members(process_group)[0]


def memberships() -> list[tuple[int, ...]]:
    """Return the global ranks of each group that this rank is in, ascending, as far as they are
    known.
    """
    groups = map(global_ranks, list(c10d._world.pg_map))
    return [tuple(sorted(ranks)) for ranks in groups if ranks]


def named_dims(mesh: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of the group and that of the dimension, for each dimension of a DeviceMesh
    that this rank is in. A dimension that spans the world uses the default group, whose description
    does not name it.
    """
    names = mesh.mesh_dim_names
    if names and mesh.mesh.dim() == len(names) and mesh.get_coordinate() is not None:
        for dim, name in enumerate(names):
            yield str(mesh.get_group(dim).group_name), str(name)


class Groups:
    """The groups seen so far."""

    def __init__(self) -> None:
        self.by_name: dict[str, LiveGroup] = {}
        self._by_id: dict[int, LiveGroup] = {}
        self._lock = threading.Lock()
        self.incarnation = -1  # the first default group makes it 0
        self.mesh_dims: dict[str, str] = {}

    def find(self, process_group: Any) -> LiveGroup:
        """Return the group of a ProcessGroup object."""
        # The id may be a former group's. The weak reference shows whether the object is still the
        # same.
        group = self._by_id.get(id(process_group))
        if group is not None and group.ref() is process_group:
            return group
        with self._lock:
            group = self._by_id.get(id(process_group))
            if group is None or group.ref() is not process_group:
                group = LiveGroup(process_group, max(self.incarnation, 0), self.mesh_dims)
                self.by_name[group.name] = self._by_id[id(process_group)] = group
        return group

    def started_again(self) -> None:
        """Count a new default group, which starts the groups' names again. Former groups that are
        still alive keep their incarnation.
        """
        self.incarnation += 1
        self.by_name = {}
        self._by_id = {
            identity: group for identity, group in self._by_id.items() if group.ref() is not None
        }
        self.mesh_dims = {}

    def reconfigured(self, process_group: Any) -> None:
        """Forget a group that got other members: its next op is the first one of another group."""
        with self._lock:
            group = self._by_id.pop(id(process_group), None)
            if group is not None:
                self.by_name.pop(group.name, None)

    def before_destroy(self) -> None:
        """Look up all groups while their incarnation is the present one: a program may go on to use
        a group that it has destroyed.
        """
        for process_group in list(c10d._world.pg_map):
            self.find(process_group)

    def name_mesh_dim(self, group_name: str, mesh_dim: str) -> None:
        """Name a group by its dimension in a DeviceMesh. A group that spans the world exists before
        the mesh that names it.
        """
        self.mesh_dims[group_name] = mesh_dim
        group = self.by_name.get(group_name)
        if group is not None and group.mesh_dim != mesh_dim:
            group.mesh_dim = mesh_dim
            for channel in group.channels.values():
                self.renamed(channel)

    def renamed(self, channel: LiveChannel) -> None:
        """Describe a channel anew: its group got another name."""
        channel.blob = 0
