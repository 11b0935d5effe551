"""What PyTorch loads at the end of ``import torch``, through the entry point group ``torch.backends`` (torch 2.5 and later).

It stands outside the package ``commlens``, imports the standard library only, and returns at once unless ``COMMLENS`` is set. When
the entry point of anybody fails, ``import torch`` fails for everybody in the environment: so nothing may leave ``start``.
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` keeps torch from loading it (and every other extension of torch).
"""

import contextlib
import os
import sys


def start() -> None:
    """Switch recording on in this process if the environment asks for it."""
    # The same rule as commlens.config.is_switched_on, written out because commlens itself may be gone.
    if os.environ.get("COMMLENS", "").strip().lower() in ("", "0", "false", "no", "off"):
        return
    try:
        from commlens.launch import recording

        recording.start_from_environment()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: whatever went wrong in commlens, torch can be imported
        with contextlib.suppress(Exception):  # no standard error, or a closed one
            sys.stderr.write(f"commlens: not recording: {type(error).__name__}: {error}\n")
