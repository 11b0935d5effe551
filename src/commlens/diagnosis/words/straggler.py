"""Words about ranks that make a running job slow: "rank 3 makes the job slow: all others wait for
40% of the time".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.straggler import StragglerCase
from commlens.diagnosis.words.finding import Words
from commlens.model.cause import Phase, Slow, Straggler, Why
from commlens.model.collective import Collective, user_frame
from commlens.text import (
    capital,
    count,
    duration,
    frame_phrase,
    group_phrase,
    op_phrase,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
    utc,
)

_S: Final = 1e9  # ns
_SLOWER: Final = 1.02  # what is less is not worth saying
_PHASES: Mapping[Phase, str] = {
    "before-the-backward": "after an optimizer step: in data loading or the forward pass",
    "optimizer": "in the optimizer step",
    "backward": "in the backward pass",
    "backward-or-before": "in the backward pass, or before it in the forward pass",
}
_HELD_BACK: Mapping[Why, str] = {
    "throttled": "was held back by its cgroup's CPU limit",
    "memory-pressure": "stood still for lack of memory",
    "no-cpu": "was ready to run but had no CPU",
}
_STEPS: Mapping[Why, str] = {
    "throttled": "raise the CPU limit of its container, or start fewer threads there",
    "memory-pressure": "give it more memory, or use less",
    "no-cpu": "find out what else runs on its cores (top, taskset), and start fewer threads",
    "slow-device": (
        "look at the clocks, temperature and other users of its GPU (`nvidia-smi -q -d"
        " CLOCK,PERFORMANCE,PIDS`), and compare its kernels with another rank's (`commlens trace"
        " --profile`)"
    ),
    "slow-link": (
        "look at the links between these ranks (`nvidia-smi topo -m`, the ports' error counters),"
        " and measure them with nccl-tests while the job does not run"
    ),
    "unknown": (
        "compare its stacks with another rank's while it is slow (`commlens stacks`, with py-spy"
        " installed), and the clocks of its GPU (`nvidia-smi -q -d CLOCK,PERFORMANCE`)"
    ),
    "uneven-work": "spread the work more evenly: tokens, experts or layers of these ranks",
}


def words(case: StragglerCase) -> Words:
    """Return what a finding says about ranks that make a job slow."""
    cause = case.cause
    where = f" on {case.node}" if case.node else ""
    return Words(
        summary=(
            f"{ranks_and_verb(cause.culprits, 'makes', 'make')} the job slow: all others{where}"
            f" wait for {cause.cost:.0%} of the time"
        ),
        explanation=" ".join(f"{capital(each)}." for each in _evidence(case)),
        next_step=_next_step(case),
        would_raise_confidence="That others wait for a rank shows that it is later, not why.",
    )


def _evidence(case: StragglerCase) -> list[str]:
    cause, who = case.cause, ranks_phrase(case.cause.culprits)
    they_wait = (
        f"{ranks_and_verb(cause.victims, 'waits', 'wait')}"
        f" {duration(cause.cost * cause.step_s * _S)} longer than {who}"
    )
    step = "round" if cause.by_rounds else "step"
    is_slower = cause.slower is not None and cause.slower > _SLOWER
    since = f" since {utc(cause.since_ns)}" if cause.since_ns and not is_slower else ""
    evidence = [
        f"In each {step} of {duration(cause.step_s * _S)}, {they_wait}"
        f" ({count(cause.steps, step)} seen{since})"
    ]
    if cause.by_rounds:
        evidence.append(
            "no rank counts optimizer steps: a round is what repeats itself in the collectives"
        )
    if is_slower:
        at = f" (about step {cause.since_step:,})" if cause.since_step else ""
        evidence.append(
            f"since {utc(cause.since_ns)}{at}, a {step} takes {cause.slower:.2f} times as long as"
            " before"
        )
    if (hot := cause.hot_line) is not None:
        line = frame_phrase(user_frame(case.hot_stack))
        less = f", {rank_phrase(hot.other)} {hot.share_other:.0%}" if hot.other is not None else ""
        evidence.append(f"{who} spends {hot.share:.0%} of the time in {line}{less}")
    if case.ends is not None and cause.stretch is not None:
        phase = f" ({_PHASES[cause.stretch.phase]})" if cause.stretch.phase is not None else ""
        evidence.append(
            f"{who} takes {duration(cause.stretch.extra_s * _S)} longer in each step"
            f" {_between_lines(case.ends)}{phase}"
        )
    evidence += _evidence_on_devices(cause, who)
    if cause.held_back is not None:
        evidence.append(f"{who} {_HELD_BACK[cause.why]} for {cause.held_back:.0%} of the time")
    return evidence


def _evidence_on_devices(cause: Straggler, who: str) -> Iterator[str]:
    if cause.transfer is not None:
        group, op = cause.transfer.group, cause.transfer.op
        yield (
            f"among {ranks_phrase(group.ranks)}, {op} takes {cause.transfer.ratio:.1f} times as"
            " long as in the groups that do the same elsewhere, when waits for late ranks are"
            " taken off"
        )
    if cause.work_ratio is not None:
        yield (
            f"{who} contributes {cause.work_ratio:.1f} times as many elements to the same"
            " collectives as each of the others: it has more work, and no fault shows"
        )
    if cause.why == "uneven-work" and cause.work_ratio is None:
        yield (
            f"no other rank does the work of this stage of the pipeline: {who} may have more of it"
            " than the other stages, and no fault shows"
        )
    if cause.why == "slow-device":
        yield (
            f"the host of {rank_phrase(cause.culprits[0])} spends its time as another rank's does,"
            " so its device takes longer"
        )
    if cause.why == "unknown":
        yield "whether the host or the device is late is not known"


def _between_lines(ends: tuple[Collective, Collective]) -> str:
    """Return between which lines a stretch lies."""
    first, second = (f"{op.op} in {frame_phrase(op.source)}" for op in ends)
    return (
        f"between {first} and {second}" if first != second else f"between one {first} and the next"
    )


def _next_step(case: StragglerCase) -> str:
    cause, who, source = case.cause, ranks_phrase(case.cause.culprits), case.frame
    if cause.why in _STEPS:
        return _STEPS[cause.why]
    if cause.hot_line is not None and source is not None:
        return f"look at {source.function} ({source.where}) on {who}"
    place = f" before {frame_phrase(source)}" if source is not None else ""
    return (
        f"profile {who}{place} (`py-spy record --duration 10 --pid {case.pid}`), and compare"
        f" it with {rank_phrase(cause.victims[0])}"
    )


def words_of_slow(context: Context, case: Case[Slow]) -> Words:
    """Return what a finding says about a rank that makes the others wait."""
    assert case.op is not None
    cause, op, rank = case.cause, case.op, case.cause.culprits[0]
    lost_ns = round(cause.lost_s * 1e9)
    before = f" before {frame_phrase(op.source)}" if op.source is not None else ""
    return Words(
        summary=(
            f"nothing is stuck, but {rank_phrase(rank)} is the last to reach the"
            " collectives of"
            f" {group_phrase(op.channel.group)}: {cause.times} of {count(cause.of, 'time')},"
            f" {duration(lost_ns // cause.times)} after the others"
        ),
        explanation=(
            f"The others waited {duration(lost_ns)} of {duration(round(cause.span_s * 1e9))} for"
            f" it, longest in {op_phrase(op)}. Clocks are corrected by the times at which the ranks"
            " leave their collectives."
        ),
        next_step=f"look at {rank_phrase(rank)}{before}: data loading, a slower GPU or host",
        would_raise_confidence="A profile of that rank would show where its time goes.",
    )
