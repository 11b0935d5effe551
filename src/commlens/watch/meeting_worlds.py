"""The exchange between worlds on different nodes that share a group made by hand, as a trainer and
an inference engine do that pass weights on.

A *world* is the ranks of one default group. A group made by hand (``ProcessGroupNCCL(store, ...)``)
may have members of several worlds. The node that reports for a world meets those of the other
worlds in the group's own store, or in a folder, by the protocol that the nodes of one job use
(:mod:`commlens.watch.nodes.exchange`): one world reports, with the evidence of all. A world that
uses several stores takes part in several exchanges. If all members of its groups are in sight, that
is in the world itself or in others on its nodes, whose boxes it reads, it meets nobody.

In the terms of that protocol, each world is a node: it draws a number, its *slot*, and overwrites
one small value about once a second, its *beat*. The lines that it passes on are its *news*. The
node with the lowest rank reports, so a world has one *rank* here, made for the purpose. Its high
bits are 4 - exchanges, so the busiest world, which sees most, has the lowest rank; its low 48 bits
are the world's name, a hash. A trainer that takes part in two exchanges and two engines that take
part in one each have the ranks ``2 << 48 | ...``, ``3 << 48 | ...`` and ``3 << 48 | ...``: the
trainer reports.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Final

from commlens.model.ranklog import RankLog
from commlens.processes.pyspy import InBackground
from commlens.text import capital, count, ranks_phrase
from commlens.watch.hand_made_groups import (
    EXCHANGES_MAX,
    NAME_BITS,
    OFF,
    by_hand,
    has_name,
    made_in,
    name_of,
    names_in,
    newest_logs,
    places_to_meet,
)
from commlens.watch.nodes.beat import LAST, Beat, ByHand, News, key
from commlens.watch.nodes.exchange import Nodes
from commlens.watch.nodes.meeting_places import Client, Place, stored
from commlens.watch.nodes.remote_evidence import unpack_world
from commlens.watch.open_waits import OpenWait
from commlens.watch.other_worlds import OtherWorlds, reading_of
from commlens.watch.roster import Member

GROUPS_EVERY_S: Final = 3.0  # between two looks for new groups
DEFER_S: Final = 8.0
"""For so long, a world leaves its own verdict to the world that reports."""
_GATHER_S: Final = 6.0
_MEMBERS_S: Final = 30.0  # between two messages on which processes a world has
_GROUPS_MAX: Final = 16  # the newest ones of a node
_SLOWER: Final = 2.0  # than the nodes of one job: the store is the program's own

WorldLogs = tuple[list[RankLog], list[str]]
"""The logs of a world, and what could not be read, in sentences."""


class _Exchange(Nodes):
    """The worlds that meet in one store or folder, each by the node that reports for it.

    :class:`Nodes` publishes the beats, chooses the reporter and gathers evidence, in a thread of
    its own. This adds what differs for worlds: which processes a world has is sent in advance,
    since a world that is out of sight cannot be asked.
    """

    answers: Mapping[int, list[RankLog]] = MappingProxyType({})
    """The logs of the worlds that answered last, by slot."""
    answered_by: Sequence[int] = ()
    """The slots of the worlds whose evidence is in the last diagnosis."""
    groups: Sequence[ByHand] = ()
    """The groups made by hand that ranks of this node are in, the newest ones."""

    def __init__(self, host: str, wake: Callable[[], None], look: Callable[[int], bytes]) -> None:
        super().__init__(host, wake, look=look)
        self.members: dict[int, bytes] = {}
        """The packed logs of each world, with one record of each rank, by slot: they say which
        processes it has if it is out of sight later, as the store ended with the program.
        """
        # the groups at this world's last look at its processes; empty: the look failed; None: there
        # was none yet
        self._seen_groups: Sequence[ByHand] | None = None
        self._look_under_way: InBackground[bytes] | None = None  # at its processes
        self._members_due = 0.0  # time.monotonic() at which to exchange processes again

    def _exchange(self, client: Client, slot: int) -> None:
        """Exchange beats, and also send which processes this world has and read that of others,
        while the store lasts. Called again and again by the thread of :class:`Nodes`.
        """
        super()._exchange(client, slot)
        others, now = [beat.slot for beat in self.others], time.monotonic()
        is_due = now >= self._members_due
        if is_due:
            self._members_due = now + _MEMBERS_S
        may_look = is_due or self._seen_groups is None  # the first time at once
        if (
            others
            and self.groups
            and may_look
            and self._look_under_way is None
            and self._seen_groups != self.groups
        ):
            self._seen_groups = self.groups
            run = functools.partial(self._look, 1)
            self._look_under_way = InBackground(run, lambda _: b"")
        self._send_members(client, slot)
        wanted = [other for other in others if is_due or other not in self.members]
        self.members |= stored(client, "members", wanted)

    def _send_members(self, client: Client, slot: int) -> None:
        """Send what the look at this world's processes found, once it has ended. It may take
        seconds, and a world that sends nothing for so long counts as lost.
        """
        content = self._look_under_way.wait() if self._look_under_way is not None else None
        if content is None:
            return
        self._look_under_way = None
        if content:
            client.set(key("members", slot), content)
        else:
            self._seen_groups = ()  # so it looks again

    def lost_worlds(self, answered: Collection[int]) -> tuple[list[list[RankLog]], list[str]]:
        """Return what is known of the worlds that were in sight until the store or folder was lost
        and that have left no evidence: their logs, which say only which processes they have, and a
        sentence on each.

        Args:
            answered: the names of the worlds that have answered in another exchange.
        """
        lost = self.lost_store
        if lost is None:
            return [], []
        beats = [
            beat
            for beat in lost.beats
            if beat.slot not in self.answers and not has_name(beat, answered)
        ]
        logs = [
            unpack_world(self.members[beat.slot], beat.host)[0]
            for beat in beats
            if beat.slot in self.members
        ]
        lines = []
        for beat in beats:
            died = (
                f" {capital(ranks_phrase(beat.dead))} of it had died by then." if beat.dead else ""
            )
            lines.append(
                f"The world that {beat.host} reports for met this one in {lost.place}, which has"
                f" ended or cannot be reached any more.{died} What its ranks did then may be"
                f" printed on {beat.host}."
            )
        return logs, lines

    def gather_worlds(
        self, asked: Sequence[Beat], timeout_s: float
    ) -> tuple[dict[int, WorldLogs], list[Beat]]:
        """Return the logs of the worlds that answer, each with what could not be read, by slot, and
        the worlds that do not.
        """
        found, silent = self.gather(
            lambda slot, content: unpack_world(content, self.host(slot)),
            timeout_s=timeout_s,
            asked=asked,
        )
        found = without_replaced(found, {beat.slot for beat in self.others})
        self.answers = {slot: logs for slot, (logs, _) in found.items()}
        return found, silent

    def _period_s(self) -> float:
        """Rest longer than the nodes of one job do, but not while evidence is gathered."""
        return super()._period_s() if self._gathering else _SLOWER * super()._period_s()


class MeetingWorlds:
    """This world's part in all its exchanges with other worlds. All is called from the watcher's
    thread.

    Args:
        host: this machine's name.
        wake: wakes the watcher; called from another thread when there is something to do.
        where: the setting ``meet``: ``auto``, ``off`` or a folder.
        folders: of the job's black boxes.
        look: returns the evidence of this world for a command on another node, given the number of
            newest records of each rank; called in a thread of its own.
    """

    def __init__(
        self,
        host: str,
        wake: Callable[[], None],
        where: str,
        folders: Sequence[Path],
        look: Callable[[int], bytes] = lambda _: b"",
    ) -> None:
        self.reported_by = ""
        """The host whose world has reported the present fault of this one, too; empty: none."""
        self.out_of_sight: set[tuple[str, int, int]] = set()
        """Among the logs gathered last, those that say only which processes a world had, as
        :func:`reading_of` identifies them.
        """
        self._host, self._wake, self._where = host, wake, where
        self._folders, self._look = folders, look
        self._worlds_here = OtherWorlds(observes=False, newest=1)  # on this node
        self._groups_here: list[ByHand] = []  # that ranks of this node are in
        self._next_groups_at = 0.0  # time.monotonic() of the next look for these
        self._exchanges: dict[Place, _Exchange] = {}
        # time.monotonic() until which checks are left to the world that reports, by is_early
        self._deferred: dict[bool, float] = {}
        self._name = name_of(host, folders[0])

    # --- where they meet

    def groups(self, members: Sequence[Member]) -> list[ByHand]:
        """Return the newest groups made by hand that ranks of this node are in, with the members on
        this node.
        """
        now = time.monotonic()
        if now < self._next_groups_at or self._where == OFF:
            return self._groups_here
        self._next_groups_at = now + GROUPS_EVERY_S
        logs = newest_logs(members)
        if any(made_in(logs)):
            others = self._worlds_here.logs(logs, self._folders).values()
            self._groups_here = by_hand(logs, chain.from_iterable(others))[-_GROUPS_MAX:]
        return self._groups_here

    def meet(
        self, members: Sequence[Member], waiting: list[OpenWait], of_all_nodes: Iterable[ByHand]
    ) -> None:
        """Describe this world to the others, wherever members of its groups are out of sight.

        Args:
            members: this node's ranks.
            waiting: what ranks of all nodes wait in.
            of_all_nodes: the groups that ranks of this world are in, on any node.
        """
        wanted = places_to_meet(of_all_nodes, self._where, self._host)
        new = [place for place in wanted if place not in self._exchanges]
        for place in new:
            self._exchanges[place] = _Exchange(self._host, self._wake, self._look)
        for place in self._exchanges.keys() - {*wanted}:  # all members are in sight now
            self._exchanges.pop(place).leave()
        rank = (EXCHANGES_MAX - len(self._exchanges)) << NAME_BITS | self._name
        for exchange in self._exchanges.values():
            exchange.groups = self._groups_here
            exchange.update_waits(members, waiting, [rank])
        for place in new:
            self._exchanges[place].begin([place])

    def leave_exchanges(self, evidence: Callable[[], bytes] | None = None) -> None:
        """Leave all exchanges: the others no longer wait for this world, but have its last
        evidence.
        """
        once = functools.cache(evidence) if evidence is not None else None
        while self._exchanges:
            self._exchanges.popitem()[1].leave(once)
        self.reported_by = ""

    def leave(self, evidence: Callable[[], bytes] | None = None) -> None:
        """Leave all exchanges, and forget the groups."""
        self.leave_exchanges(evidence)
        self._worlds_here.close()
        self._groups_here, self._next_groups_at = [], 0.0

    @property
    def ports(self) -> set[int]:
        """The ports of the stores in which they meet."""
        return {each.port for each in self._exchanges.values()}

    # --- who reports

    @property
    def reporter(self) -> Beat | None:
        """The beat of the world that reports for this one; None if this one reports."""
        found = (exchange.reporter for exchange in self._exchanges.values())
        return next((beat for beat in found if beat is not None), None)

    def waits(self, now_ns: int) -> list[OpenWait]:
        """Return the oldest waits of the worlds for which this one reports."""
        if self.reporter is not None:
            return []
        return [wait for each in self._exchanges.values() for wait in each.waits(now_ns)]

    def defer(self, *, is_early: bool) -> bool:
        """Leave a check to the world that reports, for ``DEFER_S`` at most or once it has reported.
        Returns whether it is left.

        Args:
            is_early: the check comes before the stall timeout.
        """
        if self.reporter is None:
            return False
        now = time.monotonic()
        return bool(self.reported_by) or now < self._deferred.setdefault(is_early, now + DEFER_S)

    def end_stall(self) -> None:
        """Note that no rank waits for long any more."""
        self._deferred, self.reported_by = {}, ""

    # --- deaths

    def add_dead(self, ranks: list[int]) -> None:
        """Tell the other worlds that ranks of this node have died."""
        for exchange in self._exchanges.values():
            exchange.update(dead=ranks)

    @property
    def reporter_has_deaths(self) -> bool:
        """Whether ranks of the world that reports have ended, so that it may know more about a
        death here.
        """
        reporter = self.reporter
        return reporter is not None and bool(reporter.dead or reporter.ended)

    # --- evidence and news

    def answer(self, evidence: Callable[[], bytes], *, is_last: bool = False) -> None:
        """Send the world that reports this one's evidence, if it has asked for it, or if it
        ``is_last``: this world may end before it is asked.
        """
        once = functools.cache(evidence)
        for exchange in self._exchanges.values():
            request = exchange.take_request() or (LAST if is_last else None)
            if request is not None:
                exchange.answer(request, once())

    def gather(self) -> tuple[list[list[RankLog]], list[str]]:
        """Return the logs of each other world, if this one reports, and what is missing, in
        sentences.
        """
        if self.reporter is not None:
            return [], []
        logs: list[list[RankLog]] = []
        problems: list[str] = []
        answered: set[int] = set()  # the names of the worlds that answered
        self.out_of_sight = set()
        asked = {each: each.begin_gather() for each in self._exchanges.values()}
        end = time.monotonic() + _GATHER_S
        for exchange, beats in asked.items():
            found, silent = exchange.gather_worlds(beats, max(0.0, end - time.monotonic()))
            logs += [of_world for of_world, _ in found.values()]
            problems += chain.from_iterable(unread for _, unread in found.values())
            if silent:
                hosts = ", ".join(sorted({beat.host for beat in silent}))
                problems.append(
                    f"{count(len(silent), 'world')} that may share a group made by hand, reported"
                    f" by {hosts}, did not answer in time."
                )
            answered |= {
                number
                for beat in (*beats, *exchange.others)
                if beat.slot in found
                for number in names_in(beat)
            }
        for exchange in asked:
            lost, lines = exchange.lost_worlds(answered)
            problems += lines
            logs += lost
            self.out_of_sight |= {reading_of(log) for of_world in lost for log in of_world}
        return logs, problems

    def note_joined(self, logs: Sequence[RankLog]) -> None:
        """Note which worlds' evidence is among the logs of a diagnosis."""
        joined = {reading_of(log) for log in logs}
        for exchange in self._exchanges.values():
            exchange.answered_by = [
                slot
                for slot, answer in exchange.answers.items()
                if not joined.isdisjoint(map(reading_of, answer))
            ]

    def announce(self, text: str, kind: str, *, is_complete: bool) -> None:
        """Let the worlds whose evidence is in the last diagnosis print a verdict's first line.

        Args:
            text: the line.
            kind: of the verdict.
            is_complete: all members of the groups are known. If not, worlds that take part in
                exchanges without this world do not print the line: they may know more.
        """
        met = Counter(
            rank
            for exchange in self._exchanges.values()
            for beat in exchange.others
            for rank in beat.ranks
        )
        for exchange in self._exchanges.values():
            # a world that is met in each of its exchanges knows no more than this one
            to = [
                beat.slot
                for beat in exchange.others
                if beat.slot in exchange.answered_by
                and (
                    is_complete
                    or all(met[rank] == EXCHANGES_MAX - (rank >> NAME_BITS) for rank in beat.ranks)
                )
            ]
            if to:
                exchange.announce(text, kind=kind, to=to)

    def take_news(self) -> list[tuple[str, News]]:
        """Return the lines of other worlds that were not taken before, each with its host."""
        return [news for each in self._exchanges.values() for news in each.take_news()]


def without_replaced(found: Mapping[int, WorldLogs], live: Collection[int]) -> dict[int, WorldLogs]:
    """Return the logs of worlds without those that have left and whose seat in a group, its number
    among the members, another one has taken: their program was started again.

    Args:
        found: the logs of each world, and what could not be read, by slot.
        live: the slots of those that have not left.
    """
    seats = {
        slot: {(made.identity, made.member) for made in made_in(logs)}
        for slot, (logs, _) in found.items()
    }
    taken = {seat for slot in seats.keys() & live for seat in seats[slot]}
    return {
        slot: world
        for slot, world in found.items()
        if slot in live or taken.isdisjoint(seats[slot])
    }
