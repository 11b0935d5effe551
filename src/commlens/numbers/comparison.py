"""Compare the ranks' reports on their tensors, check by check: a pure function of the reports so
far.

A *part* is what one set of ranks reported of the tensors with one relation (``Relation`` in
:mod:`commlens.model.numbers`), such as all parameters that must be equal on ranks 0 and 1.

If ranks 0, 1 and 2 must have ``fc.weight`` alike, and after step 7 rank 1 reports another hash, the
check finds one :class:`Diverged`: culprit 1, step 7, tensor ``("parameter", "fc.weight")`` with the
sides ``[0, 2]`` and ``[1]``, and ``equal_at`` the step of the last check in which they agreed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from commlens.model.cause import (
    Compared,
    Diverged,
    DivergedDoubt,
    DivergedTensor,
    OpSide,
    OwnTensors,
    TensorKind,
    TensorSide,
    Why,
)
from commlens.model.numbers import CheckId, Key, Measure, NumbersReport, Relation
from commlens.numbers.departures import (
    CONFIDENCE,
    TRAINED,
    all_ranks,
    blame,
    doubt_about,
    find_departure,
    find_lone_word,
    other_kinds,
    roots_of,
    side_of,
    tensor_of,
)
from commlens.numbers.differences import (
    SHOWN,
    SMALL,
    Difference,
    RelatedTables,
    are_close,
    count_tensors,
    differences_of,
    digest_of,
    equal_sides,
    find_differences,
    find_other_order,
    find_own_tensors,
    is_telling,
    must_be_equal,
)
from commlens.numbers.divergence import Divergence, SharedTensor, find_divergence, first_other_op
from commlens.numbers.weights import MASK, signed

OPTIMIZER: Final = "optimizer"
"""Begins the source of a check that follows an optimizer's step."""

NAN: Final = "nan"
"""The source of the check that follows a NaN."""

EVERY_OP: Final = "every-op"
"""The source of a check of all ops of a step."""

BATCH: Final = "batch"
"""The source of a check of the inputs of a model."""

_TRAINING: Final = "parameter"
"""Labels the differences of all that an optimizer's step depends on."""

_HISTORY: Final = 20  # checks
_AGREED_CHANGES: Final = 2  # after which tensors that agree count as replicas
_NEVER: Final = -(1 << 30)  # in place of a number of changes: the tensor differed, and never counts
_WHY: Final[Mapping[TensorKind, Why]] = {
    "collective-output": "collective-output",
    "hyperparameter": "optimizer-state",
    "gradient": "gradient",
    "optimizer-state": "optimizer-state",
    "parameter": "parameter",
    "buffer": "buffer",
    "op-output": "op-output",
    "module": "parameter",
    "rng": "rng",
    "value": "value",
    "batch": "same-batch",
}


class Learned(NamedTuple):
    """A tensor that is not declared a replica, at its last check."""

    digest: int
    changes: int  # after which it agreed again
    step: int


@dataclass
class _Agreement:
    """The last check in which a set of ranks had its tensors alike."""

    step: int
    digests: dict[Key, int]


class _Checked(NamedTuple):
    """The check that is compared now."""

    check: CheckId
    reports: Mapping[int, NumbersReport]
    parts: Sequence[RelatedTables]
    equal: Sequence[RelatedTables]
    """The parts whose tensors must be equal."""


