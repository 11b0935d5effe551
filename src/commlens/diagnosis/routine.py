"""A rank's routine: compare what a rank issues with its own history.

Training repeats itself. A victim simply stops somewhere in its period; the culprit leaves it. This breaks ties that a
comparison with the other ranks cannot, such as between the two ranks of a pair.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Protocol

from commlens.diagnosis.index import RankView
from commlens.model.collective import Collective

_CONTEXTS = (64, 32, 16, 8, 4, 2, 1)
_LOOK_BACK = 4096
_REPEATS = 3
"""Times that a stretch of collectives must have been repeated to be a routine, where no optimizer steps show it."""
_LONG_RUN = 256
"""So many collectives that repeat one stretch are no loop over layers: even a collective that is new then leaves the routine."""


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


def _deviation(text: str, since: int, sure_from: int) -> int | None:
    """Return the first position, from ``since`` on, whose letter history did not lead one to expect. None without such a position."""
    for position in range(max(1, since), len(text)):
        expected = _expected(text, position, sure=position >= sure_from)
        if expected is not None and text[position] not in expected:
            return position
    return None


def expected_token(tokens: Sequence[Hashable], position: int, *, sure: bool) -> bool | None:
    """Whether the token at ``position`` is one that history led one to expect there; None without such a history.

    Args:
        tokens: the history.
        position: of the token.
        sure: whether what repeats in the history is known to be steps, not layers or parameters.
    """
    text = _as_text(list(tokens))
    expected = _expected(text, position, sure=sure)
    return None if expected is None else text[position] in expected


def _expected(text: str, position: int, *, sure: bool) -> set[str] | None:
    """Return the letters that followed the longest earlier occurrence of the context before ``position``.

    None without an earlier occurrence, or if a short context was followed by different letters. Unless ``sure``, also None if what
    repeats may be a loop over layers or parameters: all loops end once.
    """
    history = text[:position]
    for length in _CONTEXTS:
        if length > position:
            continue
        context = history[-length:]
        sequels: set[str] = set()
        seen = 0
        at = latest = history.rfind(context, 0, position - 1)
        while at >= 0 and seen < 16:
            sequels.add(text[at + length])
            seen += 1
            at = history.rfind(context, 0, at + length - 1)
        if seen >= (2 if length < 4 else 1):
            period = position - length - latest
            known = len(sequels) == 1 or length >= 8
            return sequels if known and (sure or _is_inside_loop(text, position, period)) else None
    return None


def _is_inside_loop(text: str, position: int, period: int) -> bool:
    """Return whether the letters before ``position`` repeat for long with this period, and the letter there does not just end that loop."""
    start = position
    while start > period and text[start - 1] == text[start - 1 - period]:
        start -= 1
    run = position - start
    if run < min(_REPEATS * period, _CONTEXTS[0]):
        return False
    return run >= _LONG_RUN or text[position] in text[position - period : position]


def _as_text(tokens: Sequence[Hashable]) -> str:
    """Map each different token to one character, because searching a string is fast."""
    letters: dict[Hashable, str] = {}
    for one in tokens:
        if one not in letters:
            code = len(letters) + 0x100
            letters[one] = chr(code if code < 0xD800 else code + 0x800)
    return "".join(letters[one] for one in tokens)


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


def leaves_routine_at(view: RankView) -> tuple[Collective, Collective | None] | None:
    """Return the op with which a rank leaves its routine, and the op that it used to issue in that place.

    It is looked for from the view's ``routine_since`` on, by default in the last two optimizer steps.
    """
    ops, since = view.history, view.routine_since
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
    sure_from = next((i for i in range(since, length) if view.is_past_first_step(ops[skipped + i])), length)
    for text in _texts(ops):
        position = _deviation(text, since, sure_from)
        if position is not None:
            expected = _expected(text, position, sure=position >= sure_from) or set()
            usual = next((i for i in range(position - 1, -1, -1) if text[i] in expected), None)
            return ops[skipped + position], ops[skipped + usual] if usual is not None else None
    return None


def ever_leaves_routine(view: RankView) -> bool:
    """Return whether a rank left its routine anywhere in its records."""
    ops = view.history[-_LOOK_BACK:]
    sure_from = next((i for i, op in enumerate(ops) if view.is_past_first_step(op)), len(ops))
    return _deviation(_texts(ops)[0], 1, sure_from) is not None
