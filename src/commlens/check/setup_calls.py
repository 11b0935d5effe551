"""The calls of a rank that make and destroy groups, meshes and stores: torch's functions are
wrapped, and each call becomes an event.

``dist.new_group([0, 1])``, the second group of the program, becomes ``Setup(new_group, number 2)``
of a channel of its own: the group's members must make it alike. What a call makes inside, such as
the groups of a mesh, counts too; what ``init_process_group`` and ``split_group`` make does not.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as c10d

from commlens.check.notes import RankNotes
from commlens.check.sequence import Leave, Setup, StoreCall
from commlens.launchers import AGENT_STORE
from commlens.model.collective import (
    SETUP,
    STORE,
    Channel,
    Collective,
    CollectiveArgs,
    ProcessGroup,
    State,
)
from commlens.tap.groups import Groups, named_dims
from commlens.tap.hand_made import note_by_hand
from commlens.tap.made_groups import MadeGroups, ManyGroups
from commlens.tracing.patches import Patches
from commlens.tracing.preview.store import CHOSEN_PORT
from commlens.tracing.preview.world import is_spawned


class SetupCalls:
    """Notes one rank's calls."""

    def __init__(self, notes: RankNotes, groups: Groups) -> None:
        self.many_groups: list[ManyGroups] = []
        """Groups that piled up, at the moment when the default group was destroyed."""
        self._notes = notes
        self._groups = groups
        self._made = MadeGroups()
        self._is_inside = False  # init_process_group and split_group call new_group inside
        self._inits = self._splits = self._meshes = 0  # calls so far
        self._mesh: str | None = None  # the mesh that init_device_mesh makes now
        self._mesh_device = ""  # of the newest mesh

    def attach(self, patches: Patches) -> None:
        """Wrap torch's functions."""
        patches.wrap_named(c10d, "init_process_group", self._init)
        patches.wrap_named(c10d, "_new_process_group_helper", self._new_group)
        patches.wrap_named(c10d, "split_group", self._split)
        patches.wrap(c10d, "destroy_process_group", self._destroy)
        patches.wrap_named(device_mesh, "init_device_mesh", self._init_mesh)
        patches.wrap(device_mesh.DeviceMesh, "__init__", self._name_groups)

    # --- groups

    def _init(self, original: Any, given: dict[str, Any]) -> Any:
        """Record ``init_process_group``."""
        self._inits += 1
        self._groups.started_again()
        self._note_address(str(given.get("init_method") or ""))
        sequence, asked = self._notes.sequence, given.get("backend")
        default = "nccl" if self._mesh_device == "cuda" else ""
        sequence.backend = str(asked).lower() if asked is not None else default
        ranks = range(sequence.world_size)
        self._setup("init_process_group", "default_pg", ranks, self._inits)
        with self._inside():
            result = original(**given)
        sequence.left = False
        self._note_world(given)
        return result

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Leave out the groups that torch makes inside of a call that was recorded."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _note_world(self, given: dict[str, Any]) -> None:
        """Note that the program asks for another world size or rank than the check runs."""
        size, rank = self._notes.sequence.world_size, self._notes.sequence.rank
        asked_size, asked_rank = _asked(given, "world_size"), _asked(given, "rank")
        if asked_size not in (None, size):
            words = f"a world of {asked_size} ranks, but this check runs {size}"
            self._notes.note_unseen("world", words)
        elif asked_rank not in (None, rank):
            words = f"rank {asked_rank}, but this check runs another rank there"
            self._notes.note_unseen("world", words)

    def _note_address(self, address: str) -> None:
        """Note an address with another port than the launcher's: under torchrun, which makes the
        store itself, no rank listens there. Two cases are fine: the program starts its own ranks,
        or it has set the variable by which torch lets rank 0 make the store.
        """
        port, agent = os.environ.get("MASTER_PORT", ""), os.environ.get(AGENT_STORE, "True")
        is_elsewhere = address.startswith("tcp://") and address.rpartition(":")[2] != port
        if is_elsewhere and agent == "True" and not is_spawned():
            self._notes.note_unseen("address", address)

    def _new_group(self, original: Any, given: dict[str, Any]) -> Any:
        """Record the making of a group. torch calls this for the default group, too, before it is
        initialized: ``_init`` records that one.
        """
        if not c10d.is_initialized():
            return original(**given)
        name, ranks = str(given["group_name"]), given["global_ranks_in_group"] or ()
        if not ranks:
            # The program calls torch's private function itself: torch's own calls name the ranks.
            made = original(**given)
            note_by_hand(made[0])
            return made
        description = str(given.get("group_desc") or "")
        number = int(name) if name.isdecimal() else 1  # torch counts the groups in their names
        self._setup(
            "new_group",
            name,
            ranks,
            max(number, 1),
            "" if description == "undefined" else description,
            self._mesh,
        )
        self._made.note(self._notes.stack(), ranks)
        return original(**given)

    def _split(self, original: Any, given: dict[str, Any]) -> Any:
        """Record ``split_group``, which all ranks of the parent group must call alike."""
        self._splits += 1
        label = f"split_ranks={given.get('split_ranks')}"[:200]
        ranks = c10d.get_process_group_ranks(given.get("parent_pg") or c10d._get_default_group())
        self._setup("split_group", "split", ranks, self._splits, label=label)
        with self._inside():
            return original(**given)

    def _init_mesh(self, original: Any, given: dict[str, Any]) -> Any:
        """Record ``init_device_mesh``. The groups that it makes carry its label."""
        names = given.get("mesh_dim_names")
        named = f" named {', '.join(map(str, names))}" if names else ""
        self._mesh = f"mesh {tuple(given['mesh_shape'])}{named}"
        self._mesh_device = str(given["device_type"])
        if c10d.is_initialized():
            self._meshes += 1
            ranks = range(self._notes.sequence.world_size)
            self._setup("init_device_mesh", "mesh", ranks, self._meshes, label=self._mesh)
        try:
            return original(**given)
        finally:
            self._mesh = None

    def _name_groups(self, original: Any, mesh: Any, *args: Any, **kwargs: Any) -> None:
        """Name the groups of a mesh after its dimensions."""
        original(mesh, *args, **kwargs)
        with contextlib.suppress(Exception):  # a sub-mesh without groups of its own
            for group_name, dim in named_dims(mesh):
                self._groups.name_mesh_dim(group_name, dim)

    def _destroy(self, original: Any, group: Any = None) -> Any:
        """Record ``destroy_process_group``, of one group or of all."""
        is_last = group is None or group is c10d._world.default_pg
        self._notes.add(Leave("" if is_last else str(getattr(group, "group_name", ""))))
        self._groups.before_destroy()
        if is_last:
            self.many_groups += self._made.many()
            self._notes.sequence.left = True
        return original(group)

    def _setup(
        self,
        op: str,
        name: str,
        ranks: Sequence[int],
        number: int,
        description: str = "",
        label: str | None = None,
    ) -> None:
        """Record a call that makes a group, which its ranks must make alike, as a collective of a
        channel of its own; not a call inside another one.

        Args:
            op: the function.
            name: of the group, or of what else counts these calls.
            ranks: that must call it.
            number: counts such calls, from 1.
            description: of the group.
            label: tells two calls of one function apart, such as the shape of a mesh.
        """
        if not self._is_inside:
            members = tuple(int(rank) for rank in ranks)
            group = ProcessGroup(name, members, description, incarnation=self._incarnation)
            self._notes.add(Setup(self._call(op, Channel(group, SETUP), number, label)))

    @property
    def _incarnation(self) -> int:
        """How many times the program has initialised torch.distributed before."""
        return max(self._inits - 1, 0)

    def _call(self, op: str, channel: Channel, number: int, label: str | None) -> Collective:
        return Collective(
            0,
            channel,
            number,
            CollectiveArgs(op, op),
            State.ISSUED,
            0,
            stack=self._notes.stack(),
            issue_thread=threading.get_native_id(),
            module=label,
        )

    # --- stores

    def note_store(self, host: str, port: int) -> None:
        """Note a store that the program makes at another port than the launcher's: only a real run
        shows whether that port is free. Two cases are fine: the program starts its own ranks, or
        the system chooses the port.
        """
        known = (str(CHOSEN_PORT), os.environ.get("MASTER_PORT", ""))
        if str(port) not in known and not is_spawned():
            self._notes.note_unseen("store", f"{host}:{port}")

    def store_call(self, op: str, keys: tuple[str, ...]) -> None:
        """Note a call of the job's store."""
        ranks = () if op == "store.set" else tuple(range(self._notes.sequence.world_size))
        group = ProcessGroup(keys[0], ranks, incarnation=self._incarnation)
        label = f"and {len(keys) - 1} more" if len(keys) > 1 else None
        self._notes.add(StoreCall(self._call(op, Channel(group, STORE), 1, label), keys))


def _asked(given: dict[str, Any], name: str) -> int | None:
    """Return the world size or rank that a program gives to torch; None if it gives no number."""
    is_left_open = given.get(name) in (None, -1)
    asked = str(os.environ.get(name.upper(), "") if is_left_open else given[name])
    return int(asked) if asked.isdecimal() else None
