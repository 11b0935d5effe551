"""The answer: what is wrong, who did it, and what to do next. Text, JSON and HTML are renderings of it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from commlens.model.verdict_html import verdict_html

SCHEMA = "commlens.verdict/1"

Kind = Literal[
    "mismatch/op",
    "mismatch/shape",
    "mismatch/dtype",
    "mismatch/reduce-op",
    "mismatch/root",
    "mismatch/splits",
    "mismatch/p2p",
    "mismatch/device",
    "mismatch/layout",
    "missing",
    "cycle",
    "dead",
    "stuck-inside",
    "straggler",
    "waiting",
    "healthy",
]
"""``waiting`` claims no fault: the ranks wait for one that visibly works."""

Why = Literal[
    "data-loading",
    "checkpoint-io",
    "compilation",
    "throttled",
    "uninterruptible-io",
    "memory-pressure",
    "stopped",
    "holding-gil",
    "in-collective",
    "initialising",
    "finished",
    "exception",
    "exit",
    "killed",
    "out-of-memory",
    "skipped",
    "user-code",
    "unknown",
]
"""The class of the cause, from stacks, ``/proc`` and cgroup files."""

Confidence = Literal["high", "medium", "low"]


class GroupRef(msgspec.Struct, frozen=True):
    """A process group, as the verdict names it."""

    name: str
    description: str
    ranks: list[int]


class CollectiveRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """A collective, as the verdict names it."""

    op: str
    sequence_number: int
    peer: int | None = None


class Finding(msgspec.Struct, kw_only=True):
    """One thing that is wrong (or waits, or is odd)."""

    kind: Kind
    why: Why
    root_cause: bool
    culprits: list[int]  # global ranks, sorted
    victims: list[int]
    confidence: Confidence
    summary: str  # one sentence: the answer
    explanation: str = ""  # the WHY: where the culprit is, since when, what the others wait for
    next_step: str = ""
    group: GroupRef | None = None
    collective: CollectiveRef | None = None
    source: str | None = None  # "train.py:57", the culprit's own line
    source_file: str | None = None  # the same with its whole path
    function: str | None = None
    evidence: list[str] = []  # sentences, most telling first
    would_raise_confidence: str | None = None


class Verdict(msgspec.Struct, kw_only=True):
    """The whole diagnosis. The top level repeats the first root cause; ``findings`` holds all, root causes first."""

    schema: str = SCHEMA
    kind: Kind = "healthy"
    why: Why = "unknown"
    root_cause: bool = False
    culprits: list[int] = []
    victims: list[int] = []
    confidence: Confidence = "high"
    summary: str = ""
    explanation: str = ""
    group: GroupRef | None = None
    collective: CollectiveRef | None = None
    source: str | None = None
    next_step: str = ""
    findings: list[Finding] = []
    missing_evidence: list[str] = []  # what could not be known, in sentences
    looked_at: str = ""  # "4 ranks, 812 collectives on 3 groups"

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong. Waiting for a rank that visibly works is not."""
        return self.kind not in ("healthy", "waiting")

    def to_json(self) -> bytes:
        """The verdict as JSON, indented, following ``commlens.verdict/1``."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return verdict_html(self)

    @classmethod
    def from_findings(cls, findings: list[Finding], **about: Any) -> Verdict:
        """Build from findings in order of weight (root causes first). ``about`` fills looked_at and the like."""
        if not findings:
            return cls(**about)
        first = findings[0]
        top = {name: getattr(first, name) for name in Finding.__struct_fields__ if name in cls.__struct_fields__}
        return cls(**{**top, "findings": findings, **about})
