"""The branches of a program that depend on data: the lines at which ranks read values that one rank
alone cannot know, and the answers that ``--branch`` gives there.

In ``if loss.item() > 3`` at line 81, where an all_reduce wrote ``loss``, a rank of a fake world
takes one of two branches: ``BranchLine(<train.py:81>, "truth", alike=True, taken=(False,))``.
``--branch train.py:81=true,false`` is ``Branch("train.py", 81, (True, False))``: the program runs
once with each of its two choices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from commlens.errors import CommandError
from commlens.model.collective import Frame
from commlens.model.grouping import grouped

Value = bool | int | float

How = Literal[
    "truth",  # a truth value: `if loss.isnan()`, or a comparison with a number that was read
    "number",  # a number that went where it cannot be followed: int(), tolist(), numpy
    "shape",  # a shape that depends on values: nonzero, a boolean index
]


Answers = dict[tuple[str, int, str, tuple[tuple[int, ...], ...]], list[tuple[Value, bool]]]
"""The answers that one rank got to its reads of values that collectives made the same on ranks.

The keys are the file, the line, the type of the value, and the groups whose members have it alike
(none: the whole world). The values are the answers in the order of the reads, each with whether the
rank knew the value: ``{("train.py", 81, "bool", ()): [(True, False), (False, True)]}``.
"""


class Moment(NamedTuple):
    """The moment at which a rank asked for a value."""

    calls: int
    """The number of collectives and messages that the rank had issued."""
    calls_in: int
    """The number of those in the groups whose members have the value alike."""


class BranchLine(msgspec.Struct, frozen=True):
    """A line of the program that asked for a value of a tensor that a run of one rank alone cannot
    know.
    """

    frame: Frame
    how: How
    alike: bool = False
    """Collectives made the value the same on all ranks."""
    taken: tuple[Value, ...] = ()
    """The different answers that the line got in this run; none for ``shape`` and arrays."""
    forced: bool = False
    """``--branch`` gave the answers."""
    received: bool = False
    """Only some ranks received the value; the others know it, or do not need it."""
    asked: tuple[Moment, ...] = ()
    """The moments at which it was asked, in order."""
    replaceable: bool = False
    """Only floats went to places where they cannot be followed, so other numbers can be tried
    instead.
    """
    idle: bool = False
    """The rank did the same when it got other numbers."""

    @property
    def is_open(self) -> bool:
        """Check whether a real run may take another branch here."""
        return not self.forced and not self.idle

    def is_reached(self, calls: float) -> bool:
        """Check whether a rank asks here before it has issued this number of calls."""
        return not self.asked or self.asked[0].calls < calls

    @property
    def certain(self) -> bool:
        """Whether the program was seen to take a branch by the value; False: it may have taken
        one.
        """
        return self.how != "number"


class Choice(msgspec.Struct, frozen=True):
    """The answer that a line of the program gets."""

    file: str
    line: int
    value: Value

    def is_at(self, file: str, line: int) -> bool:
        """Check whether the choice is for this line. ``file`` is a full path; the choice may hold
        only its end.
        """
        return line == self.line and (file == self.file or file.endswith("/" + self.file))

    def __str__(self) -> str:
        return f"{self.file}:{self.line}={_text(self.value)}"


class Branch(msgspec.Struct, frozen=True):
    """A line of the program, and the answers to try there."""

    file: str
    line: int
    values: tuple[Value, ...]

    @property
    def choices(self) -> list[Choice]:
        """One choice for each answer."""
        return [Choice(self.file, self.line, value) for value in self.values]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}={','.join(map(_text, self.values))}"


def parse_branch(text: str) -> Branch:
    """Read ``"train.py:81=true,false"``, or ``"moe.py:40=0,4"`` where a number is read.

    Raises:
        CommandError: the text says something else.
    """
    place, equals, answers = text.partition("=")
    file, _, line = place.rpartition(":")
    try:
        if not (file and line and equals):
            raise ValueError
        values = tuple(dict.fromkeys(_value(answer) for answer in answers.split(",")))
        return Branch(file.removeprefix("./"), int(line), values)
    except ValueError:
        raise CommandError(
            f"--branch {text!r} names no line with its answers: give FILE:LINE=true,false, or"
            " FILE:LINE=0,1 for a line that reads a number."
        ) from None


def combinations(branches: Sequence[Branch]) -> Iterator[tuple[Choice, ...]]:
    """Yield the combinations of choices, one choice for each branch, in the order of how many
    differ from the first answers. So if not all are tried, each branch alone has been.
    """
    for changed in range(len(branches) + 1):
        for places in itertools.combinations(range(len(branches)), changed):
            yield from itertools.product(
                *(
                    branch.choices[1:] if place in places else branch.choices[:1]
                    for place, branch in enumerate(branches)
                )
            )


def number_of_combinations(branches: Iterable[Branch]) -> int:
    """Count what :func:`combinations` yields."""
    return math.prod(len(branch.values) for branch in branches)


def merged(decisions: Iterable[BranchLine]) -> list[BranchLine]:
    """Merge the decisions of several ranks and runs: one for each line and ``how``, in the order of
    their lines.
    """
    found: dict[tuple[str, int, How], BranchLine] = {}
    for each in decisions:
        key = (each.frame.file, each.frame.line, each.how)
        known = found.get(key)
        found[key] = each if known is None else _join(known, each)
    return [found[key] for key in sorted(found)]


def doubtful(
    decisions: Sequence[Sequence[BranchLine]], calls: Sequence[float] = ()
) -> list[BranchLine]:
    """Return the decisions by which ranks may have taken branches that do not fit together: a real
    run has other values.

    Args:
        decisions: of each rank.
        calls: the number of calls that each rank issues before it waits for ever; decisions after
            these do not matter. None: all calls.
    """
    lines = grouped(
        ((each.frame.file, each.frame.line, each.how), (each, issued))
        for own, issued in zip(decisions, calls or [math.inf] * len(decisions), strict=True)
        for each in own
        if each.is_open
    )
    diverging = [asked for asked in lines.values() if _may_diverge(asked, len(decisions))]
    return merged(each for asked in diverging for each, _ in asked)


def _may_diverge(asked: Sequence[tuple[BranchLine, float]], ranks: int) -> bool:
    """Check whether a line may send ranks into different branches in a real run, before they wait
    for ever.

    Args:
        asked: the line as each rank met it, with the number of calls that the rank issues.
        ranks: number of all ranks, also of those that did not come to the line.
    """
    if not any(each.is_reached(issued) for each, issued in asked):
        return False
    if _asked_at_different_moments(asked):
        return True
    decisions = [each for each, _ in asked]
    if all(each.alike for each in decisions):
        return False
    if decisions[0].how != "truth" or len({each.taken for each in decisions}) > 1:
        return True
    # All went the same way by a value that may differ in a real run. Where other ranks did not come
    # to the line, the value may be one that those send and know.
    return len(decisions) < ranks and any(each.received for each in decisions)


def _asked_at_different_moments(asked: Sequence[tuple[BranchLine, float]]) -> bool:
    """Check whether ranks asked the same question at different moments.

    A value that ranks have alike sends them into the same branch only if they ask for it at the
    same moment: a rank that runs alone leaves a loop at once in which the others would keep it.
    """
    questions = [
        [(moment.calls_in, moment.calls < issued) for moment in each.asked]
        for each, issued in asked
    ]
    for same_question in itertools.zip_longest(*questions):
        moments = [moment for moment in same_question if moment is not None]
        if len({calls for calls, _ in moments}) > 1 and any(reached for _, reached in moments):
            return True
    return False


def unmet(branches: Iterable[Branch], decisions: Iterable[BranchLine]) -> list[Branch]:
    """Return the branches at whose line no run asked for a value."""
    met = [(each.frame.file, each.frame.line) for each in decisions if each.forced]
    return [
        branch
        for branch in branches
        if not any(branch.choices[0].is_at(file, line) for file, line in met)
    ]


def _join(one: BranchLine, other: BranchLine) -> BranchLine:
    return msgspec.structs.replace(
        one,
        alike=one.alike and other.alike,
        taken=tuple(
            {(type(each), repr(each)): each for each in (*one.taken, *other.taken)}.values()
        ),
        forced=one.forced and other.forced,
        received=one.received or other.received,
        asked=max(one.asked, other.asked, key=len),
        replaceable=one.replaceable and other.replaceable,
        idle=one.idle and other.idle,
    )


def _value(text: str) -> Value:
    text = text.strip().lower()
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return float(text)


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


# --- values that are the same on ranks


def common_answers(answers: Mapping[int, Answers]) -> Answers:
    """Return one answer for all ranks to each read of a value that is the same on them: that of a
    rank that knows the value, else that of the first rank that read it.

    In a fake world each rank reads the content of its own buffer. If ranks read different ones,
    they would take branches that no real run takes.
    """
    common: Answers = {}
    for _, own in sorted(answers.items()):
        for read, given in own.items():
            known = common.setdefault(read, [])
            known += given[len(known) :]
            for place, (value, is_known) in enumerate(given):
                if is_known and not known[place][1]:
                    known[place] = value, is_known
    return common


def disagreeing(answers: Mapping[int, Answers], agreed: Answers) -> list[int]:
    """Return the ranks that got another answer somewhere."""
    return [
        rank
        for rank, own in sorted(answers.items())
        if any(
            repr(mine) != repr(theirs)  # NaN equals NaN
            for read, given in own.items()
            for (mine, _), (theirs, _) in zip(given, agreed[read], strict=False)
        )
    ]
