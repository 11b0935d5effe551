"""The first op after which the ranks' values differ: a pure function of the ops that they ran.

An op that gives different outputs for the same inputs has gone wrong, wherever it runs. Ranks may
compute different values from different data, so other ops are examined only where they write to a
tensor that the ranks had alike when the step began.

For example, ranks 0 and 1 begin with the same weight, and the optimizer's ``add_`` leaves different
weights, because its gradients differ: the departure is "other-inputs". Its inputs are followed back
through the ops that made them, to the first op of the backward pass that had other inputs: these
ops are the ``origins``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from commlens.model.cause import Departure, OpSide
from commlens.model.grouping import grouped
from commlens.model.numbers import Key, OpLog, OpPlace, OpRun


class SharedTensor(NamedTuple):
    """A tensor that ranks had alike when the step began."""

    key: Key
    ranks: tuple[int, ...]
    digest: int


class Divergence(NamedTuple):
    """An op after which ranks have different values; the side with the most ranks comes first."""

    position: int  # the number of ops before it, on the rank that ran it first
    departure: Departure
    key: Key  # the tensor that is written; of other ops, the op
    sides: list[list[int]]
    hashes: list[int | None]  # of each side; None: the op does not run there
    ops: list[OpSide]
    origins: list[OpSide]  # with departure "other-inputs": the ops that made the differing input


class OpsOfRank(NamedTuple):
    """The ops of a rank in one step."""

    rank: int
    log: OpLog

    def run(self, position: int | None) -> OpRun | None:
        """Return the op at a position."""
        return self.log.runs[position] if position is not None else None

    def place(self, run: OpRun) -> OpPlace:
        """Return where an op ran."""
        return self.log.places[run.place]


_Change = tuple[int, int]
"""The position of the op that changed a tensor, and the tensor's new hash."""


def find_divergence(logs: Mapping[int, OpLog], shared: Sequence[SharedTensor]) -> Divergence | None:
    """Return the first op after which values differ."""
    ranks = {rank: OpsOfRank(rank, log) for rank, log in sorted(logs.items())}
    found = [*_other_results(ranks), *_other_changes(ranks, shared)]
    return min(
        found, key=lambda divergence: (divergence.position, bool(divergence.origins)), default=None
    )


def first_other_op(logs: Mapping[int, OpLog]) -> list[OpSide]:
    """Return the first place at which ranks run different ops; empty if there is none."""
    ranks = [OpsOfRank(rank, log) for rank, log in sorted(logs.items())]
    for position in range(max((len(each.log.runs) for each in ranks), default=0)):
        sides: dict[tuple[str, str], list[OpsOfRank]] = {}
        for each in ranks:
            run = each.run(position) if position < len(each.log.runs) else None
            key = (run.op, each.place(run).source) if run is not None else ("", "")
            sides.setdefault(key, []).append(each)
        if len(sides) > 1:
            most_first = sorted(sides.values(), key=lambda side: (-len(side), side[0].rank))
            return [
                _op_side(side, position if position < len(side[0].log.runs) else None)
                for side in most_first
            ]
    return []


# --- the same inputs, other outputs


def _other_results(ranks: Mapping[int, OpsOfRank]) -> list[Divergence]:
    """Return the ops that gave ranks different outputs for the same inputs."""
    # by op, arguments and inputs; by rank; by outputs: the position of the first such op
    results: dict[tuple[object, ...], dict[int, dict[tuple[int, ...], int]]] = {}
    for each in ranks.values():
        for position, run in enumerate(each.log.runs):
            if run.outputs:
                of_rank = results.setdefault((run.op, run.arguments, run.inputs), {})
                of_rank.setdefault(each.rank, {}).setdefault(run.outputs, position)
    found = []
    for by_rank in results.values():
        # An op whose output changes on one rank depends on more than the inputs that are seen here.
        if len(by_rank) < 2 or any(len(outputs) > 1 for outputs in by_rank.values()):
            continue
        outputs = {rank: next(iter(each)) for rank, each in by_rank.items()}
        if len(set(outputs.values())) > 1:
            positions = {rank: next(iter(each.values())) for rank, each in by_rank.items()}
            index = _first_that_differs(list(outputs.values()))
            hashes = {rank: output[index] for rank, output in outputs.items()}
            lowest = min(positions)
            op = ranks[lowest].log.runs[positions[lowest]].op
            found.append(_divergence("other-result", ("op-output", op), ranks, positions, hashes))
    return found


def _first_that_differs(outputs: Sequence[tuple[int, ...]]) -> int:
    return next(
        index for index, each in enumerate(zip(*outputs, strict=True)) if len(set(each)) > 1
    )


# --- other changes of tensors that were alike


