"""The choice of engine: the native one if it was built for this very torch and Python, else the one
in Python.

Both write the same records. docs/native.md says how the native engine is built.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from commlens import native
from commlens.blackbox.writer import BoxWriter
from commlens.capture.recorder import Recorder
from commlens.tap import tap
from commlens.tap.groups import Groups

log = logging.getLogger("commlens")


_TRACED = "this process traced collectives before, with kernels in Python, which stay installed"


def choose(wanted: str) -> tuple[Callable[..., BoxWriter], Callable[..., Recorder]]:
    """Return how to make a box, and how to make its recorder, for the setting ``engine``. Never
    raises; logs why a native engine that was asked for cannot be used.
    """
    if wanted != "python":
        module, why = _native_module()
        if module is not None:
            from commlens.capture.native_recorder import NativeBoxWriter, NativeRecorder

            return partial(NativeBoxWriter, module), partial(NativeRecorder, module)
        if wanted == "native" or why:
            # A traced process has kernels in Python, which is no fault unless the native ones were
            # asked for.
            level = logging.DEBUG if why == _TRACED and wanted != "native" else logging.WARNING
            log.log(level, "commlens records in Python: %s", why or native.NOT_BUILT)
    return BoxWriter, lambda writer, **options: Recorder(writer, Groups(), **options)


def _native_module() -> tuple[Any, str]:
    """Return the module with its kernels installed, or None and the reason; no reason if it was
    simply not built.
    """
    try:
        module = native.load()
        if module is None:
            return None, ""
        if not tap.use_native(module):
            return None, _TRACED
        return module, ""
    except Exception as error:
        return None, f"the native engine cannot be used: {error}"
