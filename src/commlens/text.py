"""One wording each for signals, durations, sizes, counts, sets of ranks, groups, collectives,
tensors and source lines.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from commlens.model.grouping import grouped
from commlens.model.ops import BARRIERS, UNKNOWN_DTYPE

if TYPE_CHECKING:  # the commands' help needs no msgspec
    from commlens.model.collective import Collective, Frame, ProcessGroup, TensorSpec
    from commlens.model.hazard import Hazard, Touch
    from commlens.model.ranklog import Observation, ProcessState
    from commlens.model.worlds import JobWorld, Worlds

_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
TEXT_MAX: Final = 4096
"""Longest text of a foreign file that is kept, in characters. A path has at most so many bytes."""
DEFAULT_LABELS: Final = ("default_pg", "0", "")
_LONGEST_RANKS: Final = 80  # characters of a set of ranks in a sentence
_LONGEST_KEY: Final = 60  # characters of a key of the store
_UNCLEAN_JSON: Final = re.compile(
    rb"\\[bfrtu]|[\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa0-\xaf]"
)
"""Escapes and bytes that may stand for control characters, which a terminal would obey."""
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def signal_name(number: int) -> str:
    """``9 -> "SIGKILL"``; a real-time signal has no name and stays a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_phrase(returncode: int) -> str:
    """``"exited with status 3"``, ``"was killed by SIGKILL"``, from a return code of subprocess."""
    if returncode < 0:
        return f"was killed by {signal_name(-returncode)}"
    return f"exited with status {returncode}"


def process_phrase(seen: Observation) -> str:
    """``"killed by SIGKILL"``, ``"sleeping"``: the state of a rank's process."""
    code = seen.exit_code
    words: dict[ProcessState, str] = {
        "killed": f"killed by {seen.signal}",
        "failed": "died of an exception" if code is None else exit_phrase(code),
        "unseen": "not visible from here",
        "debugged": "stopped by a debugger",
        "holds-gil": "holds the GIL",
        "uninterruptible": "in uninterruptible I/O",
    }
    return words.get(seen.state, seen.state)


