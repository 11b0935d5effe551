"""Refusals of this rank, and those that others have posted for it to raise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from commlens.blackbox.refusal_log import Alarms
from commlens.verification.channels import Pending
from commlens.verification.refusal_exception import refusal


class Refusals:
    """The job's alarms, as far as this rank has raised them."""

    def __init__(self, alarms: Alarms, rank: int, bells: Any) -> None:
        self._alarms = alarms
        self._rank = rank
        self._bells = bells  # what wakes who is concerned
        self.raised = alarms.count()  # what was posted before our time is not for us

    def raise_new(self) -> None:
        """Raise the oldest that concerns us and has not been raised.

        Raises:
            DistributedOperationException: there is one.
        """
        count = self._alarms.count()
        while self.raised < count:
            alarm = self._alarms.read(self.raised)
            self.raised += 1
            if alarm and self._concerns_us(alarm):
                raise refusal(str(alarm.get("text", "")), str(alarm.get("kind", "")))

    def skip(self) -> None:
        """What was posted until now is told by others."""
        self.raised = self._alarms.count()

    def unraised(self) -> str | None:
        """The text of one that concerns us and was not raised."""
        for at in range(self.raised, self._alarms.count()):
            alarm = self._alarms.read(at)
            if alarm and self._concerns_us(alarm):
                return str(alarm.get("text", ""))
        return None

    def ranks_of(self, index: int) -> Iterable[int]:
        """Whom an alarm concerns."""
        ranks = self._alarms.read(index).get("ranks", ())
        return ranks if isinstance(ranks, list) else ()

    def raise_if_posted(self, pending: Pending) -> None:
        """Raise what somebody has posted of this very op, and nothing else.

        Raises:
            DistributedOperationException: it was posted.
        """
        for at in range(self.raised, self._alarms.count()):
            alarm = self._alarms.read(at)
            if alarm.get("key") == pending.channel.key and alarm.get("number") == pending.number:
                self.skip()
                raise refusal(str(alarm.get("text", "")), str(alarm.get("kind", "")))

    def post(self, pending: Pending, kind: str, text: str, *, about: tuple[int, int] | None = None, ranks: Iterable[int] = ()) -> NoReturn:
        """Post it and raise; what was posted about the same before is raised instead.

        Args:
            pending: the op that is not issued.
            kind: of the refusal.
            text: its words.
            about: key and number of the op that it is told of, where that is another.
            ranks: whom it concerns besides those of the op.

        Raises:
            DistributedOperationException: always.
        """
        key, number = about or (pending.channel.key, pending.number)
        concerned = sorted({*pending.channel.members, *ranks})
        alarm = self._alarms.post(key, number, {"kind": kind, "text": text, "by": self._rank, "ranks": concerned})
        self.raised = max(self.raised, self._alarms.count())
        self._bells.wake(concerned)
        raise refusal(str(alarm.get("text") or text), str(alarm.get("kind") or kind))

    def _concerns_us(self, alarm: dict[str, Any]) -> bool:
        ranks = alarm.get("ranks")
        return isinstance(ranks, list) and self._rank in ranks
