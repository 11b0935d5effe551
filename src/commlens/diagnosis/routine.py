"""A rank's routine: compare what a rank issues with its own history.

Training repeats itself. A victim simply stops somewhere in its period; the culprit leaves it. This breaks ties that a
comparison with the other ranks cannot, such as between the two ranks of a pair.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from commlens.model.collective import Collective

_CONTEXTS = (64, 32, 16, 8, 4, 2, 1)
_LOOK_BACK = 4096


def position_in(history: Sequence[Collective], op: Collective) -> int | None:
    """Return the position of an op in a rank's history, which is ordered by index; None if it is not there."""
    position = bisect_left(history, op.index, key=lambda each: each.index)
    return position if position < len(history) and history[position].index == op.index else None


def token(op: Collective) -> Hashable:
    """Return what identifies an op in a rank's routine: its kind, group, peer and root, the lines that issue it, and its sizes."""
    sizes = tuple((spec.shape, spec.dtype) for spec in op.args.inputs[:4])
    return (op.op, op.channel.group.name, op.channel.group.incarnation, op.channel.device, op.peer, op.args.root, op.call_lines, sizes)


def exact_tokens(ops: Sequence[Collective]) -> list[Hashable]:
    """Return the tokens with dtypes and reduce ops, for ops that met and disagree.

    A reduce op that has not been read yet is assumed to be the first known one of the same token.
    """
    known: dict[Hashable, str] = {}
    found: list[Hashable] = []
    for op in ops:
        here = (token(op), tuple(spec.dtype for spec in (op.args.inputs or op.args.outputs)[:4]))
        if op.args.reduce_op is not None:
            known.setdefault(here, op.args.reduce_op)
        found.append(here)
    return [(here, op.args.reduce_op or known.get(here)) for here, op in zip(found, ops, strict=True)]


def loose_token(op: Collective) -> Hashable:
    """Return the token without line and sizes, for programs in which these vary."""
    return (op.op, op.channel.group.name, op.channel.group.incarnation, op.channel.device, op.peer)


def _deviation(text: str, since: int) -> int | None:
    """Return the first position, from ``since`` on, whose letter history did not lead one to expect. None without such a position."""
    for position in range(max(1, since), len(text)):
        expected = _expected(text, position)
        if expected is not None and text[position] not in expected:
            return position
    return None


def expected_token(tokens: Sequence[Hashable], position: int) -> bool | None:
    """Whether the token at ``position`` is one that history led one to expect there; None without such a history."""
    text = _as_text(list(tokens))
    expected = _expected(text, position)
    return None if expected is None else text[position] in expected


def _expected(text: str, position: int) -> set[str] | None:
    """Return the letters that followed the longest earlier occurrence of the context before ``position``.

    None without an earlier occurrence, or if a short context was followed by different letters.
    """
    history = text[:position]
    for length in _CONTEXTS:
        if length > position:
            continue
        context = history[-length:]
        sequels: set[str] = set()
        seen = 0
        at = history.rfind(context, 0, position - 1)
        while at >= 0 and seen < 16:
            sequels.add(text[at + length])
            seen += 1
            at = history.rfind(context, 0, at + length - 1)
        if seen >= (2 if length < 4 else 1):
            return sequels if len(sequels) == 1 or length >= 8 else None
    return None


def _as_text(tokens: Sequence[Hashable]) -> str:
    """Map each different token to one character, because searching a string is fast."""
    letters: dict[Hashable, str] = {}
    for one in tokens:
        if one not in letters:
            code = len(letters) + 0x100
            letters[one] = chr(code if code < 0xD800 else code + 0x800)
    return "".join(letters[one] for one in tokens)


def letters(*columns: Any) -> str:
    """Map each different row of several columns of numbers to one character."""
    import numpy as np

    code = np.zeros(len(columns[0]), "int64")
    for column in columns:
        _, column = np.unique(column, return_inverse=True)
        _, code = np.unique(code * (int(column.max(initial=0)) + 1) + column, return_inverse=True)
    code = code + 0x100
    code[code >= 0xD800] += 0x800
    return str(code.astype("<u4").tobytes().decode("utf-32-le"))


class Texts(Protocol):
    """Operations of a rank that can map their own tokens to characters."""

    def texts(self) -> tuple[str, str]:
        """Return one character for each operation: of its tokens, and of its loose tokens."""


def _texts(ops: Sequence[Collective]) -> tuple[str, str]:
    texts = getattr(ops, "texts", None)
    if texts is not None:
        strict, loose = texts()
        return strict[-_LOOK_BACK:], loose[-_LOOK_BACK:]
    ops = ops[-_LOOK_BACK:]
    return _as_text([token(op) for op in ops]), _as_text([loose_token(op) for op in ops])


def leaves_routine_at(ops: Sequence[Collective], since: int | None = None) -> tuple[Collective, Collective | None] | None:
    """Return the op with which a rank leaves its routine, and the op that it used to issue in that place.

    Args:
        ops: all ops that the rank issued.
        since: the first position to look at; by default the last two optimizer steps are.
    """
    if not ops:
        return None
    skipped = max(0, len(ops) - _LOOK_BACK)
    length = len(ops) - skipped
    last_step = ops[-1].step
    if since is not None:
        since = max(1, since - skipped)
    elif ops[skipped].step < last_step - 1:
        since = next(i for i in range(length) if ops[skipped + i].step >= last_step - 1)
    else:
        since = max(1, length // 2, length - 64)
    for text in _texts(ops):
        position = _deviation(text, since)
        if position is not None:
            expected = _expected(text, position) or set()
            usual = next((i for i in range(position - 1, -1, -1) if text[i] in expected), None)
            return ops[skipped + position], ops[skipped + usual] if usual is not None else None
    return None
