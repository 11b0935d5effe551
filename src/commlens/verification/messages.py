"""The message of a refused operation: one wording for each kind, the same text on every rank.

A message about shapes has the words of Accelerate's own debug mode, which names processes; the
others name ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from commlens.matching.answer import Disagree
from commlens.model.collective import CollectiveArgs
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

_OTHER_OPS_HEADING = "Operations"
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


class CycleStep(msgspec.Struct, frozen=True):
    """One rank of a cycle, and the ranks that it waits for."""

    rank: int
    collective: str  # "all_reduce #3 of the default group"
    where: str
    absent: Sequence[int]
    op: str = ""  # "all_reduce"


def group_name(label: str | None) -> str:
    """Return the name of the group with a label: ``"group dp"``, ``"the default group"``."""
    if label is None:
        return "an unknown group"
    return f"group {label}" if label else "the default group"


def mismatch_text(answer: Disagree, subject: Subject, rows: Sequence[Row]) -> str:
    """Return the message for ranks that disagree.

    Args:
        answer: the aspect that they disagree in.
        subject: the collective.
        rows: all ranks that have announced, in order of rank.
    """
    if answer.aspect == "op":
        first = f"Cannot apply desired operation: {_OTHER_OPS}."
    else:
        first = f"Cannot apply desired operation due to {_MISMATCHES[answer.aspect][0]}."
    return "\n".join(
        [
            first,
            "",
            _operation(subject, rows, answer.aspect),
            f"{_heading(answer.aspect)}:",
            *_table(answer.aspect, rows),
        ]
    )


def absence_text(
    kind: str,
    subject: Subject,
    rows: Sequence[Row],
    absent: Mapping[int, str],
    waited_s: float,
    behind: Sequence[CycleStep] = (),
) -> str:
    """Return the message for ranks that do not arrive.

    Args:
        kind: "missing" or "dead".
        subject: the collective that the others wait in.
        rows: the ranks that have arrived.
        absent: the whereabouts of the others, by rank: "has finished", "is in load_batch
            (train.py:30)".
        waited_s: how long the others have waited, in seconds.
        behind: further ranks that wait, for those that wait.
    """
    fact = _absence(kind, absent, waited_s)
    table = _table("missing", [*rows, *(Row(rank, None, where) for rank, where in absent.items())])
    held_up = ["Held up by this:", *map(_wait_line, behind)] if behind else []
    return "\n".join(
        [
            f"Cannot apply desired operation: {fact}.",
            "",
            _operation(subject, rows, "missing"),
            "Ranks:",
            *table,
            *held_up,
        ]
    )


def _absence(kind: str, absent: Mapping[int, str], waited_s: float) -> str:
    ranks = ranks_phrase(absent)
    if kind == "dead":
        return f"{ranks} {verb(absent, 'has', 'have')} ended and will not take part"
    return f"{ranks} did not take part within {waited_s:.0f} s"


def absence_refusal(
    kind: str,
    subject: Subject,
    rows: Sequence[Row],
    absent: Mapping[int, str],
    waited_s: float,
) -> Refusal:
    """Return the facts of :func:`absence_text`, which takes the same arguments."""
    return Refusal(
        kind,
        reason=_absence(kind, absent, waited_s),
        operation=_operation_name(subject, rows, "missing"),
        absent=tuple(absent),
    )


def mismatch_refusal(
    aspect: str,
    subject: Subject,
    rows: Sequence[Row],
    leaves: LeafDisagreement | None = None,
) -> Refusal:
    """Return the facts of a message about ranks that disagree in ``aspect``: of a user's function,
    in these ``leaves`` of its arguments.
    """
    tables = _leaf_tables(leaves, rows) if leaves is not None else [_call_rows(aspect, rows)]
    return Refusal(
        f"mismatch/{aspect}",
        aspect=aspect,
        reason=_MISMATCHES[aspect][0] if aspect in _MISMATCHES else _OTHER_OPS,
        operation=_operation_name(subject, rows, aspect),
        heading=_heading(aspect),
        rows=tuple(itertools.islice(itertools.chain.from_iterable(tables), _ROWS_KEPT)),
    )


def cycle_refusal(steps: Sequence[CycleStep]) -> Refusal:
    """Return the facts of :func:`cycle_text`."""
    waits = (
        RefusedWait(step.rank, step.collective, tuple(step.absent), step.where) for step in steps
    )
    return Refusal("cycle", reason=_CYCLE, waits=tuple(waits))


def tag_text(subject: Subject, rows: tuple[Row, Row], waited_s: float, where: str) -> str:
    """Return the message for a receive whose sender has only sent a message with another tag.

    Args:
        subject: the message that is waited for.
        rows: the receive, and the sender's message with the other tag.
        waited_s: how long the receiver has waited, in seconds.
        where: the sender's whereabouts, "" if unknown.
    """
    receive, send = rows
    first = (
        f"Cannot apply desired operation due to tag mismatches. Rank {send.rank} sent no message"
        f" with tag {receive.tag} within {waited_s:.1f} s. It sent one with tag {send.tag}, which"
        f" rank {receive.rank} does not receive."
    )
    ordered = sorted(rows, key=lambda row: row.rank)
    lines = [first, "", _operation(subject, ordered, "p2p"), "Messages:", *_table("p2p", ordered)]
    return "\n".join([*lines, *([f"Rank {send.rank} {where}."] if where else [])])


def no_such_peer_text(subject: Subject, row: Row) -> str:
    """Return the message for a send to, or a receive from, a rank that does not exist."""
    lines = [
        f"Cannot apply desired operation: {_no_such_peer(subject, row)}.",
        "",
        _operation(subject, [row], "p2p"),
        "Messages:",
        *_table("p2p", [row]),
    ]
    return "\n".join(lines)


def no_such_peer_refusal(subject: Subject, row: Row) -> Refusal:
    """Return the facts of :func:`no_such_peer_text`."""
    return Refusal(
        "mismatch/p2p",
        aspect="peer",
        reason=_no_such_peer(subject, row),
        operation=_operation_name(subject, [row], "p2p"),
        culprits=(row.rank,),
    )


def _no_such_peer(subject: Subject, row: Row) -> str:
    does = "sends to" if row.args is not None and row.args.op == "send" else "receives from"
    return (
        f"rank {row.rank} {does} rank {row.peer}, which is not in {group_name(subject.group)}"
        f" [{format_ranks(subject.ranks)}]"
    )


def cycle_text(steps: Sequence[CycleStep]) -> str:
    """Return the message for ranks that wait for each other in a cycle."""
    lines = [
        f"Cannot apply desired operation: {_CYCLE}.",
        "",
        "Cycle:",
    ]
    lines += [*map(_wait_line, steps), ""]
    ops = {step.op for step in steps}
    if ops == {"recv"}:
        lines.append("Each receives before it sends: let one of them send first.")
    elif ops == {"send"}:
        lines.append("Each sends before it receives: let one of them receive first.")
    elif ops & POINT_TO_POINT:
        lines.append(
            "A message's other side is missing, or comes only after a call that waits for this"
            " rank: issue it before that call."
        )
    else:
        lines.append(
            "Each has not reached the collective of another: let all of them issue these in the"
            " same order, and leave none out."
        )
    return "\n".join(lines)


def _wait_line(step: CycleStep) -> str:
    return (
        f"  - Rank {step.rank}: waits in {step.collective} for {ranks_phrase(step.absent)}  "
        f" {step.where}".rstrip()
    )


def leaves_text(answer: LeafDisagreement, subject: Subject, rows: Sequence[Row]) -> str:
    """Return the message for ranks that call a user's function with different arguments.

    Args:
        answer: the aspect that they disagree in, and its places in the arguments.
        subject: the call and its group.
        rows: all ranks that have announced, in order of rank.
    """
    return "\n".join(
        [
            f"Cannot apply desired operation due to {_MISMATCHES[answer.aspect][0]}.",
            "",
            _operation(subject, rows, answer.aspect),
            *_leaves_table(answer, rows),
        ]
    )


def _leaves_table(answer: LeafDisagreement, rows: Sequence[Row]) -> list[str]:
    if not answer.at:
        return ["The arguments differ, but have too many elements to show where."]
    heading, lines = _heading(answer.aspect), []
    for alike in _leaf_tables(answer, rows):
        argument = alike[0].argument
        lines += [
            f"{heading} of {argument}:" if argument else f"{heading}:",
            *_lines(answer.aspect, alike),
        ]
    more = len(answer.at) - _LEAVES_SHOWN
    return [*lines, *([f"... and {more} more"] if more > 0 else [])]


def _leaf_tables(answer: LeafDisagreement, rows: Sequence[Row]) -> Iterator[list[RefusedRow]]:
    """Yield the rows of each place in the arguments that differs, of the first few places."""
    places = {row.rank: row.where for row in rows}
    for path, cells_of in answer.at[:_LEAVES_SHOWN]:
        at_path = [(rank, cells, places.get(rank, "")) for rank, cells in cells_of.items()]
        yield _join_alike(at_path, path)


def _operation(subject: Subject, rows: Sequence[Row], aspect: str) -> str:
    return f"Operation: {_operation_name(subject, rows, aspect)}"


def _operation_name(subject: Subject, rows: Sequence[Row], aspect: str) -> str:
    """Return the operation's name and where it is: the library's name if a library issued it."""
    arrived = [row.args for row in rows if row.args is not None]
    names = sorted({row.name for row in rows if row.args is not None and row.name})
    ops = {args.op for args in arrived}
    plain = (
        f"torch.distributed.{next(iter(ops))}"
        if len(ops) == 1 and not any("." in op for op in ops)
        else ""
    )
    group = "default group" if subject.group == "" else group_name(subject.group)
    where = f"{group}, ranks {format_ranks(subject.ranks)}, #{subject.number}"
    roots = {args.root for args in arrived}
    if len(roots) == 1 and (root := next(iter(roots))) is not None:
        where += f", src {root}" if ops & SENT_BY_ROOT else f", dst {root}"
    if aspect == "op" or not names:
        return f"{f'`{plain}`  ' if plain else ''}({where})"
    if len(names) == 1 and plain and not names[0].startswith("torch.distributed."):
        where = f"{plain}, {where}"
    return f"{', '.join(f'`{name}`' for name in names)}  ({where})"


def _heading(aspect: str) -> str:
    return _MISMATCHES[aspect][1] if aspect in _MISMATCHES else _OTHER_OPS_HEADING


def _table(aspect: str, rows: Sequence[Row]) -> list[str]:
    return _lines(aspect, _call_rows(aspect, rows))


def _call_rows(aspect: str, rows: Sequence[Row]) -> list[RefusedRow]:
    return _join_alike([(row.rank, _cells(aspect, row), row.where) for row in rows])


def _join_alike(
    rows: Sequence[tuple[int, tuple[str, str], str]], argument: str = ""
) -> list[RefusedRow]:
    """Return one row for all ranks with the same content, in order of their first rank. Each of
    ``rows`` has a rank, two cells, and a call site.
    """
    grouped: dict[tuple[tuple[str, str], str], list[int]] = {}
    for rank, cells, where in sorted(rows, key=lambda row: row[0]):
        grouped.setdefault((cells, where), []).append(rank)
    return [
        RefusedRow(tuple(ranks), cells, where, argument)
        for (cells, where), ranks in grouped.items()
    ]


def _lines(aspect: str, rows: Sequence[RefusedRow]) -> list[str]:
    """Return the rows as lines of a table whose columns are aligned."""
    heads = [f"{_head(aspect, row.ranks)}:" for row in rows]
    width = max((len(head) for head in heads), default=0)
    widths = [max((len(row.cells[i]) for row in rows), default=0) for i in range(2)]
    lines = []
    for head, row in zip(heads, rows, strict=True):
        shown = "  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row.cells) if widths[i])
        lines.append(f"  - {head.ljust(width)} {shown}   {row.where}".rstrip())
    return lines


def _head(aspect: str, ranks: Sequence[int]) -> str:
    if aspect == "shape":
        return ranks_phrase(ranks, "Process", "Processes")
    return ranks_phrase(ranks, "Rank", "Ranks")


def _cells(aspect: str, row: Row) -> tuple[str, str]:
    args = row.args
    if args is None:
        return "has not arrived", ""
    specs = args.payload
    shapes = ", ".join(str(list(spec.shape)) for spec in specs[:4]) + (
        f", ... ({len(specs)} tensors)" if len(specs) > 4 else ""
    )
    dtypes = ", ".join(sorted({spec.dtype for spec in specs}))
    tensors = f"{shapes} {dtypes}".strip()
    if args.op in POINT_TO_POINT:
        peer = f"rank {row.peer}" if row.peer is not None else "any rank"
        return f"{args.op} {'to' if args.op == 'send' else 'from'} {peer}, tag {row.tag}", tensors
    if aspect in ("op", "missing"):
        through = (
            f" of {row.name}"
            if row.name not in ("", args.op) and not row.name.startswith("torch.distributed.")
            else ""
        )
        return _op_words(args) + through, tensors
    if aspect == "dtype":
        return dtypes, shapes
    if aspect == "reduce-op":
        return args.reduce_op or "unknown", tensors
    if aspect == "root":
        return f"root {args.root}", tensors
    if aspect == "device":
        return ", ".join(sorted({spec.device for spec in specs})), tensors
    if aspect == "layout":
        orders = {
            spec.layout if spec.layout != "strided" else _order(spec.memory_order) for spec in specs
        }
        return ", ".join(sorted(orders)), tensors
    if aspect == "splits":
        return (
            (
                f"sends {list(args.input_splits) or 'even'}, receives"
                f" {list(args.output_splits) or 'even'}"
            ),
            tensors,
        )
    return shapes or "no tensor", dtypes


def _op_words(args: CollectiveArgs) -> str:
    words = f"`{args.op}`"
    if args.root is not None:
        words += f" with root {args.root}"
    if args.reduce_op is not None:
        words += f" {args.reduce_op}"
    return words


def _order(order: tuple[int, ...] | None) -> str:
    return "row-major" if order is None else f"dimensions in order {list(order)}"
