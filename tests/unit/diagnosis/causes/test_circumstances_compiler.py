"""Collectives that torch.compile issues by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from builders import Job, Step, all_reduce, collective
from goldens import hold
from judging import judge

from commlens.model.collective import Frame, FrameKind

GUARDS = ("/site/torch/_dynamo/eval_frame.py", "guard_collectives_hook")
SIZES = ("/site/torch/_dynamo/output_graph.py", "run_compiler_collective")
COMPILED = ("/site/torch/_inductor/output_code.py", "__call__")
CALLED = ("/site/torch/_dynamo/eval_frame.py", "compile_wrapper")


@pytest.mark.parametrize(
    ("place", "part"), [(GUARDS, "guards"), (SIZES, "sizes"), (COMPILED, None), (CALLED, None)]
)
@pytest.mark.parametrize("callers", [{0}, {0, 1}])
def test_a_collective_of_the_compiler(
    place: tuple[str, str], part: str | None, callers: set[int]
) -> None:
    """Some ranks call a compiled function once more than the others."""

    def program(job: Job, rank: int) -> Iterator[object]:
        group = job.group("1", range(3))
        inner = (Frame(place[0], 787, place[1], FrameKind.TORCH),)
        gather = collective("all_gather", group, line=7, function="evaluate")
        for step in range(5):
            if step < 4 or rank in callers:
                yield dataclasses.replace(gather, inner=inner)
            yield all_reduce(job.world, line=20)
            yield Step()

    verdict = judge(Job(3).run(program).logs())
    call = verdict.cause.compiler
    assert verdict.culprits == ([0] if callers == {0} else [2])
    assert (call and call.part) == part
    if call is not None:
        assert (call.op, call.ranks, call.source) == ("all_gather", sorted(callers), "train.py:7")
        assert not call.all_waiting
    if place is GUARDS and callers == {0}:
        hold("cycle/guards-of-the-compiler", verdict)
