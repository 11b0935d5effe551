"""Whether ranks agree, told as their records come in: what is equal costs a look-up, and memory stays bounded.

What was asked is interned by its bytes, so that ranks that agree compare two small integers. Each number of a channel is held
against the first rank that came there; :mod:`commlens.matching` decides about what differs, once for each pair of asks.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from commlens.blackbox import layout as L
from commlens.blackbox.blobs import AskedJson, GroupJson, asked_of, channel_of, decode_blob
from commlens.blackbox.tail import BoxTail, Raw, reduce_code
from commlens.matching import Answer, Aspect, Disagree, compare_coalesced, compare_collectives, compare_pair, matches_by_tag
from commlens.model.collective import Channel, CollectiveArgs
from commlens.model.ops import POINT_TO_POINT, REDUCING

ChannelKey = tuple[int, str, tuple[int, ...], str]
Code = int
"""An ask's number; 0 where it is not known."""
Place = tuple[int, int]
"""A number of a channel, and which member of a coalesced group (0: it is none)."""

KEPT: Final = 4096  # numbers of a channel that wait for the slowest rank, at most
REMEMBERED: Final = 20_000  # asks, positions and pairs of asks, at most: a program may vary its shapes for ever
SETTLED: Final = 16  # numbers of a channel after which a new pair of lines is odd
_RANKS_MAX: Final = 1 << 20
_REDUCE_LOOKS: Final = 3  # rounds of a rank's watchdog thread that its reduce ops are waited for


@dataclass(slots=True)
class Found:
    """A disagreement, as it was first seen."""

    channel: Channel
    number: int
    aspect: Aspect | Literal["shift"]
    answer: Disagree | None  # None: only lines or steps differ, which may be a rank out of step
    pair: tuple[int, int] | None = None  # sender and receiver
    lane: _Lane | None = None

    @property
    def passed(self) -> int:
        """How many numbers all ranks of this node have come past it."""
        lane = self.lane
        return min(lane.at.get(rank, 0) for rank in lane.local) - self.number if lane is not None else 0

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of this node that have not come there yet: who is the odd one may depend on them."""
        lane = self.lane
        if lane is None:
            return ()
        at = lane.reduced_at if self.aspect == "reduce-op" else lane.at
        return tuple(rank for rank in lane.local if at.get(rank, 0) < self.number)


@dataclass(slots=True)
class _Ask:
    """What some rank asked for."""

    blob: AskedJson | None
    asked: CollectiveArgs | None
    parts: tuple[CollectiveArgs, ...] = ()  # of a coalesced group


@dataclass(slots=True)
class _Lane:
    """One channel: at each number what the first rank asked that came there."""

    channel: Channel
    local: tuple[int, ...]  # its ranks that are on this node
    first_at: dict[int, tuple[tuple[Code, int, int], int]] = field(default_factory=dict)  # number: (ask, stack, step), rank
    reduced: dict[Place, tuple[int, Code, int]] = field(default_factory=dict)  # reduce op's code, ask, rank
    whole: dict[int, dict[int, Code]] = field(default_factory=dict)  # numbers at which all ranks must be seen together
    at: dict[int, int] = field(default_factory=dict)  # rank: its newest number
    reduced_at: dict[int, int] = field(default_factory=dict)  # rank: its newest number of which the reduce op is known
    floor: int = 1  # numbers below are done with
    begin: int = 0  # the first number seen
    habits: set[tuple[int, int, int]] = field(default_factory=set)  # pairs of stacks that met, with the difference of steps
    uncertain: bool = False  # several threads issue on it at once: nobody knows their order
    told: set[int] = field(default_factory=set)  # numbers that disagree
    odd: bool = False  # a pair of lines or steps met that never had before


@dataclass(slots=True)
class _Pair:
    """Messages from one rank to another: what has not met its other half."""

    channel: Channel
    sender: int
    receiver: int
    waiting: dict[tuple[int, int], tuple[Code, bool, int]] = field(default_factory=dict)  # (tag, place): ask, is a send, number
    lost: bool = False  # which message meets which is not known any more


@dataclass(slots=True)
class _End:
    """One rank's side of a pair."""

    pair: _Pair
    last: int = 0
    places: dict[int, int] = field(default_factory=dict)  # tag: how many so far
    gap: bool = False


