"""The tap: the one function that every collective of the process passes through.

It is a kernel at dispatch key ``BackendSelect`` for every ``c10d::*`` op that takes a process
group. The key is in every thread's default dispatch state and below Python, Autograd and
Functionalize, so the kernel sees collectives from Python, from C++ (DDP's reducer), from functional
collectives, DTensor, FSDP2, compiled code and other threads, on any backend. An exception raised in
it reaches the caller with its type.

Tried on torch 2.6.0, 2.13.0 and 2.15.0. The kernels are registered when the first subscriber
attaches and stay registered (removing them while threads are inside is unproven); without a
subscriber they redispatch at once. The kernels of the native engine, if it is built, take their
place, and call back into this module only while a subscriber in Python listens.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._C import DispatchKey
from torch._C._distributed_c10d import ProcessGroup, Work

_AFTER = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
_META = DispatchKey.Meta

NO_ARGUMENT = -1
"""Index of an argument that an op does not have."""


class OpSpec:
    """The positions of a ``c10d`` op's arguments. Found by schema, since torch's versions
    differ.
    """

    def __init__(self, name: str, schema: Any) -> None:
        names = [argument.name for argument in schema.arguments]
        types = [str(argument.type) for argument in schema.arguments]

        def find(*candidates: str) -> int:
            return next((names.index(c) for c in candidates if c in names), NO_ARGUMENT)

        self.name = name
        self.arguments, self.results = len(schema.arguments), len(schema.returns)
        self.process_group = find("process_group")
        self.reduce_op = find("reduce_op")
        self.root = find("root_rank", "root") if name not in ("send", "recv_") else NO_ARGUMENT
        self.peer = (
            find("dst") if name == "send" else find("src") if name == "recv_" else NO_ARGUMENT
        )
        self.tag = find("tag")
        self.splits = (find("input_split_sizes"), find("output_split_sizes"))
        self.asynchronous = find("async_op", "asyncOp")
        # A kernel does not get trailing arguments that equal their default.
        default = (
            schema.arguments[self.asynchronous].default_value if self.asynchronous >= 0 else None
        )
        self.asynchronous_default = default if isinstance(default, bool) else None
        tensor_arguments = [
            i for i, kind in enumerate(types) if "Tensor" in kind and names[i] != "sparse_indices"
        ]
        self.tensors = tuple(tensor_arguments)
        self.takes_one_list = self.tensors == (0,) and types[0] == "List[Tensor]"
        # Outputs are named so. An op with one tensor argument works in place (a barrier's tensor
        # does not matter).
        self.writes = tuple(i for i in tensor_arguments if names[i].startswith("output"))


class Subscriber:
    """A subscriber to collectives. Its methods run on the issuing thread, on the hot path, and
    raise only to refuse a collective. Those that a subscriber leaves out do nothing.
    """

    sees_fake_tensors = False
    """Whether it also gets the collectives on fake and meta tensors, which communicate nothing,
    while :func:`run_fake_tensors_as` lets them through.
    """

    def begin(self, spec: OpSpec, arguments: tuple[Any, ...]) -> Any:
        """Called before issue. The other two methods get the token that it returns. An exception
        refuses the collective.
        """

    def returned(self, token: Any, result: Any) -> None:
        """Called when the backend's call has returned ``result`` (a Work, a tuple that ends with
        one, or None).
        """

    def raised(self, token: Any, error: BaseException) -> None:
        """Called when the backend's call has raised."""


