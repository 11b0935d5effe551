"""The soak's programs without processes: no innocent rank is named, and of two halves that never
agreed, hardly ever one.
"""

from __future__ import annotations

from collections import Counter

import pytest
from chosen import examples, long
from random_programs import GlooJob, RandomProgram, draw_program

from commlens.diagnosis.examine import diagnose_logs

PROGRAMS = 150


def named(program: RandomProgram) -> tuple[set[int], str]:
    """Return the culprits of all root causes, and the words."""
    verdict = diagnose_logs(GlooJob(program.size).run(program).logs())
    roots = [
        finding
        for finding in verdict.findings
        if finding.root_cause and finding.kind not in ("waiting", "healthy")
    ]
    return {rank for finding in roots for rank in finding.culprits}, "; ".join(
        finding.summary for finding in roots
    )


@pytest.mark.parametrize("first", [0, long(PROGRAMS)])
def test_no_innocent_rank_is_named(first: int) -> None:
    counts: Counter[bool] = Counter()
    for seed in range(first, first + PROGRAMS):
        program = draw_program(seed)
        culprits, words = named(program)
        repeats_one = (
            program.size == 2 and len(program.pieces) == 1 and program.fault in ("skip", "extra")
        )
        assert culprits <= set(program.odd) or (repeats_one and len(culprits) == 1), (
            seed,
            program,
            words,
        )
        counts[bool(culprits)] += 1
    assert counts[True] > 0.6 * PROGRAMS  # in the others, the evidence does not decide


def test_two_halves_that_never_agreed_are_told_as_sides() -> None:
    told = wrong = 0
    programs = examples(PROGRAMS)
    for seed in range(programs):
        program = draw_program(seed, halves=True)
        culprits, words = named(program)
        wrong += bool(culprits)
        told += bool(words)
    assert told > 0.8 * programs
    assert wrong < 0.08 * programs  # an inner loop in the first step looks like several steps
