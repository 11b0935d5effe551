"""The message of a refused operation: one wording for each kind, the same text on every rank.

A message about shapes has the words of Accelerate's own debug mode, which names processes; the
others name ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from commlens.matching.answer import Disagree
from commlens.model.collective import CollectiveArgs, TensorSpec
from commlens.model.grouping import grouped
from commlens.model.ops import POINT_TO_POINT, SENT_BY_ROOT
from commlens.model.refusal import Refusal, RefusedRow, RefusedWait
from commlens.text import format_ranks, ranks_phrase, verb
from commlens.verification.arguments import LeafDisagreement

_MISMATCHES = {
    "shape": ("shape mismatches. All shapes across devices must be valid", "Input shapes"),
    "dtype": ("dtype mismatches. All ranks must use the same dtype", "Input dtypes"),
    "reduce-op": ("reduce op mismatches. All ranks must use the same reduce op", "Reduce ops"),
    "root": ("root mismatches. All ranks must use the same root", "Roots"),
    "device": ("device mismatches. All ranks must use the same kind of device", "Devices"),
    "layout": (
        "memory layout mismatches. All ranks must use the same memory layout",
        "Input layouts",
    ),
    "splits": (
        "split mismatches. Each rank must send as many elements as the receiver expects",
        "Splits",
    ),
    "p2p": (
        (
            "point-to-point mismatches. The receiver must expect the sender's dtype and number of"
            " elements"
        ),
        "Messages",
    ),
    "structure": (
        "structure mismatches. Containers must have the same elements on all ranks",
        "Structure",
    ),
    "value": ("value mismatches. Values must be equal on all ranks", "Values"),
    "argument": ("argument mismatches. Arguments must match on all ranks", "Arguments"),
}
"""Aspect -> the reason of a refusal, and the heading of its table."""

_OTHER_OPS = "ranks issued different operations as the same collective of their group"
_CYCLE = "ranks wait for each other, and none of them can continue"
_LEAVES_SHOWN = 8
_ROWS_KEPT = 16  # in the facts; the text has all


class Row(msgspec.Struct, frozen=True):
    """One rank's line of a table: its arguments, or its whereabouts if it has not arrived."""

    rank: int
    args: CollectiveArgs | None  # None: it has not arrived
    where: str  # "train.py:21 in main"; of an absent rank "has finished"
    name: str = ""  # "accelerate.utils.operations.broadcast", "torch.distributed.broadcast"
    peer: int | None = None  # of a message; None: any rank
    tag: int = 0


class Subject(msgspec.Struct, frozen=True):
    """The collective that a refusal is about."""

    group: str | None  # its label, such as "dp"; empty: the default group; None: unknown
    ranks: Sequence[int]  # global
    number: int


def group_name(label: str | None) -> str:
    """Return the name of the group with a label: ``"group dp"``, ``"the default group"``."""
    if label is None:
        return "an unknown group"
    return f"group {label}" if label else "the default group"


class WordedRefusal(NamedTuple):
    """A refusal as data, and its message."""

    refusal: Refusal
    text: str


def mismatch(answer: Disagree, subject: Subject, rows: Sequence[Row]) -> WordedRefusal:
    """Return the refusal of a collective in which ranks disagree.

    Args:
        answer: the aspect that they disagree in.
        subject: the collective.
        rows: all ranks that have announced, in order of rank.
    """
    table = _call_rows(answer.aspect, rows)
    return _mismatch(
        answer.aspect,
        subject,
        rows,
        table,
        [f"{_heading(answer.aspect)}:", *_lines(answer.aspect, table)],
    )


def leaves(answer: LeafDisagreement, subject: Subject, rows: Sequence[Row]) -> WordedRefusal:
    """Return the refusal of a call to which ranks pass different arguments.

    Args:
        answer: the aspect that they disagree in, and its places in the arguments.
        subject: the call and its group.
        rows: all ranks that have announced, in order of rank.
    """
    places = {row.rank: row.where for row in rows}
    heading = _heading(answer.aspect)
    table: list[RefusedRow] = []
    lines: list[str] = []
    for path, cells_of in answer.at[:_LEAVES_SHOWN]:
        at_path = [(rank, cells, places.get(rank, "")) for rank, cells in cells_of.items()]
        alike = _join_alike(at_path, path)
        table += alike
        lines += [f"{heading} of {path}:" if path else f"{heading}:"]
        lines += _lines(answer.aspect, alike)
    if not table:
        lines = ["The arguments differ, but have too many elements to show where."]
    if (more := len(answer.at) - _LEAVES_SHOWN) > 0:
        lines.append(f"... and {more} more")
    return _mismatch(answer.aspect, subject, rows, table, lines)


