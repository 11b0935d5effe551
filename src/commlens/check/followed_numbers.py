"""Numbers that a program read from tensors, followed until the program takes a branch by them.

A followed number is an ``int`` or a ``float`` of the same value that has a provenance. The results
of computations with it are followed, too. It reports what the program does with it::

    loss = total.item()  # returns follow(2.0, provenance)
    if loss / 2 > 3:     # asks provenance.decide(False) for the outcome
    list(range(int(loss)))  # calls provenance.escape(2.0): the int is plain
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from commlens.check.branches import Moment
from commlens.tracing.patches import Patches

_NEVER = Moment(0, 0)


class Listener(Protocol):
    """Is told what the program does with followed numbers."""

    def decide(self, outcome: bool, provenance: Provenance) -> bool:
        """Return the answer to a comparison or to a question for a truth value."""

    def note_escape(self, value: Any, provenance: Provenance) -> None:
        """Note that a number became a plain one, by which the program may take branches unseen."""


@dataclass(frozen=True)
class Provenance:
    """The origin of a followed number: the reads of tensors from which it was computed."""

    listener: Listener
    alike: bool
    """Collectives made the value the same on all ranks."""
    known: bool = False
    """The rank knows the value, as a real run would have it."""
    forced: bool = False
    """``--branch`` gave the number."""
    received: bool = False
    """Only some ranks received the value; the others know it, or do not need it."""
    undelivered: bool = False
    """It comes from tensors of other ranks that have not been seen yet (``exchange.py``)."""
    moment: Moment = _NEVER
    """When the number was read."""

    @property
    def settled(self) -> bool:
        """Whether the number is certain."""
        return self.known or self.forced

    def decide(self, outcome: bool) -> bool:
        """Return the answer to a question for a truth value, of which the outcome is known."""
        return self.listener.decide(outcome, self)

    def escape(self, value: Any) -> None:
        """Report that a number became a plain one."""
        self.listener.note_escape(value, self)

    def join(self, other: Provenance) -> Provenance:
        """Return the provenance of a number that is computed from two."""
        forced = self.forced and other.forced
        return Provenance(
            self.listener,
            self.alike and other.alike,
            known=self.settled and other.settled and not forced,
            forced=forced,
            received=self.received or other.received,
            undelivered=self.undelivered or other.undelivered,
            moment=max(self.moment, other.moment),
        )


class FollowedFloat(float):
    """A float that reports to its provenance."""

    provenance: Provenance


class FollowedInt(int):
    """An int that reports to its provenance."""

    provenance: Provenance


FOLLOWED = (FollowedFloat, FollowedInt)

_registered: list[Any] = []  # wrappers, kept alive: nothing else may get their addresses


def follow(value: Any, provenance: Provenance) -> Any:
    """Return an int or a float as a followed number; other values as they are."""
    followed: Any
    if type(value) is float:
        followed = float.__new__(FollowedFloat, value)
    elif type(value) is int:
        followed = int.__new__(FollowedInt, value)
    else:
        return value
    followed.provenance = provenance
    return followed


def follow_through_math(patches: Patches) -> None:
    """Follow numbers through those functions of ``math`` that call none of a number's methods."""
    from torch.jit import _builtins

    table = _builtins._get_builtin_table()
    for name, original in list(vars(math).items()):
        if not callable(original) or name.startswith("_") or name in _ROUNDING:
            continue
        patches.wrap(math, name, _call_and_follow)
        wrapper = getattr(math, name)
        if id(original) in table:  # torch.jit.script knows a function by its address
            _builtins._register_builtin(wrapper, table[id(original)])
            _registered.append(wrapper)


_ROUNDING: Final = frozenset({"floor", "ceil", "trunc"})
"""The functions of ``math`` that call a number's methods."""


def _call_and_follow(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    provenance = _joined_provenance(args)
    result = original(*args, **kwargs)
    return result if provenance is None else _followed_result(result, provenance)


def _followed_result(result: Any, provenance: Provenance) -> Any:
    """Return a result as the program gets it: the answer to a comparison, or a followed number."""
    if type(result) is bool:
        return provenance.decide(result)
    if type(result) is tuple:  # divmod
        return tuple(follow(each, provenance) for each in result)
    return follow(result, provenance)


def _joined_provenance(values: tuple[Any, ...]) -> Provenance | None:
    found: Provenance | None = None
    for value in values:
        if type(value) in FOLLOWED:
            found = value.provenance if found is None else found.join(value.provenance)
    return found


# --- the methods of followed numbers


def _computation(base: type[Any], name: str) -> Callable[..., Any]:
    """Return a method whose result is followed."""
    original = getattr(base, name)

    def compute(self: Any, *others: Any) -> Any:
        result = original(self, *others)
        # Python would go on to the plain float's reflected method, whose result is not followed.
        if result is NotImplemented and base is int and isinstance(others[0], float):
            result = getattr(float, name)(float(int.__int__(self)), *others)
        provenance = None if result is NotImplemented else _joined_provenance((self, *others))
        return result if provenance is None else _followed_result(result, provenance)

    return compute


def _conversion(base: type[Any], name: str) -> Callable[..., Any]:
    """Return a method that makes a plain number, which is not followed any more."""
    original = getattr(base, name)

    def convert(self: Any, *others: Any) -> Any:
        self.provenance.escape(self)
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
_CONVERSIONS = (
    *("__int__", "__float__", "__trunc__", "__round__", "__floor__", "__ceil__"),
    *("is_integer", "as_integer_ratio", "hex", "conjugate"),
)


def _add_methods(kind: type[Any], base: type[Any]) -> None:
    """Give a type of followed numbers the methods of its base type."""
    for name in [*_COMPARISONS, *_COMPUTATIONS, *(_OF_INTS if base is int else ())]:
        setattr(kind, name, _computation(base, name))
    for name in filter(partial(hasattr, base), _CONVERSIONS):
        setattr(kind, name, _conversion(base, name))
    plain: Callable[[Any], Any] = int.__int__ if base is int else float.__float__
    for name, method in {
        "__hash__": base.__hash__,
        "__bool__": lambda self: self.provenance.decide(bool(plain(self))),
        "__reduce_ex__": lambda self, protocol: (base, (plain(self),)),
        "__copy__": lambda self: self,
        "__deepcopy__": lambda self, memo: self,
        # a program that calls the type of a number, as statistics.mean does, gets a plain one
        "__new__": staticmethod(lambda _, value=0, *more: base(value, *more)),
    }.items():
        setattr(kind, name, method)


_add_methods(FollowedFloat, float)
_add_methods(FollowedInt, int)
