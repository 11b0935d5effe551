"""A rank's routine: compare what a rank issues with its own history.

Training repeats itself. A victim simply stops somewhere in its period; the culprit leaves it. This
breaks ties that a comparison with the other ranks cannot, such as between the two ranks of a pair.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from commlens.diagnosis.index.job_index import JobIndex, RankView
from commlens.model.collective import Collective

_CONTEXTS = (64, 32, 16, 8, 4, 2, 1)
_LOOK_BACK = 4096
_SEEN = 2  # times that a context must have been seen: once is no routine
_REPEATS = 3
"""Times that a stretch of collectives must have been repeated to be a routine, where no optimizer
steps show it.
"""
# times that a rank passed a place, after which a new way from there leaves the routine
_PASSED_OFTEN = 4
_LONGEST_LOOP = 32  # ops of a round of a loop that is told as a whole
_RECENT = 2048  # records of a rank that are its routine where ranks disagree
_MAY_LEAVE_WITHIN = 16  # records before a disagreement in which a rank may have left its routine
_LONGEST_VISIT = 64  # ops in a part of the program that is new
_LONG_RUN = 256
"""So many collectives that repeat one stretch are no loop over layers: even a collective that is
new then leaves the routine.
"""

_TokensOf = Callable[[Sequence[Collective]], list[Hashable]]


def position_in(history: Sequence[Collective], op: Collective) -> int | None:
    """Return the position of an op in a rank's history, which is ordered by index; None if it is
    not there.
    """
    position = bisect_left(history, op.index, key=lambda each: each.index)
    return position if position < len(history) and history[position].index == op.index else None


def token(op: Collective) -> Hashable:
    """Return what identifies an op in a rank's routine: its kind, group, peer and root, the lines
    that issue it, and its sizes.
    """
    sizes = tuple((spec.shape, spec.dtype) for spec in op.args.inputs[:4])
    return (*loose_token(op), sizes)


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
    return [
        (here, op.args.reduce_op or known.get(here)) for here, op in zip(found, ops, strict=True)
    ]


def loose_token(op: Collective) -> tuple[Hashable, ...]:
    """Return the token without sizes, for programs in which these vary."""
    return (
        op.op,
        op.channel.group.name,
        op.channel.group.incarnation,
        op.channel.device,
        op.peer,
        op.args.root,
        op.call_lines,
    )


def follows_history(tokens: Sequence[Hashable], position: int, *, sure: bool) -> bool | None:
    """Return whether the token at ``position`` is one that history led one to expect there; None if
    history does not decide.

    Args:
        tokens: the history.
        position: of the token.
        sure: whether what repeats in the history is known to be steps, not layers or parameters.
    """
    return _follows(_as_text(tokens), position, sure=sure)


def leaves_routine(
    ops: Sequence[Collective], tokens: Sequence[Hashable], position: int, *, sure: bool
) -> bool | None:
    """Return whether a rank leaves its routine with the op at ``position``; None if its history
    does not decide.

    Args:
        ops: the rank's history.
        tokens: one for each op, up to ``position`` at least.
        position: of the op.
        sure: whether what repeats in the history is known to be steps, not layers or parameters.
    """
    follows = follows_history(tokens, position, sure=sure)
    return (
        None if follows is None or (not follows and _is_first_visit(ops, position)) else not follows
    )


def _is_first_visit(ops: Sequence[Collective], position: int) -> bool:
    """Return whether a rank has just entered a part of the program where it never was before: then
    the others may be wrong to stay away.

    It did if its last collectives, up to this one, are all from lines that it issued nothing from
    before them.
    """
    lines = ops[position].call_lines
    if _has_passed_often(ops, position):
        # It passed this place in many steps and never went there. But what the function with the
        # loop does after it is new as well.
        is_new = all(op.call_lines != lines for op in ops[:position])
        return is_new and _is_after_loop(lines, ops[position - 1].call_lines)
    first = next(i for i in range(position + 1) if ops[i].call_lines == lines)
    if (
        not lines
        or first < position - _LONGEST_VISIT
        or ops[position].step >= ops[first].step + _REPEATS
    ):
        return False
    since = {ops[i].call_lines for i in range(first, position + 1)}
    return first > 0 and all(ops[i].call_lines not in since for i in range(first))


def _has_passed_often(ops: Sequence[Collective], position: int) -> bool:
    """Return whether a rank often went on from the lines of the op before ``position``."""
    passed = ops[position - 1].call_lines
    at = [i for i in range(position - 1) if ops[i].call_lines == passed]
    left = [
        ops[i].step for i in at if ops[i + 1].call_lines != passed or ops[i + 1].step > ops[i].step
    ]
    # Two lines may take turns several times in a step.
    return len(set(left) if ops[position].step else left) >= _PASSED_OFTEN


def _is_after_loop(lines: Sequence[tuple[str, int]], passed: Sequence[tuple[str, int]]) -> bool:
    """Return whether a call comes from a function whose loop made the call before."""
    outside = len(passed) - len(lines)
    return (
        bool(lines)
        and outside > 0
        and lines[0] != passed[outside]
        and lines[1:] == passed[outside + 1 :]
    )


def _follows(text: str, position: int, *, sure: bool) -> bool | None:
    """Return whether the letter at ``position`` follows from the letters before; None if these do
    not decide.
    """
    expected, period = _expected(text, position, sure=sure)
    if not expected or text[position] in expected:
        return True if expected else None
    return False if _departs(text, position, expected, period) else None


def _departs(text: str, position: int, expected: set[str], period: int) -> bool:
    """Return whether an unexpected letter is a departure.

    It is none if it ends the loop that repeats before it: all loops end once. It is none either if
    it is an event that comes from time to time in this place: a checkpoint comes every so many
    steps, which is longer than the context that was compared. Where different events came before,
    none of them need come this time.
    """
    before, letter = text[position - 1], text[position]
    if before + letter not in text[:position]:
        return (
            len(expected) == 1 and letter in text[position - period : position]
        ) or letter not in text[:position]
    return _is_due(text, position, letter) is False or any(
        _is_due(text, position, other) for other in expected
    )


def _is_due(text: str, position: int, letter: str) -> bool | None:
    """Return whether it is time for ``letter``, which has come after every n-th of the letters
    before it; None if n is not constant.
    """
    before = text[position - 1]
    places = [i for i in range(position) if text[i] == before]
    came = [number for number, place in enumerate(places[:-1]) if text[place + 1] == letter]
    intervals = {after - earlier for earlier, after in pairwise(came)}
    return (
        len(places) - 1 - came[-1] >= intervals.pop()
        if len(came) > 2 and len(intervals) == 1
        else None
    )


def _expected(text: str, position: int, *, sure: bool) -> tuple[set[str], int]:
    """Return the letters that followed the longest earlier occurrences of the context before
    ``position``, and how far back the latest is.

    No letters without earlier occurrences, or if a short context was followed by different letters.
    Unless ``sure``, also none if what repeats may be a loop over layers or parameters: all loops
    end once.
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
        if seen >= _SEEN:
            period = position - length - latest
            known = len(sequels) == 1 or length >= 8
            return (
                sequels if known and (sure or _is_inside_loop(text, position, period)) else set()
            ), period
    return set(), 0