class WaitSubscriber(Subscriber):
    """A subscriber to waits and Works, too: ``torch_patches.add_tracer`` reports the waits to it,
    and ``torch_patches.add_work_listener`` the asynchronous collectives that Python issues, and the
    uses of their Works other than waits.
    """

    def wait_begins(self, work: Any) -> Any:
        """Called before a thread blocks in ``work.wait()``. Returns a token, or None to ignore the
        wait.
        """

    def tensor_wait_begins(self, tensor: Any) -> Any:
        """Called before a thread blocks in a functional collective's ``wait_tensor(tensor)``."""

    def wait_ended(self, token: Any, error: BaseException | None) -> None:
        """Called when this wait has ended, perhaps with an error."""

    def issue_begins(self, frame: FrameType, asynchronous: bool | None) -> None:
        """Called when Python is about to issue an asynchronous collective, or one that may be."""

    def issue_ended(self, work: Any) -> None:
        """Called after the issue, with the Work; with None if there is none."""

    def used_without_wait(self, work: Any) -> None:
        """Called when a program takes the future of a Work, or finds by polling that it is
        complete.
        """

    def coalescing_starts(self) -> None:
        """Called after ``ProcessGroup._start_coalescing``."""

    def coalescing_ended(self, work: Any) -> None:
        """Called when ``ProcessGroup._end_coalescing`` has returned the Work of the group."""

    def backward_ended(self) -> None:
        """Called when a thread leaves a backward pass."""


_subscribers: tuple[Subscriber, ...] = ()
_fake_tensors_run_as: Any = None  # a keyset; None leaves them to torch
_lock = threading.Lock()
_libraries: list[Any] = []  # keeps the registrations alive
_native: Any = None  # the module of the native kernels, if they are installed instead of ours
_wait_listener: Callable[[Any], Any] | None = None
_wait_ended: Callable[[Any, BaseException | None], None] | None = None


def use_native(module: Any) -> bool:
    """Install the kernels of the native engine instead of those here. Return False if others are
    installed already.
    """
    global _native
    with _lock:
        if _libraries or _native is not None:
            return _native is module
        module.install([spec for _, spec in ops()], sys.modules[__name__])
        _native = module
        _update_native()
        return True


def attach(subscriber: Subscriber) -> None:
    """Report every collective to ``subscriber`` from now on. The first call registers the
    kernels.
    """
    global _subscribers
    with _lock:
        _install()
        if subscriber not in _subscribers:
            _subscribers = (*_subscribers, subscriber)
        _update_native()


def detach(subscriber: Subscriber) -> None:
    """Stop reporting to ``subscriber``. It still gets the end of calls under way."""
    global _subscribers
    with _lock:
        _subscribers = tuple(other for other in _subscribers if other is not subscriber)
        _update_native()


def detach_all() -> None:
    """Remove all subscribers without a lock: for the child of a fork."""
    global _subscribers
    _subscribers = ()
    if _native is not None:
        _native.forked()
        _update_native()


def run_fake_tensors_as(keys: Any) -> None:
    """Run collectives on fake and meta tensors with the kernels of this keyset, for a preview; None
    leaves them to torch.

    torch has Meta kernels for some of them (2.13.0 for most, 2.6.0 for none). The kernels of a fake
    process group's device take any tensor.
    """
    global _fake_tensors_run_as
    with _lock:
        _install()
        _fake_tensors_run_as = keys
        if _native is not None:
            _native.run_fake_tensors_as(keys)


def listen_to_waits(
    began: Callable[[Any], Any] | None, ended: Callable[[Any, BaseException | None], None] | None
) -> None:
    """Report the waits of functional collectives to ``began(tensor) -> token`` and ``ended(token,
    error)``.
    """
    global _wait_listener, _wait_ended
    _wait_listener, _wait_ended = began, ended
    _update_native()


def _update_native() -> None:
    """Tell the native kernels whether to call Python, which they do only while it listens."""
    if _native is not None:
        _native.set_python_listeners(bool(_subscribers), _wait_listener is not None)


def ops() -> Iterator[tuple[Any, OpSpec]]:
    """Yield every op of ``c10d`` that takes a process group."""
    for schema in torch._C._jit_get_all_schemas():
        if (
            schema.name.startswith("c10d::")
            and not schema.overload_name
            and any(a.name == "process_group" for a in schema.arguments)
        ):
            name = schema.name.removeprefix("c10d::")
            yield getattr(torch.ops.c10d, name).default, OpSpec(name, schema)


