"""Find whether a rank left its routine: compare what it issues with its own history. And how far
the ranks got at a line.

Training repeats itself. A victim simply stops somewhere in its period; the culprit leaves it. This
breaks ties that a comparison with the other ranks cannot, such as between the two ranks of a pair.

A history is written as a text with one letter for each different op: ``abbcabbcab``, where ``a`` is
the all_gather of one line, ``b`` and ``c`` the all_reduces of two others. After the last ``ab``,
the longest earlier contexts were followed by ``b``. So a rank that issues ``b`` next follows its
routine, and one that issues ``c`` or a new op leaves it; but not if ``b`` is a loop over layers,
which ends at some time, or ``c`` a checkpoint, which comes every n-th time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import msgspec

from commlens.diagnosis.align.tie_break import is_majority
from commlens.diagnosis.index.job_index import JobIndex, RankView
from commlens.model.cause import LastAtLine, Rounds
from commlens.model.collective import Collective
from commlens.text import frame_phrase

_CONTEXTS = (64, 32, 16, 8, 4, 2, 1)  # ops before one that are looked for in the history
_LONG_CONTEXT = 8  # ops: what followed decides, even if several ops did
_OCCURRENCES = 16  # of a context that are looked at, the latest ones
_LOOK_BACK = 4096  # records of a rank that are its history
_SEEN = 2  # times that a context or a round must have been seen: once is no routine
_REPEATS = 3
"""Times that a stretch of collectives must have been repeated to be a routine, where no optimizer
steps show it.
"""
# times that a rank passed a place, after which a new way from there leaves the routine
_PASSED_OFTEN = 4
_LONGEST_LOOP = 32  # ops of one round of a loop that a rank ended in
_RECENT = 2048  # records of a rank that are its routine where ranks disagree
_MAY_LEAVE_WITHIN = 16  # records before a disagreement in which a rank may have left its routine
_LONGEST_VISIT = 64  # ops in a part of the program that is new
_LONG_RUN = 256
"""So many collectives that repeat one stretch are no loop over layers: even a collective that is
new then leaves the routine.
"""

_TokensOf = Callable[[Sequence[Collective]], Iterable[Hashable]]


# --- whether a rank leaves its routine


def leaves_routine(view: RankView, op: Collective) -> bool | None:
    """Return whether a rank's history led one to expect another op; None without such a history."""
    position = position_in(view.history, op)
    if position is None:
        return None
    ops = view.history[: position + 1]
    return _Text(view, ops, _as_text(map(token, ops))).leaves_at(position)