def _other_changes(
    ranks: Mapping[int, OpsOfRank], shared: Sequence[SharedTensor]
) -> list[Divergence]:
    """Return for each tensor that ranks had alike the first op after which it differs."""
    changes = {
        rank: _changes(of_rank.log, [each for each in shared if rank in each.ranks])
        for rank, of_rank in ranks.items()
    }
    found = []
    for each in shared:
        of_tensor = {rank: changes[rank].get(each.key, []) for rank in each.ranks if rank in ranks}
        # the first changes of all ranks, then the second ones; None on a rank without another one
        for nth_changes in zip_longest(*of_tensor.values()):
            changed = dict(zip(of_tensor, nth_changes, strict=True))
            hashes = {rank: change[1] if change else None for rank, change in changed.items()}
            if len(set(hashes.values())) > 1:
                positions = {
                    rank: change[0] if change else None for rank, change in changed.items()
                }
                departure = _departure_of(ranks, positions)
                found.append(_divergence(departure, each.key, ranks, positions, hashes))
                break
    return found


def _changes(log: OpLog, shared: Iterable[SharedTensor]) -> dict[Key, list[_Change]]:
    """Return the changes of each tensor in a step. A write of the same bytes is none."""
    last = {each.key: each.digest for each in shared}
    found: dict[Key, list[_Change]] = {}
    for position, run in enumerate(log.runs):
        for kind, name, digest in run.writes:
            key: Key = (kind, name)
            if key in last and last[key] != digest:
                last[key] = digest
                found.setdefault(key, []).append((position, digest))
    return found


def _departure_of(ranks: Mapping[int, OpsOfRank], positions: Mapping[int, int | None]) -> Departure:
    """Return how the ops of ranks differ that leave a tensor different."""
    runs = [ranks[rank].run(position) for rank, position in positions.items()]
    ops = {run.op if run is not None else None for run in runs}
    if "" in ops:  # no op: other code wrote to the tensor
        return "changed-outside"
    if len(ops) > 1:
        return "other-op"
    some = [run for run in runs if run is not None]
    if len({run.arguments for run in some}) > 1:
        return "other-arguments"
    return "other-inputs" if len({run.inputs for run in some}) > 1 else "other-result"


# --- as data for the verdict


def _divergence(
    departure: Departure,
    key: Key,
    ranks: Mapping[int, OpsOfRank],
    positions: Mapping[int, int | None],
    hashes: Mapping[int, int | None],
) -> Divergence:
    by_hash = grouped((hashes[rank], rank) for rank in sorted(positions))
    sides = sorted(by_hash.values(), key=lambda side: (-len(side), side))
    members = [[ranks[rank] for rank in side] for side in sides]
    at = [positions[side[0]] for side in sides]  # the lowest rank stands for its side
    return Divergence(
        min(position for position in positions.values() if position is not None),
        departure,
        key,
        sides,
        [hashes[side[0]] for side in sides],
        [_op_side(side, position) for side, position in zip(members, at, strict=True)],
        _origins(members, at) if departure == "other-inputs" else [],
    )


def _op_side(side: Sequence[OpsOfRank], position: int | None) -> OpSide:
    """Return the op that ranks run, at its position on the first of them."""
    first = side[0]
    run = first.run(position)
    names = [each.rank for each in side]
    if run is None:
        return OpSide(names)
    place = first.place(run)
    return OpSide(
        names,
        run.op,
        module=place.module or None,
        backward=place.backward,
        source=place.source or None,
        after=place.after or None,
        arguments=list(run.arguments),
    )


def _origins(sides: Sequence[Sequence[OpsOfRank]], positions: Sequence[int | None]) -> list[OpSide]:
    """Return the ops that made the first input that differs: follow it back through ops with
    differing inputs, up to an op of the backward pass or to ops of different names.
    """
    firsts = [side[0] for side in sides]
    at = list(positions)
    while made := _made_by(firsts, at):
        at = made
        runs = [first.run(position) for first, position in zip(firsts, at, strict=True)]
        is_done = any(
            run is None or first.place(run).backward
            for first, run in zip(firsts, runs, strict=True)
        )
        if is_done or len({run.op for run in runs if run is not None}) > 1:
            break
    if at == list(positions):
        return []
    return [_op_side(side, position) for side, position in zip(sides, at, strict=True)]


def _made_by(firsts: Sequence[OpsOfRank], positions: Sequence[int | None]) -> list[int | None]:
    """Return the positions of the ops that made the first input that differs; empty if no rank ran
    one, or the ops' inputs are the same or cannot be compared.
    """
    runs = [first.run(position) for first, position in zip(firsts, positions, strict=True)]
    inputs = [run.inputs for run in runs if run is not None]
    if len(inputs) < len(firsts) or len({len(each) for each in inputs}) > 1:
        return []
    if len(set(inputs)) == 1:
        return []
    index = _first_that_differs(inputs)
    found: list[int | None] = []
    for first, position, hashes in zip(firsts, positions, inputs, strict=True):
        earlier = first.log.runs[:position]
        made = [number for number, run in enumerate(earlier) if hashes[index] in run.outputs]
        found.append(made[-1] if made else None)
    return found if any(each is not None for each in found) else []