def _is_inside_loop(text: str, position: int, period: int) -> bool:
    """Return whether the letters before ``position`` repeat for long with this period, and the
    letter there does not just end that loop.
    """
    start, far = position, max(period, position - _LONG_RUN)
    while start > far and text[start - 1] == text[start - 1 - period]:
        start -= 1
    run = position - start
    if run < min(_REPEATS * period, _CONTEXTS[0]):
        return False
    return run >= _LONG_RUN or text[position] in text[position - period : position]


def _as_text(tokens: Iterable[Hashable]) -> str:
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
    """Return the op with which a rank leaves its routine, and the op that it used to issue in that
    place.

    It is looked for from the view's ``routine_since`` on, by default in the last two optimizer
    steps.
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
    sure_from = next(
        (i for i in range(since, length) if view.has_routine(ops[skipped + i])), length
    )
    for text in _texts(ops):
        position = _departure(ops[skipped:], text, since, sure_from)
        if position is not None:
            expected, _ = _expected(text, position, sure=position >= sure_from)
            usual = next((i for i in range(position - 1, -1, -1) if text[i] in expected), None)
            return ops[skipped + position], ops[skipped + usual] if usual is not None else None
    return None


def expected_next(view: RankView) -> Collective | None:
    """Return the latest op of the kind that a rank's routine leads one to expect after its last
    record; None if it does not decide.
    """
    ops = view.history[-_LOOK_BACK:]
    sure = bool(ops) and view.has_routine(ops[-1])
    for text in _texts(ops):
        expected, _ = _expected(text, len(text), sure=True)
        letter = expected.pop() if len(expected) == 1 else ""
        if letter and (sure or _expected(text + letter, len(text), sure=False)[0]):
            return ops[text.rindex(letter)]
    return None


def ever_leaves_routine(view: RankView) -> bool:
    """Return whether a rank left its routine anywhere in its records."""
    ops = view.history[-_LOOK_BACK:]
    sure_from = next((i for i, op in enumerate(ops) if view.has_routine(op)), len(ops))
    return _departure(ops, _texts(ops)[0], 1, sure_from) is not None


class Loop(NamedTuple):
    """The ops that a rank repeats, up to its last one."""

    round: list[Collective]  # the latest op of each place in it, the first place first
    rounds: int  # that are whole
    more: int  # ops of the last round, if it is not whole

    @property
    def next(self) -> Collective:
        """The latest op of the place after the last one."""
        return self.round[self.more]


def find_loop(view: RankView) -> Loop | None:
    """Return the loop that a rank was in at its last op; None if it repeats nothing, or if the
    place in the loop is uncertain.

    A round comes to each line once: a loop inside of it could end after any number of rounds. It
    lies in one optimizer step; messages may be repeated without steps, and from different lines.
    """
    ops = view.history[-_LOOK_BACK:]
    if view.wrapped or len(ops) < 2 * _SEEN:
        return None
    text = _texts(ops)[1]
    if len(set(text)) == len(text) and all(op.is_point_to_point for op in ops):
        text = _as_text([(op.op, op.channel.key, op.peer) for op in ops])
    period, start = _longest_repetition(text)
    if period < 2 or len(set(text[start : start + period])) < period:
        return None
    rounds, more = divmod(len(text) - start, period)
    if not _is_within_steps(ops[start:], period):
        return None
    latest = ops[len(ops) - period :]
    return Loop([*latest[period - more :], *latest[: period - more]], rounds, more)


def _longest_repetition(text: str) -> tuple[int, int]:
    """Return the period of the longest stretch of repeated letters that ends with the text, and
    where it starts; 0, 0 if nothing is repeated.
    """
    found, longest = (0, 0), 0
    for period in range(1, min(len(text) // _SEEN, _LONGEST_LOOP) + 1):
        start = len(text) - period
        while start > 0 and text[start - 1] == text[start - 1 + period]:
            start -= 1
        run = len(text) - start
        if run >= _SEEN * period and run > longest:
            found, longest = (period, start), run
    return found


def _is_within_steps(ops: Sequence[Collective], period: int) -> bool:
    """Return whether each round of a loop is in a step of its own; of messages, also if there are
    no steps.
    """
    if ops[-1].step == ops[0].step:
        return all(op.is_point_to_point for op in ops)
    steps = [{op.step for op in ops[i : i + period]} for i in range(0, len(ops), period)]
    return all(len(step) == 1 for step in steps) and len(set().union(*steps)) == len(steps)


def _departure(ops: Sequence[Collective], text: str, since: int, sure_from: int) -> int | None:
    """Return the first position, from ``since`` on, at which a rank leaves its routine; None if it
    keeps it.
    """
    for position in range(max(1, since), len(text)):
        if _follows(text, position, sure=position >= sure_from) is False and not _is_first_visit(
            ops, position
        ):
            return position
    return None


def _tokens(ops: Sequence[Collective]) -> list[Hashable]:
    return [token(op) for op in ops]


def _loose_tokens(ops: Sequence[Collective]) -> list[Hashable]:
    return [loose_token(op) for op in ops]


def ranks_off_routine(job: JobIndex, ops: Mapping[int, Collective]) -> tuple[int, ...]:
    """Return the ranks that do here what they never did before in this place; none if all of them
    do.

    First check each rank's op and those that it issued since the previous op of the channel: a rank
    that skips a collective may first meet the others in a later one. Then check earlier ops, too:
    the successor of a skipped collective may pair up unnoticed.
    """
    for since_previous in (True, False):
        for tokens_of in (_tokens, exact_tokens, _loose_tokens):
            odd = [
                rank
                for rank, op in sorted(ops.items())
                if _leaves_routine_near(job.views[rank], op, tokens_of, since_previous)
            ]
            if odd and len(odd) < len(ops):
                return tuple(odd)
    return ()


def _leaves_routine_near(
    view: RankView, op: Collective, tokens_of: _TokensOf, since_previous: bool
) -> bool:
    """Return whether the rank's history led one to expect another op, here or shortly before."""
    history = view.history
    position = position_in(history, op)
    if position is None:
        return False
    oldest = max(0, position - _RECENT)
    first = max(oldest + 1, position - _MAY_LEAVE_WITHIN)
    if since_previous:
        key = op.channel.key
        first = next(
            (i + 1 for i in range(position - 1, first - 1, -1) if history[i].channel.key == key),
            first,
        )
    recent = history[oldest : position + 1]
    tokens = tokens_of(recent)
    return any(
        leaves_routine(recent, tokens, i - oldest, sure=view.has_routine(history[i]))
        for i in range(first, position + 1)
    )
