"""Read torch's own recorders of collectives.

Versions of torch and its backends differ. So we inspect the objects themselves, and conclude
nothing from a backend's name:

* torch 2.6 has ``_dump_nccl_trace_json`` in builds with NCCL. From 2.8 on, ``_dump_fr_trace_json``
  is in every build, and reads another recorder, which gloo and other backends share. In 2.15 it
  accepts the name of a backend that has a recorder of its own.
* The recorder is off by default until about torch 2.10.

Tried on 2.13.0; the rest is from torch's sources. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

_JSON_DUMPS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


@dataclass(frozen=True)
class Dump:
    """A function of torch that returns the content of one of its recorders as JSON."""

    name: str
    keywords: frozenset[str]  # names of its parameters
    function: Callable[..., Any]

    def read(
        self, *, entries: bool, only_active: bool = False, backend: str | None = None
    ) -> dict[str, Any]:
        """Return the recorder's content; empty if the recorder is off or its content is no JSON
        object.

        Args:
            entries: include the collectives, not only the groups and their status.
            only_active: leave out the collectives that are complete.
            backend: the backend whose recorder to read; ignored if the function takes none.
        """
        wanted = {"includeCollectives": entries, "onlyActive": only_active, "backend": backend}
        try:
            found = json.loads(
                self.function(
                    **{
                        name: value
                        for name, value in wanted.items()
                        if name in self.keywords and value is not None
                    }
                )
            )
        except Exception:
            return {}
        return found if isinstance(found, dict) else {}


def dumps() -> tuple[Dump, ...]:
    """Return the dump functions of this torch."""
    try:
        import torch._C._distributed_c10d as c10d
    except ImportError:
        return ()
    functions = [(name, getattr(c10d, name, None)) for name in _JSON_DUMPS]
    return tuple(
        Dump(name, _keywords(function), function)
        for name, function in functions
        if function is not None
    )


def read_recorders(
    *, entries: bool, only_active: bool = False, backends: Iterable[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the content of each of torch's recorders that is on, NCCL's first. A recorder that two
    functions read is yielded once.

    Args:
        entries: include the collectives, not only the groups and their status.
        only_active: leave out the collectives that are complete.
        backends: names of backends that may have a recorder of their own.
    """
    seen: list[dict[str, Any]] = []
    for dump in dumps():
        for backend in (None, *(backends if "backend" in dump.keywords else ())):
            content = dump.read(entries=entries, only_active=only_active, backend=backend)
            if content and content not in seen:
                seen.append(content)
                yield content


def read_recorder(backend: str) -> dict[str, Any]:
    """Return the content of the recorder of one backend; empty if torch has none for each."""
    dump = next((dump for dump in dumps() if "backend" in dump.keywords), None)
    return {} if dump is None else dump.read(entries=True, backend=backend)


def nccl_entries() -> list[dict[str, Any]]:
    """Return the entries of NCCL's recorder without stacks, oldest first; empty if it is off or is
    missing. As a pickle it takes a third of the time that JSON takes.
    """
    import torch._C._distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace", None)
    if dump is None:
        return []
    try:
        found = pickle.loads(dump(includeStackTraces=False))  # made in this process just now
        return list(found.get("entries", ()))
    except Exception:
        return []


def hooked_backends() -> set[str]:
    """Return the names of the backends whose calls torch's hooks record."""
    import torch.distributed.distributed_c10d as c10d

    from commlens.tap.backends import recorder_name

    hooks = getattr(c10d._world, "pg_flight_recorder_hooks", {})
    return {
        recorder_name(group._get_backend(device))
        for group in list(hooks)
        for device in group._device_types
    }


@functools.lru_cache(maxsize=16)
def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters. pybind11 writes them into the first line of the
    docstring.
    """
    signature = (function.__doc__ or "").strip().partition("\n")[0]
    found = re.findall(r"[(,]\s*(\w+):", signature)
    with contextlib.suppress(TypeError, ValueError):
        found = found or list(inspect.signature(function).parameters)
    return frozenset(found)
