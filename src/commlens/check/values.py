"""The lines at which a program reads values of tensors that a run of one rank alone cannot know,
and the answers that ``--branch`` gives there.

A value is unknown if another rank sends it, or if it is computed from an unknown value
(``origins.py``). Reading a number decides nothing yet: it is followed until the program takes a
branch by it. Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from commlens.check.branches import Answers, BranchLine, Choice, How, Moment, Value
from commlens.check.exchange import CheckExchange
from commlens.check.origins import UNKNOWN, Origins, ValueOrigin, alike_in, joined
from commlens.model.collective import Frame, FrameKind
from commlens.tap.running_frames import kind_of_file, user_frame
from commlens.tracing.patches import Patches

_SHOWS = (torch.Tensor.__repr__, torch.Tensor.__format__)
_LOSES = (torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__)
_LEAVES_TORCH = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
# torch's own reads that decide nothing about communication, from Python, or from C++ in a backward
_OWN_READS = (
    "/torch/autograd/graph.py",
    "/torch/distributed/tensor/_random.py",
    "/torch/distributed/device_mesh.py",
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/pipelining/stage.py",
    "/torch/distributed/pipelining/schedules.py",
    "/torch/distributed/utils.py",
    "/torch/_tensor_str.py",
)
_ANSWERS_KEPT = 8
_MOMENTS_KEPT = 1000  # of one line
_NEVER = Moment(0, 0)


class Values:
    """Notes the lines at which the program reads unknown values, while entered.

    Enter it inside the fake world.
    """

    def __init__(
        self,
        world_size: int,
        choices: Iterable[Choice] = (),
        answers: Answers | None = None,
        number: float | None = None,
        exchange: CheckExchange | None = None,
    ) -> None:
        """Give the answers of ``choices``, and to reads of values that ranks have alike the
        ``answers`` that other ranks got. Elsewhere the answer is that of the fake world; for
        floats that cannot be followed, it is ``number``, if that is given. ``exchange`` delivers
        small tensors of other ranks.
        """
        self._world_size = world_size
        self._choices = tuple(choices)
        self._others = answers or {}
        self._number = number
        self._exchange = exchange
        self.answers: Answers = {}
        """The answers to reads of values that ranks have alike, in order."""
        self._found: dict[tuple[str, int, How, bool], _Met] = {}
        self._thread = _Reading()
        self._origins = Origins(self._read, self._shaped)
        self._patches = Patches()
        self._stack = contextlib.ExitStack()

    @property
    def decisions(self) -> list[BranchLine]:
        """The lines that asked so far, in the order of their first question."""
        return [
            BranchLine(
                met.frame,
                key[2],
                met.alike,
                tuple(met.taken),
                forced=key[3],
                received=met.received,
                asked=tuple(met.asked),
                replaceable=met.replaceable,
            )
            for key, met in self._found.items()
        ]

    def __enter__(self) -> Values:
        with contextlib.ExitStack() as stack:
            stack.callback(self._patches.restore)
            follow_through_math(self._patches)
            self._patches.wrap(torch.autograd, "_engine_run_backward", self._run_backward)
            self._patches.replace_aliases()
            stack.enter_context(self._origins)
            if self._exchange is not None:
                self._exchange.attach(self._origins)
                stack.callback(self._exchange.detach)
            stack.enter_context(_Functions(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- functions of torch

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch, and follow what it reads."""
        with self._reading() as read:
            result = func(*args, **kwargs)
        if func in _SHOWS:
            return result
        if func in _LEAVES_TORCH and not _read_by_torch_itself():
            read = [self._origins.of(args[0])]
        if not read:
            return self._follow_into(result, args)
        origin = joined(read)
        if origin is None and not self._choices:
            return result
        if func in _LOSES or (func not in _LEAVES_TORCH and not _is_plain(result)):
            return self._lost(result, origin)
        return self._follow_each(result, origin)

    def _follow_each(self, result: Any, origin: ValueOrigin | None) -> Any:
        """Follow a value that was read, or each value of a list."""
        if isinstance(result, list):
            return [self._follow_each(each, origin) for each in result]
        if not _is_plain(result):  # an array
            return self._lost(result, origin)
        value, reader = self._answer(result, origin)
        if isinstance(value, bool):
            return reader.decide(value)
        if isinstance(value, int):
            reader.lose(value)  # a range or a shape of an int is not seen
        return follow(value, reader)

    def _lost(self, result: Any, origin: ValueOrigin | None) -> Any:
        """Return a value that can no longer be followed."""
        value, reader = self._answer(result, origin) if _is_plain(result) else (result, None)
        reader = reader or self._reader(origin)
        replaceable = type(value) is float and not reader.settled
        self.lose(value, reader, replaceable=replaceable)
        return self._number if replaceable and self._number is not None else value

    def _reader(self, origin: ValueOrigin | None) -> _Reader:
        if origin is None:
            return _Reader(self, alike=False, known=True)
        return _Reader(
            self,
            alike_in(origin, self._world_size),
            known=origin.known,
            received=origin.received,
            undelivered=origin.undelivered,
            moment=Moment(self._origins.calls, self._origins.calls_in(origin.alike)),
        )

    def _answer(self, value: Any, origin: ValueOrigin | None) -> tuple[Any, _Reader]:
        """Return the answer to a read: the choice's, else the one that other ranks got."""
        reader, place = self._reader(origin), user_frame(sys._getframe())
        if place is None:
            return value, reader
        choice = None if isinstance(value, bool) else self._choice(place, truth=False)
        if choice is not None:
            value = type(value)(choice.value)
            reader = replace(reader, known=False, forced=True)
            self._note(place, "number", reader, value)
        if origin is not None and origin.alike:
            value, known = self._shared(value, origin, place, reader)
            reader = replace(reader, known=known)
        return value, reader

    def _shared(
        self, value: Any, origin: ValueOrigin, place: Frame, reader: _Reader
    ) -> tuple[Any, bool]:
        """Return the answers that the other ranks got for a value that is the same on them, and
        whether one of them knew it.
        """
        scope = () if reader.alike else tuple(sorted(origin.alike))
        key = place.file, place.line, type(value).__name__, scope
        given = self.answers.setdefault(key, [])
        others = self._others.get(key, [])[len(given) : len(given) + 1]
        known = origin.known
        if others and not known and not reader.forced:
            value, known = others[0]
        given.append((value, known))
        return value, known

    def _choice(self, place: Frame, *, truth: bool) -> Choice | None:
        fitting = (
            choice
            for choice in self._choices
            if isinstance(choice.value, bool) == truth and choice.is_at(place.file, place.line)
        )
        return next(fitting, None)

    def _follow_into(self, result: Any, args: Any) -> Any:
        """Give a tensor that is computed from a followed number its origin."""
        if isinstance(result, torch.Tensor):
            readers = [each.reader for each in args if type(each) in FOLLOWED]
            if not all(each.settled for each in readers):
                self._origins.mark(result, UNKNOWN)
        return result

    def _run_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass with a mode of its own, which sees the program's hooks: torch leaves
        the outer one first.
        """
        with _Functions(self):
            return original(*args, **kwargs)

    # --- what readers report

    def decide(self, outcome: bool, reader: _Reader) -> bool:
        """Return the answer to a question for a truth value: the outcome, or the one that the check
        has chosen in order to explore the other branch.
        """
        place = user_frame(sys._getframe())
        choice = None if place is None else self._choice(place, truth=True)
        if place is not None and choice is not None:
            self._note(place, "truth", replace(reader, known=False, forced=True), choice.value)
            return bool(choice.value)
        if place is not None and not reader.settled:
            self._note(place, "truth", reader, outcome)
        return outcome

    def lose(self, value: Any, reader: _Reader, *, replaceable: bool = False) -> None:
        """Note that a number went to a place where it cannot be followed."""
        place = None if reader.settled else user_frame(sys._getframe())
        if place is not None:
            plain = value if _is_plain(value) else None
            self._note(place, "number", reader, plain, replaceable=replaceable)

    def _note(
        self,
        frame: Frame,
        how: How,
        reader: _Reader,
        value: Value | None,
        *,
        replaceable: bool = False,
    ) -> None:
        if self._exchange is not None and reader.undelivered:
            self._exchange.is_wanted = True
        met = self._found.setdefault((frame.file, frame.line, how, reader.forced), _Met(frame))
        met.alike = met.alike and reader.alike
        met.received = met.received or reader.received
        met.replaceable = met.replaceable and replaceable
        if len(met.asked) < _MOMENTS_KEPT:
            met.asked.append(reader.moment)
        if value is not None and len(met.taken) < _ANSWERS_KEPT:
            plain = value if isinstance(value, bool) else _plain(value)
            if not any(type(plain) is type(each) and plain == each for each in met.taken):
                met.taken.append(plain)

    # --- ops

    @contextlib.contextmanager
    def _reading(self) -> Iterator[list[ValueOrigin | None]]:
        outer, read = self._thread.read, list[ValueOrigin | None]()
        self._thread.read = read
        try:
            yield read
        finally:
            self._thread.read = outer

    def _read(self, origin: ValueOrigin | None) -> None:
        if (origin is None and not self._choices) or _read_by_torch_itself():
            return
        if self._thread.read is not None:
            self._thread.read.append(origin)
        else:
            self._reader(origin).lose(None)

    def _shaped(self, origin: ValueOrigin) -> None:
        place = None if _read_by_torch_itself() else user_frame(sys._getframe())
        if place is not None:
            self._note(place, "shape", self._reader(origin), None)


@dataclass
class _Met:
    """A line that asked for values, and all its questions together."""

    frame: Frame
    alike: bool = True
    received: bool = False
    replaceable: bool = True
    taken: list[Value] = field(default_factory=list)
    asked: list[Moment] = field(default_factory=list)


class _Reading(threading.local):
    """The origins of the values that the running function of torch has read; None outside of
    any.
    """

    read: list[ValueOrigin | None] | None = None


class _Functions(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._values.call(func, args, kwargs or {})


@dataclass(frozen=True)
class _Reader:
    """The origin of followed numbers."""

    values: Values
    alike: bool
    known: bool = False
    forced: bool = False
    """``--branch`` gave the number."""
    received: bool = False
    undelivered: bool = False
    moment: Moment = _NEVER
    """When the number was read."""

    @property
    def settled(self) -> bool:
        """Whether the number is certain."""
        return self.known or self.forced

    def decide(self, outcome: bool) -> bool:
        return self.values.decide(outcome, self)

    def lose(self, value: Any) -> None:
        self.values.lose(value, self)

    def join(self, other: Any) -> _Reader:
        forced = self.forced and other.forced
        return _Reader(
            self.values,
            self.alike and other.alike,
            known=self.settled and other.settled and not forced,
            forced=forced,
            received=self.received or other.received,
            undelivered=self.undelivered or other.undelivered,
            moment=max(self.moment, other.moment),
        )


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _plain(value: Any) -> int | float:
    return int.__int__(value) if isinstance(value, int) else float.__float__(value)


def _read_by_torch_itself() -> bool:
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.endswith(_OWN_READS):
            return True
        if kind_of_file(file) is FrameKind.USER:
            return False
    return False


# --- followed numbers
#
# A followed number is an int or float of the same value. It reports when it is compared or used as
# a truth value. The results of computations with it are followed, too.


class FollowedFloat(float):
    """A float that reports to its reader."""

    reader: _Reader


class FollowedInt(int):
    """An int that reports to its reader."""

    reader: _Reader


FOLLOWED = (FollowedFloat, FollowedInt)

_registered: list[Any] = []  # kept alive: nothing else may get their addresses


def follow(value: Any, reader: _Reader) -> Any:
    """Return an int or a float as a followed number; other values as they are."""
    followed: Any
    if type(value) is float:
        followed = float.__new__(FollowedFloat, value)
    elif type(value) is int:
        followed = int.__new__(FollowedInt, value)
    else:
        return value
    followed.reader = reader
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
    reader = _joined_reader(args)
    result = original(*args, **kwargs)
    return result if reader is None else _with_reader(result, reader)


def _with_reader(result: Any, reader: _Reader) -> Any:
    """Return a result as the program gets it: a truth value as the reader decides it, a number as
    a followed one.
    """
    if type(result) is bool:
        return reader.decide(result)
    if type(result) is tuple:  # divmod
        return tuple(follow(each, reader) for each in result)
    return follow(result, reader)


def _joined_reader(values: tuple[Any, ...]) -> _Reader | None:
    found: _Reader | None = None
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
        reader = None if result is NotImplemented else _joined_reader((self, *others))
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
_CONVERSIONS = (
    *("__int__", "__float__", "__trunc__", "__round__", "__floor__", "__ceil__"),
    *("is_integer", "as_integer_ratio", "hex", "conjugate"),
)
"""Make a plain number, which is not followed any more."""


def _fill(kind: type[Any], base: type[Any]) -> None:
    for name in [*_COMPARISONS, *_COMPUTATIONS, *(_OF_INTS if base is int else ())]:
        setattr(kind, name, _computation(base, name))
    for name in filter(partial(hasattr, base), _CONVERSIONS):
        setattr(kind, name, _conversion(base, name))
    plain: Callable[[Any], Any] = int.__int__ if base is int else float.__float__
    for name, method in {
        "__hash__": base.__hash__,
        "__bool__": lambda self: self.reader.decide(bool(plain(self))),
        "__reduce_ex__": lambda self, protocol: (base, (plain(self),)),
        "__copy__": lambda self: self,
        "__deepcopy__": lambda self, memo: self,
        # a program that calls the type of a number, as statistics.mean does, gets a plain one
        "__new__": staticmethod(lambda _, value=0, *more: base(value, *more)),
    }.items():
        setattr(kind, name, method)


_fill(FollowedFloat, float)
_fill(FollowedInt, int)
