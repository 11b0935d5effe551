"""The traces of several ranks side by side: whether they issued the same, and where they differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from commlens.errors import CommandError
from commlens.model.ops import POINT_TO_POINT
from commlens.model.trace import TraceData, TraceEvent
from commlens.text import format_ranks, ranks_phrase
from commlens.traces import wording
from commlens.traces.trace import Trace

_MOST = 12


class RankTraces:
    """Traces of several ranks of one job, by rank.

    Args:
        traces: one for each rank, in any order.

    Raises:
        CommandError: two are of the same rank, or there is none.
    """

    def __init__(self, traces: Iterable[Trace]) -> None:
        self.by_rank: dict[int, Trace] = {}
        for trace in traces:
            rank = trace.data.rank
            if rank in self.by_rank:
                raise CommandError(f"Two of the traces are of rank {rank}: give one for each rank.")
            self.by_rank[rank] = trace
        if not self.by_rank:
            raise CommandError("There are no traces to put together.")
        self.by_rank = dict(sorted(self.by_rank.items()))

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order."""
        return list(self.by_rank)

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return max(trace.data.world_size for trace in self.by_rank.values())

    def __iter__(self) -> Any:
        return iter(self.by_rank.values())

    def __getitem__(self, rank: int) -> Trace:
        return self.by_rank[rank]

    def __len__(self) -> int:
        return len(self.by_rank)

    def filter(self, **wanted: Any) -> RankTraces:
        """The part of every rank's trace that has these values; see :meth:`commlens.Trace.filter`."""
        return RankTraces(trace.filter(**wanted) for trace in self)

    def to_rows(self) -> list[dict[str, Any]]:
        """All ranks' rows, rank after rank."""
        return [row for trace in self for row in trace.to_rows()]

    def classes(self) -> list[list[int]]:
        """Ranks that issued the same, together; the largest class first. Point-to-point is compared by pairs, not here."""
        by_signature: dict[Hashable, list[int]] = defaultdict(list)
        for rank, trace in self.by_rank.items():
            by_signature[frozenset(_counts(trace.data, _fully).items())].append(rank)
        return sorted(by_signature.values(), key=lambda ranks: (-len(ranks), ranks[0]))

    def answer(self) -> str:
        """In one sentence: did all issue the same?"""
        classes = self.classes()
        number = len(self.by_rank)
        if number == 1:
            return f"One trace, of rank {self.ranks[0]} of {self.world_size}."
        missing = sorted(set(range(self.world_size)) - set(self.by_rank))
        lacking = f" There is no trace of {ranks_phrase(missing)}." if missing and len(missing) < self.world_size else ""
        if len(classes) == 1:
            who = f"All {number} ranks" if not missing else f"The {number} ranks here"
            order = ", but not in the same order" if self._order() else ""
            messages = "; not every message has both its ends" if self._messages() else ""
            return f"{who} issued the same{order}{messages}.{lacking}"
        kinds = (
            f"{wording.count(len(classes), 'class', 'classes')} that issued different things" if len(classes) > 2 else "different things"
        )
        if len(classes) == 2:
            text = f"{wording.capital(ranks_phrase(classes[0]))} and {ranks_phrase(classes[1])} issued {kinds}."
        else:
            listed = "; ".join(format_ranks(ranks) for ranks in classes[:6]) + ("; ..." if len(classes) > 6 else "")
            text = f"The {number} ranks are of {kinds}: {listed}."
        return text + lacking

    def differences(self) -> list[str]:
        """Where ranks differ from the largest class of ranks that issued the same, in sentences; empty where nobody does."""
        classes = self.classes()
        if len(classes) == 1:
            return [*self._order(), *self._messages()]
        sentences: list[str] = []
        usual = classes[0]
        for ranks in classes[1:]:
            sentences += self._against(ranks, usual)
        sentences += self._messages()
        if len(sentences) > _MOST:
            sentences = [*sentences[:_MOST], f"{len(sentences) - _MOST} more differences; commlens compare shows two ranks in full."]
        return sentences

    def _against(self, ranks: Sequence[int], usual: Sequence[int]) -> list[str]:
        one, other = self.by_rank[ranks[0]].data, self.by_rank[usual[0]].data
        who, others = ranks_phrase(ranks), ranks_phrase(usual)
        mine, theirs = _counts(one, _place), _counts(other, _place)
        found: dict[Hashable, list[tuple[Any, int, int]]] = {}
        for key in {**theirs, **mine}:
            if mine[key] != theirs[key]:
                op, group, phase, site = key
                alike = (op, group, phase, None if site is None else wording.pattern(site), mine[key] - theirs[key])
                found.setdefault(alike, []).append((key, mine[key], theirs[key]))
        sentences = []
        most_first = sorted(found.values(), key=lambda places: -abs(sum(mine - theirs for _, mine, theirs in places)))
        sentences += [_sentence(who, others, places) for places in most_first]
        if not sentences:  # as many of everything, of other sizes
            sizes_mine, sizes_theirs = _counts(one, _fully), _counts(other, _fully)
            places: dict[Hashable, tuple[list[Any], list[Any]]] = {}
            for counts, against, side in ((sizes_mine, sizes_theirs, 0), (sizes_theirs, sizes_mine, 1)):
                for key in counts - against:
                    places.setdefault(key[:4], ([], []))[side].append(key)
            for (op, group, phase, site), (own, usual_ones) in list(places.items()):  # type: ignore[misc]
                what = f"{op} on {group} {wording.within(phase, site)}"
                sentences.append(f"{who}: {what} is {_shapes(own)}, on {others} {_shapes(usual_ones)}")
        return sentences

    def _messages(self) -> list[str]:
        """Pairs of ranks of which one sent more, or less, than the other received. A receive from any rank may be of every pair."""
        sent: Counter[tuple[int, int, str]] = Counter()
        received: Counter[tuple[int, int, str]] = Counter()
        anything = set()
        for rank, trace in self.by_rank.items():
            for event in trace.events:
                group = wording.label(trace.data.group_of(event))
                if event.op == "recv" and event.peer is None:
                    anything.add(rank)
                elif event.op == "send" and event.peer is not None:
                    sent[rank, event.peer, group] += event.count
                elif event.op == "recv" and event.peer is not None:
                    received[event.peer, rank, group] += event.count
        return [
            f"rank {sender} sent {wording.count(sent[pair], 'message')} to rank {receiver} on {group}, which received {received[pair]}"
            for pair in sorted({**sent, **received})
            for sender, receiver, group in [pair]
            if sent[pair] != received[pair] and {sender, receiver} <= set(self.by_rank) and receiver not in anything
        ]

    def _order(self) -> list[str]:
        """Where ranks that issued the same issued it in another order. Threads have no order among one another."""
        (first, reference), *rest = [(rank, _sequence(trace.data)) for rank, trace in self.by_rank.items()]
        sentences = []
        for rank, sequence in rest:
            for place, (mine, theirs) in enumerate(zip(sequence, reference, strict=False), start=1):
                if mine != theirs:
                    sentences.append(
                        f"rank {rank} has another order than rank {first} from #{place} on: {mine[0]} on {mine[1]} "
                        f"{wording.within(*mine[2:])}, where rank {first} has {theirs[0]} on {theirs[1]} {wording.within(*theirs[2:])}"
                    )
                    break
        return sentences[:_MOST]


