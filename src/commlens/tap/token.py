"""One collective in flight, and the interface of the verifier.

The recorder and the verifier are in rooms that do not import each other: the recorder hands its
tokens to a :class:`CallVerifier`, and :mod:`commlens.launch.recording` connects the two.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from commlens.model.collective import Collective
    from commlens.tap.interned_args import InternedArgs


class Token:
    """A collective under way in this process. The constructor sets only what the hot path needs."""

    waiting = False  # a thread is blocked on it
    unknown = False  # its Work is gone, so its state cannot be learned any more
    work_ref: Any = None
    pointers: tuple[int, ...] = ()  # addresses of its outputs
    coalescing: Any = None
    tagged_number = 0  # sequence number among the messages with the same tag
    backend_number = 0  # the backend's own number of a collective that runs on a device; 0: none
    # reads how a message on a device ended; None while it has not
    result: Callable[[], int | None] | None = None
    # the C++ token of a collective whose backend calls a completion hook: done_ns and progress_ns
    hooked: Any = None
    known_how = 0  # how it was last learned that it is in flight on a device
    # slot and number of the verifier's announcement on its board
    announced: tuple[int, int] | None = None

    def __init__(
        self,
        index: int,
        offset: int,
        args: InternedArgs,
        since: int,
        thread: int,
        number: int = 0,
        stack: int = 0,
    ) -> None:
        self.index = index
        self.number = number
        self.stack = stack
        self.offset = offset
        self.args = args
        self.since = since
        self.thread = thread


class CallVerifier(Protocol):
    """The part of a verifier that the recorder and the watchdog thread call. Its methods raise only
    refusals.
    """

    exchange: Any  # what verifies in C++; None with the Python engine

    def before_issue(self, token: Token, frame: FrameType | None, reduce_op: Any) -> None:
        """Announce a collective and compare it with the peers'."""

    def announce_accepted(self, token: Token) -> None:
        """Announce a collective that the backend accepted against expectation."""

    def withdraw(self, token: Token) -> None:
        """Take back the announcement of a collective that was not issued."""

    def before_wait(self, index: int) -> None:
        """Finish the comparison before a thread blocks on the record ``index``; 0 for a Work
        without a record.
        """

    def before_planned_wait(
        self, args: InternedArgs, number: int, code: int, absent: list[int], index: int
    ) -> None:
        """Do the same for a collective that C++ announced while the ranks ``absent`` had not
        reached it.
        """

    def plan(self, args: InternedArgs, stack: int, reduce_op: int | None) -> Any:
        """Return how C++ verifies the next collective like this; None if Python must do it."""

    def refusal_for(self, error: BaseException) -> BaseException | None:
        """Return the refusal that explains a backend's error."""

    @property
    def posted_refusals(self) -> int:
        """The number of refusals that the job's ranks have posted."""

    def unraised_refusal(self) -> str | None:
        """Return the text of such a refusal, for the watchdog thread."""

    def check_wait_in_cpp(self, args: InternedArgs, waited_ns: int) -> None:
        """Post a refusal if ranks do not join the oldest collective in flight, for which a thread
        waits in C++.
        """

    def refused_groups(self, in_flight: list[Collective]) -> list[Any]:
        """Return the process groups of those collectives in flight that an unraised refusal is
        about.
        """
