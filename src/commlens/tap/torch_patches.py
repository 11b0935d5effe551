"""The patches of torch besides the tap. They do nothing while nothing listens.

``Work.wait`` (which thread is blocked in which collective, and when it is done),
``ProcessGroup._start_coalescing`` and ``_end_coalescing`` (which are not ops), ``DeviceMesh``
(names of dimensions), and the optimizers' global post-hook (steps). Tried on torch 2.6.0, 2.13.0
and 2.15.0.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Protocol

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from commlens.blackbox import layout as L
from commlens.matching.error_texts import is_mismatch_error, is_peer_error
from commlens.tap import cuda_graphs, tap
from commlens.tap.groups import Groups
from commlens.tap.interned_args import noted_reduce_ops

log = logging.getLogger("commlens")

_FIRST_READABLE_REDUCE_OP = (2, 10)
"""Tried: unreadable on 2.6.0 and 2.9.1, readable on 2.13.0. On a version between them, the recorder
calls tap_reduce_ops when it fails.
"""


class WaitListener(Protocol):
    """A tracer's interface for waits. Tokens are its own; None means that it ignores the wait."""

    def wait_begins(self, work: Any) -> Any:
        """Called before a thread blocks in ``work.wait()``."""

    def tensor_wait_begins(self, tensor: Any) -> Any:
        """Called before a thread blocks in a functional collective's ``wait_tensor(tensor)``."""

    def wait_ended(self, token: Any, error: BaseException | None) -> None:
        """Called when this wait has ended, perhaps with an error."""


class WorkListener(Protocol):
    """The interface of a listener to the asynchronous collectives that Python issues, and to the
    uses of their Works other than waits.
    """

    def issue_begins(self, frame: FrameType, asynchronous: bool | None) -> None:
        """Called when Python is about to issue an asynchronous collective, or one that may be."""

    def issue_ended(self, work: Any) -> None:
        """Called after the issue, with the Work; with None if there is none."""

    def handled(self, work: Any) -> None:
        """Called when a program takes the future of a Work, or polls it and finds it complete."""

    def coalescing_starts(self) -> None:
        """Called after ``ProcessGroup._start_coalescing``."""

    def coalescing_ended(self, work: Any) -> None:
        """Called when ``ProcessGroup._end_coalescing`` has returned the Work of the group."""

    def backward_ended(self) -> None:
        """Called when a thread leaves a backward pass."""


class _Recorder(Protocol):
    """The part of :class:`commlens.capture.recorder.Recorder` that the patches call."""

    writer: Any
    groups: Groups
    steps: int

    @property
    def verifier(self) -> Any: ...
    @property
    def listens_to_waits(self) -> bool: ...
    @property
    def reads_reduce_ops(self) -> bool: ...
    def tapped_wait(self, original: Any, slow: Any) -> Any: ...
    def wait_begins(self, work: Any) -> Any: ...
    def wait_ended(self, work: Any, token: Any, error: BaseException | None) -> None: ...
    def tensor_wait_begins(self, tensor: Any) -> Any: ...
    def tensor_wait_ended(self, held: Any, error: BaseException | None) -> None: ...
    def error_to_raise(self, error: BaseException) -> BaseException: ...
    def coalescing_starts(self) -> None: ...
    def coalescing_ends(self) -> Any: ...
    def group_returned(self, token: Any, work: Any) -> None: ...
    def raised(self, token: Any, error: BaseException) -> None: ...
    def capture_begins(self) -> None: ...
    def capture_ends(self, graph: Any) -> None: ...
    def replays(self, graph: Any) -> None: ...
    def handled(self, work: Any) -> None: ...
    @property
    def hazards(self) -> Any: ...


_recorder: _Recorder | None = None
_lock = threading.RLock()  # of the tracers
_tracers: tuple[WaitListener, ...] = ()
_work_listeners: tuple[WorkListener, ...] = ()
_installed: set[str] = set()  # names of the functions that have installed their patches
work_is_completed = Work.is_completed
"""The original, without the patch that notes that a program polls."""


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have had it


os.register_at_fork(after_in_child=_forked)


def set_recorder(recorder: _Recorder | None) -> None:
    """Report to ``recorder`` from now on; with None, the patches only pass calls through."""
    global _recorder
    _recorder = recorder
    if recorder is not None:
        _untap_work_wait()  # installed by a tracer, without a native recorder
    listen()


def active_recorder() -> _Recorder | None:
    """Return the recorder of this process; None if nothing is recorded, as in a forked child."""
    return _recorder


