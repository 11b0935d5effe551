"""Groups that the program makes by hand: by ``ProcessGroup(store, rank, size)``, or by torch's
helper behind ``new_group``.

Nothing maps the members of such a group to global ranks. What the program itself writes into
``distributed_c10d._world.pg_group_ranks`` is no such map: vLLM writes nothing, SGLang writes
``{0: 0, 1: 1, ...}``. All members know the group by its store, with its prefixes, and its size:
that of ``ProcessGroup(PrefixStore("weights", TCPStore("n1", 29600)), 0, 3)`` is
``Membership(member=0, size=3, store="n1:29600/weights", ordinal=0)``.
"""

from __future__ import annotations

import socket
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

from commlens.model.limits import LOOPBACK

_prefixes: MutableMapping[Any, str] = weakref.WeakKeyDictionary()
"""PrefixStore -> its address with all its prefixes, which torch does not tell later."""
_made: MutableMapping[Any, tuple[str, int]] = weakref.WeakKeyDictionary()
"""Group -> its store's name and its ordinal, as in `Membership`."""
_stores: MutableMapping[Any, Any] = weakref.WeakKeyDictionary()
"""Group -> its store, for a torch whose groups do not tell it (2.6)."""
_by_hand: MutableMapping[Any, bool] = weakref.WeakKeyDictionary()
"""Groups for which the program called torch's helper itself."""
_generations: MutableMapping[Any, str] = weakref.WeakKeyDictionary()
"""Group that got other members while it lived -> a name of its members that all of them know."""
_counts: Counter[tuple[str, int]] = Counter()
"""The groups that this process has made, by the store's name and the group's size."""


class Membership(NamedTuple):
    """The facts by which the members of a group that was made by hand find each other."""

    member: int  # this process's rank in the group
    size: int
    store: str  # "localhost:29600/weight_sync": address or path, and prefixes
    ordinal: int  # groups of this size that the process had made with this store before


def note_prefix(store: Any, inner: Any, prefix: str) -> None:
    """Note that ``store`` is a PrefixStore around another store."""
    _prefixes[store] = f"{store_name(inner)}/{prefix.strip('/')}"


def note_backend(process_group: Any) -> None:
    """Note that a group gets a backend, which makes it usable: its store is known now."""
    if process_group not in _made:
        store = store_name(group_store(process_group))
        made = count_made(process_group.rank(), process_group.size(), store)
        _made[process_group] = (store, made.ordinal)


def membership(member: int, size: int, store: Any, name: str = "") -> Membership:
    """Return what is known of a group before it is made.

    Args:
        member: this process's rank in the group.
        size: the number of members.
        store: where they meet.
        name: the group's name, if torch's helper makes it: it adds the name to the prefixes.
    """
    store = store_name(store) + (f"/{name}" if name else "")
    return Membership(member, size, store, _counts[store, size])


def count_made(member: int, size: int, store: str) -> Membership:
    """Count a group that a library makes with a meeting point of its own, and return it."""
    ordinal = _counts[store, size]
    _counts[store, size] += 1
    return Membership(member, size, store, ordinal)


def note_by_hand(process_group: Any) -> None:
    """Note that the program itself called torch's helper to make a group."""
    _by_hand[process_group] = True


def note_generation(process_group: Any, uuid: int) -> None:
    """Note that ``reconfigure`` gave a group other members, which torch's maps do not tell."""
    _generations[process_group] = f"{process_group.group_name}/generation-{uuid}"


def hand_made(process_group: Any, world: Any) -> Membership | None:
    """Return what is known of a group that was made by hand, or that has other members than when
    torch made it; None for any other group that torch made.

    Args:
        process_group: the group.
        world: ``distributed_c10d._world``.
    """
    member, size = process_group.rank(), process_group.size()
    if (generation := _generations.get(process_group)) is not None:
        return Membership(member, size, generation, 0)
    if process_group is world.default_pg or _torch_maps(process_group, member, world):
        return None
    store, ordinal = _made.get(process_group) or ("", 0)
    return Membership(member, size, store, ordinal)


def _torch_maps(process_group: Any, member: int, world: Any) -> bool:
    """Tell whether torch's map from global ranks to the group's members can be true. A program
    that makes a group by hand may have put there a map that is none.
    """
    member_of_rank = world.pg_group_ranks.get(process_group)
    if member_of_rank is None or process_group in _by_hand:
        return False
    default = world.default_pg
    return default is None or (
        member_of_rank.get(default.rank(), member) == member
        and len(member_of_rank) <= default.size()
    )


def group_store(process_group: Any) -> Any:
    """Return a group's store; None if it is not known."""
    if hasattr(process_group, "get_group_store"):
        return process_group.get_group_store()
    return _stores.get(process_group)


def innermost_store(store: Any) -> Any:
    """Return the store that is inside of a store's prefixes."""
    inner = getattr(store, "underlying_store", None)
    return store if inner is None else innermost_store(inner)


def store_name(store: Any) -> str:
    """Return a store's address or path with its prefixes, alike on all processes that use it; empty
    if it has neither.

    A loopback address and this host's own name are ``localhost``.
    """
    known = None if store is None else _prefixes.get(store)
    if known is not None:
        return known
    inner = getattr(store, "underlying_store", None)
    if inner is not None:
        return store_name(inner)
    host, port, path = (getattr(store, name, "") for name in ("host", "port", "path"))
    return store_address(host, port) if host and port else str(path)


def store_address(host: Any, port: Any) -> str:
    """Return the address of a store, alike on all processes that use it."""
    is_here = host in LOOPBACK or host == socket.gethostname()
    return f"{'localhost' if is_here else host}:{port}"


def hook_stores_and_groups(registered: Callable[[Any], None]) -> None:
    """Note the prefixes of stores and the stores of groups from now on.

    Args:
        registered: called with each group that has got a backend.
    """
    import torch.distributed as dist

    make_prefix = dist.PrefixStore.__init__
    register = dist.ProcessGroup._register_backend

    def init_prefix_store(self: Any, *args: Any, **kwargs: Any) -> None:
        make_prefix(self, *args, **kwargs)
        given = {**dict(zip(("prefix", "store"), args, strict=False)), **kwargs}
        try:
            note_prefix(self, given["store"], given["prefix"])
        except Exception:  # another torch: the group is known by its address alone
            return

    def register_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = register(self, *args, **kwargs)
        registered(self)
        return result

    dist.PrefixStore.__init__ = init_prefix_store
    dist.ProcessGroup._register_backend = register_backend
    if not hasattr(dist.ProcessGroup, "get_group_store"):
        _note_stores_of_groups(dist)


def _note_stores_of_groups(dist: Any) -> None:
    make_group = dist.ProcessGroup.__init__

    def init_group(self: Any, *args: Any, **kwargs: Any) -> None:
        make_group(self, *args, **kwargs)
        for given in (*args[:1], kwargs.get("store")):
            if isinstance(given, dist.Store):
                _stores[self] = given

    dist.ProcessGroup.__init__ = init_group
