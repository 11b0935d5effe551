"""The hooks in ``torch.distributed`` that start recording: ``init_process_group``,
``destroy_process_group`` and the making of groups.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from commlens.capture.rank_environment import Place, place_of

log = logging.getLogger("commlens")
_hooked = False
After = Callable[[bool, Any], None] | None
"""A function to call after the hooked one: with whether that raised, and its result."""


class NewGroup(NamedTuple):
    """A group that is about to be made, in which this process is ``rank``."""

    rank: int
    size: int
    ranks: Sequence[int]  # global ones; a default group has none
    backend: str
    name: str
    description: str


class InitListener(Protocol):
    """The methods that the hooks call. Each ``before_...`` may return a function to call after the
    hooked one.

    Errors of all these are logged, not raised, except those of the function that ``before_destroy``
    returns.
    """

    def before_init(self, place: Place) -> After:
        """``init_process_group`` was called."""

    def before_new_group(self, group: NewGroup) -> After:
        """A group is about to be made."""

    def before_mesh(self, shape: Any, names: Any) -> After:
        """``init_device_mesh`` was called."""

    def before_split(self, parent: Any, split_ranks: Any) -> After:
        """``split_group`` was called."""

    def before_store_wait(self, op: str, keys: Sequence[str]) -> After:
        """A thread is about to wait for keys in a store."""

    def before_store_write(self, keys: Sequence[str]) -> After:
        """A thread writes keys into a store."""

    def before_destroy(self, is_last: bool) -> Callable[[], None] | None:
        """``destroy_process_group`` was called, for all groups if ``is_last``. Return a function to
        call after it.
        """

    def after_destroy(self) -> None:
        """``destroy_process_group`` returned."""


def safely(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of commlens and return its result. If it raises an error, log it and return
    None.
    """
    try:
        return function(*args)
    except Exception as error:
        name = getattr(function, "__name__", "a hook")
        log.warning(
            "commlens: %s failed, the job goes on without it: %s: %s",
            name,
            type(error).__name__,
            error,
        )
        return None


def hook_init(listener: Callable[[], InitListener | None]) -> None:
    """Install the hooks, once per process. Each call of a hooked function calls ``listener`` for
    the current listener; None: nothing listens.
    """
    global _hooked
    if _hooked:
        return
    _hooked = True
    import torch.distributed as dist
    import torch.distributed.device_mesh as device_mesh
    import torch.distributed.distributed_c10d as c10d

    def hooked(original: Callable[..., Any], before: Callable[..., After]) -> Callable[..., Any]:
        """Return a function that calls ``before(listener, args, kwargs)``, the original, and the
        function that ``before`` returned.
        """

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            current = listener()
            after = safely(before, current, args, kwargs) if current is not None else None
            if after is None:
                return original(*args, **kwargs)
            result, raised = None, True
            try:
                result = original(*args, **kwargs)
                raised = False
            finally:
                safely(after, raised, result)
            return result

        return call

    original_destroy = c10d.destroy_process_group

    @functools.wraps(original_destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        current = listener()
        group = args[0] if args else kwargs.get("group")
        is_last = group is None or group is dist.group.WORLD
        after = safely(current.before_destroy, is_last) if current is not None else None
        result = original_destroy(*args, **kwargs)
        if current is not None:
            safely(current.after_destroy)
        if after is not None:
            after()
        return result

    # A program that imported init_process_group, new_group or init_device_mesh by name before
    # commlens was switched on calls the original, which calls this helper.
    c10d._new_process_group_helper = hooked(c10d._new_process_group_helper, _before_new_group)
    init_process_group = hooked(
        c10d.init_process_group,
        lambda current, args, kwargs: current.before_init(place_of(args, kwargs)),
    )
    split_group = hooked(c10d.split_group, _before_split)
    for module in (dist, c10d):
        module.init_process_group = init_process_group
        module.destroy_process_group = destroy_process_group
        module.split_group = split_group
    device_mesh.split_group = split_group
    device_mesh.init_device_mesh = dist.init_device_mesh = hooked(
        device_mesh.init_device_mesh, _before_mesh
    )
    # Store itself is not hooked: C++ would take the hook for the override of a store that is
    # written in Python, and call it without end.
    for store in filter(None, (getattr(dist, name, None) for name in _STORES)):
        for name, before in _STORE_METHODS.items():
            if hasattr(store, name):
                setattr(store, name, hooked(getattr(store, name), functools.partial(before, name)))


def _before_new_group(
    current: InitListener, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> After:
    size, rank, ranks, backend, _, name, *_ = args
    description = str(kwargs.get("group_desc") or "")
    return current.before_new_group(
        NewGroup(rank, size, ranks or (), str(backend), str(name), description)
    )


def _before_mesh(current: InitListener, args: tuple[Any, ...], kwargs: dict[str, Any]) -> After:
    shape = args[1] if len(args) > 1 else kwargs["mesh_shape"]
    return current.before_mesh(shape, kwargs.get("mesh_dim_names"))


def _before_store_wait(
    name: str, current: InitListener, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> After:
    if name == "queue_pop" and not (args[2] if len(args) > 2 else kwargs.get("block", True)):
        return None
    return current.before_store_wait(f"store.{name}", _keys(args, kwargs))


def _before_store_write(
    name: str, current: InitListener, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> After:
    if name == "add" and args[2:] == (0,):
        return None  # adding 0 reads the key
    return current.before_store_write(_keys(args, kwargs))


def _before_split(current: InitListener, args: tuple[Any, ...], kwargs: dict[str, Any]) -> After:
    given = {**dict(zip(("parent_pg", "split_ranks"), args, strict=False)), **kwargs}
    return current.before_split(given.get("parent_pg"), given.get("split_ranks"))


def _keys(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[str]:
    """Return the keys that a store's method was called with, after the store itself."""
    given = args[1] if len(args) > 1 else kwargs.get("keys") or kwargs.get("key") or ()
    return [given] if isinstance(given, str) else list(given)


_STORES = ("TCPStore", "FileStore", "HashStore", "PrefixStore")
_STORE_METHODS = {
    **dict.fromkeys(("get", "wait", "multi_get", "queue_pop"), _before_store_wait),
    **dict.fromkeys(
        ("set", "add", "compare_set", "append", "multi_set", "queue_push"), _before_store_write
    ),
}