@dataclass(slots=True)
class _Side:
    """One rank's view of a channel."""

    lane: _Lane
    channel: Channel
    era: int = 0
    first: int = 0  # index of its record number 1
    ends: dict[tuple[int, str], _End] = field(default_factory=dict)  # (peer, op)


class Agreement:
    """All ranks of this node, compared.

    Args:
        on_node: the ranks whose records will come. Ranks of other nodes are not waited for.
    """

    def __init__(self, on_node: Iterable[int]) -> None:
        self.on_node = frozenset(on_node)
        self.compared = 0  # records held against others
        self.passed_over = 0  # numbers that were given up before all had come
        self.again: Counter[tuple[ChannelKey, str]] = Counter()  # how often each aspect of a channel disagreed
        self._found: list[Found] = []
        self._codes: dict[bytes | tuple[Code, ...], Code] = {}
        self._asks: dict[Code, _Ask] = {}
        self._next_code = itertools.count(1)
        self.special: set[Code] = set()  # reduces, or needs all ranks to be compared
        self._whole: set[Code] = set()
        self._stacks: dict[bytes, int] = {}
        self._lanes: dict[tuple[ChannelKey, int], _Lane] = {}
        self._pairs: dict[tuple[ChannelKey, int, int, int], _Pair] = {}
        self._any_source: set[tuple[ChannelKey, int]] = set()
        self._known: dict[tuple[object, ...], Answer] = {}
        self._seen_pairs: set[tuple[object, ...]] = set()
        self._touched: set[int] = set()

    # --- what a rank's feed asks for

    def code(self, payload: bytes | None) -> Code:
        """The number of an ask."""
        if payload is None:
            return 0
        code = self._codes.get(payload)
        if code is None:
            blob = decode_blob(payload)
            if not isinstance(blob, AskedJson):
                return 0
            if len(self._codes) >= REMEMBERED:
                self._codes.clear()  # the numbers go on: what was interned before is no longer equal to what comes, but compared
            code = self._codes[payload] = next(self._next_code)
            asked = asked_of(blob, 0)
            self._asks[code] = _Ask(blob, asked)
            if asked.op in REDUCING or asked.op == "all_to_all":
                self.special.add(code)
            if asked.op == "all_to_all":
                self._whole.add(code)
            self._bound()
        return code

    def group_code(self, members: tuple[Code, ...]) -> Code:
        """The number of a coalesced group of asks."""
        if not all(members):
            return 0
        code = self._codes.get(members)
        if code is None:
            code = self._codes[members] = next(self._next_code)
            parts = tuple(part.asked for member in members if (part := self._asks.get(member)) is not None and part.asked is not None)
            self._asks[code] = _Ask(None, parts[0] if parts else None, parts)
            if any(member in self._whole for member in members):
                self.special.add(code)
                self._whole.add(code)
        return code

    def op(self, code: Code) -> str:
        """Its wire op."""
        ask = self._asks.get(code)
        return ask.asked.op if ask is not None and ask.asked is not None else ""

    def stack(self, payload: bytes | None) -> int:
        """The number of a stack; 0 where it is not known."""
        if payload is None:
            return 0
        if len(self._stacks) > REMEMBERED:
            self._stacks.clear()
        return self._stacks.setdefault(payload, len(self._stacks) + 1)

    def lane(self, channel: Channel, era: int) -> _Lane:
        """The channel as all ranks share it."""
        key = (channel.key, era)
        lane = self._lanes.get(key)
        if lane is None:
            local = tuple(rank for rank in channel.group.ranks if rank in self.on_node)
            lane = self._lanes[key] = _Lane(channel, local)
        return lane

    def pair(self, channel: Channel, era: int, sender: int, receiver: int) -> _Pair:
        """The messages from one rank to another."""
        key = (channel.key, era, sender, receiver)
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._pairs[key] = _Pair(channel, sender, receiver)
        return pair

    def _bound(self) -> None:
        if len(self._asks) > 2 * REMEMBERED:
            oldest = next(iter(self._asks))
            del self._asks[oldest]
            self.special.discard(oldest)
            self._whole.discard(oldest)
        if len(self._known) > REMEMBERED:
            self._known.clear()

    # --- collectives

    def differs(self, lane: _Lane, number: int, rank: int, mine: tuple[Code, int, int], theirs: tuple[Code, int, int], other: int) -> None:
        """Another rank came to this number before, with something else: another ask, another line, another step."""
        code, stack, step = mine
        known, known_stack, known_step = theirs
        if code != known and code and known:
            if code in self._whole or known in self._whole:
                answer = self._compare(lane, {rank: code, other: known}, by_rank=True)
            else:
                answer = self._compare(lane, {other: known, rank: code}, by_rank=False)
            if isinstance(answer, Disagree):
                self._disagree(lane, number, answer, (known, code))
                return
        if stack and known_stack:
            habit = (known_stack, stack, step - known_step)
            if habit not in lane.habits:
                if number - lane.begin >= SETTLED and not lane.odd and not lane.uncertain:
                    lane.odd = True
                    self._found.append(Found(lane.channel, number, "shift", None, lane=lane))
                if len(lane.habits) < 1024:
                    lane.habits.add(habit)

    def all_ranks(self, lane: _Lane, number: int, rank: int, code: Code) -> None:
        """What is sent to each rank must be what each expects: every pair counts, not only those with the first that came."""
        met = lane.whole.setdefault(number, {})
        met[rank] = code
        if len(met) == len(lane.local):
            del lane.whole[number]
            answer = self._compare(lane, met, by_rank=True)
            if isinstance(answer, Disagree):
                self._disagree(lane, number, answer, tuple(sorted(met.values())))
        elif len(lane.whole) > KEPT:
            del lane.whole[next(iter(lane.whole))]

    def reduces(self, lane: _Lane, place: Place, rank: int, code: Code, reduce_op: int) -> None:
        """A rank's reduce op is known now."""
        known = lane.reduced.get(place)
        number = place[0]
        if known is None:
            lane.reduced[place] = (reduce_op, code, rank)
            if len(lane.reduced) > 2 * KEPT:
                del lane.reduced[next(iter(lane.reduced))]
            return
        if known[0] == reduce_op or number in lane.told:
            return
        key = ("reduce", *known[:2], reduce_op, code)
        answer = self._known.get(key)
        if answer is None:
            asked = {known[2]: self._with_reduce_op(known[1], known[0]), rank: self._with_reduce_op(code, reduce_op)}
            answer = self._known[key] = compare_collectives({r: a for r, a in asked.items() if a is not None}, lane.channel.group.ranks)
        if isinstance(answer, Disagree):
            self._disagree(lane, number, answer, key)

    def _with_reduce_op(self, code: Code, reduce_op: int) -> CollectiveArgs | None:
        ask = self._asks.get(code)
        return asked_of(ask.blob, reduce_op) if ask is not None and ask.blob is not None else None

    def _compare(self, lane: _Lane, met: Mapping[int, Code], *, by_rank: bool) -> Answer | None:
        """Compare asks, each combination once. Whose they are matters only where ranks ask for different things by right."""
        asks = {rank: self._asks.get(code) for rank, code in met.items()}
        if any(ask is None or ask.asked is None for ask in asks.values()):
            return None
        by_rank = by_rank or any(ask is not None and ask.asked is not None and len(ask.asked.outputs) > 1 for ask in asks.values())
        key: tuple[object, ...] = (lane.channel.key, *sorted(met.items())) if by_rank else tuple(met.values())
        answer = self._known.get(key)
        if answer is None:
            ranks = lane.channel.group.ranks
            if any(ask is not None and ask.parts for ask in asks.values()):
                parts = {r: ask.parts or (ask.asked,) for r, ask in asks.items() if ask is not None and ask.asked is not None}
                answer = compare_coalesced(parts, ranks)
            else:
                answer = compare_collectives({r: ask.asked for r, ask in asks.items() if ask is not None and ask.asked is not None}, ranks)
            self._known[key] = answer
        return answer

    def _disagree(self, lane: _Lane, number: int, answer: Disagree, what: tuple[object, ...]) -> None:
        if number in lane.told or lane.uncertain:
            return
        if len(lane.told) > KEPT:
            lane.told = {told for told in lane.told if told >= lane.floor}
        lane.told.add(number)
        key = lane.channel.key
        self.again[(key, answer.aspect)] += 1
        pair = (key, answer.aspect, *what)
        if pair in self._seen_pairs or len(self._seen_pairs) > REMEMBERED:
            return
        self._seen_pairs.add(pair)
        self._found.append(Found(lane.channel, number, answer.aspect, answer, lane=lane))

    # --- point to point

    def message(self, end: _End, rank: int, code: Code, number: int, tag: int) -> None:
        """Compare a send or a receive with its other half, if that has been seen."""
        pair = end.pair
        if pair.lost:
            return
        if not matches_by_tag(pair.channel.group.backend):
            tag = 0
        if number == end.last + 1:
            place = end.places.get(tag, 0) + 1
        elif number > end.last:
            end.gap = True  # overwritten before it was read: the numbers still count, as long as there is one tag
            place = number
        else:
            pair.lost = True  # issued by several threads at once
            return
        end.last = number
        end.places[tag] = place
        if end.gap and len(end.places) > 1:
            pair.lost = True
            pair.waiting.clear()
            return
        sends = rank == pair.sender and self.op(code) == "send"
        other = pair.waiting.get((tag, place))
        if other is None or other[1] == sends:
            pair.waiting[(tag, place)] = (code, sends, number)
            if len(pair.waiting) > KEPT:
                del pair.waiting[next(iter(pair.waiting))]
                self.passed_over += 1
            return
        del pair.waiting[(tag, place)]
        sent, received = (code, other[0]) if sends else (other[0], code)
        key = ("p2p", sent, received)
        answer = self._known.get(key)
        if answer is None:
            out, into = self._asks.get(sent), self._asks.get(received)
            if out is None or into is None or out.asked is None or into.asked is None:
                return
            answer = self._known[key] = compare_pair(pair.sender, out.asked, pair.receiver, into.asked)
        if isinstance(answer, Disagree) and (pair.channel.key, pair.receiver) not in self._any_source:
            self.again[(pair.channel.key, "p2p")] += 1
            what = (pair.channel.key, pair.sender, pair.receiver)
            if what not in self._seen_pairs:
                self._seen_pairs.add(what)
                self._found.append(Found(pair.channel, number, "p2p", answer, (pair.sender, pair.receiver)))

    def from_any_source(self, channel: Channel, rank: int) -> None:
        """A receive from whoever sends first: from now on nobody knows which message meets which receive of this rank."""
        self._any_source.add((channel.key, rank))

    # --- what came of it

    def take_found(self) -> list[Found]:
        """What disagrees and has not been told of yet."""
        found, self._found = self._found, []
        return found

    def trim(self, lanes: Iterable[_Lane]) -> None:
        """Forget the numbers that all ranks of this node have passed, and those that the slowest is too far away from."""
        for lane in lanes:
            slowest = min((lane.at.get(rank, 0) for rank in lane.local), default=0)
            newest = max(lane.at.values(), default=0)
            floor = max(slowest + 1, newest - KEPT)
            if floor <= lane.floor:
                continue
            if floor > slowest + 1:
                self.passed_over += floor - max(lane.floor, slowest + 1)
            first_at = lane.first_at
            if floor - lane.floor < 4 * len(first_at) + 64:
                for number in range(lane.floor, floor):
                    first_at.pop(number, None)
            else:
                lane.first_at = {number: what for number, what in first_at.items() if number >= floor}
            lane.floor = floor


