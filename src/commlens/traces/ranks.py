"""The traces of several ranks: classes of ranks that issued the same collectives, and the
differences between them.

Ranks are compared on each group that they share, within their stage of a pipeline. If ranks 0 to 6
issued 8 all_gathers on ``dp`` and rank 7 issued 7, there are two classes, ``[[0, ..., 6], [7]]``,
and one difference: "rank 7 issued 1 fewer all_gather on dp ... than ranks 0-6 (7 instead of 8)".
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from commlens.errors import CommandError
from commlens.model.grouping import grouped, natural
from commlens.model.network import Network
from commlens.model.ops import POINT_TO_POINT, UNEVEN
from commlens.model.trace import Phase, TraceData, TraceEvent
from commlens.reports.trace_page import RankClasses
from commlens.text import capital, count, format_ranks, joined, number, ranks_phrase, size
from commlens.traces import wording
from commlens.traces.page import page_of
from commlens.traces.trace import Trace

_MOST_DIFFERENCES = 12
MOST_CLASSES: Final = 8  # a page shows one rank of each of at most this many classes


class TracedPlace(NamedTuple):
    """Where a rank issues a collective."""

    op: str
    group: str  # its label
    phase: Phase | None
    site: str | None  # the path of the module


class TracedContent(NamedTuple):
    """A collective with all that ranks must have alike: not the peer, the root, the group's ranks
    and uneven sizes.
    """

    place: TracedPlace
    group_size: int
    dtype: str
    input_bytes: int
    output_bytes: int
    reduce_op: str | None


class Deviation(NamedTuple):
    """Ranks of a stage issued different collectives on a group."""

    stage: list[int]
    group: str
    classes: list[list[int]]


class RankTraces:
    """Traces of several ranks of one job, by rank.

    Raises:
        CommandError: two traces are from the same rank, or there is no trace.
    """

    def __init__(self, traces: Iterable[Trace]) -> None:
        self.by_rank: dict[int, Trace] = {}
        for trace in traces:
            rank = trace.data.rank
            if rank in self.by_rank:
                raise CommandError(f"Two traces are from rank {rank}: give one per rank.")
            self.by_rank[rank] = trace
        if not self.by_rank:
            raise CommandError("There are no traces to merge.")
        self.by_rank = dict(sorted(self.by_rank.items()))
        # by rank and kind of key, then by the label of a group: see _counted()
        self._counters: dict[tuple[int, Callable[..., Any]], dict[str, Counter[Any]]] = {}

    @functools.cached_property
    def stages(self) -> list[list[int]]:
        """The ranks of each pipeline stage, which are compared only with one another; all ranks in
        one list without a pipeline.
        """
        return find_stages({rank: trace.data for rank, trace in self.by_rank.items()})

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order."""
        return list(self.by_rank)

    @property
    def world_size(self) -> int:
        """The job's world size."""
        return max(trace.data.world_size for trace in self.by_rank.values())

    def __iter__(self) -> Any:
        return iter(self.by_rank.values())

    def __getitem__(self, rank: int) -> Trace:
        return self.by_rank[rank]

    def __len__(self) -> int:
        return len(self.by_rank)

    def filter(self, **wanted: Any) -> RankTraces:
        """Filter the trace of every rank; see :meth:`commlens.Trace.filter`."""
        part = RankTraces(trace.filter(**wanted) for trace in self)
        part.stages = self.stages  # their messages may be filtered out
        return part

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the rows of all ranks, rank after rank."""
        return [row for trace in self for row in trace.to_rows()]

    def classes(self) -> list[list[int]]:
        """Return the classes of ranks that issued the same collectives, largest first.
        Point-to-point is compared by pairs instead.
        """
        return self._classes(self.ranks)

    def _classes(
        self, ranks: Iterable[int], labels: Iterable[str] | None = None
    ) -> list[list[int]]:
        """Do the same for some ranks and, if ``labels`` are given, the collectives on these
        groups.
        """
        by_signature: dict[Hashable, list[int]] = defaultdict(list)
        for rank in ranks:
            counted = self._counted(rank, _content)
            chosen = counted if labels is None else [label for label in labels if label in counted]
            by_signature[
                frozenset((label, frozenset(counted[label].items())) for label in chosen)
            ].append(rank)
        return sorted(by_signature.values(), key=lambda ranks: (-len(ranks), ranks[0]))

    def _counted(self, rank: int, key: Callable[..., Any]) -> dict[str, Counter[Any]]:
        """Count a rank's collectives, without point-to-point, by group label and key: ``_place`` or
        ``_content``.
        """
        counted = self._counters.get((rank, key))
        if counted is None:
            counted = self._counters[rank, key] = {}
            data = self.by_rank[rank].data
            for event in data.events:
                if event.op not in POINT_TO_POINT:
                    counted.setdefault(wording.label(data.group_of(event)), Counter())[
                        key(data, event)
                    ] += event.count
        return counted

    def _members(self) -> dict[str, set[int]]:
        """Return the ranks of the groups with each label: only they can issue collectives there."""
        members: dict[str, set[int]] = defaultdict(set)
        for trace in self:
            for group in trace.data.groups:
                members[wording.label(group)].update(group.ranks or self.ranks)
        return members

    def _deviations(self) -> list[Deviation]:
        """Return the stages and groups whose ranks issued different collectives there."""
        members = self._members().items()
        found = [
            Deviation(stage, label, self._classes(sorted(ranks & {*stage}), [label]))
            for stage in self.stages
            for label, ranks in members
        ]
        return [each for each in found if len(each.classes) > 1]

    def answer(self) -> str:
        """Say in one sentence whether all ranks issued the same collectives, or all ranks of each
        pipeline stage.
        """
        if len(self) == 1:
            return f"One trace, from rank {self.ranks[0]} of {self.world_size}."
        missing = sorted(set(range(self.world_size)) - set(self.by_rank))
        lacking = (
            f" There is no trace of {ranks_phrase(missing)}."
            if missing and len(missing) < self.world_size
            else ""
        )
        deviations = self._deviations()
        if deviations:
            return self._answer_to(deviations) + lacking
        subject = f"All {len(self)} ranks" if not missing else f"The {len(self)} ranks here"
        if len(self.classes()) == 1:
            collectives = any(self._counted(rank, _content) for rank in self.by_rank)
            done = (
                "issued the same collectives"
                if collectives or not self.stages[1:]
                else "issued only sends and receives"
            )
        elif len(self.stages) == len(self):
            done = "pass messages like stages of a pipeline, so their collectives are not compared"
        elif len(self.stages) > 1:
            done = (
                "issued the same collectives as the others of their pipeline stage"
                f" ({_listed(self.stages)})"
            )
        else:
            done = "issued the same collectives on the groups that they share"
        order = ", but not in the same order" if self._order() else ""
        messages = "; some sends and receives do not match" if self._messages() else ""
        return f"{subject} {done}{order}{messages}.{lacking}"

    def _answer_to(self, deviations: list[Deviation]) -> str:
        """Say which ranks of the first stage with deviations issued different collectives."""
        of_stage = [each for each in deviations if each.stage is deviations[0].stage]
        labels = [each.group for each in of_stage]
        compared = {rank for each in of_stage for members in each.classes for rank in members}
        classes = self._classes(sorted(compared), labels)
        together = (
            f"The {len(compared)} ranks"
            if len(compared) == len(self)
            else capital(ranks_phrase(sorted(compared)))
        )
        if len(classes) == 2:
            text = (
                f"{capital(ranks_phrase(classes[0]))} and {ranks_phrase(classes[1])} issued"
                " different collectives."
            )
        else:
            text = (
                f"{together} fall into {len(classes)} classes that issued different collectives:"
                f" {_listed(classes)}."
            )
        return text + (
            f" They are one stage of a pipeline (the stages: {_listed(self.stages)})."
            if len(self.stages) > 1
            else ""
        )

    def differences(self) -> list[str]:
        """Return sentences on how ranks differ from the largest class of their stage; empty if no
        rank differs.
        """
        sentences = [
            sentence
            for _, group, (usual, *others) in self._deviations()
            for ranks in others
            for sentence in self._differences_from(ranks, usual, group)
        ]
        sentences += [*(self._order() if not sentences else []), *self._messages()]
        if len(sentences) > _MOST_DIFFERENCES:
            more = len(sentences) - _MOST_DIFFERENCES
            sentences = [
                *sentences[:_MOST_DIFFERENCES],
                f"{more} more differences; commlens compare shows all of them for two ranks.",
            ]
        return sentences

    def _differences_from(
        self, ranks: Sequence[int], majority: Sequence[int], group: str
    ) -> list[str]:
        """Return how a class of ranks differs from the largest one on a group: in the numbers of
        collectives or, if these are the same, in their sizes.
        """
        these, others = ranks_phrase(ranks), ranks_phrase(majority)
        # the ranks of a class issued the same, so the first one stands for all
        mine, theirs = (
            self._counted(each[0], _place).get(group, Counter()) for each in (ranks, majority)
        )
        if mine != theirs:
            return _count_sentences(these, others, mine, theirs)
        mine, theirs = (
            self._counted(each[0], _content).get(group, Counter()) for each in (ranks, majority)
        )
        own = grouped((content.place, content) for content in mine - theirs)
        usual = grouped((content.place, content) for content in theirs - mine)
        return [
            f"{these}: {place.op} on {place.group} {wording.within(place.phase, place.site)} is"
            f" {_shapes(own.get(place, []))}; on {others} it is {_shapes(usual.get(place, []))}"
            for place in {**own, **usual}
        ]

    def _messages(self) -> list[str]:
        """Report pairs of ranks with different numbers of sends and receives. A rank that receives
        from any rank is left out.
        """
        sent: Counter[tuple[int, int, str]] = Counter()
        received: Counter[tuple[int, int, str]] = Counter()
        any_source = set()
        for rank, trace in self.by_rank.items():
            for event in trace.events:
                group = wording.label(trace.data.group_of(event))
                if event.op == "recv" and event.peer is None:
                    any_source.add(rank)
                elif event.op == "send" and event.peer is not None:
                    sent[rank, event.peer, group] += event.count
                elif event.op == "recv" and event.peer is not None:
                    received[event.peer, rank, group] += event.count
        unmatched = [pair for pair in sorted({**sent, **received}) if sent[pair] != received[pair]]
        return [
            f"rank {sender} sent {count(sent[sender, receiver, group], 'message')} to rank"
            f" {receiver} on {group}, but rank {receiver} received"
            f" {received[sender, receiver, group]}"
            for sender, receiver, group in unmatched
            if {sender, receiver} <= set(self.by_rank) and receiver not in any_source
        ]

    def _order(self) -> list[str]:
        """Report ranks whose order differs within a stage. Threads are not ordered against one
        another.
        """
        return [sentence for stage in self.stages for sentence in self._order_within(stage)][
            :_MOST_DIFFERENCES
        ]

    def _order_within(self, stage: Sequence[int]) -> list[str]:
        """Report ranks of a stage whose order differs from that of its first rank, on the groups
        that the two share.
        """
        first, *rest = stage
        members = self._members()
        sentences = []
        for rank in rest:
            shared = {label for label, ranks in members.items() if {first, rank} <= ranks}
            orders = zip(
                _sequence(self.by_rank[rank].data, shared),
                _sequence(self.by_rank[first].data, shared),
                strict=False,
            )
            for place, (mine, theirs) in enumerate(orders, start=1):
                if mine != theirs:
                    sentences.append(
                        f"rank {rank}'s order differs from rank {first}'s from #{place} on:"
                        f" {mine.op} on {mine.group} {wording.within(mine.phase, mine.site)}, where"
                        f" rank {first} has {theirs.op} on {theirs.group}"
                        f" {wording.within(theirs.phase, theirs.site)}"
                    )
                    break
        return sentences

    def to_html(
        self,
        *,
        name: str,
        names: Sequence[str] = (),
        notes: Sequence[str] = (),
        network: Network | str | None = None,
    ) -> bytes:
        """Return an HTML page with the trace of one rank of each class.

        ``names`` are those of the ranks' traces, in the order of the ranks; the others are as for
        :func:`~commlens.traces.page.page_of`.
        """
        classes = self.classes()
        shown = [members[0] for members in classes[:MOST_CLASSES]]
        name_of = dict(zip(self.ranks, names or [name] * len(self), strict=True))
        notes = [*notes]
        if len(classes) > MOST_CLASSES:
            notes.append(
                f"There are {len(classes)} classes of ranks; this page shows one rank of each of"
                f" the {MOST_CLASSES} largest."
            )
        return page_of(
            [self[rank].data for rank in shown],
            name=name,
            names=[name_of[rank] for rank in shown],
            notes=notes,
            ranks=RankClasses(
                self.answer(),
                self.differences(),
                [
                    f"rank {members[0]}"
                    + (f", for {ranks_phrase(members)}" if len(members) > 1 else "")
                    for members in classes[:MOST_CLASSES]
                ],
            )
            if len(self) > 1
            else None,
            network=network,
        )


def _place(data: TraceData, event: TraceEvent) -> TracedPlace:
    return TracedPlace(event.op, wording.label(data.group_of(event)), event.phase, event.site)


def _content(data: TraceData, event: TraceEvent) -> TracedContent:
    sizes = (0, 0) if event.op in UNEVEN else (event.input_bytes, event.output_bytes)
    return TracedContent(
        _place(data, event),
        len(data.group_of(event).ranks),
        event.dtype,
        *sizes,
        event.reduce_op,
    )


def _listed(classes: Sequence[Sequence[int]]) -> str:
    return "; ".join(format_ranks(ranks) for ranks in classes[:6]) + (
        "; ..." if len(classes) > 6 else ""
    )


def _sequence(data: TraceData, labels: set[str]) -> list[TracedPlace]:
    """Return the order of a rank's collectives on these groups: of one thread, since threads have
    no order, and only those that are recorded one by one.
    """
    threads = {event.thread for event in data.events}
    places = (
        _place(data, event)
        for event in data.events
        if event.count == 1
        and event.op not in POINT_TO_POINT
        and (event.thread == 0 or len(threads) == 1)
    )
    return [place for place in places if place.group in labels]


def _count_sentences(
    these: str, others: str, mine: Counter[TracedPlace], theirs: Counter[TracedPlace]
) -> list[str]:
    """Return the differences of two counts by place, largest first. Modules that differ only in a
    number share a sentence.
    """
    alike = grouped(
        (
            (_without_numbers(place), mine[place] - theirs[place]),
            (place, mine[place], theirs[place]),
        )
        for place in {**theirs, **mine}
        if mine[place] != theirs[place]
    )
    largest_first = sorted(
        alike.values(),
        key=lambda places: -abs(sum(mine - theirs for _, mine, theirs in places)),
    )
    return [_count_sentence(these, others, places) for places in largest_first]


def _without_numbers(place: TracedPlace) -> TracedPlace:
    return place._replace(site=None if place.site is None else wording.pattern(place.site))


def _count_sentence(these: str, others: str, found: list[tuple[TracedPlace, int, int]]) -> str:
    """Return one sentence about places that differ only in the module, with the numbers of calls
    of both classes.
    """
    (op, group, phase, _), mine, theirs = found[0]
    sites = sorted({site for (_, _, _, site), _, _ in found if site is not None}, key=natural)
    each = " each" if len(sites) > 1 else ""
    where = wording.within(phase, wording.fold(sites) or None)
    more = "more" if mine > theirs else "fewer"
    return (
        f"{these} issued {number(abs(mine - theirs))} {more} {op} on {group} {where}{each} than"
        f" {others} ({number(mine)} instead of {number(theirs)})"
    )


def _shapes(contents: list[TracedContent]) -> str:
    """Return what collectives send, ``"float32 4 MiB"``, each kind once."""
    shapes = {
        f"{each.dtype} {size(most)}"
        if (most := max(each.input_bytes, each.output_bytes))
        else each.dtype
        for each in contents
    }
    return joined(sorted(shapes)) or "missing"


# --- the pipeline stages of a job, inferred from its messages: stages do different things by design

Edges = Counter[tuple[int, int]]  # number of messages by sender and receiver


def find_stages(by_rank: Mapping[int, TraceData]) -> list[list[int]]:
    """Return the ranks of each pipeline stage, first stage first; one list with all ranks if there
    is no pipeline.

    Ranks form a pipeline if their messages on one group go to neighbours only, and not evenly
    around a ring, as in context parallelism: the first stage receives no activations. Ranks at the
    same position of their pipelines are one stage.
    """
    positions = grouped(
        (rank, (label, position))
        for label, edges in _messages(by_rank).items()
        for ranks in _components(edges)
        if _is_pipeline(ranks, edges, by_rank, label)
        for position, rank in enumerate(ranks)
    )
    stages = grouped((tuple(sorted(positions.get(rank, ()))), rank) for rank in by_rank)
    return [stages[where] for where in sorted(stages)]


def _messages(by_rank: Mapping[int, TraceData]) -> dict[str, Edges]:
    """Count the messages on each group, by its label; each as its sender saw it, or its receiver if
    the sender has no trace.
    """
    found: dict[str, Edges] = defaultdict(Counter)
    for rank, data in by_rank.items():
        for event in data.events:
            if event.op == "send" and event.peer is not None:
                found[wording.label(data.group_of(event))][rank, event.peer] += event.count
            elif event.op == "recv" and event.peer is not None and event.peer not in by_rank:
                found[wording.label(data.group_of(event))][event.peer, rank] += event.count
    return found


def _components(edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the sets of ranks that messages connect, each in order."""
    together: dict[int, set[int]] = {}
    for one, other in edges:
        joined = together.get(one, {one}) | together.get(other, {other})
        together.update(dict.fromkeys(joined, joined))
    return [sorted(ranks) for ranks in {id(ranks): ranks for ranks in together.values()}.values()]


def _is_pipeline(
    ranks: list[int], edges: Edges, by_rank: Mapping[int, TraceData], label: str
) -> bool:
    """Return whether ranks that messages connect form a line."""
    size = len(ranks)
    if size == 2:  # two ranks cannot show whether they are a line or a ring, except by who begins
        begin = {_first_message(by_rank[rank], label) for rank in ranks if rank in by_rank}
        return begin == {"send", "recv"}
    at = {rank: position for position, rank in enumerate(ranks)}
    # by distance: messages from each position
    steps: dict[int, list[int]] = defaultdict(lambda: [0] * size)
    for (sender, receiver), calls in edges.items():
        if sender in at:
            steps[(at[receiver] - at[sender]) % size][at[sender]] += calls
    return set(steps) <= {1, size - 1} and any(len(set(calls)) > 1 for calls in steps.values())


def _first_message(data: TraceData, label: str) -> str | None:
    return next(
        (
            event.op
            for event in data.events
            if event.op in ("send", "recv") and wording.label(data.group_of(event)) == label
        ),
        None,
    )
