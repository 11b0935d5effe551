"""All ranks' operations as columns, one rank after the other, from dumps of any origin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from commlens.errors import CommlensError
from commlens.formats.evidence import evidence_of
from commlens.formats.gathered import Gathered, rank_of
from commlens.model.ranks import ranks_phrase

if TYPE_CHECKING:
    from commlens.formats.rows import Rows

__all__ = ["every_rank", "narrowed"]


def every_rank(
    gathered: Gathered, problems: list[str], *, ranks: Collection[int] | None = None, seen: Callable[[], None] | None = None
) -> Iterator[Rows]:
    """Read everything once. Only one rank's operations are in memory at a time, but for black boxes.

    Args:
        gathered: what there is.
        problems: takes a sentence for whatever could not be taken.
        ranks: only these.
        seen: called for each file, for a progress bar.
    """
    from commlens.formats.log_rows import rows_of_log

    taken: dict[int, str] = {}
    if gathered.ours:
        evidence = evidence_of(gathered.ours, problems)
        for log in evidence.logs:
            taken[log.rank] = log.source
            if (ranks is None or log.rank in ranks) and log.issued:
                yield rows_of_log(log)
    nameless = 0
    for source, kind in gathered.foreign():
        if seen is not None:
            seen()
        assert kind.read is not None
        if ranks is not None and 0 <= gathered.whose(source.name).rank not in ranks:
            continue
        try:
            several = kind.read(source)
        except CommlensError as error:
            problems.append(str(error))
            continue
        for rows in several:
            named = gathered.whose(source.name)
            rows.rank, note = rank_of(rows.rank, rows.possible_ranks, named)
            rows.host = rows.host or named.host
            rows.problems += [*source.problems, *([note] if note else [])]
            if rows.rank < 0:
                nameless += 1
                rows.rank = -nameless
                problems.append(f"Of which rank {source.name} is can be seen neither from its name nor from what is in it.")
                continue
            if rows.rank in taken:
                problems.append(
                    f"{rows.source} is of {ranks_phrase([rows.rank])}, as {taken[rows.rank]} is, and is left out. "
                    f"Dumps of two jobs? Give one job's."
                )
                continue
            taken[rows.rank] = rows.source
            problems += [f"{rows.source}: {text}" for text in rows.problems]
            if ranks is None or rows.rank in ranks:
                yield rows


def narrowed(rows: Rows, groups: Collection[str]) -> Rows:
    """Only the operations of some process groups, called by name, description or mesh dimension."""
    import numpy as np

    from commlens.formats.rows import DTYPES

    wanted = [bool({one.group.name, one.group.description, one.group.label} & set(groups)) for one in rows.channels]
    mask = np.array([*wanted, False])[rows.channel]
    chosen = replace(rows, **{one.name: getattr(rows, one.name) for one in fields(rows)})
    chosen.set_columns({name: getattr(rows, name)[mask] for name in DTYPES})
    return chosen
