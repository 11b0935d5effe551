"""The module that PyTorch loads at the end of ``import torch``, through the entry point group
``torch.backends`` (torch 2.5 and later).

It is outside the package ``commlens``, imports only the standard library, and returns at once
unless ``COMMLENS`` is set. If any entry point fails, ``import torch`` fails for every program in
the environment, so ``start`` lets no exception out. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` keeps torch
from loading it (and every other extension of torch).
"""

import contextlib
import os
import sys


def start() -> None:
    """Switch recording on in this process if ``COMMLENS`` asks for it."""
    # The rule of commlens.config.is_switched_on, repeated because the package may be missing.
    if os.environ.get("COMMLENS", "").strip().lower() in ("", "0", "false", "no", "off"):
        return
    try:
        from commlens.launch import recording

        recording.start_from_environment()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # SystemExit too: torch must be importable, whatever fails in commlens
        with contextlib.suppress(Exception):  # no standard error, or a closed one
            sys.stderr.write(f"commlens: not recording: {type(error).__name__}: {error}\n")