def add_tracer(tracer: WaitListener) -> None:
    """Report waits to ``tracer``, too."""
    global _tracers
    with _lock:
        _tracers = (*_tracers, tracer)
        listen()


def remove_tracer(tracer: WaitListener) -> None:
    """Stop reporting waits to ``tracer``."""
    global _tracers
    with _lock:
        _tracers = tuple(other for other in _tracers if other is not tracer)
        listen()


def add_work_listener(listener: WorkListener) -> None:
    """Report issues, and uses of Works other than waits, to ``listener``, too."""
    global _work_listeners
    _work_listeners = (*_work_listeners, listener)
    _install_once(_tap_issues, _tap_coalescing, _tap_ends_of_backward)
    _install(_tap_other_uses_of_works)


def remove_work_listener(listener: WorkListener) -> None:
    """Stop reporting issues and uses of Works to ``listener``."""
    global _work_listeners
    _work_listeners = tuple(other for other in _work_listeners if other is not listener)


def listen() -> None:
    """Report waits to the present listeners. Call this again when a recorder begins to verify."""
    if _tracers:
        tap.listen_to_waits(_tensor_wait_begins, _tensor_wait_ended)
    elif _recorder is not None:
        listens = _recorder.listens_to_waits
        tap.listen_to_waits(
            _recorder.tensor_wait_begins if listens else None,
            _recorder.tensor_wait_ended if listens else None,
        )
    else:
        tap.listen_to_waits(None, None)
        _untap_work_wait()
        return
    _install_all()


def _install_all() -> None:
    _install(_tap_work_wait)
    if not python_reads_reduce_ops() and (
        _tracers or _recorder is None or not _recorder.reads_reduce_ops
    ):
        _install(tap_reduce_ops)
    if _recorder is not None:
        _install_once(
            _tap_coalescing,
            _tap_meshes,
            _tap_optimizers,
            _tap_cuda_graphs,
            _tap_calls_of_others,
        )
        _install(_tap_other_uses_of_works)
        if _recorder.verifier is not None:
            _install(_tap_waits_in_cpp)


def _install_once(*installs: Callable[[], None]) -> None:
    for install in installs:
        if install.__name__ not in _installed:
            _installed.add(install.__name__)
            _install(install)


def _install(install: Callable[[], None]) -> None:
    try:
        install()
    except Exception as error:
        log.warning(
            "commlens: %s does not work with this torch: %s: %s",
            install.__name__,
            type(error).__name__,
            error,
        )


def python_reads_reduce_ops() -> bool:
    """Return whether Python can read the reduce op of every call in this torch; if not, only of the
    calls made from Python.
    """
    return torch_version() >= _FIRST_READABLE_REDUCE_OP


@functools.lru_cache(maxsize=1)
def torch_version() -> tuple[int, int]:
    """Return the major and minor version of this torch."""
    numbers = re.findall(r"\d+", torch.__version__)
    return int(numbers[0]), int(numbers[1])


_waits: list[tuple[Any, Any]] = []  # classes whose wait is tapped, with the original


def _tap_work_wait() -> None:
    if _waits:
        return
    # Classes of C++ Works with a wait of their own (the fake backend's) do not call that of Work.
    for kind in (Work, *Work.__subclasses__()):
        if "wait" in kind.__dict__ and kind.__module__.startswith(("torch.", "torch")):
            original = kind.__dict__["wait"]
            _waits.append((kind, original))
            slow = _tapped_wait(original)
            tapped = slow if _recorder is None else _recorder.tapped_wait(original, slow)
            setattr(kind, "wait", tapped)  # noqa: B010 - a plain assignment is what type checkers refuse


def sees_waits_for(work: Any) -> bool:
    """Return whether the waits for a Work are reported; not those of a class written in Python."""
    owner = next(kind for kind in type(work).__mro__ if "wait" in kind.__dict__)
    return any(owner is kind for kind, _ in _waits)


def _untap_work_wait() -> None:
    for kind, original in _waits:
        setattr(kind, "wait", original)  # noqa: B010
    _waits.clear()


