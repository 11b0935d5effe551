"""``commlens.verify_operation``: compare the arguments of a user's multi-rank function across ranks
before it runs.

Nothing is sent over the user's process groups: the ranks of a node read each other's boards, and
wait there for each other at most as long as for a collective.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, ParamSpec, TypeVar, overload

from commlens.errors import DistributedOperationException
from commlens.verification.arguments import describe, pack

P = ParamSpec("P")
R = TypeVar("R")

GROUP_NAMES = ("group", "process_group")
"""Parameters that hold the process group, unless the decorator names one."""

_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by process group


@overload
def verify_operation(function: Callable[P, R]) -> Callable[P, R]: ...


@overload
def verify_operation(
    *, group: Any = None, values: bool | Collection[str] = False, shapes: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def verify_operation(
    function: Callable[..., Any] | None = None,
    *,
    group: Any = None,
    values: bool | Collection[str] = False,
    shapes: bool = True,
) -> Any:
    """Before each call, compare the function's arguments with those of the other ranks that call
    it.

    For a function that all ranks of a group call together, such as a helper around some
    collectives::

        @commlens.verify_operation(values=["op"])
        def gather_metrics(inputs, op="mean"): ...

    With verification on (``commlens launch --debug``, ``with commlens.verify()``), a call waits
    until the group's other ranks call the function too. Then lists, tuples, dicts, named tuples and
    dataclasses must have the same elements, tensors the same shapes, dtypes and device types, and
    everything else the same types; otherwise all these ranks raise, and the function runs on none.
    Ranks on nodes that cannot be reached are not compared, which is logged once. With verification
    off, the decorator does nothing.

    Args:
        function: the function. Its name must be the same on all ranks.
        group: the process group whose ranks call it, or the name of the parameter that holds it. By
            default a parameter ``group`` or ``process_group``, else all ranks.
        values: whether numbers, strings and booleans must be equal too: in all arguments, or in
            those with these names.
        shapes: False if tensors may differ in size and need only the same number of dimensions.

    Raises:
        ValueError: the function has no parameter with the name in ``group``.
        DistributedOperationException: raised by the decorated function: the arguments do not match,
            or a rank did not arrive.
    """
    if function is None:
        return functools.partial(verify_operation, group=group, values=values, shapes=shapes)
    signature = inspect.signature(function)
    name = _name(function)
    if isinstance(group, str) and group not in signature.parameters:
        raise ValueError(
            f"verify_operation(group={group!r}): {name} has no parameter {group!r}; its parameters"
            f" are {', '.join(signature.parameters) or 'none'}"
        )
    named = frozenset() if isinstance(values, bool) else frozenset(values)

    def compare_value(argument: str) -> bool:
        return values is True or argument in named

    @functools.wraps(function)
    def verified(*args: Any, **kwargs: Any) -> Any:
        distributed = sys.modules.get("torch.distributed")
        if (
            distributed is None
            or not distributed.is_available()
            or not distributed.is_initialized()
        ):
            return function(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # it raises the same error
        bound.apply_defaults()
        among = _group(group, bound.arguments) or distributed.group.WORLD
        verifier, known = verifier_of(among)
        with next_call(among) as number:
            if verifier is not None and verifier.is_active:
                verifier.before_call(
                    name,
                    known,
                    number,
                    lambda: pack(describe(bound.arguments, compare_value, shapes=shapes)),
                    sys._getframe(1),
                )
        return function(*args, **kwargs)

    return verified


def _name(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", "")
    if module == "__main__":
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        module = os.path.splitext(os.path.basename(main))[0] if main else "__main__"  # noqa: PTH119, PTH122
    return f"{module}.{getattr(function, '__qualname__', function)}".replace("<locals>.", "")


def _group(group: Any, arguments: dict[str, Any]) -> Any:
    """Return the process group of a call; None for the default one."""
    if isinstance(group, str):
        return arguments[group]
    if group is not None:
        return group
    return next(
        (arguments[name] for name in GROUP_NAMES if hasattr(arguments.get(name), "rank")), None
    )


@contextlib.contextmanager
def next_call(among: Any) -> Iterator[int]:
    """Number the calls of decorated functions in a group. Calls count on all ranks alike, whether
    they verify or not.

    A call that is refused does not count: the function did not run.
    """
    try:
        number = _calls[among] = _calls.get(among, 0) + 1
    except TypeError:  # this rank is no member
        yield 0
        return
    try:
        yield number
    except DistributedOperationException:
        if _calls.get(among) == number:
            _calls[among] = number - 1
        raise


def verifier_of(among: Any) -> tuple[Any, Any]:
    """Return the process's verifier and the recorder's view of the group; None for both without a
    verifier.
    """
    from commlens.tap.torch_patches import active_recorder

    recorder = active_recorder()
    if recorder is None or recorder.verifier is None or not hasattr(among, "rank"):
        return None, None
    return recorder.verifier, recorder.groups.find(among)
