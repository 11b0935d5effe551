"""Find out from where on a rank's history shows steps: before, what repeats may be a loop over
layers, which ends once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from commlens.model.collective import Collective, user_lines

_ROUNDS = 3  # steps, or rounds of the outermost loop, after which a rank has a routine
_NEVER = 1 << 62


def routine_from(history: Sequence[Collective], *, rounds: bool) -> int:
    """Return the index of the op from which on several steps are complete, or several rounds of the
    outermost loop; a huge one if none is.

    Args:
        history: a rank's records, oldest first.
        rounds: whether to look for rounds, which needs the stacks of all ops.
    """
    return min(_after_steps(history), _after_rounds(history) if rounds else _NEVER)


def _after_steps(history: Sequence[Collective]) -> int:
    """Return the index of the op from which on several steps are complete; a huge one if there is
    none.

    A program may have several optimizers. So a step is what they do between two visits of a line,
    most often.
    """
    last: dict[object, int] = {}
    further: Counter[int] = Counter()
    for op in history if history and history[-1].step >= history[0].step + _ROUNDS else ():
        line = op.call_lines
        further[op.step - last.get(line, op.step)] += 1
        last[line] = op.step
    del further[0]
    done = history[0].step + _ROUNDS * further.most_common(1)[0][0] if further else _NEVER
    return next((op.index for op in history if op.step >= done), _NEVER)


def _after_rounds(history: Sequence[Collective]) -> int:
    """Return the index of the op that begins the outermost loop's round ``_ROUNDS`` + 1; a huge one
    if there is none.

    A round begins where the first line that repeats issues again after the last one did: between
    them are inner loops.
    """
    paths = {
        id(op.stack): [(frame.file, frame.line) for frame in user_lines(op.stack)][::-1]
        for op in history
    }
    depth = 0
    while len({tuple(path[depth : depth + 1]) for path in paths.values()}) == 1 and depth < min(
        map(len, paths.values())
    ):
        depth += 1
    lines = [tuple(paths[id(op.stack)][depth : depth + 1]) for op in history]
    runs = Counter(
        line
        for line, previous in zip(lines, [None, *lines], strict=False)
        if line and line != previous
    )
    # in the order in which they were first seen
    repeated = [line for line, times in runs.items() if times > 1]
    rounds, ended = 0, False
    for op, line in zip(history, lines, strict=True):
        if repeated and line == repeated[-1]:
            ended = True
        elif repeated and line == repeated[0] and ended:
            rounds, ended = rounds + 1, False
            if rounds == _ROUNDS:
                return op.index
    return _NEVER
