"""The patches of torch's Python functions, for what the tap does not see because it is no op.

==================================================  ================================================
patched                                             to learn
==================================================  ================================================
``Work.wait``                                       which thread is blocked in which collective
``Work.is_completed``, ``get_future`` ...           that a program need not wait
``ProcessGroup._start_coalescing`` and its end      which ops are one coalesced group
``ProcessGroup.allreduce`` ...                      that the program itself is about to get a Work;
                                                    before torch 2.10 also the reduce op
``torch.autograd``'s run of a backward pass         where DDP's reducer waits in C++
``DeviceMesh``, optimizers, ``CUDAGraph`` ...       names of groups, steps, captures and replays
==================================================  ================================================

There are three kinds of listeners: one *recorder*, of a live rank, *tracers*, which hear of waits,
and *work listeners*, which hear of issues and of other uses of Works. ``listen`` and
``add_work_listener`` install the patches that a listener needs. A patch stays for good, and does
nothing while none listens; only that of ``Work.wait`` is taken off again. Tried on torch 2.6.0,
2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
import logging
import os
import pkgutil
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Work

from commlens.blackbox import layout as L
from commlens.matching.error_texts import is_mismatch_error, is_peer_error
from commlens.tap import libraries, tap
from commlens.tap.groups import named_dims

log = logging.getLogger("commlens")

_FIRST_READABLE_REDUCE_OP = (2, 10)
"""Tried: unreadable on 2.6.0 and 2.9.1, readable on 2.13.0. On a version between them, the recorder
calls tap_reduce_ops when it fails.
"""

_GROUP: Final = "torch._C._distributed_c10d:ProcessGroup"
_RUN_BACKWARD: Final = ("_engine_run_backward",)
_RUNS_BACKWARD: Final = {"torch.autograd": _RUN_BACKWARD, "torch.autograd.graph": _RUN_BACKWARD}
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

# --- the listeners

_recorder: Any = None  # the Recorder of capture
_lock = threading.RLock()  # held to change the tracers
_tracers: tuple[tap.WaitSubscriber, ...] = ()
_work_listeners: tuple[tap.WaitSubscriber, ...] = ()
work_is_completed = Work.is_completed
"""The original, without the patch that notes that a program polls."""


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have had it


os.register_at_fork(after_in_child=_forked)


def set_recorder(recorder: Any) -> None:
    """Report to ``recorder`` from now on; with None, the patches only pass calls through."""
    global _recorder
    _recorder = recorder
    if recorder is not None:
        _untap_work_wait()  # installed by a tracer, without a native recorder
    calls = getattr(recorder, "library_calls", None)
    libraries.listen(*((None, None) if calls is None else (calls.begin, calls.end)))
    listen()


def active_recorder() -> Any:
    """Return the recorder of this process; None if nothing is recorded, as in a forked child."""
    return _recorder


def add_tracer(tracer: tap.WaitSubscriber) -> None:
    """Report waits to ``tracer``, too."""
    global _tracers
    with _lock:
        _tracers = (*_tracers, tracer)
        listen()


def remove_tracer(tracer: tap.WaitSubscriber) -> None:
    """Stop reporting waits to ``tracer``."""
    global _tracers
    with _lock:
        _tracers = tuple(other for other in _tracers if other is not tracer)
        listen()


def add_work_listener(listener: tap.WaitSubscriber) -> None:
    """Report issues, and uses of Works other than waits, to ``listener``, too."""
    global _work_listeners
    _work_listeners = (*_work_listeners, listener)
    _install(_coalescing_starts, _coalescing_ends)
    _install(_issues, _backward_passes, _tap_other_uses_of_works)


def remove_work_listener(listener: tap.WaitSubscriber) -> None:
    """Stop reporting issues and uses of Works to ``listener``."""
    global _work_listeners
    _work_listeners = tuple(other for other in _work_listeners if other is not listener)


def listen() -> None:
    """Report waits to the present listeners, and install the patches that they need. Call this
    again when a recorder begins to verify.
    """
    recorder = _recorder
    began: Any = None
    ended: Any = None
    if _tracers:
        began, ended = _tensor_wait_begins, _tensor_wait_ended
    elif recorder is not None and recorder.listens_to_waits:
        began, ended = recorder.tensor_wait_begins, recorder.tensor_wait_ended
    tap.listen_to_waits(began, ended)
    if recorder is None and not _tracers:
        _untap_work_wait()
        return
    _install(_tap_work_wait)
    # C++ reads them in each version of torch, for a native recorder alone
    in_python = _tracers or recorder is None or not recorder.reads_reduce_ops
    if in_python and not python_reads_reduce_ops():
        _install(tap_reduce_ops)
    if recorder is not None:
        _install(_coalescing_starts, _coalescing_ends, _tap_other_uses_of_works)
        _install(_meshes, _tap_optimizers, _broadcasts_of_buffers, _graphs, _calls_of_others)
        if recorder.verifier is not None:
            _install(_refusals_in_cpp)


# --- the mechanism


def _install(*installs: Callable[[], None]) -> None:
    for install in installs:
        try:
            install()
        except Exception as error:
            _warn(install.__name__, error)


def _warn(patch: str, error: Exception) -> None:
    log.warning(
        "commlens: the patch %s does not work with this torch: %s: %s",
        patch,
        type(error).__name__,
        error,
    )


@dataclass(eq=False)
class _Patch:
    """Replaces functions of torch at its first call, for good. A decorator: ``make`` takes one of
    these functions, and returns the function that replaces it and calls it.
    """

    # by "module" or "module:class", which is imported; those that this torch lacks are left out
    names: Mapping[str, tuple[str, ...]]
    make: Callable[[Any], Any]

    def __call__(self) -> None:
        wanted, self.names = self.names, {}
        for owner, names in wanted.items():
            try:
                place = pkgutil.resolve_name(owner)
                found = {name: getattr(place, name) for name in names if hasattr(place, name)}
                for name, original in found.items():
                    setattr(place, name, _in_place_of(original, self.make(original), name))
                if not found:
                    raise AttributeError(f"{owner} has no {' or '.join(names)}")
            except Exception as error:
                _warn(f"of {', '.join(names)}", error)


def _in_place_of(original: Any, function: Any, name: str) -> Any:
    """Let a function replace a method of torch. It must call the original itself.

    In a subclass that is written in Python, C++ takes what replaces a method of the base class for
    the subclass's own and calls it. The original would call it again, without end, if the frame
    that calls the original did not have the method's name: by this, pybind11 knows such calls.
    """
    function.__code__ = function.__code__.replace(co_name=name)
    return functools.wraps(original)(function)


# --- waits: of Python, and of functions that wait in C++

_tapped_waits: list[tuple[Any, Any]] = []  # classes whose wait is tapped, with the original


def _tap_work_wait() -> None:
    """Replace ``Work.wait``, by the recorder's own in C++ if it has one."""
    if _tapped_waits:
        return
    # Classes of C++ Works with a wait of their own (the fake backend's) do not call that of Work.
    # One that is written in Python is left alone: C++ would take a builtin for its own wait.
    for kind in (Work, *Work.__subclasses__()):
        original = kind.__dict__.get("wait")
        if original is not None and (kind is Work or not isinstance(original, FunctionType)):
            _tapped_waits.append((kind, original))
            slow = _tapped_wait(original)
            tapped = slow if _recorder is None else _recorder.tapped_wait(original, slow)
            setattr(kind, "wait", tapped)  # noqa: B010 - a plain assignment is what type checkers refuse


