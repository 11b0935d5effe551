"""How a backend behaves, decided by its object: names such as "nccl" stand for different engines in
different versions of torch. NCCL's object has an ``uid``, the key of its status in a dump of
torch's recorder (2.8); gloo's has none (2.13), nor has that of the NCCL backend that is the default
from 2.15 on, which has completion hooks.

Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple

import torch
import torch._C._distributed_c10d as _c10d

_ON_THE_HOST = ("ProcessGroupGloo", "ProcessGroupMPI", "FakeProcessGroup")
_ON = ("1", "y", "yes", "t", "true", "on")
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")

Completion = Literal["call", "hooks", "status", "unknown"]
"""How it is learned that an op is complete. ``call``: its call or its Work tells. ``hooks``: the
backend calls completion hooks, and torch's hooks mark the entries of its recorder. ``status``:
torch's recorder has a status for each group, by ``uid``. ``unknown``: nothing tells.
"""


def _classes(*names: str) -> tuple[type, ...]:
    return tuple(found for name in names if isinstance(found := getattr(_c10d, name, None), type))


class Backend(NamedTuple):
    """The behaviour of a group's backend for one device type."""

    runs_ahead: bool
    """A synchronous call only enqueues the op on a device and returns, without a Work since torch
    2.8: it may run much later.

    The other backends' synchronous calls wait until the op is done.
    """

    uid: str = ""
    """The id under which torch's own recorder files the backend's progress; empty if there is none.
    """

    tells_results: bool = False
    """Whether torch's watchdog thread sets the result of each Work. With blocking wait it does not
    see them. A backend with completion hooks would query the device to answer.
    """

    timeout_ms: int = 0
    """After which the backend gives an op up; 0: unknown."""

    completion: Completion = "unknown"

    recorder: str = ""
    """Name of the recorder in which torch's hooks mark what is complete; empty if there is none."""

    watches: bool = True
    """Whether a thread of the backend looks for completed ops. With blocking wait none does: a
    completion hook is called when the group issues its next op.
    """


def backend_of(process_group: Any, device: str) -> Backend:
    """Return the behaviour of a ProcessGroup's backend for a device type."""
    backend = _object_of(process_group, device)
    if backend is None:  # a process group written in Python
        return Backend(runs_ahead=device != "cpu")
    if isinstance(backend, _classes(*_ON_THE_HOST)):
        return Backend(False, timeout_ms=_timeout_ms(backend), completion="call")
    completion = completion_of(backend)
    has_hooks = completion == "hooks"
    watches = not any(os.environ.get(name, "").lower() in _ON for name in _BLOCKING_WAIT)
    return Backend(
        True,
        str(int(backend.uid)) if completion == "status" else "",
        watches and not has_hooks,
        _timeout_ms(backend),
        completion,
        recorder_name(backend) if has_hooks else "",
        watches,
    )


def recorder_name(backend: Any) -> str:
    """Return the name by which torch's hooks know the recorder of a backend."""
    return str(backend.name()).replace(":", "_")


def completion_of(backend: Any) -> Completion:
    """Return how it is learned that an op of a backend is complete.

    Args:
        backend: the object of a backend; or its class, of which it is assumed that it has hooks if
            nothing else tells.
    """
    hooks = getattr(backend, "supports_completion_hooks", False)
    kind = backend if isinstance(backend, type) else type(backend)
    if issubclass(kind, _classes(*_ON_THE_HOST)):
        return "call"
    if hooks is True:
        return "hooks"
    if isinstance(getattr(backend, "uid", None), int | property):
        return "status"
    return "hooks" if hooks else "unknown"


def completion_by_class() -> dict[str, Completion]:
    """Return how completion is learned by name of a backend's class in this torch."""
    return {
        name: completion_of(value)
        for name, value in sorted(vars(_c10d).items())
        if name.startswith("ProcessGroup")
        and isinstance(value, type)
        and issubclass(value, _c10d.Backend)
    }


def _object_of(process_group: Any, device: str) -> Any:
    try:
        backend = process_group._get_backend(torch.device(device))
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a ProcessGroupWrapper around it
        wrapped = getattr(backend, "wrapped_pg", None)
    except Exception:
        return None
    return backend if wrapped is None else wrapped


def _timeout_ms(backend: Any) -> int:
    try:
        return int(backend.options._timeout.total_seconds() * 1000)
    except Exception:
        return 0