class TensorComparison:
    """The state of the comparison: the differences found so far, and the tensors that have
    agreed.
    """

    def __init__(self) -> None:
        # by the subject of the checks and the set of ranks
        self._agreed: dict[tuple[str, tuple[int, ...]], _Agreement] = {}
        self._learned: dict[tuple[str, tuple[int, ...], Key], Learned] = {}
        # by the set of ranks that must have different batches: the hash of each rank's last batch
        self._batches: dict[tuple[int, ...], dict[int, int]] = {}
        # by the subject of the checks: the last one without NaN, and the newest ones
        self._without_nan: dict[str, int] = {}
        self._history: dict[str, deque[Compared]] = {}
        # the differences that were found: a label for their kind, and the ranks
        self._found: set[tuple[str, tuple[int, ...]]] = set()
        self.other_ops: tuple[int, list[OpSide]] | None = None
        """The first step in which ranks ran different ops, although their values did not differ,
        and these ops.
        """

    def compare(
        self, check: CheckId, reports: Mapping[int, NumbersReport], parts: Sequence[RelatedTables]
    ) -> list[Diverged]:
        """Return the tensors that differ between ranks in this check, and were alike before. A
        difference is returned once.

        Args:
            check: the check.
            reports: of the ranks.
            parts: the tables in these reports, one part for each set of ranks and relation.
        """
        if check.source == EVERY_OP:
            return self._divergence(check, reports, parts)
        equal = [part for part in parts if must_be_equal(part, check)]
        is_of_nan = check.source == NAN
        found = [
            *(_first_nan(check, reports) if is_of_nan else self._not_finite(check, reports)),
            *self._unequal(_Checked(check, reports, parts, equal)),
            *self._same(check, [part for part in parts if part.relation == "different"]),
        ]
        for part in equal:
            if part.agrees:
                table = next(iter(part.tables.values()))
                digests = {each.key: each.digest for each in table.measures}
                self._agreed[check.subject, part.ranks] = _Agreement(check.number, digests)
        return found

    # --- tensors that must be equal

    def _unequal(self, now: _Checked) -> list[Diverged]:
        """Return the causes why tensors differ that must be equal."""
        check = now.check
        not_declared = [
            part
            for part in now.parts
            if part.relation in ("presumed", "learned") and not must_be_equal(part, check)
        ]
        differences = [
            *find_differences(now.equal, check.tolerance),
            *self._new_differences(check, not_declared),
        ]
        history = self._history.setdefault(check.subject, deque(maxlen=_HISTORY))
        counted = [each for each in differences if each.key[0] != "rng" or each.learned]
        history.append(Compared(check.number, len(counted)))
        return self._causes_of(now, differences)

    def _causes_of(self, now: _Checked, differences: Sequence[Difference]) -> list[Diverged]:
        """Return the causes that were not found before: first of what an optimizer's step depends
        on, then of each other kind.
        """
        trained, buffers, values, rng = (
            [each for each in differences if each.key[0] in kinds]
            for kinds in (TRAINED, ["buffer"], ["value"], ["rng"])
        )
        own = find_own_tensors(now.check, now.reports, now.equal)
        order = find_other_order(now.equal)
        ranks = sorted(now.reports) if own else all_ranks([*trained, *([order] if order else [])])
        label = _TRAINING
        if order is not None and order.key[0] == "module":
            self._note(_TRAINING, ranks, now.check)  # what differs besides is a consequence
            label = "module"
        found = [
            *self._new_cause(now, label, ranks, trained, rng, order, own),
            *self._new_cause(now, "buffer", all_ranks(buffers), buffers, rng),
            *self._new_cause(now, now.check.source, all_ranks(values), values, rng),
        ]
        if not found:
            random = [each for each in rng if each.learned]
            found = self._new_cause(now, "rng", all_ranks(random), random, rng)
        return found

    def _note(self, label: str, ranks: Sequence[int], check: CheckId) -> bool:
        """Note a difference, and return whether it is to be reported: none with this label was
        found on any of these ranks before, or the ranks wait for the answer of this check.
        """
        is_known = any(
            each == label and not set(ranks).isdisjoint(before) for each, before in self._found
        )
        self._found.add((label, tuple(ranks)))
        return not is_known or bool(check.wait_s)

    def _new_cause(
        self,
        now: _Checked,
        label: str,
        ranks: Sequence[int],
        differences: Sequence[Difference],
        rng: Sequence[Difference],
        order: Difference | None = None,
        own: Sequence[OwnTensors] = (),
    ) -> list[Diverged]:
        """Return the cause of some differences; none if it is not to be reported.

        Args:
            now: the check in which they were found.
            label: the name of this kind of difference, which is reported once for the same ranks.
            ranks: that have any of them; empty if there are no differences.
            differences: the tensors that differ.
            rng: differences of random number generators, which may explain them.
            order: the first parameter or module that ranks have at another place.
            own: tensors that only some ranks have.
        """
        check = now.check
        if not ranks or not self._note(label, ranks, check):
            return []
        roots = [order] if order is not None else roots_of(differences)
        ranks = all_ranks(roots) if roots else list(ranks)
        steps = [each.step for each in self._agreements(check, ranks) if each.step < check.number]
        equal_at = max(steps, default=None)
        lone = find_lone_word(roots)
        stale = self._stale(check, roots)
        departure = find_departure(roots, own, order, lone, stale, rng, equal_at)
        culprits, blamed_by = blame(roots, own, ranks, stale)
        learned = any(each.learned for each in roots)
        doubt = doubt_about(blamed_by, learned)
        kind = roots[0].key[0] if roots else "parameter"
        equal_kinds, unequal_kinds = other_kinds(roots, differences, now.equal)
        cause = Diverged(
            kind="diverged",
            why=_WHY[kind] if departure != "other-random-numbers" else "rng",
            root_cause=True,
            culprits=culprits,
            blamed_by=blamed_by,
            victims=sorted(set(ranks) - set(culprits)),
            certain=not learned,
            confidence=CONFIDENCE[doubt],
            doubt=doubt,
            ranks=ranks,
            source=check.source,
            step=check.number,
            equal_at=equal_at,
            departure=departure,
            tensors=[tensor_of(each, lone) for each in roots[:SHOWN]],
            differing=len(roots),
            compared=count_tensors(now.parts),
            equal_kinds=equal_kinds,
            unequal_kinds=unequal_kinds,
            only_on=list(own),
            history=list(self._history[check.subject]),
        )
        return [cause]

    def _agreements(self, check: CheckId, ranks: Collection[int]) -> list[_Agreement]:
        """Return when sets of ranks agreed last that have any of these ranks."""
        return [
            agreement
            for (subject, together), agreement in self._agreed.items()
            if subject == check.subject and not set(together).isdisjoint(ranks)
        ]

    def _stale(self, check: CheckId, roots: Sequence[Difference]) -> list[int]:
        """Return the ranks that did not take the last step: each differing tensor has exactly two
        values, the one on which all ranks agreed last, which these fewer ranks still have, and a
        new one. Empty if any tensor tells otherwise.
        """
        stale: set[int] = set()
        for root in roots:
            before = {each.digests.get(root.key) for each in self._agreements(check, root.ranks)}
            old: list[dict[int, Measure]] = []
            changed: list[dict[int, Measure]] = []
            for side, measure in zip(root.sides, root.measures, strict=True):
                (old if measure.digest in before else changed).append(side)
            if len(old) != 1 or len(changed) != 1:
                return []
            # With as many ranks on both sides: an optimizer's step changes parameters and states.
            is_odd = len(old[0]) < len(changed[0]) or (
                len(old[0]) == len(changed[0])
                and check.source.startswith(OPTIMIZER)
                and root.key[0] in ("parameter", "optimizer-state")
            )
            if not is_odd:
                return []
            stale |= set(old[0])
        return sorted(stale)

    # --- tensors that count as replicas because they have been

    def _new_differences(self, check: CheckId, parts: Sequence[RelatedTables]) -> list[Difference]:
        """Return tensors that have agreed while they changed, and now differ."""
        found = []
        for part in parts:
            if len(part.tables) < len(part.ranks):
                continue
            for key, measures in part.by_key().items():
                if len(measures) == len(part.ranks):
                    found += self._compare_not_declared(check, part, key, measures)
        return found

    def _compare_not_declared(
        self, check: CheckId, part: RelatedTables, key: Key, measures: Mapping[int, Measure]
    ) -> list[Difference]:
        """Return the difference of a tensor that counts as a replica because it has agreed so far,
        and remember whether it agrees now.
        """
        at = check.subject, part.ranks, key
        first, *others = measures.values()
        before = self._learned.get(at)
        if all(each.digest == first.digest for each in others):
            has_changed = before is not None and before.digest != first.digest
            changes = (before.changes if before is not None else 0) + has_changed
            self._learned[at] = Learned(first.digest, changes, check.number)
            return []
        self._learned[at] = Learned(0, _NEVER, check.number)
        if not _counts_as_replica(part.relation, before, first, others):
            return []
        if before is not None:
            agreement = self._agreed.setdefault(
                (check.subject, part.ranks), _Agreement(before.step, {})
            )
            agreement.step = before.step
            agreement.digests[key] = before.digest
        return differences_of(key, [measures], check.tolerance, learned=True)

    # --- values that must differ

    def _same(self, check: CheckId, parts: Sequence[RelatedTables]) -> list[Diverged]:
        """Return the causes why ranks have the same values that must have different ones."""
        found = []
        for part in parts:
            sides = equal_sides(part)
            is_batch = check.source == BATCH
            if is_batch:
                sides = self._same_batch_again(part, sides)
            if not sides:
                continue
            ranks = sorted(rank for side in sides for rank in side)
            if not self._note("batch" if is_batch else check.source, ranks, check):
                continue
            key: Key = next(iter(part.by_key()))
            found.append(
                Diverged(
                    kind="diverged",
                    why=_WHY[key[0]],
                    root_cause=True,
                    blamed_by="undecided",
                    victims=ranks,
                    confidence=CONFIDENCE["which-is-right"],
                    doubt="which-is-right",
                    ranks=sorted(part.tables),
                    source=check.source,
                    step=check.number,
                    departure="same-data",
                    tensors=[DivergedTensor(*key, [side_of(side) for side in sides])],
                    differing=1,
                    compared=1,
                )
            )
        return found

    def _same_batch_again(
        self, part: RelatedTables, sides: Sequence[dict[int, Measure]]
    ) -> list[dict[int, Measure]]:
        """Return the sides whose ranks shared a batch at the last check, and share a new one now. A
        program whose batch is always the same is a benchmark.
        """
        last = self._batches.get(part.ranks, {})  # a rank without a batch then shared none
        self._batches[part.ranks] = {rank: digest_of(part, rank) for rank in part.tables}
        return [
            side
            for side in sides
            if len({last.get(rank, rank) for rank in side}) == 1
            and all(last.get(rank) != digest_of(part, rank) for rank in side)
        ]

    # --- ops

    def _divergence(
        self, check: CheckId, reports: Mapping[int, NumbersReport], parts: Sequence[RelatedTables]
    ) -> list[Diverged]:
        """Return the first op after which values differ that were alike when the step began."""
        logs = {rank: each.ops for rank, each in reports.items() if each.ops is not None}
        found = find_divergence(logs, list(_shared(parts))) if len(logs) > 1 else None
        if found is None:
            if self.other_ops is None and (ran := first_other_op(logs)):
                self.other_ops = check.number, ran
            return []
        ranks = sorted(rank for side in found.sides for rank in side)
        if not self._note(EVERY_OP, ranks, check):
            return []
        for label in (_TRAINING, "buffer"):
            self._note(label, ranks, check)  # what differs from now on is a consequence
        return [
            _cause_of_divergence(check, found, ranks, sum(len(log.runs) for log in logs.values()))
        ]

    # --- NaN

    def _not_finite(self, check: CheckId, reports: Mapping[int, NumbersReport]) -> list[Diverged]:
        """Return the first parameters or optimizer states that are NaN."""
        having = {rank: report.nans for rank, report in reports.items() if report.nans}
        before = self._without_nan.get(check.subject)
        if not having:
            self._without_nan[check.subject] = check.number
            return []
        if not self._note("nan", sorted(reports), check):
            return []
        first = next(iter(having.values()))[0]
        key = first.key
        with_it = {
            rank: measure for rank, nans in having.items() for measure in nans if measure.key == key
        }
        everywhere = len(having) == len(reports)
        culprits = [] if everywhere else sorted(having)
        doubt: DivergedDoubt = "on-all" if everywhere else "first-unseen"
        self._note(_TRAINING, sorted(reports), check)  # what differs now is a consequence
        return [
            Diverged(
                kind="diverged",
                why="nan",
                root_cause=True,
                culprits=culprits,
                blamed_by="nobody" if everywhere else "majority",
                victims=sorted(set(reports) - set(culprits)),
                certain=True,
                confidence=CONFIDENCE[doubt],
                doubt=doubt,
                ranks=sorted(reports),
                source=check.source,
                step=check.number,
                equal_at=before,
                departure="not-finite",
                tensors=[DivergedTensor(*key, [side_of(with_it)])],
                differing=max(len(nans) for nans in having.values()),
                compared=0,
            )
        ]


