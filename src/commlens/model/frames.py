"""Which code a source file belongs to: the user's, an installed library, torch, commlens or
Python.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final


class FrameKind(str, Enum):
    """The owner of the code in a stack frame. Reports show the user's frames and fold the
    others.
    """

    USER = "user"
    # an installed package other than torch: shown if the stack has no user frame
    LIBRARY = "library"
    TORCH = "torch"
    COMMLENS = "commlens"
    PYTHON = "python"
    NATIVE = "native"  # a C++ frame


KindPrefixes = list[tuple[str, FrameKind]]
"""Path prefixes and the kind of frame that each indicates; the first match counts."""

_MOST_FOLDERS: Final = 32
_STDLIB: Final = re.compile(r"/lib(64)?/python3\.\d+/")
_LAUNCHERS: Final = re.compile(
    r"/bin/(torchrun|accelerate|deepspeed|ray|fabric|lightning|composer|commlens|pytest|ipython|jupyter[\w-]*)$|"
    # Packages that are installed in place, from their repository.
    r"/ray/(_private|train|util|workers)/|/(lightning|src/lightning)/(pytorch|fabric)/|/(pytorch_lightning|lightning_fabric)/|"
    r"/accelerate/(accelerator|launchers|optimizer|data_loader|state|utils|commands)\b|/transformers/(trainer\w*|models|generation)\b|"
    r"/deepspeed/(runtime|launcher|comm|pipe|utils|checkpoint|moe|ops)/|/(torch_extensions|\.triton/cache)/"
)
_OUR_OWN: Final = re.compile(
    r"/commlens/(tap|capture|verification|tracing|numbers|launch)/[\w/]+\.py$"
)
"""What stands in stacks of a rank that is recorded, wherever commlens is installed."""

_TYPED: Final = ("<string>", "<stdin>", "<input>", "<console>", "<ipython-input")


SETUP_FUNCTIONS: Final = frozenset(
    {
        "init_process_group",
        "new_group",
        "_new_group_with_tag",
        "_new_process_group_helper",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "split_group",
        "init_device_mesh",
        "_store_based_barrier",
        "rendezvous",
        "_init_process_groups",
        "_tcp_rendezvous_handler",
        "_env_rendezvous_handler",
        "_create_c10d_store",
        "_create_store_from_options",
    }
)
"""Functions of torch that make process groups, and meet the other ranks for it."""


_THREAD_WAITS: Final = {
    "/threading.py": {"join", "_wait_for_tstate_lock"},
    "/concurrent/futures/_base.py": {"result"},
    "/asyncio/base_events.py": {"_run_once"},
}


def waits_for_thread(innermost: Iterable[tuple[str, str]]) -> bool:
    """Return whether the innermost frames, as files and functions, show that a thread waits for
    another one of its process.
    """
    return any(
        # py-spy writes "Thread.join"
        function.rpartition(".")[2] in functions and file.endswith(end)
        for file, function in innermost
        for end, functions in _THREAD_WAITS.items()
    )


def process_prefixes(torch_folder: str, commlens_folder: str) -> KindPrefixes:
    """Return the prefixes by which to classify this process's own files."""
    paths = sysconfig.get_paths()
    python = [paths["stdlib"], paths["platstdlib"]]
    return kind_prefixes(
        {"prefixes": {"commlens": commlens_folder, "torch": torch_folder, "python": python}}
    )


def kind_prefixes(about: dict[str, Any]) -> KindPrefixes:
    """Return the prefixes by which to classify a process's files, from ``"prefixes"`` in the JSON
    about the process.

    Packages beside torch in site-packages are libraries: shown if the stack has no user frame.
    """
    named = about.get("prefixes")
    named = named if isinstance(named, dict) else {}

    def folders(key: str) -> list[str]:
        value = named.get(key, [])
        found = [
            text
            for text in (value if isinstance(value, list) else [value])
            if isinstance(text, str) and text
        ]
        return [
            text if text.startswith("<") else text.rstrip("/") + "/"
            for text in found[:_MOST_FOLDERS]
        ]

    commlens, torch, python = folders("commlens"), folders("torch"), folders("python")
    result = [(f"{folder}scenarios/", FrameKind.USER) for folder in commlens]
    result += [(folder, FrameKind.COMMLENS) for folder in commlens]
    result += [(folder, FrameKind.TORCH) for folder in torch]
    for folder in python:
        if not folder.startswith("<"):
            result += [
                (f"{folder}site-packages/", FrameKind.LIBRARY),
                (f"{folder}dist-packages/", FrameKind.LIBRARY),
            ]
    result += [(folder, FrameKind.PYTHON) for folder in python]
    # "...": frames that were left out
    result += [
        ("<frozen", FrameKind.PYTHON),
        ("<eval_with_key", FrameKind.TORCH),
        ("...", FrameKind.PYTHON),
    ]
    return result


def frame_kind(file: str, prefixes: KindPrefixes) -> FrameKind:
    """Classify a file by its prefix; if none matches, by the usual names of such folders."""
    named = next((kind for prefix, kind in prefixes if file.startswith(prefix)), None)
    if named is not None:
        return named
    for packages in ("/site-packages/", "/dist-packages/"):
        _, found, inside = file.rpartition(packages)
        if found:
            own = FrameKind.USER if inside.startswith("commlens/scenarios/") else FrameKind.COMMLENS
            return {"torch": FrameKind.TORCH, "commlens": own}.get(
                inside.split("/")[0], FrameKind.LIBRARY
            )
    if _OUR_OWN.search(file):
        return FrameKind.COMMLENS
    if file.startswith("<"):
        return FrameKind.USER if file.startswith(_TYPED) else FrameKind.LIBRARY
    if _STDLIB.search(file):
        return FrameKind.PYTHON
    if "/torchinductor_" in file:
        return FrameKind.TORCH
    return FrameKind.LIBRARY if _LAUNCHERS.search(file) else FrameKind.USER
