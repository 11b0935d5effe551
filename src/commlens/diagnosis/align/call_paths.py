"""Where the call paths of two ranks part: the user's lines on the way to a collective that the
other rank does not have::

    rank 0:  train.py:60 main --> model.py:31 forward
    rank 1:  train.py:61 main --> train.py:45 generate --> model.py:31 forward

Both are in the collective at model.py:31, which tells nothing; the paths part in ``main``. So the
path of rank 1 is "train.py:61 main -> train.py:45 generate -> model.py:31 forward", and its place
is train.py:45, the innermost line that rank 0 does not have.
"""

from __future__ import annotations

from itertools import dropwhile, takewhile
from typing import NamedTuple

from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.collective import Collective, Frame, FrameKind, Stack, user_lines
from commlens.text import frame_phrase

_SHOWN = 5  # lines of a path
_LOOK_BACK = 512  # earlier collectives in which ranks may have met at the same lines


class Path(NamedTuple):
    """A rank's stack from where it leaves that of the other rank, to the innermost line."""

    # the user's innermost line that the other rank does not have: helpers are on both sides
    line: Frame | None
    phrase: str  # "train.py:35 train -> train.py:22 evaluate -> comm.py:5 reduce"
    place: str  # "train.py:22 evaluate"; if they part inside of a library, with the library's line
    caller: str = ""  # "train.py:35 train", where the ranks part, if that is not the place itself

    @property
    def with_caller(self) -> str:
        """``"train.py:22 evaluate, called at train.py:35 train"``: the branch is in the caller."""
        return (
            f"{self.place}, called at {self.caller}"
            if self.caller and self.caller != self.place
            else self.place
        )


def parting_paths_of_ranks(
    job: JobIndex, rank: int, own: Collective, rank_met: int, other: Collective
) -> tuple[Path, Path]:
    """Return the paths to the collectives of ``rank`` and of ``rank_met``, from where they part;
    their own lines if they do not part.

    Ranks may legally come to one collective by different paths (``if rank == 0: ... else: ...``).
    So the rank's stack is compared with its own usual one: that with which it used to meet the
    other rank at the line where the other rank is now, if it did.
    """
    usual = _usual_stack(job, rank, own, rank_met, other)
    from_usual, from_other = parting_paths(own.stack, usual), parting_paths(own.stack, other.stack)
    if from_usual is None or from_other is None:
        return path_of(own), path_of(other)
    mine = from_usual[0]
    line = _new_line(job, rank, own, other)
    if line is not None:
        mine = mine._replace(line=line, place=frame_phrase(line))
    if usual == other.stack:
        return mine, from_other[1]
    # from the first line on that this rank would have reached by its usual path, if there is one
    lines = [*user_lines(other.stack)][::-1]
    missed = [*dropwhile(lambda frame: frame not in usual or frame in own.stack, lines)]
    return mine, _path(missed, own.stack, None) if missed else from_other[1]


def _usual_stack(
    job: JobIndex, rank: int, own: Collective, rank_met: int, other: Collective
) -> Stack:
    """Return the stack with which the rank used to meet the other rank at the line where the other
    rank is now; the other rank's stack if it never did.
    """
    key, lines = own.channel.key, [*user_lines(other.stack)]
    mine, theirs = job.views[rank], job.views[rank_met]
    for number in _earlier_numbers(own) if lines else ():
        my_op, their_op = mine.op_at(key, number), theirs.op_at(key, number)
        if my_op is None or their_op is None:
            break
        if [*user_lines(their_op.stack)] == lines:
            return my_op.stack
    return other.stack


def _earlier_numbers(op: Collective) -> range:
    """Return the numbers of the collectives before one, the newest first."""
    return range(op.sequence_number - 1, max(0, op.sequence_number - _LOOK_BACK), -1)


