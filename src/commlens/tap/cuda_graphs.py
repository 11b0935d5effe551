"""Tells whether a CUDA graph is being captured.

The recorder learns from :mod:`commlens.tap.torch_patches` when a capture begins and ends.
"""

from __future__ import annotations


def is_capturing() -> bool:
    """Return whether a graph is being captured from this thread's stream. The host must not wait
    for the stream then.
    """
    import torch

    # Not is_available, which starts CUDA's driver: a process that then forks has children in which
    # CUDA cannot be used.
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