class Feed:
    """One rank's records on their way into the agreement.

    Args:
        agreement: of all ranks.
        rank: global.
        tail: where the records come from.
    """

    def __init__(self, agreement: Agreement, rank: int, tail: BoxTail) -> None:
        self.rank = rank
        self.tail = tail
        self._agreement = agreement
        self._sides: dict[int, _Side | None] = {}  # by the group blob's position
        self._by_channel: dict[ChannelKey, _Side | None] = {}
        self._codes: dict[int, Code] = {}  # by the asked blob's position
        self._stacks: dict[int, int] = {}
        self._coalesced: dict[int, list[Code]] = {}
        self._reducing: deque[tuple[int, int, _Lane, Place, Code, int]] = deque()  # heartbeat when read, index, lane, place, ask, looks
        self._beat = 0
        self._eras: Counter[tuple[ChannelKey, int, str]] = Counter()

    def poll(self, at_most: int) -> int:
        """Read what is new and compare it. Returns how many records that were.

        Raises:
            FormatError: the box cannot be read.
        """
        raws = self.tail.poll(at_most)
        if raws:
            self._take(raws)
        if self._reducing and self.tail.heartbeat != self._beat:
            self._read_reduce_ops()
        return len(raws)

    def _take(self, raws: Sequence[Raw]) -> None:
        agreement, rank, beat = self._agreement, self.rank, self.tail.heartbeat
        sides, codes, stacks, special = self._sides, self._codes, self._stacks, agreement.special
        touched: dict[int, _Lane] = {}
        for index, group, asked, stack, number, step, coalescing, tag, flags, peer, members, _, _ in raws:
            side = sides[group] if group in sides else self._side(group)
            if side is None:
                continue
            code = codes.get(asked) or self._code(asked)
            if peer >= 0 or flags & L.FLAG_ANY_SOURCE:
                self._message(side, code, number, tag, flags, peer)
                continue
            if coalescing:
                if not flags & L.FLAG_COALESCED_END:
                    place = (number, self._add_member(coalescing, code))
                    if code in special and code not in agreement._whole:
                        self._reducing.append((beat, index, side.lane, place, code, 0))
                    continue
                code = self._close(coalescing, members)
            if not number:
                continue
            if number == 1:
                if side.first and not self.tail.was_never_issued(side.first):
                    side = self._next_era(side)
                side.first = index
            lane = side.lane
            touched[id(lane)] = lane
            if flags & L.FLAG_CONCURRENT:
                lane.uncertain = True
            site = stacks.get(stack) or self._stack(stack)
            mine = (code, site, step)
            first = lane.first_at.get(number)
            if first is None:
                if number >= lane.floor:
                    lane.first_at[number] = (mine, rank)
                    lane.begin = lane.begin or number
            elif first[1] == rank:  # it was refused before issue, and its number is taken again
                lane.first_at[number] = (mine, rank)
            elif first[0] != mine:
                agreement.differs(lane, number, rank, mine, first[0], first[1])
            if code in special:
                if code in agreement._whole:
                    agreement.all_ranks(lane, number, rank, code)
                else:
                    self._reducing.append((beat, index, lane, (number, 0), code, 0))
            if number > lane.at.get(rank, 0):
                lane.at[rank] = number
        agreement.compared += len(raws)
        agreement.trim(touched.values())

    # --- what positions stand for

    def _side(self, group: int) -> _Side | None:
        blob = self.tail.decoded(group)
        side = None
        if isinstance(blob, GroupJson):
            try:
                channel = channel_of(blob, limit=_RANKS_MAX)
            except ValueError:
                channel = None
            if channel is not None:
                known = self._by_channel.get(channel.key)
                if known is None and sum(rank in self._agreement.on_node for rank in channel.group.ranks) > 1:
                    known = self._by_channel[channel.key] = _Side(self._agreement.lane(channel, 0), channel)
                side = known
        if len(self._sides) > REMEMBERED:
            self._sides.clear()
        self._sides[group] = side
        return side

    def _next_era(self, side: _Side) -> _Side:
        """The group was destroyed and made again under its former name: its numbers start anew."""
        side.era += 1
        side.lane = self._agreement.lane(side.channel, side.era)
        side.ends.clear()
        return side

    def _code(self, position: int) -> Code:
        if len(self._codes) > REMEMBERED:
            self._codes.clear()
        code = self._codes[position] = self._agreement.code(self.tail.blob(position))
        return code

    def _stack(self, position: int) -> int:
        if not position:
            return 0
        if len(self._stacks) > REMEMBERED:
            self._stacks.clear()
        stack = self._stacks[position] = self._agreement.stack(self.tail.blob(position))
        return stack

    # --- coalesced groups and messages

    def _add_member(self, coalescing: int, code: Code) -> int:
        """Note a member of an open group. Returns its place in it, from 1."""
        if coalescing not in self._coalesced and len(self._coalesced) > 64:
            del self._coalesced[next(iter(self._coalesced))]  # never closed: its caller raised
        parts = self._coalesced.setdefault(coalescing, [])
        parts.append(code)
        return len(parts)

    def _close(self, coalescing: int, members: int) -> Code:
        """The code of a group that is complete; 0 where a member was not read."""
        parts = self._coalesced.pop(coalescing, [])
        return self._agreement.group_code(tuple(parts)) if parts and len(parts) == members else 0

    def _message(self, side: _Side, code: Code, number: int, tag: int, flags: int, peer: int) -> None:
        agreement, op = self._agreement, self._agreement.op(code)
        if peer < 0:
            agreement.from_any_source(side.channel, self.rank)
            return
        if op not in POINT_TO_POINT or peer not in agreement.on_node:
            return
        end = side.ends.get((peer, op))
        if end is None or (number == 1 and end.last):
            key = (side.channel.key, peer, op)
            self._eras[key] += end is not None  # the group was made again: numbers start anew
            era = self._eras[key]
            sender, receiver = (self.rank, peer) if op == "send" else (peer, self.rank)
            end = side.ends[(peer, op)] = _End(agreement.pair(side.channel, era, sender, receiver))
        agreement.message(end, self.rank, code, number, tag)

    # --- reduce ops

    def _read_reduce_ops(self) -> None:
        """The rank's watchdog thread has been at work since: the reduce ops of what was read before may be there."""
        self._beat = self.tail.heartbeat
        floor = self.tail.issued - self.tail.capacity
        ready = []
        while self._reducing and self._reducing[0][0] != self._beat:
            one = self._reducing.popleft()
            if one[1] > floor:
                ready.append(one)
        if not ready:
            return
        first = min(one[1] for one in ready)
        words = self.tail.reduce_words(first, max(one[1] for one in ready))
        reduces, rank = self._agreement.reduces, self.rank
        for _, index, lane, place, code, looks in ready:
            reduce_op = reduce_code(words[index - first], index) if index - first < len(words) else 0
            if reduce_op:
                if place[0] > lane.reduced_at.get(rank, 0):
                    lane.reduced_at[rank] = place[0]
                known = lane.reduced.get(place)
                if known is None or known[0] != reduce_op:
                    reduces(lane, place, rank, code, reduce_op)
            elif looks + 1 < _REDUCE_LOOKS:
                self._reducing.append((self._beat, index, lane, place, code, looks + 1))
