"""The events of a trace, in the order of their issue. A long program has too many to keep one by
one: from some step on, those that differ only in time become one *summary*.

With two whole steps, and a model that issues one all_reduce in each of five steps, the log has
three events: those of steps 0 and 1, and one that counts 3, of steps 2 to 4.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from commlens.model.trace import TraceEvent
from commlens.tracing.raw_event import RawEvent
from commlens.tracing.trace_events import TraceEvents, reduce_op_text

WHOLE_EVENTS = 50_000
"""Further collectives are summarised even if no step ends."""
_SUMMARISE_AT = 2_000  # events kept before old ones are summarised
_NAME_EVERY = 64  # events between replacements of reduce ops by their names


@dataclass(slots=True)
class _Summary:
    """Events of later steps that differ only in time."""

    first: RawEvent
    last_step: int
    count: int = 0


class EventLog:
    """The events and the summaries of one trace."""

    def __init__(self, whole_until: int) -> None:
        """Create an empty log. The events of steps from ``whole_until`` on are summarised."""
        self.events: list[RawEvent] = []
        self.summaries: dict[Any, _Summary] = {}  # by all that the events have alike
        self._whole_until = whole_until
        self._summarise_at = _SUMMARISE_AT
        self._summarising = threading.Lock()
        self._sequence = itertools.count(1).__next__

    @property
    def last(self) -> int:
        """The sequence number of the last event; 0 if there is none."""
        return self.events[-1].sequence if self.events else 0

    def add(self, event: RawEvent) -> None:
        """Add an event, and number it."""
        event.sequence = self._sequence()
        self.events.append(event)

    def tidy(self, event: RawEvent, steps: int, setup_until: int) -> None:
        """Save memory, once in many events."""
        if event.sequence % _NAME_EVERY == 0:
            # A reduce op of the dispatcher takes 10 KB. The slice is twice as long as needed,
            # because other threads may have added events since this one.
            for recent in self.events[-2 * _NAME_EVERY :]:
                recent.reduce_op = reduce_op_text(recent.reduce_op)
        if len(self.events) >= self._summarise_at:
            self.summarise(steps, setup_until)

    def summarise(self, steps: int, setup_until: int) -> None:
        """Summarise the events of the completed steps after the whole ones. In a program whose
        steps do not end, also those after the first ``WHOLE_EVENTS``, but for the newest thousand.

        Args:
            steps: number of completed steps.
            setup_until: the last event of the setup, whose events have summaries of their own.
        """
        if not self._summarising.acquire(blocking=False):
            return  # another thread does it
        try:
            if steps <= self._whole_until and self.last <= WHOLE_EVENTS:
                self._summarise_at = max(_SUMMARISE_AT, len(self.events) + _SUMMARISE_AT // 2)
                return  # all events stay whole
            events = self.events.copy()
            kept = []
            for position, event in enumerate(events):
                is_later_step = self._whole_until <= event.step < steps
                is_old = position < len(events) - _SUMMARISE_AT // 2
                if is_later_step or (is_old and event.sequence > WHOLE_EVENTS):
                    self._summarise(event, in_setup=event.sequence <= setup_until)
                else:
                    kept.append(event)
            # at once, before what other threads have added meanwhile
            self.events[: len(events)] = kept
            # not again for each event, where the whole steps alone have so many
            self._summarise_at = max(_SUMMARISE_AT, len(kept) + _SUMMARISE_AT // 2)
        finally:
            self._summarising.release()

    def _summarise(self, event: RawEvent, *, in_setup: bool) -> None:
        event.reduce_op = reduce_op_text(event.reduce_op)
        key = (
            id(event.args),
            event.reduce_op,
            event.path,
            event.phase,
            event.info.index,
            event.owner,
            event.cause,
            event.functional,
            event.microbatch,
            in_setup,
        )
        summary = self.summaries.setdefault(key, _Summary(event, event.step))
        summary.count += 1
        summary.last_step = event.step

    def converted(self, converter: TraceEvents) -> list[TraceEvent]:
        """Return the events and the summaries in the form of a trace, in order."""
        events = [converter.convert(raw) for raw in list(self.events)]
        return sorted(
            [*events, *self._converted_summaries(converter)], key=lambda event: event.sequence
        )

    def _converted_summaries(self, converter: TraceEvents) -> Iterator[TraceEvent]:
        for summary in list(self.summaries.values()):
            event = converter.convert(summary.first)
            event.count, event.last_step = summary.count, summary.last_step
            if summary.count > 1:
                event.started_ns = event.returned_ns = 0
                event.wait_began_ns = event.wait_ended_ns = 0
                event.call = 0
            yield event
