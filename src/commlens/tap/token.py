"""One in-flight collective, and the interfaces between the tap, the recorder and the verifier.

The recorder and the verifier are in rooms that do not import each other: the recorder hands its tokens to a :class:`Verifier`,
and :mod:`commlens.launch.recording` connects the two.
"""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from commlens.tap.groups import Groups
    from commlens.tap.interned_args import InternedArgs


class Token:
    """A collective under way in this process. The constructor sets only what the hot path needs."""

    waiting = False  # a thread is blocked on it
    unknown = False  # its Work is gone, so its state cannot be learned any more
    work_ref: Any = None
    pointers: tuple[int, ...] = ()  # addresses of its outputs
    coalescing: Any = None
    tagged_number = 0  # sequence number among the messages with the same tag
    announced: tuple[int, int] | None = None  # slot and number of the verifier's announcement on its board

    def __init__(self, index: int, offset: int, args: InternedArgs, since: int, thread: int, number: int = 0, stack: int = 0) -> None:
        self.index = index
        self.number = number
        self.stack = stack
        self.offset = offset
        self.args = args
        self.since = since
        self.thread = thread


class Verifier(Protocol):
    """Compares each collective with the peers' before it is issued. Its methods raise only refusals."""

    exchange: Any  # what verifies in C++; None with the Python engine

    def before_issue(self, token: Token, frame: FrameType | None, reduce_op: Any) -> None:
        """Announce a collective and compare it with the peers'."""

    def announce_late(self, token: Token) -> None:
        """Announce a collective that the backend accepted against expectation."""

    def withdraw(self, token: Token) -> None:
        """Take back the announcement of a collective that was not issued."""

    def before_wait(self, index: int) -> None:
        """Finish the comparison before a thread blocks on the record ``index``; 0 for a Work without a record."""

    def before_planned_wait(self, args: InternedArgs, number: int, code: int, absent: list[int], index: int) -> None:
        """Do the same for a collective that C++ announced while the ranks ``absent`` had not reached it."""

    def plan(self, args: InternedArgs, stack: int, reduce_op_code: int) -> Any:
        """Return how C++ verifies the next collective like this; None if Python must do it."""

    def pending_refusal(self) -> BaseException | None:
        """Return a refusal that this rank has not raised yet."""

    def unraised_refusal(self) -> str | None:
        """Return the text of such a refusal, for the watchdog thread."""

    def group_destroyed(self) -> None:
        """Forget the groups: the next default group starts their names again."""

    def before_end(self) -> None:
        """Raise a pending refusal before the process group is destroyed."""

    def enter(self) -> list[int]:
        """Verify from now on. Return the ranks that did not join in time."""

    def leave(self) -> None:
        """Undo one :meth:`enter`."""

    def meet(self) -> list[int]:
        """Wait for the node's recorded ranks to start verifying. Return those that did not."""

    def stop(self) -> None:
        """Stop verifying; the process goes on."""

    def close(self) -> None:
        """Stop verifying at the end of the process."""


class Recorder(Protocol):
    """What the patches of torch report to. Wait tokens are the recorder's own; None means that it ignores the wait."""

    writer: Any
    groups: Groups
    steps: int  # optimizer steps completed

    @property
    def verifier(self) -> Verifier | None:
        """The verifier, if collectives are verified."""

    @property
    def listens_to_waits(self) -> bool:
        """Whether waits of functional collectives must be reported to Python."""

    @property
    def reads_reduce_ops(self) -> bool:
        """Whether it reads reduce ops even where torch hides them from Python."""

    def tapped_wait(self, original: Any, slow: Any) -> Any:
        """Return the ``Work.wait`` to install in place of ``original``."""

    def wait_begins(self, work: Any) -> Any:
        """Note that a thread is about to block in ``work.wait()``."""

    def wait_ended(self, work: Any, token: Any, error: BaseException | None) -> None:
        """Note that this wait ended."""

    def tensor_wait_begins(self, tensor: Any) -> Any:
        """Note that a thread is about to block in ``wait_tensor(tensor)``."""

    def tensor_wait_ended(self, held: Any, error: BaseException | None) -> None:
        """Note that this wait ended."""

    def error_to_raise(self, error: BaseException) -> BaseException:
        """Return the exception to raise in place of a backend's error."""

    def coalescing_starts(self) -> None:
        """Note a call of ``ProcessGroup._start_coalescing``."""

    def coalescing_ends(self) -> Any:
        """Record a coalesced group before ``ProcessGroup._end_coalescing`` runs."""

    def group_returned(self, token: Any, work: Any) -> None:
        """Note that ``ProcessGroup._end_coalescing`` returned."""

    def raised(self, token: Any, error: BaseException) -> None:
        """Note that the backend's call raised."""
