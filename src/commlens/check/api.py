"""Check a program: run it as every rank, put the sequences together, judge."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commlens.check import branch_words
from commlens.check.branches import (
    Branch,
    Choice,
    Value,
    parse_branch,
    unmet,
)
from commlens.check.explore import explore, to_try
from commlens.check.judge import Checked, judge
from commlens.check.processes import RankProcesses
from commlens.check.run_rank import Plan, warm_up
from commlens.check.run_world import ALL_UP_TO, run_classes, run_whole
from commlens.check.schedule import RULES
from commlens.check.sequence import RankSequence
from commlens.errors import CommandError
from commlens.model.verdict import Verdict
from commlens.text import joined

_TIMEOUT_S = 300.0

Branches = Mapping[str, Sequence[Value]] | Sequence[str]
"""``{"train.py:81": (True, False)}``, or texts as ``--branch`` takes them."""


def check_plan(
    plan: Plan,
    *,
    backend: str = "",
    script: str = "",
    seen: Callable[[int, int], None] | None = None,
    branches: Sequence[Branch] = (),
    all_ranks: bool = False,
) -> tuple[Checked, dict[int, str]]:
    """Check a program, and return what its ranks printed, too.

    Args:
        plan: the program and its world.
        backend: "gloo" or "nccl"; empty: the one that the program asks for.
        script: the program's name.
        seen: called after each rank with the number of ranks run so far, and the most that may be
            run: of a large world, a few are run. With several combinations, a rank counts once for
            each; it counts once if it is run again.
        branches: answers to the program's reads of tensors; their combinations are tried.
        all_ranks: run every rank, also of a large world.
    """
    if plan.world_size < 1:
        raise CommandError(f"The world size must be at least 1, not {plan.world_size}.")
    if backend and backend not in RULES:
        raise CommandError(f"There are no rules of {backend!r}: give {joined(list(RULES), 'or')}.")
    warm_up()
    plan = plan._replace(backend=backend)
    done = set[tuple[tuple[Choice, ...], int]]()
    total = plan.world_size * len(to_try(branches))
    outputs: dict[int, str] = {}

    def judge_all(sequences: Mapping[int, RankSequence]) -> Checked:
        return judge(sequences, backend=backend, script=script)

    def run(choices: tuple[Choice, ...]) -> Checked:
        def ended(sequence: RankSequence) -> None:
            done.add((choices, sequence.rank))
            if seen is not None:
                seen(len(done), total)

        checked = None
        if not all_ranks and plan.world_size > ALL_UP_TO:
            ranks = RankProcesses(plan._replace(choices=choices), ended=ended)
            checked = run_classes(ranks, judge_all, plan.world_size, plan.ranks_per_node)
        if checked is None:
            ranks = RankProcesses(plan._replace(choices=choices), ended=ended)
            checked = run_whole(ranks, judge_all, plan.world_size)
        outputs.update(ranks.outputs)
        return checked

    explored = explore(run, judge_all, branches)
    for branch in unmet(branches, explored.decisions):
        raise CommandError(branch_words.no_such_branch(str(branch), explored.decisions))
    return explored.checked.with_verdict(branch_words.verdict(explored)), outputs


def check(
    function: Callable[[], Any],
    *,
    world_size: int,
    backend: str = "",
    steps: int | None = None,
    fake_tensors: bool = False,
    ranks_per_node: int = 8,
    timeout_s: float = _TIMEOUT_S,
    branches: Branches = (),
    all_ranks: bool = False,
) -> Verdict:
    """Find the mismatches and deadlocks that every run of a program would meet, without running it
    on several ranks: ``assert not check(main, world_size=8).is_fault``.

    The function is called once for each rank, in a forked process in which nothing is sent.

    Args:
        function: the program of each rank. It creates its own process group, as in a script.
        world_size: number of ranks.
        backend: "gloo" or "nccl", whose rules count; empty: the one that the function asks for.
        steps: stop after this many optimizer steps; None: at the end.
        fake_tensors: use tensors without memory, for models that would not fit.
        ranks_per_node: determines ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.
        timeout_s: seconds for the run of each rank.
        branches: answers to try where a line asks for a value of a tensor:
            ``{"train.py:81": (True, False)}``, or ``["train.py:81=true,false"]``. Of several lines,
            16 combinations at most.
        all_ranks: run every rank, also of more than 16; otherwise a few of each kind.

    Returns:
        The verdict: "healthy" if nothing is wrong, "undetermined" if that is not proven.

    Raises:
        CommandError: a process group already exists, or an argument is wrong.
    """
    if not hasattr(os, "fork"):
        raise CommandError("check() needs a system that can fork processes.")
    plan = Plan(
        function,
        world_size,
        steps,
        fake_tensors=fake_tensors,
        ranks_per_node=ranks_per_node,
        timeout_s=timeout_s,
    )
    checked, _ = check_plan(
        plan,
        backend=backend,
        branches=branches_of(branches),
        all_ranks=all_ranks,
    )
    verdict = checked.verdict
    if "PYTEST_CURRENT_TEST" in os.environ and (verdict.kind != "healthy" or verdict.findings):
        print(verdict)  # pytest shows it if the test fails, and abridges what an assertion shows
    return verdict


def branches_of(given: Branches) -> list[Branch]:
    """Return the branches that a caller of :func:`check` gave.

    Raises:
        CommandError: one names no line, or no answers.
    """
    if isinstance(given, Mapping):
        given = [f"{line}={','.join(map(str, answers))}" for line, answers in given.items()]
    return [parse_branch(text) for text in given]