def tags(subject: Subject, rows: tuple[Row, Row], waited_s: float, where: str) -> WordedRefusal:
    """Return the refusal of a receive whose sender has only sent a message with another tag.

    Args:
        subject: the message that is waited for.
        rows: the receive, and the sender's message with the other tag.
        waited_s: how long the receiver has waited, in seconds.
        where: the sender's whereabouts, "" if unknown.
    """
    receive, send = rows
    table = _call_rows("p2p", rows)
    return _mismatch(
        "p2p",
        subject,
        rows,
        table,
        [
            f"{_heading('p2p')}:",
            *_lines("p2p", table),
            *([f"Rank {send.rank} {where}."] if where else []),
        ],
        f" due to tag mismatches. Rank {send.rank} sent no message with tag {receive.tag} within"
        f" {waited_s:.1f} s. It sent one with tag {send.tag}, which rank {receive.rank} does not"
        " receive",
    )


def _mismatch(
    aspect: str,
    subject: Subject,
    rows: Sequence[Row],
    table: Sequence[RefusedRow],
    lines: Sequence[str],
    why: str = "",
) -> WordedRefusal:
    known = _MISMATCHES.get(aspect)
    refusal = Refusal(
        f"mismatch/{aspect}",
        aspect=aspect,
        reason=known[0] if known else _OTHER_OPS,
        operation=_operation_name(subject, rows, aspect),
        heading=_heading(aspect),
        rows=tuple(table[:_ROWS_KEPT]),
    )
    why = why or (f" due to {refusal.reason}" if known else f": {refusal.reason}")
    return _refused(refusal, why, *lines)


def _refused(refusal: Refusal, why: str, *lines: str) -> WordedRefusal:
    operation = [f"Operation: {refusal.operation}"] if refusal.operation else []
    return WordedRefusal(
        refusal, "\n".join([f"Cannot apply desired operation{why}.", "", *operation, *lines])
    )


def absence(
    kind: str,
    subject: Subject,
    rows: Sequence[Row],
    absent: Mapping[int, str],
    waited_s: float,
    behind: Sequence[RefusedWait] = (),
) -> WordedRefusal:
    """Return the refusal of a collective in which ranks do not arrive.

    Args:
        kind: "missing" or "dead".
        subject: the collective that the others wait in.
        rows: the ranks that have arrived.
        absent: the whereabouts of the others, by rank: "has finished", "is in load_batch
            (train.py:30)".
        waited_s: how long the others have waited, in seconds.
        behind: further ranks that wait, for those that wait.
    """
    fact = f"did not take part within {waited_s:.0f} s"
    if kind == "dead":
        fact = f"{verb(absent, 'has', 'have')} ended and will not take part"
    refusal = Refusal(
        kind,
        reason=f"{ranks_phrase(absent)} {fact}",
        operation=_operation_name(subject, rows, "missing"),
        absent=tuple(absent),
    )
    all_rows = [*rows, *(Row(rank, None, where) for rank, where in absent.items())]
    held_up = ["Held up by this:", *map(_wait_line, behind)] if behind else []
    table = _lines("missing", _call_rows("missing", all_rows))
    return _refused(refusal, f": {refusal.reason}", "Ranks:", *table, *held_up)


def no_such_peer(subject: Subject, row: Row) -> WordedRefusal:
    """Return the refusal of a message to or from a rank that does not exist."""
    does = "sends to" if row.args is not None and row.args.op == "send" else "receives from"
    refusal = Refusal(
        "mismatch/p2p",
        aspect="peer",
        reason=(
            f"rank {row.rank} {does} rank {row.peer}, which is not in"
            f" {group_name(subject.group)} [{format_ranks(subject.ranks)}]"
        ),
        operation=_operation_name(subject, [row], "p2p"),
        culprits=(row.rank,),
    )
    table = _lines("p2p", _call_rows("p2p", [row]))
    return _refused(refusal, f": {refusal.reason}", "Messages:", *table)


def cycle(waits: Sequence[RefusedWait], ops: Set[str]) -> WordedRefusal:
    """Return the refusal of the collectives in which ranks wait for each other in a cycle.

    Args:
        waits: of the ranks, in the order of the cycle.
        ops: in which they wait.
    """
    refusal = Refusal("cycle", reason=_CYCLE, waits=tuple(waits))
    if ops == {"recv"}:
        advice = "Each receives before it sends: let one of them send first."
    elif ops == {"send"}:
        advice = "Each sends before it receives: let one of them receive first."
    elif ops & POINT_TO_POINT:
        advice = (
            "A message's other side is missing, or comes only after a call that waits for this"
            " rank: issue it before that call."
        )
    else:
        advice = (
            "Each has not reached the collective of another: let all of them issue these in the"
            " same order, and leave none out."
        )
    return _refused(refusal, f": {_CYCLE}", "Cycle:", *map(_wait_line, waits), "", advice)


def _wait_line(wait: RefusedWait) -> str:
    return (
        f"  - Rank {wait.rank}: waits in {wait.collective} for {ranks_phrase(wait.absent)}  "
        f" {wait.where}".rstrip()
    )


