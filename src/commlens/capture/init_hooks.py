"""The hooks in ``torch.distributed`` that start recording: ``init_process_group``, ``destroy_process_group`` and the making of groups."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

from commlens.capture.rank_environment import rank_and_world

log = logging.getLogger("commlens")
_hooked = False


class InitListener(Protocol):
    """What the hooks call. An error of these methods is logged; only what ``before_destroy`` returns may raise."""

    def begin(self, rank: int, world_size: int) -> None:
        """``init_process_group`` was called; the rank is -1 if it is not known yet."""

    def after_init(self) -> None:
        """``init_process_group`` returned."""

    def before_new_group(self, rank: int, world_size: int) -> Callable[[Any], None] | None:
        """A group is about to be made, in which this process has this rank. Return what to call with it afterwards."""

    def before_destroy(self) -> Callable[[], None] | None:
        """``destroy_process_group`` was called. Return what to call after it."""

    def after_destroy(self) -> None:
        """``destroy_process_group`` returned."""


def safely(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of commlens and return its result; log its error, if it raises one, and return None."""
    try:
        return function(*args)
    except Exception as error:
        log.warning("commlens: %s failed, the job goes on without it: %s: %s", function.__name__, type(error).__name__, error)
        return None


def hook_init(listener: Callable[[], InitListener | None]) -> None:
    """Install the hooks, once per process; they ask for the listener at each call."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    original_init, original_destroy, original_new = c10d.init_process_group, c10d.destroy_process_group, c10d._new_process_group_helper

    @functools.wraps(original_init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        current = listener()
        if current is None:
            return original_init(*args, **kwargs)
        safely(current.begin, *rank_and_world(args, kwargs))
        result = original_init(*args, **kwargs)
        safely(current.after_init)
        return result

    @functools.wraps(original_destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        current = listener()
        after = safely(current.before_destroy) if current is not None else None
        result = original_destroy(*args, **kwargs)
        if current is not None:
            safely(current.after_destroy)
        if after is not None:
            after()
        return result

    @functools.wraps(original_new)
    def _new_process_group_helper(group_size: int, group_rank: int, *args: Any, **kwargs: Any) -> Any:
        # A program that imported init_process_group by name before commlens was switched on gets only here, and so does
        # init_device_mesh.
        current = listener()
        after = safely(current.before_new_group, group_rank, group_size) if current is not None else None
        result = original_new(group_size, group_rank, *args, **kwargs)
        if after is not None:
            safely(after, result[0])
        return result

    c10d._new_process_group_helper = _new_process_group_helper
    for module in (dist, c10d):
        module.init_process_group = init_process_group
        module.destroy_process_group = destroy_process_group
