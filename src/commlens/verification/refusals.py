"""Refusals: the exception, and which of the job's posted refusals this rank has raised.

A rank that finds a fault posts a refusal in the job's log, for itself and the other ranks that it
concerns, and raises it: ``{"kind": "mismatch/shape", "text": "Cannot apply ...", "by": 1, "ranks":
[0, 1, 2, 3], ...}``, under the key of the channel and the number of the collective. Each of these
ranks raises the same text at its next collective or wait.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NoReturn, cast

import msgspec

from commlens.boards.refusal_log import RefusalLog
from commlens.errors import DistributedOperationException
from commlens.model.refusal import Refusal
from commlens.verification.channels import Pending
from commlens.verification.messages import WordedRefusal

# the longest wait until a refusal is posted on all nodes; a node that is lost is given up before
_ON_ALL_NODES_S: Final = 10.0
_NAP_S: Final = 0.001


class Refusals:
    """The job's refusals, and up to where this rank has raised them."""

    def __init__(self, posted: RefusalLog, rank: int, bells: Any) -> None:
        self._posted = posted
        self._rank = rank
        self._bells = bells  # wake the ranks that a refusal concerns
        self._drafts: RefusalLog | None = None
        self._elsewhere: Callable[[Iterable[int]], list[int]] = lambda _: []
        self.raised = posted.count()  # refusals from before this rank verified are not for it

    def reach_other_nodes(
        self, drafts: RefusalLog, elsewhere: Callable[[Iterable[int]], list[int]]
    ) -> None:
        """Post on all nodes what concerns them.

        Args:
            drafts: the log that the node's relay takes such refusals from.
            elsewhere: returns which ranks are on other, linked nodes.
        """
        self._drafts, self._elsewhere = drafts, elsewhere

    def raise_new(self) -> None:
        """Raise the oldest refusal that concerns this rank and has not been raised.

        Raises:
            DistributedOperationException: there is one.
        """
        count = self._posted.count()
        while self.raised < count:
            posted = self._posted.read(self.raised)
            self.raised += 1
            if _concerns(posted, self._rank):
                raise _exception(posted)

    @contextlib.contextmanager
    def left_to_raise(self) -> Iterator[None]:
        """Suppress a refusal that is raised within this, and leave it to a later call to raise."""
        raised = self.raised
        try:
            yield
        except DistributedOperationException:
            self.raised = raised

    def skip(self) -> None:
        """Do not raise what has been posted so far."""
        self.raised = self._posted.count()

    def new(self) -> list[dict[str, Any]]:
        """Return the refusals that concern this rank and have not been raised."""
        new = [self._posted.read(at) for at in range(self.raised, self._posted.count())]
        return [posted for posted in new if _concerns(posted, self._rank)]

    def ranks_of(self, index: int) -> Iterable[int]:
        """Return the ranks that a refusal concerns."""
        ranks = self._posted.read(index).get("ranks", ())
        return ranks if isinstance(ranks, list) else ()

    def concern_since(self, rank: int, since_ns: int) -> bool:
        """Return whether a refusal that concerns a rank was posted on this node at this time
        (``CLOCK_MONOTONIC``) or later.
        """
        for at in reversed(range(self._posted.count())):
            posted = self._posted.read(at)
            if posted.get("posted_ns", since_ns) < since_ns:
                return False  # those before it are older
            if _concerns(posted, rank):
                return True
        return False

    def raise_if_posted(self, pending: Pending) -> None:
        """Raise a refusal of this very collective.

        Raises:
            DistributedOperationException: another rank has posted one.
        """
        for at in range(self.raised, self._posted.count()):
            posted = self._posted.read(at)
            if posted.get("key") == pending.channel.key and posted.get("number") == pending.number:
                self.skip()  # as in post(), this exception stands for all that were posted so far
                raise _exception(posted)

    def post(
        self,
        pending: Pending,
        refused: WordedRefusal,
        *,
        about: tuple[int, int] | None = None,
        ranks: Iterable[int] = (),
    ) -> NoReturn:
        """Post a refusal and raise it; if another rank has posted one of the same collective
        before, raise that one.

        Args:
            pending: the collective that is not issued.
            refused: what is refused, and the message.
            about: key and number to post it under, if they are not those of ``pending``: all ranks
                that find this fault must use the same, so that only the first is posted.
            ranks: ranks that it concerns, too, though they are not in the channel.

        Raises:
            DistributedOperationException: always.
        """
        key, number = about or (pending.channel.key, pending.number)
        concerned = sorted({*pending.channel.members, *ranks})
        content = {
            **msgspec.to_builtins(refused.refusal),
            "text": refused.text,
            "by": self._rank,
            "ranks": concerned,
        }
        self._post_on_all_nodes(key, number, content, concerned)
        posted = self._posted.post(key, number, content)
        self.raised = max(self.raised, self._posted.count())
        self._bells.wake(concerned)  # whatever they sleep on
        raise _exception(posted)

    def _post_on_all_nodes(
        self, key: int, number: int, content: dict[str, Any], concerned: list[int]
    ) -> None:
        """Let the relays of the nodes post a refusal, and raise it when it comes back. Return if no
        other node is concerned, or if none is linked any more or it does not come back in time:
        then it is for this node alone.

        Ranks on two nodes may find faults of one collective at once. So one relay, the hub,
        chooses: it posts a draft on all nodes if it has posted none of the same collective and this
        rank had ``seen`` all refusals that concern it. Else one that was posted before comes back.

        Raises:
            DistributedOperationException: this refusal, or another one that was posted before and
                concerns this rank.
        """
        elsewhere = self._elsewhere(concerned)
        if self._drafts is None or not elsewhere:
            return
        seen = self._posted.shared  # before raise_new, so that no newer one counts as seen
        self.raise_new()
        self._drafts.post(key, number, {**content, "seen": seen})
        self._bells.ring(elsewhere)  # as after an announcement: the relay sleeps on this bell
        until = time.monotonic() + _ON_ALL_NODES_S
        while time.monotonic() < until and self._elsewhere(concerned):
            self.raise_new()
            time.sleep(_NAP_S)


def _concerns(posted: dict[str, Any], rank: int) -> bool:
    ranks = posted.get("ranks")
    return isinstance(ranks, list) and rank in ranks


def _exception(posted: dict[str, Any]) -> DistributedOperationException:
    """Return commlens's exception, which also is Accelerate's if that is loaded."""
    operations = sys.modules.get("accelerate.utils.operations")
    accelerates = getattr(operations, "DistributedOperationException", None)
    text = str(posted.get("text", ""))
    error = (
        _combined_class(accelerates)(text)
        if isinstance(accelerates, type)
        else DistributedOperationException(text)
    )
    error.kind = str(posted.get("kind", ""))
    error.refusal = {name: posted[name] for name in Refusal.__struct_fields__ if name in posted}
    return error


@functools.lru_cache(maxsize=2)
def _combined_class(accelerates: type[Exception]) -> type[DistributedOperationException]:
    bases = DistributedOperationException, accelerates
    return cast(
        "type[DistributedOperationException]",
        type("DistributedOperationException", bases, {"__module__": "commlens"}),
    )
