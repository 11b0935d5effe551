"""The hooks in ``torch.distributed`` that start recording: ``init_process_group``,
``destroy_process_group`` and the making of groups.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from commlens.tap.call_arguments import reader_of
from commlens.tap.hand_made import hook_stores_and_groups

log = logging.getLogger("commlens")
_hooked = False
After = Callable[[bool, Any], None] | None
"""A function to call after the hooked one: with whether that raised, and its result."""


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


def _with_hook(
    listener: Callable[[], Any],
    original: Callable[..., Any],
    before: str,
    *first: str,
    names: Sequence[str] = (),
) -> Callable[..., Any]:
    """Return a function that calls the listener's method ``before`` with the arguments, the
    original, and the function that the method returned; only the original if its arguments cannot
    be read.

    Args:
        listener: returns the listener.
        original: the function of torch.
        before: the method's name.
        first: arguments that the method gets before those of the call.
        names: of the first arguments of a function in C++, which does not tell them.
    """
    read = (
        (lambda args, kwargs: {**dict(zip(names, args, strict=False)), **kwargs})
        if names
        else reader_of(original)
    )

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given, after = read(args, kwargs), None
        if given is not None:
            after = safely(getattr(listener(), before), *first, given)
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


def _destroy_with_hook(
    listener: Callable[[], Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that destroys a group as ``original`` does, between two calls of the
    listener. What the first of these returns is called last; its errors are raised.
    """
    read = reader_of(original)

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        group = (read(args, kwargs) or {}).get("group")
        is_last = group is None or group is dist.group.WORLD
        current = listener()
        after = safely(current.before_destroy, is_last)
        result = original(*args, **kwargs)
        safely(current.after_destroy)
        if after is not None:
            after()
        return result

    return destroy_process_group


def hook_init(listener: Callable[[], Any]) -> None:
    """Install the hooks, once per process. Each call of a hooked function calls ``listener`` for
    the current :class:`commlens.capture.session.TorchEvents`.
    """
    global _hooked
    if _hooked:
        return
    _hooked = True
    import torch.distributed as dist
    import torch.distributed.device_mesh as device_mesh
    import torch.distributed.distributed_c10d as c10d

    hooked = functools.partial(_with_hook, listener)
    # A program that imported init_process_group, new_group or init_device_mesh by name before
    # commlens was switched on calls the original, which calls this helper.
    c10d._new_process_group_helper = hooked(c10d._new_process_group_helper, "before_new_group")
    init_process_group = hooked(c10d.init_process_group, "before_init")
    split_group = hooked(c10d.split_group, "before_split")
    destroy_process_group = _destroy_with_hook(listener, c10d.destroy_process_group)
    for module in (dist, c10d):
        module.init_process_group = init_process_group
        module.destroy_process_group = destroy_process_group
        module.split_group = split_group
    device_mesh.split_group = split_group
    device_mesh.init_device_mesh = dist.init_device_mesh = hooked(
        device_mesh.init_device_mesh, "before_mesh"
    )

    if hasattr(dist.ProcessGroup, "reconfigure"):  # from torch 2.15 on
        dist.ProcessGroup.reconfigure = hooked(
            dist.ProcessGroup.reconfigure, "before_reconfigure", names=("group", "opts")
        )

    hook_stores_and_groups(lambda group: safely(listener().backend_registered, group))
    # Store itself is not hooked: C++ would take the hook for the override of a store that is
    # written in Python, and call it without end.
    for store in filter(None, (getattr(dist, name, None) for name in _STORES)):
        for name, before in _STORE_METHODS.items():
            if hasattr(store, name):
                method = hooked(getattr(store, name), before, name, names=_OF_STORE)
                setattr(store, name, method)
    dist.TCPStore.__init__ = hooked(
        dist.TCPStore.__init__, "before_store_made", names=_OF_TCP_STORE
    )
    if (gloo := getattr(dist, "ProcessGroupGloo", None)) is not None:
        gloo.__init__ = hooked(gloo.__init__, "before_gloo", names=_OF_GLOO)


_OF_STORE = ("store", "key", "second")
# fmt: off
_OF_TCP_STORE = (
    "self", "host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers",
)
# fmt: on
_OF_GLOO = ("self", "store", "rank", "size")
_STORES = ("TCPStore", "FileStore", "HashStore", "PrefixStore")
_STORE_METHODS = {
    **dict.fromkeys(("get", "wait", "multi_get", "queue_pop"), "before_store_wait"),
    **dict.fromkeys(
        ("set", "add", "compare_set", "append", "multi_set", "queue_push"),
        "before_store_write",
    ),
}