def _new_line(job: JobIndex, rank: int, own: Collective, other: Collective) -> Frame | None:
    """Return the innermost line on a rank's path on which it has not been before; None if it has
    been on all, or if none of its earlier collectives is recorded.
    """
    ops = (job.views[rank].op_at(own.channel.key, number) for number in _earlier_numbers(own))
    stacks = {id(op.stack): op.stack for op in ops if op is not None}  # ops share their stacks
    if not stacks:
        return None
    known = {*other.stack}.union(*stacks.values())
    return next((frame for frame in user_lines(own.stack) if frame not in known), None)


# --- two stacks


def parting_paths(own: Stack, other: Stack) -> tuple[Path, Path] | None:
    """Return two paths from where they part; None if they are the same, or have no outermost
    function in common.
    """
    mine, only_mine, only_theirs = _differing_frames(own, other)
    common = len(mine) - len(only_mine)
    if not common and not branch_in_one_function(own, other):
        return None
    last = next((frame for frame in reversed(mine[:common]) if frame.kind is FrameKind.USER), None)
    alone = not any(user_lines((*only_mine, *only_theirs)))
    paths = _path(only_mine, other, last, alone=alone), _path(only_theirs, own, last, alone=alone)
    return paths if paths[0].phrase != paths[1].phrase else None


def branch_in_one_function(own: Stack, other: Stack) -> bool:
    """Return whether two stacks part at two lines of one function."""
    _, only_mine, only_theirs = _differing_frames(own, other)
    return bool(only_mine and only_theirs) and (only_mine[0].file, only_mine[0].function) == (
        only_theirs[0].file,
        only_theirs[0].function,
    )


def _differing_frames(own: Stack, other: Stack) -> tuple[list[Frame], list[Frame], list[Frame]]:
    """Return the first stack, outermost first, and the frames of each stack that the other does not
    have.
    """
    mine, theirs = (
        [frame for frame in reversed(stack) if frame.kind is not FrameKind.COMMLENS]
        for stack in (own, other)
    )
    common = 0
    while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
        common += 1
    return mine, mine[common:], theirs[common:]


# --- one stack


def issued_by_library(stack: Stack) -> bool:
    """Return whether a library calls torch's function, such as a schedule of a pipeline."""
    own = takewhile(lambda frame: frame.kind is not FrameKind.USER, stack)
    return any(
        frame.kind in (FrameKind.TORCH, FrameKind.LIBRARY)
        and not frame.file.endswith(("c10d.py", "c10d_logger.py"))
        for frame in own
    )


def path_of(op: Collective) -> Path:
    """Return an op's innermost line as a path."""
    return Path(op.source, frame_phrase(op.source), frame_phrase(op.source))


def _path(frames: list[Frame], others: Stack, last: Frame | None, *, alone: bool = False) -> Path:
    """Return the path of the user's lines among ``frames``, outermost first.

    Args:
        frames: those inside of the last common one.
        others: the stack of the other rank.
        last: the user's last common line, for a path without lines of the user.
        alone: whether neither path has lines of the user; then the innermost line of a library,
            else of torch outside of torch.distributed, is named beside the last common one.
    """
    lines = list(user_lines(tuple(frames)))
    if lines:
        parts = [frame_phrase(frame) for frame in lines]
        if len(parts) > _SHOWN:
            parts[_SHOWN - 2 : -2] = ["..."]
        line = next((frame for frame in reversed(lines) if frame not in others), lines[0])
        return Path(line, " -> ".join(parts), frame_phrase(line), frame_phrase(lines[0]))
    by_kind = {frame.kind: frame for frame in frames if "torch/distributed/" not in frame.file}
    inner = by_kind.get(FrameKind.LIBRARY) or by_kind.get(FrameKind.TORCH) if alone else None
    phrase = " -> ".join(
        filter(None, [frame_phrase(last), in_package(inner) if inner is not None else ""])
    )
    return Path(last, phrase, phrase)


def in_package(frame: Frame) -> str:
    """``"torch/distributed/checkpoint/utils.py:135 gather_object"``: a library's line, without the
    path to its packages.
    """
    separator = "-packages/" if "-packages/" in frame.file else "/"
    file = frame.file.rpartition(separator)[2]
    return f"{file}:{frame.line} {frame.function}"
