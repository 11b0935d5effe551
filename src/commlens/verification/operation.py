"""``commlens.verify_operation``: compare the arguments of one's own multi-rank function across ranks, before it runs.

Nothing is sent over the user's process groups: the ranks of a node read each other's boards, and wait for each other there,
for at most as long as they would for a collective.
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
from commlens.verification.arguments import describe, packed

P = ParamSpec("P")
R = TypeVar("R")

GROUP_NAMES = ("group", "process_group")
"""Parameters that say which ranks call the function, where the decorator does not."""

_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by process group


@overload
def verify_operation(function: Callable[P, R]) -> Callable[P, R]: ...


@overload
def verify_operation(
    *, group: Any = None, values: bool | Collection[str] = False, shapes: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def verify_operation(
    function: Callable[..., Any] | None = None, *, group: Any = None, values: bool | Collection[str] = False, shapes: bool = True
) -> Any:
    """Before each call, compare the function's arguments with those of the other ranks that call it.

    For a function that all ranks of a group call together, such as a helper around some collectives::

        @commlens.verify_operation(values=["op"])
        def gather_metrics(inputs, op="mean"): ...

    Where verification is on (``commlens launch --debug``, ``with commlens.verify()``), a call waits until the group's other ranks on
    this node call it too. Then lists, tuples, dicts, named tuples and dataclasses must have the same elements, tensors the same shapes,
    dtypes and device types, and everything else the same types; if not, all of them raise, and the function runs on none. Elsewhere
    the decorator does nothing, and what is on other nodes is not compared, which is said once.

    Args:
        function: the function. Its name must be the same on all ranks.
        group: the process group whose ranks call it, or the name of the parameter that holds it. By default a parameter
            ``group`` or ``process_group``, else all ranks.
        values: whether numbers, text and booleans must be equal too: everywhere, or in the arguments of these names.
        shapes: False where tensors may differ in size, and only the number of dimensions must be the same.

    Raises:
        DistributedOperationException: from the decorated function: the arguments do not fit, or a rank did not come.
    """
    if function is None:
        return functools.partial(verify_operation, group=group, values=values, shapes=shapes)
    signature = inspect.signature(function)
    name = _name(function)
    named = frozenset() if isinstance(values, bool) else frozenset(values)

    def compare_value(argument: str) -> bool:
        return values is True or argument in named

    @functools.wraps(function)
    def verified(*args: Any, **kwargs: Any) -> Any:
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return function(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which says it best itself
        bound.apply_defaults()
        among = _group(group, bound.arguments) or distributed.group.WORLD
        verifier, known = verifier_of(among)
        with next_call(among) as number:
            if verifier is not None and verifier.is_active:
                verifier.before_call(
                    name, known, number, lambda: packed(describe(bound.arguments, compare_value, shapes=shapes)), sys._getframe(1)
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
    """The process group of a call; None for the default one."""
    if isinstance(group, str):
        return arguments[group]
    if group is not None:
        return group
    return next((arguments[name] for name in GROUP_NAMES if hasattr(arguments.get(name), "rank")), None)


@contextlib.contextmanager
def next_call(among: Any) -> Iterator[int]:
    """The number of this call among those of such functions in the group: verified or not, all ranks count alike.

    A call that is refused inside does not count: the function did not run.
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
    """The process's verifier and what the recorder knows of the group; nothing where there is none."""
    from commlens.tap.torch_patches import active_recorder

    recorder = active_recorder()
    if recorder is None or recorder.verifier is None or not hasattr(among, "rank"):
        return None, None
    return recorder.verifier, recorder.groups.find(among)
