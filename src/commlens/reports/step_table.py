"""Where the communication time of a step goes, in words: for ``commlens status --step`` and the
verdict's page.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Final

import msgspec

from commlens.speed.bandwidth import ReachedRate
from commlens.speed.rhythm import PeriodicPause, StepChange
from commlens.speed.step_times import RankTime, StepPart, StepTimes
from commlens.text import (
    capital,
    count,
    duration,
    number,
    rank_phrase,
    ranks_phrase,
    short_duration,
    size,
    used_columns,
    utc,
)

HEADINGS: Final = (
    "group",
    "where",
    "calls",
    "bytes",
    "waited",
    "of the step",
    "hidden",
    "on the device",
)
_BARS_MAX: Final = 64
_WORTH_NAMING: Final = 0.02  # of the step: a difference between the ranks


class RankBar(msgspec.Struct):
    """Where the time of a step goes on one rank."""

    rank: str
    waits: float  # percent of the step
    sends: float
    text: str  # "waits 21 ms, sends 6.0 ms"


class RateBar(msgspec.Struct):
    """What a kind of transfer reaches of its links' nominal rate."""

    percent: float
    text: str  # a sentence


class StepTable(msgspec.Struct):
    """The answer in a few sentences, a table and what is not known."""

    answer: str
    headings: list[str]
    rows: list[list[str]]
    notes: list[str]
    bars: list[RankBar] = []
    rates: list[RateBar] = []


def step_table(times: StepTimes) -> StepTable:
    """Return the words. Columns that say nothing are left out."""
    if not times.steps:
        return StepTable(
            "Where a step's communication time goes is not known.", [], [], times.unknown
        )
    headings, rows = used_columns(HEADINGS, [_cells(part, times) for part in times.parts])
    bars, ranks, left_out = _bars(times), len(times.ranks), times.places_left_out
    notes = []
    if 0 < len(bars) < ranks:
        notes.append(f"Of {number(ranks)} ranks, the {len(bars)} that wait least are drawn.")
    if left_out:
        are = "is" if left_out == 1 else "are"
        notes.append(f"{count(left_out, 'more place')} with less time {are} not shown.")
    rates = [RateBar(round(100 * each.share, 1), rate_words(each)) for each in times.rates]
    return StepTable(_answer(times), headings, rows, [*notes, *times.unknown], bars, rates)


def _bars(times: StepTimes) -> list[RankBar]:
    """Return a bar for each rank, of many for those that wait least; none if no time is known, or
    only a part of it, or of a single rank.
    """
    is_known = any(each.waited_ns or each.sent_ns for each in times.ranks)
    if not is_known or times.waits_left_out or len(times.ranks) < 2:
        return []
    least = sorted(times.ranks, key=lambda each: each.waited_ns)[:_BARS_MAX]
    return [_bar(each, times.step_ns) for each in sorted(least, key=lambda each: each.rank)]


def _bar(time: RankTime, step_ns: int) -> RankBar:
    sends = f", sends {short_duration(time.sent_ns)}" if time.sent_ns else ""
    return RankBar(
        rank_phrase(time.rank),
        round(100 * time.waited_ns / step_ns, 1),
        round(100 * time.sent_ns / step_ns, 1),
        f"waits {short_duration(time.waited_ns)}{sends}",
    )


def _answer(times: StepTimes) -> str:
    seen = (
        f"step {times.first_step}"
        if times.steps == 1
        else f"steps {times.first_step} to {times.last_step}"
    )
    text = (
        f"A step takes {short_duration(times.step_ns)} ({seen}). A rank waits in collectives for"
        f" {'at least ' if times.waits_left_out else ''}"
    )
    waited = {each.rank: each.waited_ns for each in times.ranks} or times.waited_by_rank
    waited_ns = mean(waited.values())  # on an accelerator, for late ranks
    text += f"{short_duration(waited_ns)} of it ({waited_ns / times.step_ns:.0%})"
    if times.hidden_ns:
        text += (
            f"; another {short_duration(times.hidden_ns)} of collectives are hidden behind its work"
        )
    if times.device_ns:
        text += f"; they take {short_duration(times.device_ns)} on the device"
    in_calls = {each.rank: each.waited_ns + each.messages_ns for each in times.ranks} or waited
    least = min(in_calls, key=lambda rank: in_calls[rank])
    most = max(waited, key=lambda rank: waited[rank])
    is_least = waited[least] == min(waited.values()) and not times.waits_left_out
    gap_ns = min(each[most] - each[least] for each in (waited, in_calls))
    if is_least and gap_ns > _WORTH_NAMING * times.step_ns:
        text += (
            f". {capital(rank_phrase(least))} waits least ({short_duration(waited[least])}),"
            f" {rank_phrase(most)} most ({short_duration(waited[most])})"
        )
    return f"{text}."


def rate_words(reached: ReachedRate) -> str:
    """Return what a kind of transfer reaches of its links' nominal rate, as a sentence."""
    return (
        f"In {reached.group}, {reached.op} of {size(reached.payload_bytes)} reaches"
        f" {size(reached.bytes_s)}/s on the bus, {reached.share:.0%} of the nominal"
        f" {size(reached.nominal_bytes_s)}/s ({reached.links})."
    )


def change_words(change: StepChange) -> str:
    """Return since when a step takes longer, as a sentence."""
    return (
        f"Since step {change.step:,} ({utc(change.since_ns)}), a step takes {change.ratio:.2f}"
        f" times as long: {short_duration(change.after_ns)} against"
        f" {short_duration(change.before_ns)}."
    )


def period_words(pause: PeriodicPause, ranks: Sequence[int] = ()) -> str:
    """Return how often a step takes longer, as sentences.

    Args:
        pause: the long steps.
        ranks: for which the others wait then.
    """
    waits = f"all others wait for {ranks_phrase(ranks)} for" if ranks else "a step takes"
    longer = "" if ranks else " longer"
    return (
        f"Every {pause.steps:,} steps ({duration(pause.seconds * 1e9)}), {waits}"
        f" {duration(pause.extra_s * 1e9)}{longer}: {pause.share:.0%} of the time"
        f" ({count(pause.times, 'time')} seen, last in step {pause.newest:,}). A checkpoint, an"
        " evaluation or a collection of garbage comes like that: no rank is called slow for it."
    )


def _cells(part: StepPart, times: StepTimes) -> list[str]:
    hidden_ns = part.hidden_ns if times.hidden_ns else 0
    spans = [short_duration(ns) if ns else "" for ns in (part.waited_ns, hidden_ns, part.device_ns)]
    share = f"{part.waited_ns / times.step_ns:.0%}" if part.waited_ns else ""
    carries = size(part.payload_bytes) if part.payload_bytes else ""
    return [
        "" if part.place else part.group,
        part.place,
        number(round(part.calls, 2)),
        carries,
        spans[0],
        share,
        *spans[1:],
    ]
