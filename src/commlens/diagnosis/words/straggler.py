"""Words about ranks that make a running job slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from commlens.diagnosis.causes.straggler import FoundStraggler, Stretch
from commlens.diagnosis.words.finding import Words
from commlens.model.cause import Phase, Why
from commlens.text import capital, count, duration, frame_phrase, ranks_and_verb, ranks_phrase

_S: Final = 1e9  # ns
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
}


def words(found: FoundStraggler) -> Words:
    """Return what a finding says about ranks that make a job slow."""
    cause = found.cause
    where = f" on {found.node}" if found.node else ""
    return Words(
        summary=(
            f"{ranks_and_verb(cause.culprits, 'makes', 'make')} the job slow: all others{where}"
            f" wait for {cause.cost:.0%} of the time"
        ),
        explanation=" ".join(f"{capital(each)}." for each in _evidence(found)),
        next_step=_next_step(found),
        would_raise_confidence="That others wait for a rank shows that it is later, not why.",
    )


def _evidence(found: FoundStraggler) -> list[str]:
    cause, who = found.cause, ranks_phrase(found.cause.culprits)
    they_wait = (
        f"{ranks_and_verb(cause.victims, 'waits', 'wait')}"
        f" {duration(cause.cost * cause.step_s * _S)} longer than {who}"
    )
    evidence = [
        f"In each step of {duration(cause.step_s * _S)}, {they_wait}"
        f" ({count(cause.steps, 'step')} seen)"
    ]
    if found.hotspot is not None:
        spends = f"{who} spends {found.hotspot.share:.0%} of the time in"
        line, other = frame_phrase(found.hotspot.frame), found.hotspot.other
        less = f", rank {other} {found.hotspot.share_other:.0%}" if other is not None else ""
        evidence.append(f"{spends} {line}{less}")
    if found.stretch is not None and cause.stretch is not None:
        phase = f" ({_PHASES[cause.stretch.phase]})" if cause.stretch.phase is not None else ""
        evidence.append(
            f"{who} takes {duration(cause.stretch.extra_s * _S)} longer in each step"
            f" {_between(found.stretch)}{phase}"
        )
    if cause.held_back is not None:
        evidence.append(f"{who} {_HELD_BACK[cause.why]} for {cause.held_back:.0%} of the time")
    return evidence


def _between(stretch: Stretch) -> str:
    """Return between which lines a stretch lies."""
    first, second = (
        f"{op.op} in {frame_phrase(op.source)}" for op in (stretch.after, stretch.before)
    )
    return (
        f"between {first} and {second}" if first != second else f"between one {first} and the next"
    )


def _next_step(found: FoundStraggler) -> str:
    cause, who, source = found.cause, ranks_phrase(found.cause.culprits), found.source
    if cause.held_back is not None:
        return _STEPS[cause.why]
    if found.hotspot is not None and source is not None:
        return f"look at {source.function} ({source.where}) on {who}"
    place = f" before {frame_phrase(source)}" if source is not None else ""
    return (
        f"profile {who}{place} (`py-spy record --duration 10 --pid {found.pid}`), and compare"
        f" it with rank {cause.victims[0]}"
    )