def _operation_name(subject: Subject, rows: Sequence[Row], aspect: str) -> str:
    """Return the operation's name and where it is: the library's name if a library issued it."""
    arrived = [row.args for row in rows if row.args is not None]
    names = sorted({row.name for row in rows if row.args is not None} - {""})
    ops = {args.op for args in arrived}
    of_torch = len(ops) == 1 and "." not in min(ops)
    plain = f"torch.distributed.{min(ops)}" if of_torch else ""
    where = _place(subject, arrived)
    if aspect == "op" or not names:
        return f"{f'`{plain}`  ' if plain else ''}({where})"
    if len(names) == 1 and plain and not names[0].startswith("torch.distributed."):
        where = f"{plain}, {where}"
    return f"{', '.join(f'`{name}`' for name in names)}  ({where})"


def _place(subject: Subject, arrived: Sequence[CollectiveArgs]) -> str:
    """Return the group, its ranks, the number, and the root if there is one."""
    group = "default group" if subject.group == "" else group_name(subject.group)
    where = f"{group}, ranks {format_ranks(subject.ranks)}, #{subject.number}"
    roots = {args.root for args in arrived}
    if len(roots) == 1 and (root := next(iter(roots))) is not None:
        from_root = any(args.op in SENT_BY_ROOT for args in arrived)
        where += f", {'src' if from_root else 'dst'} {root}"
    return where


def _heading(aspect: str) -> str:
    return _MISMATCHES[aspect][1] if aspect in _MISMATCHES else "Operations"


def _call_rows(aspect: str, rows: Sequence[Row]) -> list[RefusedRow]:
    return _join_alike([(row.rank, _cells(aspect, row), row.where) for row in rows])


def _join_alike(
    rows: Sequence[tuple[int, tuple[str, str], str]], argument: str = ""
) -> list[RefusedRow]:
    """Return one row for all ranks with the same content, in order of their first rank. Each of
    ``rows`` has a rank, two cells, and a call site.
    """
    alike = grouped(
        ((cells, where), rank) for rank, cells, where in sorted(rows, key=lambda row: row[0])
    )
    return [
        RefusedRow(tuple(ranks), cells, where, argument) for (cells, where), ranks in alike.items()
    ]


def _lines(aspect: str, rows: Sequence[RefusedRow]) -> list[str]:
    """Return the rows as lines of a table whose columns are aligned."""
    noun = ("Process", "Processes") if aspect == "shape" else ("Rank", "Ranks")
    heads = [f"{ranks_phrase(row.ranks, *noun)}:" for row in rows]
    width = max((len(head) for head in heads), default=0)
    widths = [max((len(row.cells[i]) for row in rows), default=0) for i in range(2)]
    lines = []
    for head, row in zip(heads, rows, strict=True):
        shown = "  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row.cells) if widths[i])
        lines.append(f"  - {head.ljust(width)} {shown}   {row.where}".rstrip())
    return lines


def _cells(aspect: str, row: Row) -> tuple[str, str]:
    args = row.args
    if args is None:
        return "has not arrived", ""
    specs = args.payload
    more = f", ... ({len(specs)} tensors)" if len(specs) > 4 else ""
    shapes = ", ".join(str(list(spec.shape)) for spec in specs[:4]) + more
    dtypes = ", ".join(sorted({spec.dtype for spec in specs}))
    tensors = f"{shapes} {dtypes}".strip()
    if args.op in POINT_TO_POINT:
        peer = f"rank {row.peer}" if row.peer is not None else "any rank"
        return f"{args.op} {'to' if args.op == 'send' else 'from'} {peer}, tag {row.tag}", tensors
    if aspect in ("op", "missing"):
        is_torchs = row.name in ("", args.op) or row.name.startswith("torch.distributed.")
        return _op_words(args) + ("" if is_torchs else f" of {row.name}"), tensors
    if aspect == "dtype":
        return dtypes, shapes
    if aspect in _WORDS_OF:
        return _WORDS_OF[aspect](args), tensors
    return shapes or "no tensor", dtypes


_WORDS_OF: dict[str, Callable[[CollectiveArgs], str]] = {
    "reduce-op": lambda args: args.reduce_op or "unknown",
    "root": lambda args: f"root {args.root}",
    "device": lambda args: ", ".join(sorted({spec.device for spec in args.payload})),
    "layout": lambda args: ", ".join(sorted({_layout(spec) for spec in args.payload})),
    "splits": lambda args: (
        f"sends {list(args.input_splits) or 'even'}, receives {list(args.output_splits) or 'even'}"
    ),
}


def _op_words(args: CollectiveArgs) -> str:
    words = f"`{args.op}`"
    if args.root is not None:
        words += f" with root {args.root}"
    if args.reduce_op is not None:
        words += f" {args.reduce_op}"
    return words


def _layout(spec: TensorSpec) -> str:
    if spec.layout != "strided":
        return spec.layout
    order = spec.memory_order
    return "row-major" if order is None else f"dimensions in order {list(order)}"
