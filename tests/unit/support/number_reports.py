"""Reports of simulated ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from commlens.model.cause import Diverged, TensorKind
from commlens.model.numbers import CheckId, Measure, NumbersReport, Relation, TableRef, TensorTable
from commlens.numbers.comparison import TensorComparison
from commlens.numbers.differences import parts_of

Values = Mapping[str, float]
"""A number for each tensor, ``"parameter a"``, which stands for its bytes."""


def measure(key: str, value: float, *, items: int = 100) -> Measure:
    kind, _, name = key.partition(" ")
    content = repr((name, value)).encode()
    digest = int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
    nans = int(value != value)
    norm = value if kind != "batch" else 1.0
    parameter = name.partition(" of ")[2] if kind == "optimizer-state" else ""
    mean = value if kind == "hyperparameter" else 0.0
    about = (kind, name, digest, items, "float32", norm, mean, nans)
    return Measure(*about, parameter=parameter)  # type: ignore[arg-type]


@dataclass
class Job:
    """Ranks whose tensors are compared."""

    size: int = 4
    relation: Relation = "equal"
    comparison: TensorComparison = field(default_factory=TensorComparison)

    def check(
        self,
        step: int,
        values: Values,
        odd: Mapping[int, Values] | None = None,
        *,
        source: str = "optimizer 1",
        groups: Sequence[tuple[int, ...]] | None = None,
        order: Mapping[int, Sequence[str]] | None = None,
        without: Mapping[int, Sequence[str]] | None = None,
        ranks: Sequence[int] | None = None,
        wait_s: float = 0.0,
        tolerance: float = 0.0,
    ) -> list[Diverged]:
        """Compare ``values``, which all ranks have but for what the odd ones have instead."""
        check = CheckId(source, step, tolerance, wait_s)
        tables: dict[str, TensorTable] = {}
        reports = {}
        for rank in ranks if ranks is not None else range(self.size):
            own = {**values, **(odd or {}).get(rank, {})}
            names = [
                name
                for name in (order or {}).get(rank, own)
                if name not in (without or {}).get(rank, ())
            ]
            measures = tuple(measure(name, own[name]) for name in names)
            refs = []
            for group in groups or [tuple(range(self.size))]:
                if rank in group:
                    table = TensorTable(group, self.relation, measures)
                    digest = str(hash((group, measures)))
                    tables[digest] = table
                    refs.append(TableRef(group, self.relation, digest))
            nans = tuple(each for each in measures if each.nans and each.kind == "parameter")
            reports[rank] = NumbersReport(rank, check, tuple(refs), nans)
        return self.comparison.compare(check, reports, parts_of(reports, tables.get))


def kinds(*names: TensorKind) -> list[TensorKind]:
    return list(names)