def _counts_as_replica(
    relation: Relation, before: Learned | None, first: Measure, others: Iterable[Measure]
) -> bool:
    """Return whether a tensor that differs now should be equal: it agreed in all checks before and,
    if it is not presumed to be a replica, changed meanwhile. In the first check, a presumed replica
    should be equal if it nearly is.
    """
    is_presumed = relation == "presumed"
    if not is_telling(first) and not (is_presumed and first.kind == "hyperparameter"):
        return False
    if before is None:
        return is_presumed and all(are_close(first, each, SMALL) for each in others)
    return before.changes >= (0 if is_presumed else _AGREED_CHANGES)


def _cause_of_divergence(check: CheckId, found: Divergence, ranks: list[int], ops: int) -> Diverged:
    """Return as a cause the first op after which the ranks' values differ; ``ops``: that were
    compared.
    """
    has_majority = 2 * len(found.sides[0]) > len(ranks)
    culprits = sorted(rank for side in found.sides[1:] for rank in side) if has_majority else []
    doubt: DivergedDoubt | None = None if culprits else "no-majority"
    kind, name = found.key
    sides = [
        TensorSide(side, f"{value & MASK:016x}" if value is not None else "")
        for side, value in zip(found.sides, found.hashes, strict=True)
    ]
    return Diverged(
        kind="diverged",
        why=_WHY[kind],
        root_cause=True,
        culprits=culprits,
        blamed_by="majority" if culprits else "undecided",
        victims=sorted(set(ranks) - set(culprits)),
        certain=True,
        confidence=CONFIDENCE[doubt],
        doubt=doubt,
        ranks=ranks,
        source=check.source,
        step=check.number,
        departure=found.departure,
        tensors=[DivergedTensor(kind, name, sides)],
        differing=1,
        compared=ops,
        ops=found.ops,
        origins=found.origins,
    )