def merge(traces: Iterable[Trace]) -> RankTraces:
    """Put the traces of several ranks side by side.

    Raises:
        CommandError: two are of the same rank, or there is none.
    """
    return RankTraces(traces)


def _place(data: TraceData, event: TraceEvent) -> tuple[Any, ...]:
    return (event.op, wording.label(data.group_of(event)), event.phase, event.site)


def _fully(data: TraceData, event: TraceEvent) -> tuple[Any, ...]:
    # Not the peer, the root or the group's ranks: they differ from rank to rank, and must.
    return (*_place(data, event), len(data.group_of(event).ranks), event.dtype, event.input_bytes, event.output_bytes, event.reduce_op)


def _counts(data: TraceData, key: Callable[[TraceData, TraceEvent], tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    counts: Counter[tuple[Any, ...]] = Counter()
    for event in data.events:
        if event.op not in POINT_TO_POINT:
            counts[key(data, event)] += event.count
    return counts


def _sequence(data: TraceData) -> list[tuple[Any, ...]]:
    threads = {event.thread for event in data.events}
    return [
        _place(data, event)
        for event in data.events
        if event.count == 1 and event.op not in POINT_TO_POINT and (event.thread == 0 or len(threads) == 1)
    ]


def _sentence(who: str, others: str, found: list[tuple[Any, int, int]]) -> str:
    (op, group, phase, _), mine, theirs = found[0]
    sites = sorted({key[3] for key, _, _ in found if key[3] is not None}, key=wording.natural)
    each = " each" if len(sites) > 1 else ""
    where = wording.within(phase, wording.fold(sites) or None)
    more = "more" if mine > theirs else "fewer"
    return (
        f"{who} issued {wording.number(abs(mine - theirs))} {more} {op} on {group} {where}{each} than {others} "
        f"({wording.number(mine)} against {wording.number(theirs)})"
    )


def _shapes(keys: list[Any]) -> str:
    return wording.joined(sorted({f"{key[5]} {wording.size(max(key[6], key[7]))}".strip() for key in keys})) or "missing"