def sees_waits_for(work: Any) -> bool:
    """Return whether the waits for a Work are reported; not those of a class written in Python."""
    owner = next(kind for kind in type(work).__mro__ if "wait" in kind.__dict__)
    return any(owner is kind for kind, _ in _tapped_waits)


def _untap_work_wait() -> None:
    for kind, original in _tapped_waits:
        setattr(kind, "wait", original)  # noqa: B010
    _tapped_waits.clear()


def _tapped_wait(original: Any) -> Any:
    """Report each wait to the tracers and the recorder, before and after. The recorder's verifier
    may raise before it, and replaces the backend's error by a peer's refusal.
    """

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder
        held = [(each, mark) for each in _tracers if (mark := each.wait_begins(self)) is not None]
        token = recorder.wait_begins(self) if recorder is not None else None
        if token is None and not held:
            return original(self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            _wait_ended(self, recorder, token, held, error)
            if recorder is not None and recorder.verifier is not None:
                raise recorder.error_to_raise(error)  # noqa: B904 - its cause is set
            raise
        _wait_ended(self, recorder, token, held, None)
        return result

    return wait


def _wait_ended(
    work: Any, recorder: Any, token: Any, held: list[tuple[Any, Any]], error: BaseException | None
) -> None:
    if token is not None:
        recorder.wait_ended(work, token, error)
    for tracer, mark in held:
        tracer.wait_ended(mark, error)


def _tensor_wait_begins(tensor: Any) -> Any:
    """Report that a thread waits for the tensor of a functional collective; the tap calls this."""
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


waits_in_cpp: dict[int, int] = {}
"""By thread that is in a function of torch that waits for collectives in C++, while a verifier is
on: since when, CLOCK_MONOTONIC in ns.
"""


@functools.partial(
    _Patch,
    {
        **_RUNS_BACKWARD,
        "torch.distributed": ("_broadcast_coalesced", "_verify_params_across_processes"),
        "torch.distributed:Reducer": ("_rebuild_buckets",),
        "torch._C:Future": ("wait",),
    },
)
def _refusals_in_cpp(original: Any) -> Any:
    """Raise a refusal instead of the backend's error where C++ waits for collectives: DDP's
    reducer, and futures.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        is_outermost = thread not in waits_in_cpp  # such functions call one another
        if is_outermost:
            waits_in_cpp[thread] = time.monotonic_ns()
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            is_of_peers = is_peer_error(str(error)) or is_mismatch_error(str(error))
            if _recorder is None or _recorder.verifier is None or not is_of_peers:
                raise
            raise _recorder.error_to_raise(error)  # noqa: B904 - its cause is set
        finally:
            if is_outermost:
                waits_in_cpp.pop(thread, None)

    return call


@functools.partial(_Patch, {"torch.distributed": ("_broadcast_coalesced",)})
def _broadcasts_of_buffers(original: Any) -> Any:
    """Report a call that issues collectives and waits for them in C++: DDP's broadcast of buffers.
    Only the native recorder asks for it.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        begins = getattr(recorder := _recorder, "cpp_waits", None)
        if begins is None:
            return original(*args, **kwargs)
        begins()
        try:
            return original(*args, **kwargs)
        finally:
            recorder.waited_in_cpp()

    return call


# --- issues, groups of collectives, and other uses of their Works


@functools.partial(_Patch, {_GROUP: _ISSUING_METHODS})
def _issues(original: Any) -> Any:
    """Report to the work listeners a call from Python that returns a Work: asynchronous, or of
    unknown options.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        listeners, work = _work_listeners, None
        asynchronous = _async_op_in(args, kwargs) if listeners else False
        if asynchronous is False:
            return original(self, *args, **kwargs)
        for listener in listeners:
            listener.issue_begins(sys._getframe(1), asynchronous)
        try:
            work = original(self, *args, **kwargs)
            return work
        finally:
            for listener in listeners:
                listener.issue_ended(work)

    return method


def _async_op_in(args: Any, kwargs: Any) -> bool | None:
    """Return the ``asyncOp`` of a call's options; None if there is none."""
    for argument in (*args[:0:-1], *kwargs.values()):
        asynchronous = getattr(argument, "asyncOp", None)
        if asynchronous is not None:
            return bool(asynchronous)
    return None


@functools.partial(_Patch, {_GROUP: ("_start_coalescing",)})
def _coalescing_starts(start: Any) -> Any:
    """Report that this thread begins a coalesced group."""

    def _start_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = start(self, *args, **kwargs)
        if _recorder is not None:
            _recorder.coalescing_starts()
        for listener in _work_listeners:
            listener.coalescing_starts()
        return result

    return _start_coalescing


@functools.partial(_Patch, {_GROUP: ("_end_coalescing",)})
def _coalescing_ends(end: Any) -> Any:
    """Report that this thread ends a coalesced group, and the one Work of all its ops."""

    def _end_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder
        token = recorder.coalescing_ends() if recorder is not None else None
        work = None
        try:
            work = end(self, *args, **kwargs)
        except BaseException as error:
            if token is not None:
                recorder.raised(token, error)
            raise
        finally:
            for listener in _work_listeners:
                listener.coalescing_ended(work)
        if token is not None:
            recorder.group_returned(token, work)
        return work

    return _end_coalescing


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
        if method is not None and not hasattr(method, "notes_use"):
            noting = _in_place_of(method, _noting_use(method), name)
            noting.notes_use = True
            setattr(Work, name, noting)


def _noting_use(original: Any) -> Any:
    """Report a use of a Work that shows how far it is; to the work listeners, for which it then is
    complete, not if a poll finds that it is not.
    """
    polls = original.__name__ == "is_completed"

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _recorder is not None:
            _recorder.used_without_wait(self)
        result = original(self, *args, **kwargs)
        if result or not polls:
            for listener in _work_listeners:
                listener.used_without_wait(self)
        return result

    return method


@functools.partial(_Patch, _RUNS_BACKWARD)
def _backward_passes(original: Any) -> Any:
    """Report to the work listeners that a backward pass has ended."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            for listener in _work_listeners:
                listener.backward_ended()

    return call


# --- reduce ops, where torch hides them


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


noted_reduce_ops: dict[int, Any] = {}
"""By native thread id: the reduce op of the call under way, once :func:`tap_reduce_ops` was
called.
"""


@functools.partial(_Patch, {_GROUP: _REDUCING_METHODS})
def tap_reduce_ops(original: Any) -> Any:
    """Note the reduce op in a call's options, mostly its last argument, while a call from Python
    runs: for a torch whose boxed ReduceOp cannot be read (2.6 to 2.9). Those of C++ callers (DDP's,
    which are sums) stay unknown there.
    """

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


# --- graphs, meshes, steps, and calls that do nothing


@functools.partial(
    _Patch, {"torch.cuda.graphs:CUDAGraph": ("capture_begin", "capture_end", "replay")}
)
def _graphs(original: Any) -> Any:
    """Report the capture and the replays of CUDA graphs: a captured collective does not run, and a
    replay passes no tap.

    Every user of graphs calls these methods: ``torch.cuda.graph``, ``make_graphed_callables`` and
    inductor. Neither importing nor patching them initialises the driver.
    """
    name = original.__name__

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder
        if recorder is not None and name == "capture_begin":
            recorder.capture_begins()
        elif recorder is not None and name == "replay":
            recorder.replays(self)
        try:
            return original(self, *args, **kwargs)
        finally:  # even if the capture failed
            if recorder is not None and name == "capture_end":
                recorder.capture_ends(self)

    return method


@functools.partial(_Patch, {"torch.distributed.device_mesh:DeviceMesh": ("__init__",)})
def _meshes(original: Any) -> Any:
    """Name the groups of each mesh that is made."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            for group_name, dim in named_dims(self) if _recorder is not None else ():
                _recorder.groups.name_mesh_dim(group_name, dim)
        except Exception as error:
            # Also reached by sub-meshes without groups of their own, whose groups were named with
            # their parent.
            log.debug(
                "commlens: a DeviceMesh's groups could not be read: %s: %s",
                type(error).__name__,
                error,
            )

    return __init__


@functools.cache
def _tap_optimizers() -> None:
    """Count optimizer steps, in the recorder and in the black box."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def commlens_step(*_: Any) -> None:
        recorder = _recorder
        if recorder is not None:
            recorder.steps += 1
            recorder.writer.word(L.STEPS, recorder.steps)

    register_optimizer_step_post_hook(commlens_step)


@functools.partial(_Patch, {"torch.distributed.distributed_c10d": ("_warn_not_in_group",)})
def _calls_of_others(original: Any) -> Any:
    """Note the calls with a group that this rank is not in: torch warns and does nothing."""

    def _warn_not_in_group(op_name: Any) -> None:
        if _recorder is not None:
            _recorder.hazards.not_a_member()
        # torch's own text, for the line that torch would name: a call of the original would name
        # this function's
        world = torch.distributed.GroupMember.WORLD
        rank = -1 if world is None else world.rank()
        text = f"Running {op_name} on global rank {rank} which does not belong to the given group."
        warnings.warn(text, stacklevel=2)

    return _warn_not_in_group
