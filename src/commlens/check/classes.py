"""Run a few ranks of a large world, and assume that each other rank does the same as one of these.

Ranks differ by their positions: the first and the last of a mesh dimension or of a node, the stages
of a pipeline. Those are run first. Where two positions differ, ranks between them are run until the
border is known. Ranks drawn at random then test the assumption. It remains an assumption for every
rank that was not run.

A pipeline of 64 ranks, for example, has three classes: the first rank, the last rank, and all
others. Ranks 0, 32 and 63 are run, then ranks between them until the borders of the classes are
known, then 8 ranks drawn at random.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from commlens.check.prediction import (
    Dimension,
    dimension_of,
    does_as,
    fixed_peers,
    names_in,
    predict,
)
from commlens.check.sequence import Issue, RankSequence, Setup
from commlens.model.grouping import grouped

_CORNERS = 27
_RUNS = 192  # ranks to run at most
_DRAWN = 8  # at random
_ROUNDS = 4  # of drawing, while some of those do something else

Run = Callable[[Iterable[int]], Mapping[int, RankSequence]]
"""Runs ranks, or returns their sequences if they were run before."""


class Classes(NamedTuple):
    """The ranks of a world, sorted into classes that do the same."""

    sequences: dict[int, RankSequence]
    """The sequences of all ranks; those of ranks that were not run are assumed."""
    ran: list[int]
    classes: list[list[int]]
    """All ranks that do the same, the largest class first."""
    drawn: int
    """Ranks drawn at random that did as was assumed."""
    surprising: list[int]
    """Ranks drawn at random in the last round that did something else."""


def explore_classes(
    run: Run, world_size: int, ranks_per_node: int, also: Iterable[int] = ()
) -> Classes:
    """Find the classes of a world's ranks. The ranks of ``also`` are run in any case."""
    return _Search(run, world_size, ranks_per_node).result(also)