def _shared(parts: Sequence[RelatedTables]) -> Iterator[SharedTensor]:
    """Yield the tensors that agreed on all of their ranks."""
    for part in parts:
        if part.relation not in ("equal", "presumed") or len(part.tables) < len(part.ranks):
            continue
        for key, measures in part.by_key().items():
            digests = {each.digest for each in measures.values()}
            if len(measures) == len(part.ranks) and len(digests) == 1:
                yield SharedTensor(key, part.ranks, signed(digests.pop()))


def _first_nan(check: CheckId, reports: Mapping[int, NumbersReport]) -> list[Diverged]:
    """Return the place where NaN came up first. Ranks can be compared because all issue the same
    collectives in each step.
    """
    events = {
        rank: event
        for rank, report in sorted(reports.items())
        if (event := report.first_nan) is not None
    }
    if not events:
        return []
    first = min((event.step, event.number) for event in events.values())
    culprits = [rank for rank, event in events.items() if (event.step, event.number) == first]
    event = events[culprits[0]]
    everywhere = len(culprits) == len(events)
    doubt: DivergedDoubt | None = "on-all" if everywhere else None
    return [
        Diverged(
            kind="diverged",
            why="nan",
            root_cause=True,
            culprits=[] if everywhere else culprits,
            blamed_by="nobody" if everywhere else "earliness",
            victims=sorted(events) if everywhere else sorted(set(events) - set(culprits)),
            certain=True,
            confidence=CONFIDENCE[doubt],
            doubt=doubt,
            ranks=sorted(events),
            source=check.source,
            step=event.step,
            departure="not-finite",
            tensors=[],
            differing=0,
            compared=0,
            module=event.module or None,
            op=event.op or None,
        )
    ]
