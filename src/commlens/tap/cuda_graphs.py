"""Notice the capture and the replays of CUDA graphs: a captured collective does not run, and a
replay passes no tap.

The methods of ``torch.cuda.CUDAGraph`` are patched, which every user of graphs calls:
``torch.cuda.graph``, ``make_graphed_callables`` and inductor. Neither importing nor patching them
initialises the driver. Tried on torch 2.6.0, 2.13.0 and 2.15.0, with an emulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol


class Listener(Protocol):
    """The part of a recorder that is called. Its methods never raise."""

    def capture_begins(self) -> None:
        """Called before a graph is captured."""

    def capture_ends(self, graph: Any) -> None:
        """Called when the capture of a graph has ended, even if it failed."""

    def replays(self, graph: Any) -> None:
        """Called before a graph is replayed."""


_installed = False


def is_capturing() -> bool:
    """Return whether this thread's stream is being captured: nothing may wait for it then."""
    import torch

    # Not is_available, which starts CUDA's driver: a process that then forks has children in which
    # CUDA cannot be used.
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def install(listener: Callable[[], Listener | None]) -> None:
    """Patch the methods, once. ``listener`` returns whom to tell; None for nobody."""
    global _installed
    from torch.cuda.graphs import CUDAGraph

    if _installed:
        return
    _installed = True

    def patch(
        name: str,
        before: Callable[[Listener, Any], None] | None,
        after: Callable[[Listener, Any], None] | None,
    ) -> None:
        original = getattr(CUDAGraph, name)

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            told = listener()
            if told is not None and before is not None:
                before(told, self)
            try:
                return original(self, *args, **kwargs)
            finally:
                if told is not None and after is not None:
                    after(told, self)

        setattr(CUDAGraph, name, method)

    patch("capture_begin", lambda told, _: told.capture_begins(), None)
    patch("capture_end", None, lambda told, graph: told.capture_ends(graph))
    patch("replay", lambda told, graph: told.replays(graph), None)
