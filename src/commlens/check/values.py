"""The lines at which a program reads values of tensors that a run of one rank alone cannot know,
and the answers that ``--branch`` gives there.

A value is unknown if another rank sends it, or if it is computed from an unknown value
(``origins.py``). Reading a number decides nothing yet: it is followed (``followed_numbers.py``)
until the program takes a branch by it::

    loss = total.item()  # an all_reduce wrote total: what the other ranks added is unknown
    print(loss)          # decides nothing
    if loss > 3: ...     # BranchLine(<this line>, "truth", taken=(False,))
    n = int(loss)        # BranchLine(<this line>, "number"): an int cannot be followed

Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from commlens.check.branches import Answers, BranchLine, Choice, How, Moment, Value
from commlens.check.exchange import CheckExchange
from commlens.check.followed_numbers import FOLLOWED, Provenance, follow, follow_through_math
from commlens.check.origins import UNKNOWN, Origins, ValueOrigin, alike_in, joined
from commlens.model.collective import Frame, FrameKind
from commlens.tap.running_frames import kind_of_file, user_frame
from commlens.tracing.patches import Patches

# what these read is only shown
_SHOWS = (torch.Tensor.__repr__, torch.Tensor.__format__)
# Python makes a plain number of the result: float(tensor)
_MAKES_PLAIN = (torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__)
# these read the tensor's memory, without an op that could be seen
_READS_MEMORY = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
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
        """Answer the reads of unknown values.

        Args:
            world_size: number of ranks.
            choices: the answers of ``--branch``.
            answers: the answers that other ranks got to reads of values that ranks have alike.
                Elsewhere the answer is the value that the fake world computes.
            number: is read in place of every float that cannot be followed; None: the value that
                the fake world computes.
            exchange: delivers small tensors of other ranks.
        """
        self._world_size = world_size
        self._choices = tuple(choices)
        self._others = answers or {}
        self._number = number
        self._exchange = exchange
        self.answers: Answers = {}
        """The answers to reads of values that ranks have alike, in order."""
        self._lines: dict[tuple[str, int, How, bool], _Line] = {}
        """By file, line, way of the read, and whether ``--branch`` gave the answer."""
        self._thread = _Reading()
        self._origins = Origins(self._read, self._shaped)
        self._patches = Patches()
        self._stack = contextlib.ExitStack()

    @property
    def decisions(self) -> list[BranchLine]:
        """The lines that asked so far, in the order of their first question."""
        return [
            BranchLine(
                line.frame,
                how,
                line.alike,
                tuple(line.taken),
                forced=forced,
                received=line.received,
                asked=tuple(line.asked),
                replaceable=line.replaceable,
            )
            for (_, _, how, forced), line in self._lines.items()
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
        """Call a function of torch. Numbers that it read from unknown values are followed."""
        with self._reading() as read:
            result = func(*args, **kwargs)
        if func in _SHOWS:
            return result
        if func in _READS_MEMORY and not _read_by_torch_itself():
            read = [self._origins.of(args[0])]
        if not read:
            numbers = [each.provenance for each in args if type(each) in FOLLOWED]
            is_known = all(each.settled for each in numbers)
            if isinstance(result, torch.Tensor) and not is_known:
                self._origins.mark(result, UNKNOWN)
            return result
        origin = joined(read)
        if origin is None and not self._choices:
            return result  # the rank knows the value, and --branch cannot change it
        if func in _MAKES_PLAIN or (func not in _READS_MEMORY and not _is_number(result)):
            return self._escaped(result, origin)
        return self._follow_each(result, origin)

    def _follow_each(self, result: Any, origin: ValueOrigin | None) -> Any:
        """Follow a value that was read, or each value of a list."""
        if isinstance(result, list):
            return [self._follow_each(each, origin) for each in result]
        if not _is_number(result):  # an array
            return self._escaped(result, origin)
        value, provenance = self._answer(result, origin)
        if isinstance(value, bool):
            return provenance.decide(value)
        if isinstance(value, int):
            provenance.escape(value)  # range(n) or torch.zeros(n) would not be seen
        return follow(value, provenance)

    def _escaped(self, result: Any, origin: ValueOrigin | None) -> Any:
        """Return a value that cannot be followed: a plain number, an array."""
        value, provenance = result, self._provenance(origin)
        if _is_number(result):
            value, provenance = self._answer(result, origin)
        replaceable = type(value) is float and not provenance.settled
        self.note_escape(value, provenance, replaceable=replaceable)
        return self._number if replaceable and self._number is not None else value

    def _provenance(self, origin: ValueOrigin | None) -> Provenance:
        if origin is None:
            return Provenance(self, alike=False, known=True)
        return Provenance(
            self,
            alike_in(origin, self._world_size),
            known=origin.known,
            received=origin.received,
            undelivered=origin.undelivered,
            moment=Moment(self._origins.calls, self._origins.calls_in(origin.alike)),
        )

    def _answer(self, value: Any, origin: ValueOrigin | None) -> tuple[Any, Provenance]:
        """Return the answer to a read: that of ``--branch``, else the one that other ranks got."""
        provenance, place = self._provenance(origin), user_frame(sys._getframe())
        if place is None:
            return value, provenance
        choice = None if isinstance(value, bool) else self._choice(place, truth=False)
        if choice is not None:
            value = type(value)(choice.value)
            provenance = replace(provenance, known=False, forced=True)
            self._note(place, "number", provenance, value)
        if origin is not None and origin.alike:
            value, known = self._common_answer(value, origin, place, provenance)
            provenance = replace(provenance, known=known)
        return value, provenance

    def _common_answer(
        self, value: Any, origin: ValueOrigin, place: Frame, provenance: Provenance
    ) -> tuple[Any, bool]:
        """Return the answer that the other ranks got to this read of a value that is the same on
        them, and whether one of them knew it. Without one, it is the value at hand.
        """
        groups = () if provenance.alike else tuple(sorted(origin.alike))
        key = place.file, place.line, type(value).__name__, groups
        own = self.answers.setdefault(key, [])
        others = self._others.get(key, [])
        known = origin.known
        if len(others) > len(own) and not known and not provenance.forced:
            value, known = others[len(own)]
        own.append((value, known))
        return value, known

    def _choice(self, place: Frame, *, truth: bool) -> Choice | None:
        """Return the answer of ``--branch`` at a line: a truth value, or a number."""
        fitting = (
            choice
            for choice in self._choices
            if isinstance(choice.value, bool) == truth and choice.is_at(place.file, place.line)
        )
        return next(fitting, None)

    def _run_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass with a mode of its own, which sees the program's hooks: torch leaves
        the outer one first.
        """
        with _Functions(self):
            return original(*args, **kwargs)

    # --- what the program does with followed numbers

    def decide(self, outcome: bool, provenance: Provenance) -> bool:
        """Return the answer to a question for a truth value: the outcome, or that of ``--branch``,
        so that the program takes the other branch.
        """
        place = user_frame(sys._getframe())
        choice = None if place is None else self._choice(place, truth=True)
        if place is not None and choice is not None:
            forced = replace(provenance, known=False, forced=True)
            self._note(place, "truth", forced, choice.value)
            return bool(choice.value)
        if place is not None and not provenance.settled:
            self._note(place, "truth", provenance, outcome)
        return outcome

    def note_escape(self, value: Any, provenance: Provenance, *, replaceable: bool = False) -> None:
        """Note that a number went to a place where it cannot be followed."""
        place = None if provenance.settled else user_frame(sys._getframe())
        if place is not None:
            number = value if _is_number(value) else None
            self._note(place, "number", provenance, number, replaceable=replaceable)

    def _note(
        self,
        frame: Frame,
        how: How,
        provenance: Provenance,
        value: Value | None,
        *,
        replaceable: bool = False,
    ) -> None:
        """Note a line that asked for a value, and the answer that it got; None: an array."""
        if self._exchange is not None and provenance.undelivered:
            self._exchange.is_wanted = True
        key = frame.file, frame.line, how, provenance.forced
        line = self._lines.setdefault(key, _Line(frame))
        line.alike = line.alike and provenance.alike
        line.received = line.received or provenance.received
        line.replaceable = line.replaceable and replaceable
        if len(line.asked) < _MOMENTS_KEPT:
            line.asked.append(provenance.moment)
        if value is not None and len(line.taken) < _ANSWERS_KEPT:
            plain = value if isinstance(value, bool) else _plain(value)
            if not any(type(plain) is type(each) and plain == each for each in line.taken):
                line.taken.append(plain)

    # --- ops

    @contextlib.contextmanager
    def _reading(self) -> Iterator[list[ValueOrigin | None]]:
        """Collect the origins of the values that ops read meanwhile."""
        outer, read = self._thread.read, list[ValueOrigin | None]()
        self._thread.read = read
        try:
            yield read
        finally:
            self._thread.read = outer

    def _read(self, origin: ValueOrigin | None) -> None:
        """Note that an op read a value."""
        if (origin is None and not self._choices) or _read_by_torch_itself():
            return
        if self._thread.read is not None:
            self._thread.read.append(origin)
        else:  # from C++: the result cannot be followed
            self._provenance(origin).escape(None)

    def _shaped(self, origin: ValueOrigin) -> None:
        """Note that a value decided the shape of a tensor."""
        place = None if _read_by_torch_itself() else user_frame(sys._getframe())
        if place is not None:
            self._note(place, "shape", self._provenance(origin), None)


@dataclass
class _Line:
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
    """Passes the calls of torch's functions to :meth:`Values.call`."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._values.call(func, args, kwargs or {})


def _is_number(value: Any) -> bool:
    """Check whether a value is a truth value, an int or a float, followed or not."""
    return isinstance(value, (bool, int, float))


def _plain(value: Any) -> int | float:
    """Return a number without its provenance; a plain ``int()`` would count as an escape."""
    return int.__int__(value) if isinstance(value, int) else float.__float__(value)


def _read_by_torch_itself() -> bool:
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.endswith(_OWN_READS):
            return True
        if kind_of_file(file) is FrameKind.USER:
            return False
    return False
