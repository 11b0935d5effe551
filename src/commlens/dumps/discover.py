"""What lies where the user said, by kind, and whose it is: the common beginning of everything that takes dumps."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from commlens.dumps.detect import BLACK_BOX, DUMP_MARKER, HEAD_BYTES, Kind, reader_for
from commlens.dumps.read import BOX_NAME
from commlens.dumps.sources import Named, Paths, Source, name_paths, open_sources, settle
from commlens.dumps.sources.source import Held
from commlens.errors import CommlensError

__all__ = ["Gathered", "by_kind", "gather", "rank_of"]

_NAMED_MAX = 10  # files of other programs that are named, of each folder


def by_kind(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | Paths, problems: list[str], *, prefix: str = ""
) -> Iterator[tuple[Source, Kind]]:
    """Every file that may tell something of a job, with its kind. What others left there is said in ``problems``.

    Raises:
        CommandError: a path does not exist or cannot be read.
        MissingDependency: a URL needs a package that is not installed.
    """
    strange: Counter[str] = Counter()
    for source in open_sources(paths, problems, prefix=prefix):
        try:
            kind = reader_for(source.head(HEAD_BYTES), source.name)
        except CommlensError as error:
            problems.append(str(error))
            continue
        source.beginning = b""
        base = source.name.replace("!", "/").rsplit("/", 1)
        if kind is None and BOX_NAME.fullmatch(base[-1]):
            kind = BLACK_BOX  # its process died while it made it
        if kind is DUMP_MARKER:
            continue
        if kind is None:
            strange[base[0]] += 1
            if strange[base[0]] <= _NAMED_MAX:
                problems.append(f"{source.name} is no dump of a kind that is known here, and is left out.")
            continue
        yield source, kind
    for folder, count in strange.items():
        if count > _NAMED_MAX:
            problems.append(f"{count - _NAMED_MAX} more files in {folder} are no dumps.")


@dataclass
class Gathered:
    """What there is.

    Attributes:
        paths: as named, for going through them again.
        ours: black boxes and what was observed of their processes, for :func:`commlens.dumps.read.evidence_of`.
        kinds: how many foreign files there are of each kind.
        size: bytes of all foreign files, as stored and as far as known.
        problems: what could not be taken, in sentences.
    """

    paths: Paths
    ours: list[Source] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    size: int = 0
    problems: list[str] = field(default_factory=list)
    prefix: str = ""
    _whose: dict[str, Named] = field(default_factory=dict)
    _light: list[tuple[Source, Kind]] | None = field(default_factory=list)  # the foreign files, unless one holds its bytes

    def foreign(self) -> Iterator[tuple[Source, Kind]]:
        """The other files, one after the other: let go of each, since some hold their bytes."""
        if self._light is not None:
            return iter(self._light)
        return ((source, kind) for source, kind in by_kind(self.paths, [], prefix=self.prefix) if kind.read is not None)

    def whose(self, source: str) -> Named:
        """Rank and host as the file's name tells them, read together with all the others."""
        return self._whose.get(source, Named())


def gather(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | Paths, *, prefix: str = "", seen: Callable[[], None] | None = None
) -> Gathered:
    """Look at everything once, without reading it.

    Args:
        paths: files, folders, archives, URLs, ``-``.
        prefix: as of torchfrtrace: take only files whose name begins so, and read the rank after it.
        seen: called for each file, for a progress bar.

    Raises:
        CommandError: a path does not exist or cannot be read.
        MissingDependency: a URL needs a package that is not installed.
    """
    found = Gathered(paths if isinstance(paths, Paths) else name_paths(paths), prefix=prefix)
    names: list[str] = []
    for source, kind in by_kind(found.paths, found.problems, prefix=prefix):
        if kind.read is None:
            found.ours.append(source)
        else:
            names.append(source.name)
            if isinstance(source.place, Held):
                found._light = None
            elif found._light is not None:
                found._light.append((source, kind))
            found.kinds[kind.name] += 1
            found.size += max(source.size, 0)
        if seen is not None:
            seen()
    found._whose = dict(zip(names, settle(names, prefix), strict=True))
    found.problems += dict.fromkeys(one.note for one in found._whose.values() if one.note)
    return found


def rank_of(stated: int, possible: Sequence[int], named: Named) -> tuple[int, str]:
    """The rank of a dump, from what is in it and what it is called, and a sentence where the two do not agree.

    Args:
        stated: what the content says; -1 for nothing.
        possible: ranks that it can be of, by the groups in it; empty when not known.
        named: what the name says.
    """
    if stated >= 0:
        other = named.sure and 0 <= named.rank != stated
        return stated, f"its name says rank {named.rank}, and what is in it rank {stated}" if other else ""
    if named.rank >= 0 and possible and named.rank not in possible and len(possible) > 1:
        note = f"its name says rank {named.rank}, which is in none of the process groups that it names"
        return named.rank, note
    return named.rank, ""
