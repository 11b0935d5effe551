"""Numbers that a program read from tensors, followed until it takes a branch by them.

A followed number is an int or float of the same value. It reports when it is compared or used as a
truth value. The results of computations with it are followed, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from commlens.tracing.patches import Patches


class Reader(Protocol):
    """Where a followed number comes from."""

    def decide(self, outcome: bool) -> bool:
        """Return the outcome of a comparison that the program gets, or the number's truth value:
        ``outcome``, or the one that the check has chosen in order to explore the other branch.
        """

    def lose(self, value: Any) -> None:
        """Note that the number went to a place where it cannot be followed."""

    def join(self, other: Reader) -> Reader:
        """Return the reader of a result that is computed from this reader's number and
        another's.
        """


class FollowedFloat(float):
    """A float that reports to its reader."""

    reader: Reader


class FollowedInt(int):
    """An int that reports to its reader."""

    reader: Reader


FOLLOWED = (FollowedFloat, FollowedInt)

_registered: list[Any] = []  # kept alive: nothing else may get their addresses


def follow(value: Any, reader: Reader) -> Any:
    """Return an int or a float as a followed number; other values as they are."""
    followed: Any
    if type(value) is float:
        followed = FollowedFloat(value)
    elif type(value) is int:
        followed = FollowedInt(value)
    else:
        return value
    followed.reader = reader
    return followed


def install(patches: Patches) -> None:
    """Follow numbers through the functions of ``math``, which call none of a number's methods."""
    from torch.jit import _builtins

    table = _builtins._get_builtin_table()
    for name in ("isnan", "isinf", "isfinite", "exp", "log", "log2", "log10", "sqrt", "pow"):
        original = getattr(math, name)
        patches.wrap(math, name, _call_and_follow)
        wrapper = getattr(math, name)
        if id(original) in table:  # torch.jit.script knows a function by its address
            _builtins._register_builtin(wrapper, table[id(original)])
            _registered.append(wrapper)


def _call_and_follow(original: Callable[..., Any], *args: Any) -> Any:
    reader = _reader(args)
    result = original(*args)
    return result if reader is None else _with_reader(result, reader)


def _with_reader(result: Any, reader: Reader) -> Any:
    """Return a result as the program gets it: a truth value as the reader decides it, a number as
    a followed one.
    """
    if type(result) is bool:
        return reader.decide(result)
    if type(result) is tuple:  # divmod
        return tuple(follow(each, reader) for each in result)
    return follow(result, reader)


def _reader(values: tuple[Any, ...]) -> Reader | None:
    found: Reader | None = None
    for value in values:
        if type(value) in FOLLOWED:
            found = value.reader if found is None else found.join(value.reader)
    return found


def _computation(base: type[Any], name: str) -> Callable[..., Any]:
    original = getattr(base, name)

    def compute(self: Any, *others: Any) -> Any:
        result = original(self, *others)
        # Python would go on to the plain float's reflected method, whose result is not followed.
        if result is NotImplemented and base is int and isinstance(others[0], float):
            result = getattr(float, name)(float(int.__int__(self)), *others)
        reader = None if result is NotImplemented else _reader((self, *others))
        return result if reader is None else _with_reader(result, reader)

    return compute


def _conversion(base: type[Any], name: str) -> Callable[..., Any]:
    original = getattr(base, name)

    def convert(self: Any, *others: Any) -> Any:
        self.reader.lose(self)
        return original(self, *others)

    return convert


_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_COMPUTATIONS = [
    *(
        f"__{prefix}{name}__"
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow")
        for prefix in ("", "r")
    ),
    "__neg__",
    "__pos__",
    "__abs__",
]
_OF_INTS = [
    *(
        f"__{prefix}{name}__"
        for name in ("and", "or", "xor", "lshift", "rshift")
        for prefix in ("", "r")
    ),
    "__invert__",
]
_CONVERSIONS = ("__int__", "__float__", "__trunc__", "__round__", "__floor__", "__ceil__")
"""Make a plain number, which is not followed any more."""


def _fill(kind: type[Any], base: type[Any]) -> None:
    for name in [*_COMPARISONS, *_COMPUTATIONS, *(_OF_INTS if base is int else ())]:
        setattr(kind, name, _computation(base, name))
    for name in _CONVERSIONS:
        setattr(kind, name, _conversion(base, name))
    plain: Callable[[Any], Any] = int.__int__ if base is int else float.__float__
    for name, method in {
        "__hash__": base.__hash__,
        "__bool__": lambda self: self.reader.decide(bool(plain(self))),
        "__reduce_ex__": lambda self, protocol: (base, (plain(self),)),
        "__copy__": lambda self: self,
        "__deepcopy__": lambda self, memo: self,
    }.items():
        setattr(kind, name, method)


_fill(FollowedFloat, float)
_fill(FollowedInt, int)
