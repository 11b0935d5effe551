"""Infer rank and host from the names of files and folders.

Pure functions. :func:`parse_name` reads one name. :func:`parse_names` reads all names of a job
together, which reveals more: if no name says ``rank``, the rank is the number that differs in every
name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from commlens.model.grouping import natural

RANK_MAX: Final = 9_999_999

# of the job, not of a node or a group
_RANK: Final = re.compile(
    r"(?<![a-z])(?<!local[\s_.-])(?<!node[\s_.-])(?<!group[\s_.-])g?rank[\s_.=-]*([0-9]+)"
    r"|(?<![a-z])globalrank[\s_.=-]*([0-9]+)",
    re.IGNORECASE,
)
_LOCAL_RANK: Final = re.compile(
    r"(?<![a-z])(?:local[\s_.-]?rank|lrank|gpu|cuda|device|dev|local|proc(?:ess)?)[\s_.:=-]*([0-9]+)",
    re.IGNORECASE,
)
_NODE: Final = re.compile(
    r"(?<![a-z])(?:node[\s_.-]?rank|group[\s_.-]?rank|node|host|worker|machine|pod)[\s_.:=-]*([0-9]+)",
    re.IGNORECASE,
)
_R_NUMBER: Final = re.compile(r"(?:^|[._-])r([0-9]+)(?=$|[._-])", re.IGNORECASE)
_N_OF_M: Final = re.compile(r"(?<!\d)([0-9]+)[_.-]of[_.-]([0-9]+)(?!\d)", re.IGNORECASE)
_DATE: Final = re.compile(
    r"(?<!\d)(?:19|20)\d\d[-_.]?[01]\d[-_.]?[0-3]\d(?:[T"
    r" _.-]?[0-2]\d[-_.:]?[0-5]\d(?:[-_.:]?[0-5]\d(?:[.,]\d+)?)?Z?)?(?!\d)"
)
# the number of a process, or a time in seconds: it differs between the ranks of a node
_OF_PROCESS: Final = re.compile(r"pid[_.-]?[0-9]+|(?<!\d)[0-9]{9,}(?!\d)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[0-9]+")
_ENDING: Final = re.compile(
    r"\.(?:pickle|pkl|json|jsonl|gz|zst|zstd|bz2|xz|bin|txt|log|out|err|dump|trace|pt|box|dat|tar|tgz|zip|stdout|stderr)$",
    re.IGNORECASE,
)
_HOST: Final = re.compile(
    r"^(?:[a-z0-9-]*(?:host|node|worker|machine|pod|server|nid|slurm|dgx|hgx|gpu-?node)[a-z0-9]*(?:[._-][a-z0-9._-]*)?|ip-[0-9-]+.*|\d+\.\d+\.\d+\.\d+"
    r"|[a-z]{1,4}\d{1,6}(?:-\d+)*|[a-z0-9-]+\.(?:internal|local|cluster|compute|lan|net|com|edu|org)[a-z0-9.-]*)$",
    re.IGNORECASE,
)
_NO_HOST: Final = re.compile(
    r"^(?:(?:nccl|comm|lib|gloo|fr|flight|recorder|trace|traces|dump|dumps|debug|info|log|logs|std|out|err|torch|elastic|attempt|run|job|step|stack|data|tmp|rank"
    r"|global|pg|watchdog|hang|v|r|s|t|gpu|cuda|device|dev|local)[\s_.-]*\d*)+$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class FileName:
    """Rank and host of the process that wrote a file, as far as its name reveals them."""

    rank: int = -1  # global; -1 if unknown
    host: str = ""  # or the name of the node's folder
    node: int = -1  # number of the node; -1 if unknown
    local_rank: int = -1  # number of the process on its node; -1 if unknown
    sure: bool = False  # the name says ``rank`` rather than only holding a number
    note: str = ""  # a sentence if the name is ambiguous


def parse_name(name: str, prefix: str = "") -> FileName:
    """Infer rank and host from one name: a path, URL, or ``archive!member``. Folders are used if
    the file's own name says nothing.

    The first of these that is there tells the rank:

    1. the number after ``prefix``, which torchfrtrace was given as the prefix of its files
    2. the number after ``rank`` in the file's name, or else in the nearest folder's that has one
    3. none yet, if there is the number of a GPU: :func:`parse_names` infers it from the other names
    4. the only number in the file's name; of several the last one, with a note
    5. the nearest folder whose name is a number

    Examples: ``nccl_trace_rank_3``, ``_dump_9``, ``host42_rank_7.pickle``, ``rank00012.json``,
    ``trace.3``, ``node-3/gpu2/dump``.
    """
    *above, last = _parts(name)
    if last in ("", ".", ".."):
        return FileName()
    folders = _from_folders(tuple(above))
    base = _without_endings(last)
    host = _own_host(base) or folders.host
    if prefix and last.startswith(prefix) and (number := re.match(r"[0-9]+", last[len(prefix) :])):
        rank = _rank_number(number[0])
        return FileName(rank=rank, host=host, sure=rank >= 0)
    node, local = _last_number(_NODE, base), _last_number(_LOCAL_RANK, base)
    about = FileName(
        host=host,
        node=folders.node if node < 0 else node,
        local_rank=folders.local_rank if local < 0 else local,
    )
    own = _stated_rank(base)
    if own >= 0 or folders.sure:
        return _as_stated(about, own, folders, name)
    if about.local_rank >= 0:
        return about
    numbers = _numbers(base)
    if len(numbers) > 1:
        note = (
            f"{name} holds several numbers and does not say which of them is the rank;"
            f" {numbers[-1]} is used."
        )
        return replace(about, rank=numbers[-1], note=note)
    return replace(about, rank=numbers[0] if numbers else folders.rank)


def _as_stated(about: FileName, own: int, folders: FileName, name: str) -> FileName:
    """Add the rank that a name says, its own or that of a folder."""
    note = ""
    if own >= 0 and folders.sure and folders.rank != own:
        note = (
            f"{name} says rank {folders.rank} in a folder's name and rank {own} in its own; {own}"
            " is used."
        )
    return replace(about, rank=own if own >= 0 else folders.rank, sure=True, note=note)


def _parts(name: str) -> list[str]:
    """Split a path, a URL or an ``archive!member``."""
    if "\\" in name or "!" in name:
        return re.split(r"[/\\!]", name.rstrip("/\\!"))
    return name.rstrip("/").split("/")


@lru_cache(maxsize=4096)
def _from_folders(parts: tuple[str, ...]) -> FileName:
    """Infer rank and host from the folders, nearest first; ``sure`` if one says ``rank``."""
    near = [part for part in reversed(parts) if part not in ("", ".", "..")]
    stated = _first_known(_stated_rank(part) for part in near)
    bare = (_rank_number(part) for part in near if part.isdecimal() and part.isascii())
    return FileName(
        rank=stated if stated >= 0 else _first_known(bare),
        host=next((part for part in near if _HOST.match(part) and not _NO_HOST.match(part)), ""),
        node=_first_known(_last_number(_NODE, part) for part in near),
        local_rank=_first_known(_last_number(_LOCAL_RANK, part) for part in near),
        sure=stated >= 0,
    )


def _first_known(numbers: Iterable[int]) -> int:
    """Return the first number that is known; -1 if none is."""
    return next((number for number in numbers if number >= 0), -1)


def parse_names(names: Sequence[str], prefix: str = "") -> list[FileName]:
    """Infer ranks from all names of a job together; an ambiguous name is resolved by how it differs
    from the others.

    * ``node-0/gpu0``, ..., ``node-3/gpu7``: nodes in order, as many ranks on each as there are GPU
      numbers.
    * ``trace-3-28123``, ``trace-4-28124``: the position whose numbers all differ and are lowest.
    * ``1-of-4``, ..., ``4-of-4``: ranks counted from 1.
    """
    parsed = [parse_name(name, prefix) for name in names]
    _counted_from_one(names, parsed)
    _by_position(names, parsed)
    _by_node(names, parsed)
    return parsed


def _counted_from_one(names: Sequence[str], parsed: list[FileName]) -> None:
    """Subtract 1 from the ranks of names as ``2-of-4`` if one is *n of n* and none *0 of n*."""
    sizes: dict[int, int] = {}  # n, by the name's index
    for at, name in enumerate(names):
        match = _N_OF_M.search(name)
        if match and 0 <= parsed[at].rank == _rank_number(match[1]):
            sizes[at] = _rank_number(match[2])
    if any(parsed[at].rank == size for at, size in sizes.items()) and all(
        parsed[at].rank for at in sizes
    ):
        for at in sizes:
            parsed[at] = replace(parsed[at], rank=parsed[at].rank - 1)


def _by_position(names: Sequence[str], parsed: list[FileName]) -> None:
    """Resolve names that differ only in their numbers, by the position that tells them apart."""
    # by the name without its numbers: the numbers, by the name's index
    shapes: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(dict)
    for at, (name, found) in enumerate(zip(names, parsed, strict=True)):
        if found.note and not found.sure:
            base = _without_endings(_parts(name)[-1])
            numbers = _numbers(base)
            shapes[_NUMBER.sub("#", _without_dates(base)), len(numbers)][at] = numbers
    for members in shapes.values():
        ranks = _ranks_among([*zip(*members.values(), strict=True)]) if len(members) > 1 else None
        if ranks is None:
            continue
        for at, rank in zip(members, ranks, strict=True):
            parsed[at] = replace(parsed[at], rank=rank, note="")


def _ranks_among(columns: Sequence[Sequence[int]]) -> Sequence[int] | None:
    """Return the ranks among the numbers at each place of alike names: the numbers of one place
    that are 0 to n - 1, or else those that all differ and are lowest. None if that is not clear.
    """
    different = [column for column in columns if len(set(column)) == len(column)]
    complete = [column for column in different if sorted(column) == list(range(len(column)))]
    best = min(complete or different, key=max, default=None)
    if best is None or complete:
        return best
    return best if sum(max(column) == max(best) for column in different) == 1 else None


def _by_node(names: Sequence[str], parsed: list[FileName]) -> None:
    """Infer ranks from nodes, in the order of their names, and local ranks. Nodes have the names
    of folders or hosts, unless numbers tell all of them apart.
    """
    unranked = [at for at, found in enumerate(parsed) if found.rank < 0 <= found.local_rank]
    numbered = {(parsed[at].node, parsed[at].local_rank) for at in unranked if parsed[at].node >= 0}
    suffices = len(numbered) == len(unranked)
    where = {
        at: (parsed[at].node, () if suffices else natural(_before_local(names[at])))
        for at in unranked
    }
    order = {node: position for position, node in enumerate(sorted(set(where.values())))}
    per_node = 1 + max((parsed[at].local_rank for at in unranked), default=0)
    note = (
        f"The file names hold node and GPU numbers instead of ranks: {per_node} ranks on each of"
        f" {len(order)} nodes, in the order of their names, are assumed."
        if len(order) > 1
        else ""
    )
    for at in unranked:
        parsed[at] = replace(
            parsed[at], rank=order[where[at]] * per_node + parsed[at].local_rank, note=note
        )


def _before_local(name: str) -> str:
    """Return the part of a name that may tell its node."""
    *_, last = _LOCAL_RANK.finditer(name)  # it has a local rank, which this found
    return _OF_PROCESS.sub("", _without_dates(name[: last.start()]))


def _stated_rank(part: str) -> int:
    found = [_rank_number(match[1] or match[2]) for match in _RANK.finditer(part)]
    if known := [number for number in found if number >= 0]:
        return known[-1]
    if match := _N_OF_M.search(part):
        return _rank_number(match[1])
    short = _R_NUMBER.findall(part)
    return _rank_number(short[-1]) if short else -1


def _last_number(pattern: re.Pattern[str], part: str) -> int:
    found = pattern.findall(part)
    return _rank_number(found[-1]) if found else -1


def _rank_number(number: str) -> int:
    """Return a number; -1 if it is too large for a rank."""
    return int(number) if len(number) <= 12 and int(number) <= RANK_MAX else -1


def rank_of_dump(recorded: int, candidates: Sequence[int], name: FileName) -> tuple[int, str]:
    """Return a dump's rank from its content and its name, and a note if the two contradict each
    other.
    """
    if recorded >= 0:
        contradicts = name.sure and name.rank >= 0 and name.rank != recorded
        return recorded, (
            f"its name says rank {name.rank}, but its content is of rank {recorded}"
            if contradicts
            else ""
        )
    if name.rank >= 0 and len(candidates) > 1 and name.rank not in candidates:
        return (
            name.rank,
            f"its name says rank {name.rank}, which is not in all process groups of the dump",
        )
    return name.rank, ""


def _without_endings(name: str) -> str:
    while (shorter := _ENDING.sub("", name)) != name and shorter:
        name = shorter
    return name


def _without_dates(text: str) -> str:
    return _DATE.sub("", text)


def _numbers(base: str) -> list[int]:
    """Return the numbers of a name that could be a rank, without dates and times."""
    return [int(number) for number in _NUMBER.findall(_without_dates(base)) if len(number) <= 7]


_AROUND_RANK: Final = re.compile(
    r"[_.-]?(?:(?:global|local|node|group)[_.-]?)?rank[\s_.=-]*[0-9]+[_.-]?", re.IGNORECASE
)
_DUMP_WORDS: Final = re.compile(
    r"^(?:(?:nccl|comm_lib|gloo|fr)[_-])?(?:trace|dump)s?[_.-]", re.IGNORECASE
)


def _own_host(base: str) -> str:
    """Return the host in ``host42_rank_7`` or ``rank_7.host42``, or ""."""
    for piece in _AROUND_RANK.split(base) if _RANK.search(base) else ():
        candidate = _DUMP_WORDS.sub("", piece).strip("_.-")
        if (
            candidate
            and not _NO_HOST.match(candidate)
            and (_HOST.match(candidate) or "." in candidate)
        ):
            return candidate
    return ""