def duration(ns: float) -> str:
    """``"0.8 s"``, ``"31 s"``, ``"5 min 10 s"``, ``"2 h 5 min"``."""
    seconds = max(0.0, ns / 1e9)
    if seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, rest = divmod(round(whole / 60), 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def utc(ns: int) -> str:
    """Return a time of day: Unix ns to ``"12:03:05 UTC"``."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(ns // 1_000_000_000))


def short_duration(ns: float) -> str:
    """``"1.2 s"``, ``"350 ms"``, ``"4.0 us"``: two or three digits, for the time of one collective
    or one step.
    """
    unit, factor = "us", 1e3
    if ns >= 0.9995e9:
        unit, factor = "s", 1e9
    elif ns >= 0.9995e6:
        unit, factor = "ms", 1e6
    shown = ns / factor
    digits = 0 if shown >= 9.95 or not shown else 1 if shown >= 0.9995 else 2
    return f"{shown:.{digits}f} {unit}"


def size(amount: float) -> str:
    """Bytes in decimal units, as networks are sold: ``"512 B"``, ``"4.1 kB"``, ``"16.8 MB"``."""
    value = float(amount)
    unit = 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value /= 1000
        unit += 1
    digits = 0 if unit == 0 or abs(value) >= 99.95 else 1
    return f"{value:.{digits}f} {_UNITS[unit]}"


def two_sizes(before: float, after: float) -> tuple[str, str]:
    """Two sizes to compare: different ones never read alike, if necessary as ``"16,384 B"`` and
    ``"16,392 B"``.
    """
    one, other = size(before), size(after)
    return (
        (one, other)
        if one != other or before == after
        else (f"{number(before)} B", f"{number(after)} B")
    )


def number(value: float) -> str:
    """``"12"``, ``"1,024"``, ``"2.5"``: as few digits as it takes."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def count(value: float, singular: str, plural: str | None = None) -> str:
    """``"1 rank"``, ``"1,024 ranks"``."""
    return f"{number(value)} {singular if value == 1 else plural or singular + 's'}"


def verb(ranks: Iterable[int], singular: str, plural: str) -> str:
    """The verb form for one rank or for several: ``verb([2], "waits", "wait")`` is ``"waits"``."""
    return singular if len(set(ranks)) == 1 else plural


_with_alike: ContextVar[Callable[[Iterable[int]], Collection[int]]] = ContextVar(
    "with_alike", default=set
)


@contextlib.contextmanager
def naming_alike(with_alike: Callable[[Iterable[int]], Collection[int]]) -> Iterator[None]:
    """Let :func:`ranks_phrase` name more ranks than it is given: ``with_alike`` adds those that are
    in the same state and were not examined themselves. It is no parameter, since sentences name
    ranks in two hundred places.
    """
    token = _with_alike.set(with_alike)
    try:
        yield
    finally:
        _with_alike.reset(token)


_worlds: ContextVar[Worlds | None] = ContextVar("worlds", default=None)


@contextlib.contextmanager
def naming_worlds(worlds: Worlds) -> Iterator[None]:
    """Let :func:`ranks_phrase`, :func:`rank_phrase` and :func:`group_phrase` take numbers of
    processes, and name each by its world and its rank there.
    """
    token = _worlds.set(worlds or None)
    try:
        yield
    finally:
        _worlds.reset(token)


def used_columns(
    headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """A table's headings and rows without the columns that are empty in all rows."""
    used = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    return [headings[column] for column in used], [[row[column] for column in used] for row in rows]


def csv_cell(text: str) -> str:
    """The text as a cell of CSV. An apostrophe keeps spreadsheets from running a text that begins
    like a formula.
    """
    return f"'{text}" if text.startswith(_FORMULA) else text


INLINE_CODE: Final = "python -c '...'"
"""Stands for a program that is given on the command line, in place of a script's name."""


def printable(name: str) -> str:
    """Escape whatever a terminal or an encoding cannot print: foreign file names can hold any
    bytes.
    """
    if name.isprintable():
        return name
    text = name.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def clean(text: str) -> str:
    """A text from a foreign file, so that every output can hold it: not too long, and lone
    surrogates and control characters escaped.
    """
    if len(text) > TEXT_MAX:
        text = f"{text[:TEXT_MAX]}... (cut: {len(text)} characters)"
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def clean_json(content: bytes, *, always: bool = False) -> bytes:
    """JSON with all texts clean; the same if it cannot be read. Without ``always``, texts are only
    cut if one has control characters.
    """
    if not always and not _UNCLEAN_JSON.search(content):
        return content
    import msgspec

    try:
        return msgspec.json.encode(clean_all(msgspec.json.decode(content)))
    except (ValueError, RecursionError, OverflowError):
        return content  # its reader says what is wrong


def clean_all(value: Any) -> Any:
    """The data of a JSON file, or for one, with all texts clean."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, (list, tuple)):
        return [clean_all(one) for one in value]
    if isinstance(value, dict):
        return {clean_all(key): clean_all(one) for key, one in value.items()}
    return value


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """The text with a full stop. Not capitalised, since it may begin with ``rank 2`` or a file's
    name.
    """
    text = text.strip()
    return text if text.endswith((".", "!", "?", ":")) else f"{text}."


def joined(parts: Iterable[str], last: str = "and") -> str:
    """Return the parts as a list in words: ``"a, b and c"``."""
    *first, end = list(parts) or [""]
    return f"{', '.join(first)} {last} {end}" if first else end


def format_ranks(ranks: Iterable[int]) -> str:
    """Compress ranks, e.g. ``[0, 1, 3] -> "0-1,3"`` and ``[0, 8, 16, 24] -> "0-24:8"`` (stride
    after the colon).

    A stride is used from four members on. Duplicates are dropped and the order does not matter.
    """
    left = sorted(set(ranks))
    parts: list[str] = []
    start = 0
    while start < len(left):
        stride = left[start + 1] - left[start] if start + 1 < len(left) else 0
        end = start + 1
        while end < len(left) and left[end] - left[end - 1] == stride:
            end += 1
        if stride == 1:
            parts.append(f"{left[start]}-{left[end - 1]}")
        elif end - start >= 4:
            parts.append(f"{left[start]}-{left[end - 1]}:{stride}")
        else:
            parts.append(str(left[start]))
            end = start + 1
        start = end
    return ",".join(parts)


def parse_ranks(text: str, *, limit: int = 1_000_000) -> tuple[int, ...]:
    """Reverse :func:`format_ranks`. An empty text gives no ranks.

    Raises:
        ValueError: the text is not a set of ranks, or names more than ``limit`` of them, since it
            may come from a damaged file.
    """
    ranks: list[int] = []
    for part in text.split(","):
        if not part.strip():
            continue
        span, _, step_text = part.partition(":")
        first_text, dash, last_text = span.partition("-")
        try:
            first = int(first_text)
            last = int(last_text) if dash else first
            step = int(step_text) if step_text else 1
        except ValueError:
            raise ValueError(f"not a set of ranks: {text[:80]!r}") from None
        if step < 1 or last < first or len(ranks) + (last - first) // step + 1 > limit:
            raise ValueError(f"not a set of ranks: {text[:80]!r}")
        ranks.extend(range(first, last + 1, step))
    return tuple(ranks)


def ranks_phrase(ranks: Iterable[int], one: str = "rank", several: str = "ranks") -> str:
    """``"rank 2"``, ``"ranks 0-1,3"``; a long set is cut short: ``"ranks 1,3-9,... (3967 in
    all)"``. ``one`` and ``several`` are used in place of rank and ranks.
    """
    members = sorted(_with_alike.get()(ranks))
    if (worlds := _worlds.get()) is not None:
        return joined(_by_world(members, worlds, " of group {}"))
    return _some_ranks(members, one, several)


def rank_phrase(rank: int | None) -> str:
    """``"rank 2"``; ``"trainer 2"`` where worlds are named; ``"any rank"`` for None."""
    worlds = _worlds.get()
    if rank is None:
        return "any rank"
    return f"rank {rank}" if worlds is None else _by_world([rank], worlds, " of group {}")[0]


def _some_ranks(members: Sequence[int], one: str = "rank", several: str = "ranks") -> str:
    if len(members) == 1:
        return f"{one} {members[0]}"
    text = format_ranks(members)
    if len(text) > _LONGEST_RANKS:
        text = f"{text[: text.rindex(',', 0, _LONGEST_RANKS - 20)]},... ({len(members)} in all)"
    return f"{several} {text}"


def _by_world(numbers: Sequence[int], worlds: Worlds, of_group: str = "") -> list[str]:
    """Return the processes with these numbers, by world: ``"trainer 0"``, ``"rollout 0-1"``,
    ``"replica 1"`` where it is one process; then the members of groups that no process is known to
    be: ``"member 2 of group weights"``; then ``"rank 9"``, of numbers that neither has.
    """
    parts = []
    for world in worlds.worlds:
        if ranks := [number - world.first for number in numbers if number in world.numbers]:
            parts.append(_in_world(world, ranks) if worlds.are_several else _some_ranks(ranks))
    groups = grouped(
        ((outsider.group, outsider.size > 0), outsider.member)
        for outsider in worlds.outsiders
        if outsider.number in numbers
    )
    parts += [
        _some_ranks(members, "member", "members") + of_group.format(name)
        if of_a_group
        else _some_ranks(members, name, name)
        for (name, of_a_group), members in groups.items()
    ]
    others = [
        each
        for each in numbers
        if each not in range(worlds.size)
        and each not in [outsider.number for outsider in worlds.outsiders]
    ]
    return [*parts, _some_ranks(others)] if others else parts


def _in_world(world: JobWorld, ranks: Sequence[int]) -> str:
    if world.size == 1:
        return world.name
    if world.name[-1].isdigit():
        return _some_ranks(ranks, f"{world.name} rank", f"{world.name} ranks")
    return _some_ranks(ranks, world.name, world.name)


def number_named(ranks: Iterable[int]) -> int:
    """Return the number of ranks that :func:`ranks_phrase` names."""
    return len(_with_alike.get()(ranks))


def ranks_and_verb(ranks: Iterable[int], singular: str, plural: str) -> str:
    """``"rank 2 waits"``, ``"ranks 0-1,3 wait"``."""
    members = set(ranks)
    return f"{ranks_phrase(members)} {verb(members, singular, plural)}"


def group_label(group: ProcessGroup, default: str = "default group") -> str:
    """The mesh dimension, else the description, else torch's name; ``default`` for the default
    group.
    """
    return default if _is_default(group) else group.label


def _is_default(group: ProcessGroup) -> bool:
    return group.label in DEFAULT_LABELS


def group_phrase(group: ProcessGroup) -> str:
    """``"group dp [0-3]"``, ``"the default group [0-3]"``; without ranks if only one is known."""
    name = "the default group" if _is_default(group) else f"group {group.label}"
    ranks = group.asked_for
    return f"{name} [{members_text(ranks)}]" if len(ranks) > 1 else name


def members_text(ranks: Sequence[int]) -> str:
    """``"0-1,3"``; where worlds are named ``"trainer 0, rollout 0-1"``."""
    worlds = _worlds.get()
    return format_ranks(ranks) if worlds is None else ", ".join(_by_world(ranks, worlds))


def numbered(name: str, number: int) -> str:
    """``"message #3"``; ``"message"`` where the number is unknown."""
    return f"{name} #{number}" if number else name


def op_phrase(op: Collective, *, group: bool = True) -> str:
    """``"all_reduce #41 of group dp [0-3]"``, ``"recv #3 from rank 1"``, ``"new_group #2 of ranks
    0-1"``, or of ``"group dp [0-1]"`` where the program gives it a name.
    """
    if op.is_store_wait:
        return f"{op.op} {'of' if op.is_for_key else 'for the'} {key_phrase(op)}"
    if op.is_setup:
        made = op.channel.group
        if op.op == "init_process_group":
            return op.op + (f" #{op.sequence_number}" if op.sequence_number > 1 else "")
        members = group_phrase(made) if made.description else ranks_phrase(made.asked_for)
        where = f", where {ranks_phrase(made.all_ranks)} meet" if made.members else ""
        return f"{op.op} #{op.sequence_number} of {members}{where}"
    name = numbered(op.op, op.sequence_number)
    if op.is_point_to_point:
        return message_phrase(op, [op.peer] if op.peer is not None else [])
    return f"{name} of {group_phrase(op.channel.group)}" if group else name


def message_phrase(op: Collective, peers: Iterable[int]) -> str:
    """``"send #3 to ranks 4-5"``: messages like ``op`` with several peers; without peers, ``"recv
    #3 from any rank"``.
    """
    peers = sorted(peers)
    return (
        f"{numbered(op.op, op.sequence_number)} {'to' if op.op == 'send' else 'from'}"
        f" {ranks_phrase(peers) if peers else 'any rank'}"
    )


def key_phrase(op: Collective) -> str:
    """``"key 'rate-7'"``: of the job's store, for which a rank waits. In the constructor of a
    ``TCPStore``, ``"server at localhost:29600"`` or ``"2 clients at localhost:29600"``.
    """
    key = op.channel.group.name
    if not op.is_for_key:
        return f"{op.module or 'server'} at {key}"
    shown = key if len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]}..."
    return f"key {shown!r}{f' {op.module}' if op.module else ''}"


def frame_phrase(frame: Frame | None) -> str:
    """``"train.py:57 load_batch"``; empty where no line is known."""
    return f"{frame.where} {frame.function}".rstrip() if frame is not None else ""


def tensor_phrase(spec: TensorSpec) -> str:
    """``"float32[5,5]"``; ``"25 elements"`` where the dtype is unknown, as in torch's log lines."""
    if spec.dtype == UNKNOWN_DTYPE:
        return f"{spec.numel} elements"
    shape = ",".join(map(str, spec.shape))
    odd = "" if spec.layout == "strided" else f" {spec.layout}"
    if spec.memory_order is not None:
        odd += f" in memory order {list(spec.memory_order)}"
    return f"{spec.dtype}[{shape}]{odd}"


def tensors_phrase(specs: Sequence[TensorSpec]) -> str:
    """``"float32[5,5]"``, ``"4 x float32[5]"``, or the first tensor and the number of the
    others.
    """
    if not specs:
        return "no tensor"
    first = tensor_phrase(specs[0])
    if len(specs) == 1:
        return first
    if all(spec == specs[0] for spec in specs):
        return f"{len(specs)} x {first}"
    return f"{first} and {len(specs) - 1} more"


def args_phrase(op: Collective, reduce_op: str | None = None) -> str:
    """``"float32[1048576] SUM"``, with the root where there is one, and the step of a library that
    issues it, if that is known; empty for an op without tensors.

    Args:
        op: the collective.
        reduce_op: its reduce op if ``op`` does not have it.
    """
    specs = op.args.payload
    if not specs or op.op in BARRIERS:
        return ""
    text = tensors_phrase(specs)
    if reduce_op := op.args.reduce_op or reduce_op:
        text += f" {reduce_op}"
    if op.args.root is not None:
        text += f", root {op.args.root}"
    if op.module is not None:
        text += f", for {op.module}"
    return text


def hazard_phrase(hazard: Hazard) -> str:
    """Return a hazard as a sentence without its full stop."""
    where = frame_phrase(hazard.source)
    calls = f"{hazard.op} at {where}"
    if hazard.what == "never-waited":
        return (
            f"{calls} is asynchronous, and {count(hazard.times, 'Work')} of it"
            f" {'was' if hazard.times == 1 else 'were'} never waited for: its result may be"
            " incomplete, and an error of it is lost"
        )
    if hazard.what == "not-a-member":
        return (
            f"{calls} was called {count(hazard.times, 'time')} with a group that the rank is not"
            " in: torch does nothing then"
        )
    if hazard.touch is not None:
        return _touch_phrase(hazard, hazard.touch, calls)
    return (
        f"{where} made {count(hazard.times, 'group')} of ranks {hazard.group} that were never"
        " destroyed: each keeps connections and threads; make it once"
    )


def _touch_phrase(hazard: Hazard, touch: Touch, calls: str) -> str:
    verb = "writes to" if touch.access == "written" else "reads"
    by, op = frame_phrase(touch.source), f"{touch.op}, "
    if hazard.what == "shared-in-flight":
        by, op = f"{touch.op} at {by}", ""
    times = f", {number(hazard.times)} times" if hazard.times > 1 else ""
    if touch.operand == "input":
        result = "the ranks may get the old or the new values"
    elif touch.access == "read":
        result = "it may get values from before the collective, or a part of the result"
    else:
        result = "the result may be lost, or mixed with these values"
    return (
        f"{by} {verb} the {touch.operand} of {calls} before the wait for it"
        f" ({op}{touch.tensor}{times}): {result}"
    )