class _Search:
    """The ranks that were run so far, and their classes."""

    def __init__(self, run: Run, world_size: int, ranks_per_node: int) -> None:
        self._run = run
        self._world = Dimension(1, world_size)
        self._node = Dimension(1, ranks_per_node)
        self._size = world_size
        # Of the ranks that were run: their sequences, the number of each one's class, and by this
        # number the sequences of a class.
        self._ran: dict[int, RankSequence] = {}
        self._class_of: dict[int, int] = {}
        self._members: list[list[RankSequence]] = []
        self._dimensions: list[Dimension] = [self._world]
        self._meshes: list[Dimension] = []
        self._names: dict[tuple[int, tuple[int, ...]], list[str]] = {}  # of groups
        self._random = random.Random(world_size)
        # _run_and_classify clears these when it has run other ranks
        self._kind = cache(self._find_kind)
        self._nearest_class = cache(self._find_nearest_class)
        self._fixed_peers = cache(self._find_fixed_peers)

    def result(self, also: Iterable[int]) -> Classes:
        """Run ranks until the classes are known, or as many as allowed."""
        self._run_and_classify({0, self._size - 1, *also})
        # the roots of collectives of the whole world do something else than the other ranks
        self._run_and_classify(
            {
                op.args.root
                for sequence in self._ran.values()
                for op in sequence.ops
                if op.args.root is not None and len(op.channel.group.ranks) == self._size
            }
        )
        self._run_and_classify(self._corners_and_middles())
        drawn, surprising = 0, list[int]()
        for _ in range(_ROUNDS):
            self._find_borders()
            others = [rank for rank in range(self._size) if rank not in self._ran]
            sample = self._random.sample(others, min(_DRAWN, len(others)))
            taken = {rank: self._most_similar_rank(rank) for rank in sample}
            self._run_and_classify(sample)
            surprising = [
                rank for rank, like in taken.items() if self._class_of[rank] != self._class_of[like]
            ]
            drawn += len(sample) - len(surprising)
            if not surprising or len(self._ran) >= _RUNS:
                break
        return self._with_predictions(drawn, sorted(surprising))

    # --- what to run

    def _corners_and_middles(self) -> set[int]:
        """Return the first, middle and last positions of each dimension, and of the dimensions of
        the program's groups together.
        """
        corners = itertools.product(
            *(
                [place * each.stride for place in _ends_and_middle(each.size)]
                for each in self._meshes
            )
        )
        chosen = {sum(places) for places in itertools.islice(corners, _CORNERS)}
        for each in self._dimensions:
            chosen |= {place * each.stride for place in _ends_and_middle(each.size)}
        return {rank for rank in chosen if rank < self._size}

    def _find_borders(self) -> None:
        """Run ranks between two ranks of different classes along each dimension until their border
        is known, and one rank for each combination of positions.
        """
        while len(self._ran) < _RUNS:
            wanted = set(self._ranks_between_classes()) or set(self._ranks_of_new_kinds())
            if not wanted:
                return
            self._run_and_classify(sorted(wanted)[: _RUNS - len(self._ran)])

    def _ranks_between_classes(self) -> Iterator[int]:
        """Yield a rank between two neighbours of different classes along each dimension.

        Along nodes and along the world, two ranks are neighbours if they have the same places in
        the inner meshes. Otherwise the ranks of one tensor-parallel group, which differ, would make
        every rank differ from the next one.
        """
        for each in self._dimensions:
            inner = () if each in self._meshes else self._meshes[:-1]
            alike = grouped(
                (tuple(self._nearest_class(mesh, mesh.position(rank)) for mesh in inner), rank)
                for rank in range(0, each.stride * each.size, each.stride)
            )
            for ranks in alike.values():
                ran = [index for index, rank in enumerate(ranks) if rank in self._ran]
                for one, other in itertools.pairwise(ran):
                    classes = {self._class_of[ranks[index]] for index in (one, other)}
                    if len(classes) > 1 and other - one > 1:
                        yield self._middle(ranks[one : other + 1])

    def _middle(self, ranks: list[int]) -> int:
        """Return the rank between the first and the last to run next: the middle one of those that
        begin or end a place of the outermost mesh, as a pipeline's stage does; without such ranks,
        the middle one of all.
        """
        stride = self._meshes[-1].stride if self._meshes else 1
        edges = [
            rank
            for before, rank, after in zip(ranks, ranks[1:], ranks[2:], strict=False)
            if len({before // stride, rank // stride, after // stride}) > 1
        ]
        return edges[len(edges) // 2] if edges else ranks[len(ranks) // 2]

    def _ranks_of_new_kinds(self) -> Iterator[int]:
        """Yield one rank for each combination of positions of which no rank was run."""
        known = {self._kind(rank) for rank in self._ran}
        for rank in range(self._size):
            kind = self._kind(rank)
            if kind not in known:
                known.add(kind)
                yield rank

    def _run_and_classify(self, ranks: Iterable[int]) -> None:
        """Run ranks, and find their classes."""
        wanted = sorted({*self._ran, *ranks})
        before = self._ran
        self._ran = dict(self._run(wanted))
        for known in (self._kind, self._nearest_class, self._fixed_peers):
            known.cache_clear()
        self._names = names_in(self._ran.values())
        self._note_dimensions()
        if any(self._ran[rank] is not sequence for rank, sequence in before.items()):
            self._class_of, self._members = {}, []  # some were run again
        for rank, sequence in self._ran.items():
            if rank not in self._class_of:
                self._class_of[rank] = self._find_class(sequence)

    def _find_class(self, sequence: RankSequence) -> int:
        """Return the number of the class of a rank that was run; a new one, if it does what no
        other rank does.
        """
        for number, members in enumerate(self._members):
            if does_as(members[0], sequence, self._names):
                members.append(sequence)
                return number
        self._members.append([sequence])
        return len(self._members) - 1

    def _note_dimensions(self) -> None:
        """Note the dimensions along which ranks may differ: those of the groups that they use,
        nodes, and the world.
        """
        found = {
            dimension
            for sequence in self._ran.values()
            for event in sequence.events
            if isinstance(event, (Issue, Setup))
            and (dimension := _dimension(event)) is not None
            and dimension.stride * dimension.size <= self._size
        }
        self._meshes = sorted(found - {self._world})
        nodes = [self._node, Dimension(self._node.size, self._size // self._node.size)]
        self._dimensions = list(
            dict.fromkeys(each for each in (*self._meshes, *nodes, self._world) if each.size > 1)
        )

    # --- what the ranks do that were not run

    def _find_kind(self, rank: int) -> tuple[int, ...]:
        """Return the classes of the positions of a rank along all dimensions but the world: ranks
        of one kind are assumed to do the same.
        """
        return tuple(
            self._nearest_class(each, each.position(rank))
            for each in self._dimensions
            if each != self._world
        )

    def _find_nearest_class(self, dimension: Dimension, place: int) -> int:
        """Return the class of the nearest rank that was run on the axis of a dimension."""
        nearest = min(
            (each for each in range(dimension.size) if each * dimension.stride in self._ran),
            key=lambda each: abs(each - place),
        )
        return self._class_of[nearest * dimension.stride]

    def _find_fixed_peers(self, number: int) -> frozenset[int]:
        """Return the messages whose peer is at a fixed place, for all ranks of a class."""
        first, *others = self._members[number]
        return fixed_peers(first, others)

    def _most_similar_rank(self, rank: int) -> int:
        """Return the rank that was run and is most similar to a rank."""
        kind = self._kind(rank)

        def unlikeness(other: int) -> tuple[int, int]:
            differing = sum(a != b for a, b in zip(kind, self._kind(other), strict=True))
            return differing, abs(rank - other)

        return min(self._ran, key=unlikeness)

    def _with_predictions(self, drawn: int, surprising: list[int]) -> Classes:
        """Return all ranks, with a prediction for each that was not run."""
        self._run_and_classify(
            [rank for rank in range(self._size) if self._predict(rank) is None][:_RUNS]
        )
        sequences: dict[int, RankSequence] = {}
        classes: list[list[int]] = [[] for _ in self._members]
        for rank in range(self._size):
            like = rank if rank in self._ran else self._most_similar_rank(rank)
            predicted = self._predict(rank)
            if predicted is None:
                predicted = RankSequence(rank, self._size, problem="it was not run")
            sequences[rank] = predicted
            classes[self._class_of[like]].append(rank)
        classes.sort(key=len, reverse=True)
        return Classes(sequences, sorted(self._ran), classes, drawn, surprising)

    def _predict(self, rank: int) -> RankSequence | None:
        """Return a rank's sequence: its own if it was run, else what the most similar rank does,
        moved to it; None if that cannot be moved.
        """
        if rank in self._ran:
            return self._ran[rank]
        like = self._most_similar_rank(rank)
        fixed = self._fixed_peers(self._class_of[like])
        return predict(self._ran[like], rank, self._names, fixed)


def _dimension(event: Issue | Setup) -> Dimension | None:
    call = event.op if isinstance(event, Issue) else event.call
    return dimension_of(call.channel.group.ranks)


def _ends_and_middle(number: int) -> list[int]:
    return sorted({0, number // 2, number - 1})
