"""Discover dump files, classify them, and infer rank and host: the first step of every command that
takes dumps.

A folder with ``rank0.71.box``, ``trace_rank_1`` (a pickle of torch's recorder), ``n1.log`` and
``notes.pdf`` becomes one box in ``own``, the other two of the first three in ``foreign()``, of
which the first is of rank 1 by its name, and a sentence in ``problems``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from commlens.dumps.detect import (
    BLACK_BOX,
    BOX_NAME,
    DUMP_MARKER,
    HEAD_BYTES,
    REPORT,
    TEXT,
    Kind,
    detect_kind,
    is_trace,
)
from commlens.dumps.sources import FileName, Paths, Source, name_paths, open_sources, parse_names
from commlens.dumps.sources.source import Held
from commlens.errors import CommlensError

_NUMBER = re.compile(r"\d+")
_RANKS_PER_LOG = 2  # at most, where each rank has a log of its own: of one node in two, say
_NAMED_MAX = 10  # unknown files per folder that are named in a problem; the rest is counted


@dataclass
class DumpFiles:
    """The dump files at the given paths, by kind."""

    paths: tuple[str, ...]  # to walk again
    # black boxes and observations of their processes
    own: list[tuple[Source, Kind]] = field(default_factory=list)
    reports: list[Source] = field(default_factory=list)  # verdicts and pages beside them
    kinds: Counter[str] = field(default_factory=Counter)  # number of other tools' files by kind
    size: int = 0  # stored bytes of all other tools' files, as far as known
    problems: list[str] = field(default_factory=list)  # sentences about files that cannot be used
    prefix: str = ""  # of file names, as asked for
    # names of files that hold nothing readable, and of files without a byte
    left_out: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    # those of both that are named like another tool's dumps
    unread: list[str] = field(default_factory=list)
    _names: dict[str, FileName] = field(default_factory=dict)
    # None if a source holds its bytes: walk again
    _foreign: list[tuple[Source, Kind]] | None = field(default_factory=list)

    @property
    def holds_dumps(self) -> bool:
        """Whether there are black boxes or another tool's dumps, besides text logs, which a folder
        of traces may have, too.
        """
        return bool(self.own) or bool(self.kinds.keys() - {TEXT.name})

    def foreign(self) -> Iterator[tuple[Source, Kind]]:
        """Yield other tools' files. Release each before taking the next, since some hold their
        bytes.
        """
        if self._foreign is not None:
            return iter(self._foreign)
        again = DumpFiles(self.paths, prefix=self.prefix)  # takes the notes, which are known
        return ((source, kind) for source, kind in _classify(again) if kind.read is not None)

    def file_name(self, source: Source, kind: Kind) -> FileName:
        """Return rank and host from a file's name, inferred together with all other names.

        A dump is of one rank, but a log is often of a whole job: the number in its name is the
        job's, unless it is said to be a rank, or the files are about as many as the number.
        """
        name = self.by_name(source.name)
        is_number_of_job = (
            kind is TEXT and not name.sure and name.rank > _RANKS_PER_LOG * self.kinds[TEXT.name]
        )
        return replace(name, rank=-1, note="") if is_number_of_job else name

    def by_name(self, name: str) -> FileName:
        """Return the same by the name of a source."""
        return self._names.get(name, FileName())


def discover(
    paths: Paths,
    *,
    prefix: str = "",
    own_only: bool = False,
) -> DumpFiles:
    """Walk the paths once and classify every file by its beginning.

    ``prefix`` is torchfrtrace's: only files whose name begins with it are kept, and the rank is
    read after it. With ``own_only``, other tools' dumps count as files that are not dumps.

    Raises:
        CommandError: a path does not exist or cannot be read.
        MissingDependency: a URL needs a package that is not installed.
    """
    found = DumpFiles(name_paths(paths), prefix=prefix)
    names: list[str] = []
    logs: set[str] = set()
    for source, kind in _classify(found, own_only=own_only):
        if kind is REPORT:
            found.reports.append(source)
            continue
        if kind.read is None:
            found.own.append((source, kind))
            continue
        names.append(source.name)
        if kind is TEXT:  # its lines tell the rank, so that the numbers in its name do not matter
            logs.add(source.name)
        if isinstance(source.place, Held):
            found._foreign = None
        elif found._foreign is not None:
            found._foreign.append((source, kind))
        found.kinds[kind.name] += 1
        found.size += max(source.size, 0)
    forms = {_form(name) for name in names}
    found.unread = [name for name in (*found.left_out, *found.empty) if _form(name) in forms]
    names += found.unread
    found._names = dict(zip(names, parse_names(names, prefix), strict=True))
    found.problems += dict.fromkeys(
        about.note for name, about in found._names.items() if about.note and name not in logs
    )
    return found


def _form(name: str) -> str:
    """Return a file's name without its numbers, in which the names of a job's dumps differ."""
    return _NUMBER.sub("#", name)


def _classify(files: DumpFiles, *, own_only: bool = False) -> Iterator[tuple[Source, Kind]]:
    """Yield every file at the paths that is a dump, with its kind. Note the other ones in
    ``files``.
    """
    problems, left_out = files.problems, files.left_out
    unknown: Counter[str] = Counter()  # files that are no dumps, by folder
    for source in open_sources(files.paths, problems, prefix=files.prefix, empty=files.empty):
        try:
            head = source.head(HEAD_BYTES)
            kind = detect_kind(head)
        except CommlensError as error:
            problems.append(str(error))
            left_out.append(source.name)
            continue
        source.beginning = b""
        folder, _, name = source.name.replace("!", "/").rpartition("/")
        if kind is None and BOX_NAME.fullmatch(name):
            kind = BLACK_BOX  # its process died while creating it
        if kind is DUMP_MARKER:
            continue
        if kind is None or (own_only and kind.read is not None):
            unknown[folder] += 1
            left_out.append(source.name)
            if unknown[folder] <= _NAMED_MAX:
                view = f"a trace, which commlens view {source.name} shows"
                problems.append(
                    f"{source.name} is"
                    f" {view if is_trace(head) else 'not a dump that commlens can read'}, and is"
                    " left out."
                )
            continue
        yield source, kind
    for folder, count in unknown.items():
        if count > _NAMED_MAX:
            problems.append(f"{count - _NAMED_MAX} more files in {folder} are not dumps.")
