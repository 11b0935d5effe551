"""Let NCCL load commlens's profiler plugin (``_nccl_profiler.c``), which notes what NCCL tells it
beside the process's black box.

NCCL loads one plugin in a process, when the first communicator is made. A plugin that the user or
the installation has chosen is left alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Final

PLUGIN: Final = "NCCL_PROFILER_PLUGIN"
"""NCCL's variable that names the plugin."""
FOLDER: Final = "COMMLENS_NCCL_FOLDER"
EVENTS: Final = "COMMLENS_NCCL_EVENTS"
DEFAULT_NAME: Final = "libnccl-profiler.so"
"""The library that NCCL takes without the variable."""

_LINKER_CACHE: Final = Path("/etc/ld.so.cache")
_LINKER_FOLDERS: Final = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")


def library() -> Path | None:
    """Return the plugin; None if it was not built, because there was no C compiler."""
    built = sorted(Path(__file__).parent.glob("_nccl_profiler*.so"))
    return built[0] if built else None


def why_not(environ: Mapping[str, str]) -> str:
    """Return why NCCL would not load commlens's plugin in a process with this environment, in a
    clause; empty if it would.
    """
    if library() is None:
        return "the plugin was not built: install commlens where there is a C compiler"
    if other := other_plugin(environ):
        return f"{other}, and NCCL loads one plugin"
    return ""


def other_plugin(environ: Mapping[str, str]) -> str:
    """Return where another plugin is chosen, in a clause; empty if none is."""
    ours = library()
    given = environ.get(PLUGIN, "")
    if given and given != str(ours):
        return f"{PLUGIN} is {given}"
    for file in _configuration_files(environ):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if any(line.startswith(f"{PLUGIN}=") for line in file.read_text().splitlines()):
                return f"{file} sets {PLUGIN}"
    for folder in (*environ.get("LD_LIBRARY_PATH", "").split(":"), *_LINKER_FOLDERS):
        if folder and (Path(folder) / DEFAULT_NAME).exists():
            return f"{DEFAULT_NAME} is in {folder}"
    with contextlib.suppress(OSError):
        if DEFAULT_NAME.encode() + b"\0" in _LINKER_CACHE.read_bytes():
            return f"{DEFAULT_NAME} is among the libraries of the system"
    return ""


def _configuration_files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files from which NCCL takes variables that are not set."""
    if own := environ.get("NCCL_CONF_FILE"):
        yield Path(own)
    elif home := environ.get("HOME"):
        yield Path(home) / ".nccl.conf"
    yield Path("/etc/nccl.conf")


def switch_on(level: str, folder: Path, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Set the variables by which NCCL finds the plugin, and the plugin its folder. Returns False,
    and sets nothing, if :func:`why_not` has a reason.

    Args:
        level: the setting nccl_profiler.
        folder: of the job's black boxes.
        environ: of the process, or of one that is to be started.
    """
    plugin = library()
    if plugin is None or why_not(environ):
        return False
    environ.update({PLUGIN: str(plugin), FOLDER: str(folder), EVENTS: level})
    return True