def _install() -> None:
    if _libraries or _native is not None:
        return
    library = torch.library.Library("c10d", "IMPL")
    _libraries.append(library)
    for op, spec in ops():
        library.impl(spec.name, _kernel(op, spec), "BackendSelect", with_keyset=True)
    waits = torch.library.Library("_c10d_functional", "IMPL")
    _libraries.append(waits)
    waits.impl(
        "wait_tensor",
        _wait_kernel(torch.ops._c10d_functional.wait_tensor.default),
        "BackendSelect",
        with_keyset=True,
    )


def _kernel(op: Any, spec: OpSpec) -> Callable[..., Any]:
    redispatch = op._handle.redispatch_boxed

    def commlens_tap(keys: Any, *arguments: Any) -> Any:
        subscribers = _subscribers
        below = keys & _AFTER
        if not subscribers or keys.has(_META):
            # FakeTensor and meta tensors: nothing is communicated.
            if _fake_tensors_run_as is None or not keys.has(_META):
                return redispatch(below, *arguments)
            below = _fake_tensors_run_as
            subscribers = tuple([each for each in subscribers if each.sees_fake_tensors])
        if len(subscribers) == 1:
            subscriber = subscribers[0]
            token = subscriber.begin(spec, arguments)
            try:
                result = redispatch(below, *arguments)
            except BaseException as error:
                subscriber.raised(token, error)
                raise
            subscriber.returned(token, result)
            return result
        tokens: list[tuple[Subscriber, Any]] = []
        try:
            for subscriber in subscribers:
                tokens.append((subscriber, subscriber.begin(spec, arguments)))
            result = redispatch(below, *arguments)
        except BaseException as error:
            for subscriber, token in tokens:
                subscriber.raised(token, error)
            raise
        for subscriber, token in tokens:
            subscriber.returned(token, result)
        return result

    return commlens_tap


def _wait_kernel(op: Any) -> Callable[..., Any]:
    redispatch = op._handle.redispatch_boxed

    def commlens_tap_wait(keys: Any, tensor: Any) -> Any:
        began, ended = _wait_listener, _wait_ended
        if began is None or ended is None or keys.has(_META):
            fake = _fake_tensors_run_as is not None and keys.has(_META)
            return redispatch(_fake_tensors_run_as if fake else keys & _AFTER, tensor)
        token = began(tensor)
        if token is None:
            return redispatch(keys & _AFTER, tensor)
        try:
            result = redispatch(keys & _AFTER, tensor)
        except BaseException as error:
            ended(token, error)  # may raise a refusal instead
            raise
        ended(token, None)
        return result

    return commlens_tap_wait


# --- called from the native kernels while Python listens


def begin_all(spec: OpSpec, arguments: tuple[Any, ...], fake: bool) -> list[tuple[Subscriber, Any]]:
    """Report the begin of an op to all subscribers, or with ``fake`` only to those that see fake
    tensors. Return their tokens.
    """
    tokens: list[tuple[Subscriber, Any]] = []
    try:
        for subscriber in _subscribers:
            if not fake or subscriber.sees_fake_tensors:
                tokens.append((subscriber, subscriber.begin(spec, arguments)))
    except BaseException as error:
        raised_all(tokens, error)
        raise
    return tokens


def returned_all(tokens: list[tuple[Subscriber, Any]], result: Any) -> None:
    """Report to them that the op returned."""
    for subscriber, token in tokens:
        subscriber.returned(token, result)


def raised_all(tokens: list[tuple[Subscriber, Any]], error: BaseException) -> None:
    """Report to them that the op raised."""
    for subscriber, token in tokens:
        subscriber.raised(token, error)


def wait_begins(tensor: Any) -> Any:
    """Report to the wait listener that a thread waits for a functional collective. Return its
    token.
    """
    began = _wait_listener
    return began(tensor) if began is not None else None


def wait_ended(token: Any, error: BaseException | None) -> None:
    """Report to it that this wait ended."""
    ended = _wait_ended
    if ended is not None:
        ended(token, error)


unbox_group = ProcessGroup.unbox
"""Return the one Python object of a process group, given its ScriptObject."""

unbox_work = Work.unbox