def _tapped_wait(original: Any) -> Any:
    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder
        if _tracers:
            return _traced_wait(original, self, args, kwargs)
        if recorder is None:
            return original(self, *args, **kwargs)
        token = recorder.wait_begins(self)
        if token is None:
            return original(self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            recorder.wait_ended(self, token, error)
            if recorder.verifier is not None:
                raise recorder.error_to_raise(error)  # noqa: B904 - its cause is set
            raise
        recorder.wait_ended(self, token, None)
        return result

    return wait


def _traced_wait(original: Any, work: Any, args: Any, kwargs: Any) -> Any:
    recorder = _recorder
    held = [
        (tracer, token) for tracer in _tracers if (token := tracer.wait_begins(work)) is not None
    ]
    token = recorder.wait_begins(work) if recorder is not None else None
    error: BaseException | None = None
    try:
        return original(work, *args, **kwargs)
    except BaseException as raised:
        error = raised
        if recorder is not None and recorder.verifier is not None:
            raise recorder.error_to_raise(raised)  # noqa: B904
        raise
    finally:
        if recorder is not None and token is not None:
            recorder.wait_ended(work, token, error)
        for tracer, token in held:
            tracer.wait_ended(token, error)


def _tensor_wait_begins(tensor: Any) -> Any:
    recorder = _recorder
    held = [
        (tracer, token)
        for tracer in _tracers
        if (token := tracer.tensor_wait_begins(tensor)) is not None
    ]
    token = recorder.tensor_wait_begins(tensor) if recorder is not None else None
    return (recorder, token, held) if held or token is not None else None


def _tensor_wait_ended(tokens: Any, error: BaseException | None) -> None:
    recorder, token, held = tokens
    if token is not None:
        recorder.tensor_wait_ended(token, error)
    for tracer, mark in held:
        tracer.wait_ended(mark, error)


def _tap_waits_in_cpp() -> None:
    """Raise a refusal instead of the backend's error where C++ waits for collectives: DDP's
    reducer, and futures.
    """
    if hasattr(torch._C.Future.wait, "__wrapped__"):
        return
    for owner, name in (
        (torch.autograd, "_engine_run_backward"),
        (torch.autograd.graph, "_engine_run_backward"),
        (torch.distributed, "_broadcast_coalesced"),
        (torch.distributed, "_verify_params_across_processes"),
        (torch.distributed.Reducer, "_rebuild_buckets"),
        (torch._C.Future, "wait"),
    ):
        setattr(owner, name, _raising_refusals(getattr(owner, name)))


waits_in_cpp: dict[int, int] = {}
"""By thread that is in such a function: since when, CLOCK_MONOTONIC in ns."""


def _raising_refusals(original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        outermost = waits_in_cpp.setdefault(thread, now := time.monotonic_ns()) == now
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            if (
                _recorder is None
                or _recorder.verifier is None
                or not (is_peer_error(str(error)) or is_mismatch_error(str(error)))
            ):
                raise
            raise _recorder.error_to_raise(error)  # noqa: B904 - its cause is set
        finally:
            if outermost:
                waits_in_cpp.pop(thread, None)

    return call


_REDUCING_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
)
_ISSUING_METHODS = (
    *_REDUCING_METHODS,
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
)


def _tap_issues() -> None:
    for name in _ISSUING_METHODS:
        if name in ProcessGroup.__dict__:
            setattr(ProcessGroup, name, _telling_issue(ProcessGroup.__dict__[name]))


def _telling_issue(original: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _work_listeners:
            told = _told_asynchronous(args, kwargs)
            if told is not False:
                return _told_issue(original, self, args, kwargs, told, sys._getframe(1))
        return original(self, *args, **kwargs)

    return method


def _told_issue(
    original: Any, group: Any, args: Any, kwargs: Any, told: bool | None, frame: FrameType
) -> Any:
    listeners, work = _work_listeners, None
    for listener in listeners:
        listener.issue_begins(frame, told)
    try:
        work = original(group, *args, **kwargs)
        return work
    finally:
        for listener in listeners:
            listener.issue_ended(work)


def _told_asynchronous(args: Any, kwargs: Any) -> bool | None:
    """Return the ``asyncOp`` of a call's options; None if there is none."""
    for argument in (*args[:0:-1], *kwargs.values()):
        told = getattr(argument, "asyncOp", None)
        if told is not None:
            return bool(told)
    return None


def _tap_coalescing() -> None:
    start, end = (
        ProcessGroup.__dict__["_start_coalescing"],
        ProcessGroup.__dict__["_end_coalescing"],
    )

    @functools.wraps(start)
    def _start_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = start(self, *args, **kwargs)
        if _recorder is not None:
            _recorder.coalescing_starts()
        for listener in _work_listeners:
            listener.coalescing_starts()
        return result

    @functools.wraps(end)
    def _end_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder
        token = recorder.coalescing_ends() if recorder is not None else None
        work = None
        try:
            work = end(self, *args, **kwargs)
        except BaseException as error:
            if recorder is not None and token is not None:
                recorder.raised(token, error)
            raise
        finally:
            for listener in _work_listeners:
                listener.coalescing_ended(work)
        if recorder is not None and token is not None:
            recorder.group_returned(token, work)
        return work

    for function in (_start_coalescing, _end_coalescing):
        setattr(ProcessGroup, function.__name__, function)


def _tap_cuda_graphs() -> None:
    cuda_graphs.install(active_recorder)


_OTHER_USES = (
    "get_future",
    "get_future_result",
    "is_completed",
    "is_success",
    "synchronize",
    "block_current_stream",
    "exception",
    "result",
)


def _tap_other_uses_of_works() -> None:
    """Note that a program polls a Work or takes its future: then it need not wait for it. A preview
    patches these methods, too, and takes what was installed during it away with its own.
    """
    for name in _OTHER_USES:
        method = Work.__dict__.get(name)
        if method is not None and getattr(method, "__code__", None) is not _NOTES_USE:
            setattr(Work, name, _noting_use(method))


def _noting_use(original: Any) -> Any:
    polls = original.__name__ == "is_completed"

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _recorder is not None:
            _recorder.handled(self)
        result = original(self, *args, **kwargs)
        if result or not polls:
            for listener in _work_listeners:
                listener.handled(self)
        return result

    return method


_NOTES_USE: Final = _noting_use(work_is_completed).__code__  # of all that it returns


def _tap_ends_of_backward() -> None:
    for module in (torch.autograd, torch.autograd.graph):
        setattr(module, "_engine_run_backward", _telling_end(module._engine_run_backward))  # noqa: B010


def _telling_end(original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            for listener in _work_listeners:
                listener.backward_ended()

    return call


def _tap_calls_of_others() -> None:
    """Note the calls with a group that this rank is not in: torch warns and does nothing."""
    from torch.distributed import distributed_c10d

    if not hasattr(distributed_c10d, "_warn_not_in_group"):
        return

    @functools.wraps(distributed_c10d._warn_not_in_group)
    def _warn_not_in_group(op_name: Any) -> None:
        if _recorder is not None and _recorder.hazards is not None:
            _recorder.hazards.not_a_member()
        # torch's own text, from torch's own line: to call it would name this one
        world = distributed_c10d.GroupMember.WORLD
        rank = -1 if world is None else world.rank()
        text = f"Running {op_name} on global rank {rank} which does not belong to the given group."
        warnings.warn(text, stacklevel=2)

    distributed_c10d._warn_not_in_group = _warn_not_in_group


def _tap_meshes() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    original = DeviceMesh.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _recorder is not None:
            _learn_mesh(self, _recorder)

    setattr(DeviceMesh, "__init__", __init__)  # noqa: B010


def _learn_mesh(mesh: Any, recorder: _Recorder) -> None:
    """Name the groups of a mesh. A dimension that spans the world uses the default group, whose
    description does not name it.
    """
    try:
        names = mesh.mesh_dim_names
        if not names or mesh.mesh.dim() != len(names) or mesh.get_coordinate() is None:
            return
        for dim, name in enumerate(names):
            recorder.groups.name_mesh_dim(str(mesh.get_group(dim).group_name), str(name))
    except Exception as error:
        # Also reached by sub-meshes without groups of their own, whose groups were named with their
        # parent.
        log.debug(
            "commlens: a DeviceMesh's groups could not be read: %s: %s", type(error).__name__, error
        )


def _tap_optimizers() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def commlens_step(*_: Any) -> None:
        recorder = _recorder
        if recorder is not None:
            recorder.steps += 1
            recorder.writer.word(L.STEPS, recorder.steps)

    register_optimizer_step_post_hook(commlens_step)


def tap_reduce_ops() -> None:
    """Note the reduce op of calls from Python, for a torch whose boxed ReduceOp cannot be read (2.6
    to 2.9).

    The reduce ops of C++ callers (DDP's, which are sums) stay unknown there.
    """
    global _reduce_ops_tapped
    if _reduce_ops_tapped:
        return
    _reduce_ops_tapped = True
    for name in _REDUCING_METHODS:
        if name in ProcessGroup.__dict__:
            setattr(ProcessGroup, name, _noting_reduce_op(ProcessGroup.__dict__[name]))


_reduce_ops_tapped = False


def _noting_reduce_op(original: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _recorder is None and not _tracers:
            return original(self, *args, **kwargs)
        reduce_op = getattr(args[-1], "reduceOp", None) if args else None
        if reduce_op is None:
            reduce_op = next(
                (a.reduceOp for a in (*args, *kwargs.values()) if hasattr(a, "reduceOp")), None
            )
        thread = threading.get_native_id()
        noted_reduce_ops[thread] = reduce_op
        try:
            return original(self, *args, **kwargs)
        finally:
            noted_reduce_ops.pop(thread, None)

    return method