def leaves_routine_at(view: RankView) -> tuple[Collective, Collective | None] | None:
    """Return the op with which a rank leaves its routine, and the op that it used to issue in that
    place.

    It is looked for from the view's ``routine_since`` on, by default in the last two optimizer
    steps; where no steps are counted, in the last 64 ops, at most half of all.
    """
    ops, skipped = view.history[-_LOOK_BACK:], max(0, len(view.history) - _LOOK_BACK)
    if not ops:
        return None
    recent_step = ops[-1].step - 1
    if view.routine_since is not None:
        since = max(1, view.routine_since - skipped)
    elif ops[0].step < recent_step:
        since = next(i for i, op in enumerate(ops) if op.step >= recent_step)
    else:
        since = max(1, len(ops) // 2, len(ops) - 64)
    for text in _texts(view, ops):
        position = _Text(view, ops, text).first_departure(range(since, len(ops)))
        if position is not None:
            expected, _ = _expected(text, position, sure=view.has_routine(ops[position]))
            usual = next((i for i in range(position - 1, -1, -1) if text[i] in expected), None)
            return ops[position], ops[usual] if usual is not None else None
    return None


def ever_leaves_routine(view: RankView) -> bool:
    """Return whether a rank left its routine anywhere in its records."""
    ops = view.history[-_LOOK_BACK:]
    return _Text(view, ops, _texts(view, ops)[0]).first_departure(range(1, len(ops))) is not None


def expected_next(view: RankView) -> Collective | None:
    """Return the latest op of the kind that a rank's routine leads one to expect after its last
    record; None if it does not decide.
    """
    ops = view.history[-_LOOK_BACK:]
    sure = bool(ops) and view.has_routine(ops[-1])
    for text in _texts(view, ops):
        expected, _ = _expected(text, len(text), sure=True)
        letter = expected.pop() if len(expected) == 1 else ""
        if letter and (sure or _expected(text + letter, len(text), sure=False)[0]):
            return ops[text.rindex(letter)]
    return None


def follows_history(tokens: Sequence[Hashable], position: int) -> bool | None:
    """Return whether the token at ``position`` is one that the tokens before led one to expect
    there; None if these do not decide. What repeats counts as steps, not as layers or parameters.
    """
    return _follows(_as_text(tokens), position, sure=True)


class _Text(NamedTuple):
    """Some of a rank's records, and one letter for each."""

    view: RankView
    ops: Sequence[Collective]
    text: str

    def leaves_at(self, position: int) -> bool | None:
        """Return whether the rank leaves its routine with the op at ``position``; None if its
        history does not decide.
        """
        sure = self.view.has_routine(self.ops[position])
        follows = _follows(self.text, position, sure=sure)
        if follows is None or (not follows and _is_first_visit(self.ops, position)):
            return None
        return not follows

    def first_departure(self, positions: Iterable[int]) -> int | None:
        """Return the first of these positions at which the rank leaves its routine; None if it
        keeps it.
        """
        return next((position for position in positions if self.leaves_at(position)), None)


def _follows(text: str, position: int, *, sure: bool) -> bool | None:
    """Return whether the letter at ``position`` follows from the letters before; None if these do
    not decide. ``sure``: what repeats is known to be steps, not layers or parameters.
    """
    expected, period = _expected(text, position, sure=sure)
    if not expected:
        return None
    if text[position] in expected:
        return True
    return False if _is_departure(text, position, expected, period) else None


def _is_departure(text: str, position: int, expected: set[str], period: int) -> bool:
    """Return whether an unexpected letter is a departure.

    It is none if it ends the loop that repeats before it: all loops end once. It is none either if
    it is an event that comes from time to time in this place: a checkpoint comes every so many
    steps, which is longer than the context that was compared.
    """
    before, letter = text[position - 1], text[position]
    if before + letter in text[:position]:  # an event that came in this place before
        is_early = _is_due(text, position, letter) is False
        return is_early or any(_is_due(text, position, other) for other in expected)
    if letter not in text[:position]:
        return True
    # It never came in this place. If it is one of the round that repeats, it comes at the wrong
    # place of it; else it ends that loop. Where different letters came here, none need come.
    return len(expected) == 1 and letter in text[position - period : position]


def _is_due(text: str, position: int, letter: str) -> bool | None:
    """Return whether it is time for ``letter``, which has come after every n-th of the letters
    before it; None if n is not constant. In ``aaacaaacaaacaaa``, the ``c`` comes after every third
    ``a``, and is due.
    """
    before = text[position - 1]
    places = [i for i in range(position) if text[i] == before]
    came = [number for number, place in enumerate(places[:-1]) if text[place + 1] == letter]
    intervals = {after - earlier for earlier, after in pairwise(came)}
    if len(came) < 3 or len(intervals) != 1:
        return None
    return len(places) - 1 - came[-1] >= intervals.pop()


def _expected(text: str, position: int, *, sure: bool) -> tuple[set[str], int]:
    """Return the letters that came at the earlier places like ``position``, and how far back the
    latest of these is: in ``abbcabbcab``, at the end, ``b``, and 4. Places are alike if the same
    letters come before them, as many as possible.

    No letters if there are no such places, or if few letters are the same and different ones
    followed. Unless ``sure``, also none if what repeats may be a loop over layers or parameters:
    all loops end once.
    """
    for length in _CONTEXTS:
        places = [*islice(_places_like(text, position, length), _OCCURRENCES)]
        if len(places) >= _SEEN:
            letters, period = {text[place] for place in places}, position - places[0]
            decides = len(letters) == 1 or length >= _LONG_CONTEXT
            if decides and (sure or _is_inside_loop(text, position, period)):
                return letters, period
            return set(), period
    return set(), 0


def _places_like(text: str, position: int, length: int) -> Iterator[int]:
    """Yield the earlier places before which the same ``length`` letters come as before
    ``position``, the latest first.
    """
    if length <= position:
        context, place = text[position - length : position], position
        while (start := text.rfind(context, 0, place - 1)) >= 0:
            place = start + length
            yield place


def _is_inside_loop(text: str, position: int, period: int) -> bool:
    """Return whether the letters before ``position`` repeat for long with this period, and the
    letter there does not just end that loop: in ``abababab``, an ``a`` or ``b`` does not, a ``c``
    may.
    """
    start, far = position, max(period, position - _LONG_RUN)
    while start > far and text[start - 1] == text[start - 1 - period]:
        start -= 1
    run = position - start
    if run < min(_REPEATS * period, _CONTEXTS[0]):
        return False
    return run >= _LONG_RUN or text[position] in text[position - period : position]


def _is_first_visit(ops: Sequence[Collective], position: int) -> bool:
    """Return whether a rank has just entered a part of the program where it never was before, such
    as the evaluation after the first epoch: then the others may be wrong to stay away.

    It has if its last collectives, up to this one, come from lines that issued none before. After
    many collectives or several steps there, that part is routine. If the rank passed this place
    often and never went there, only what the function with the loop does after it is such a part.
    """
    lines = ops[position].call_lines
    first = next(i for i in range(position + 1) if ops[i].call_lines == lines)
    if _has_passed_often(ops, position):
        return first == position and _is_after_loop(lines, ops[position - 1].call_lines)
    is_long = first < position - _LONGEST_VISIT or ops[position].step >= ops[first].step + _REPEATS
    if not lines or first == 0 or is_long:
        return False
    visited = {op.call_lines for op in ops[first : position + 1]}
    return all(op.call_lines not in visited for op in ops[:first])


def _has_passed_often(ops: Sequence[Collective], position: int) -> bool:
    """Return whether a rank often went on from the lines of the op before ``position``."""
    passed = ops[position - 1].call_lines
    at = [i for i in range(position - 1) if ops[i].call_lines == passed]
    steps = [
        ops[i].step for i in at if ops[i + 1].call_lines != passed or ops[i + 1].step > ops[i].step
    ]
    # Two lines may take turns several times in a step: where steps are counted, it passes once.
    return len(set(steps) if ops[position].step else steps) >= _PASSED_OFTEN


def _is_after_loop(lines: Sequence[tuple[str, int]], passed: Sequence[tuple[str, int]]) -> bool:
    """Return whether a call comes from a function whose loop made the call before: ``validate()``
    at line 30 of ``main``, after ``train_step()`` in the loop at line 20 of ``main``.
    """
    outside = len(passed) - len(lines)
    return (
        bool(lines)
        and outside > 0
        and lines[0] != passed[outside]
        and lines[1:] == passed[outside + 1 :]
    )


# --- a history as a text


def position_in(history: Sequence[Collective], op: Collective) -> int | None:
    """Return the position of an op in a rank's history, which is ordered by index; None if it is
    not there.
    """
    position = bisect_left(history, op.index, key=lambda each: each.index)
    return position if position < len(history) and history[position].index == op.index else None


def token(op: Collective) -> tuple[Hashable, ...]:
    """Return the token that identifies an op in a rank's routine: its kind, group, peer and root,
    the lines that issue it, and its sizes. Those of all_to_all may vary from step to step, as the
    tokens that a router sends, so they are left out.
    """
    return (*loose_token(op), _sizes(op) if op.op != "all_to_all" else ())


def loose_token(op: Collective) -> tuple[Hashable, ...]:
    """Return the token without sizes, for programs in which these vary."""
    return (
        op.op,
        op.channel.group.kind,
        op.channel.group.incarnation,
        op.channel.device,
        op.peer,
        op.args.root,
        op.call_lines,
    )


def _sizes(op: Collective) -> Hashable:
    return tuple((spec.shape, spec.dtype) for spec in op.args.inputs[:4])


def _exact_tokens(ops: Sequence[Collective]) -> list[Hashable]:
    """Return the tokens with all sizes, dtypes and reduce ops, for ops that met and disagree.

    A reduce op that has not been read yet is assumed to be the first known one of the same token.
    """
    known: dict[Hashable, str] = {}
    found: list[Hashable] = []
    for op in ops:
        dtypes = tuple(spec.dtype for spec in (op.args.inputs or op.args.outputs)[:4])
        here = (token(op), _sizes(op), dtypes)
        if op.args.reduce_op is not None:
            known.setdefault(here, op.args.reduce_op)
        found.append(here)
    return [
        (here, op.args.reduce_op or known.get(here)) for here, op in zip(found, ops, strict=True)
    ]


def _texts(view: RankView, ops: Sequence[Collective]) -> tuple[str, str]:
    """Return a rank's ops as a text twice: by their tokens, and by their loose tokens.

    A dump holds few steps, in which not all ways to a line may have been repeated: there, the loose
    one is without the lines.
    """
    tokens: list[tuple[Hashable, ...]] = []
    known: dict[Hashable, tuple[Hashable, ...]] = {}  # records share their parts
    for op in ops:
        parts = (id(op.channel), id(op.args), id(op.stack), op.peer)
        if parts not in known:
            known[parts] = token(op)
        tokens.append(known[parts])
    # the last part of a token is the sizes, the one before it the lines
    loose = [one[: -1 if view.dump is None else -2] for one in tokens]
    return _as_text(tokens), _as_text(loose)


def _as_text(tokens: Iterable[Hashable]) -> str:
    """Map each different token to one character, because searching a string is fast."""
    letters: dict[Hashable, int] = {}
    codes = [0x100 + letters.setdefault(one, len(letters)) for one in tokens]
    return "".join(chr(code if code < 0xD800 else code + 0x800) for code in codes)


# --- the loop in which a rank ended


class Loop(NamedTuple):
    """The ops that a rank repeats, up to its last one: of ``xyzabcabcab``, the round ``abc``, 2
    whole rounds, and 2 more ops.
    """

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
    text = _texts(view, ops)[1]
    if len(set(text)) == len(text) and all(op.is_point_to_point for op in ops):
        # a schedule of a pipeline, written out: each message is from a line of its own
        text = _as_text([(op.op, op.channel.key, op.peer) for op in ops])
    period, start = _longest_repetition(text)
    if period < 2 or len(set(text[start : start + period])) < period:
        return None
    rounds, more = divmod(len(text) - start, period)
    if not _is_within_steps(ops[start:], period):
        return None
    latest = ops[-period:]
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


# --- ranks that disagree


def ranks_off_routine(job: JobIndex, ops: Mapping[int, Collective]) -> tuple[int, ...]:
    """Return the ranks that do here what they never did before in this place; none if all of them
    do.

    First check each rank's op and those that it issued since the previous op of the channel: a rank
    that skips a collective may first meet the others in a later one. Then check earlier ops, too:
    the successor of a skipped collective may pair up unnoticed.
    """
    for since_previous in (True, False):
        for tokens_of in (partial(map, token), _exact_tokens, partial(map, loose_token)):
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
    position = position_in(view.history, op)
    if position is None:
        return False
    recent = view.history[max(0, position - _RECENT) : position + 1]
    here = len(recent) - 1
    first = max(1, here - _MAY_LEAVE_WITHIN)
    if since_previous:
        before = range(here - 1, first - 1, -1)
        first = next((i + 1 for i in before if recent[i].channel.key == op.channel.key), first)
    text = _as_text(tokens_of(recent))
    return _Text(view, recent, text).first_departure(range(first, here + 1)) is not None


# --- how far ranks got at a line

RANKS_MAX = 256
"""In larger jobs, ranks are not counted where there may be many lines to count at."""


def count_rounds(job: JobIndex, op: Collective, *, of_all: bool = False) -> Rounds | None:
    """Return how far the ranks got at the line of an op; None if no majority of the job got equally
    far, or if all did: at train.py:20, rank 3 to all_reduce #38, and ranks 0-2 to #40. With
    ``of_all``, ranks that never came there got to 0.
    """
    by_number: dict[int, list[int]] = defaultdict(list)
    for rank, view in sorted(job.views.items()) if op.source is not None else ():
        numbers = [
            one.sequence_number
            for one in view.history
            if one.op == op.op and one.source == op.source
        ]
        if numbers or (of_all and not view.wrapped):
            by_number[max(numbers, default=0)].append(rank)
    last = [LastAtLine(ranks, number) for number, ranks in by_number.items()]
    last.sort(key=lambda at: (len(at.ranks), at.ranks))
    if len(last) < 2 or not is_majority(len(last[-1].ranks), len(job.views)):
        return None
    return Rounds(op.op, frame_phrase(op.source), last)


def with_next_line(job: JobIndex, rounds: Rounds, ops: Mapping[int, Collective]) -> Rounds:
    """Return rounds with the line to which the ranks went on that got least far, if it is new to
    them, and with the optimizer steps of all ranks, if they did equally many.

    Args:
        job: the indexed ranks.
        rounds: at the line of one of these ops.
        ops: in which the ranks wait, by rank.
    """
    least = min(rounds.last, key=lambda at: at.number)
    behind = {rank: ops[rank] for rank in least.ranks if rank in ops}
    is_new = all(job.views[rank].is_new_line(op) for rank, op in behind.items())
    lines = {frame_phrase(op.source) for op in behind.values()} if is_new and least.number else ()
    steps = {op.step for op in ops.values()}
    return msgspec.structs.replace(
        rounds,
        went_on=next(iter(lines)) if len(lines) == 1 else None,
        steps=max(steps) if len(steps) == 1 else 0,
    )
