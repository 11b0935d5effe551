"""The verdict: what is wrong, which ranks are to blame, and what to do next. Text, JSON and HTML
render it.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from commlens.model.bypass import Bypass
from commlens.model.cause import (
    AnyCause,
    CollectiveRef,
    Confidence,
    GroupRef,
    Kind,
    Rank,
    Why,
)
from commlens.model.verdict_html import verdict_html, verdict_text
from commlens.model.worlds import ONE_WORLD, Worlds

SCHEMA = "commlens.verdict/2"

NOTHING_FOUND: Final[tuple[Kind, ...]] = ("healthy", "undetermined")


Do = Literal["retry", "exclude-node", "stop", "wait", "unknown"]
"""``retry``: start the job again, the cause passes. ``exclude-node``: start it again without these
nodes. ``stop``: the program or its settings are at fault, so each attempt will meet the fault.
``wait``: the job may still go on by itself. ``unknown``: the evidence does not decide.
"""

Because = Literal[
    "hardware",
    "node-lost",
    "storage",
    "data",
    "preempted",
    "time-limit",
    "connection",
    "stale-address",
    "stuck",
    "crashed",
    "killed",
    "working",
    "program",
    "exception",
    "memory",
    "settings",
    "cancelled",
    "not-known",
]
"""Why.

``hardware``: a part of the node broke. ``node-lost``: the node fell silent. ``storage``: a file
server does not answer. ``data``: a rank reads or writes files, and does not come back.
``preempted``: the scheduler took the node away. ``connection``: a connection or a store was lost.
``stale-address``: a store kept an address of an earlier start. ``stuck``: a collective that all its
ranks have entered does not complete. ``crashed``: a process ended by a signal of its own.
``killed``: another process ended it. ``working``: ranks visibly work. ``program``: ranks disagree,
wait for each other, or leave out what the others do. ``exception``: the program raised it, or
exited with a status. ``memory``: there was not enough. ``settings``: of the job or the node, such
as a port that is taken. ``cancelled``: a person ended the job.
"""


class Action(msgspec.Struct, frozen=True, omit_defaults=True):
    """What to do with the job, and why."""

    do: Do
    because: Because
    confidence: Confidence
    nodes: list[str] = []  # hosts of the culprits, as far as they are known; those to exclude
    parts: list[str] = []  # of these nodes, that broke: a GPU's PCI address, a network interface
    since_ns: int = 0  # when the first of them broke, Unix ns; 0: nothing broke
    line: str | None = None  # of the program: file name and line number
    wait_s: float | None = None  # how long ranks may still work before they count as stuck
    attempts: int = 1  # in a row that ended with this fault, with this one


class Finding(msgspec.Struct, kw_only=True):
    """One fault, wait or anomaly."""

    # the fault; "waiting" claims none: the ranks wait for one that works, or may not be stuck
    kind: Kind
    why: Why  # the class of the cause
    root_cause: bool  # false: a consequence of another finding, or nothing is wrong
    # global ranks to blame, sorted; empty if nothing is wrong or no rank can be named
    culprits: list[Rank]
    victims: list[Rank]  # global ranks that wait or ended because of it, sorted
    confidence: Confidence
    # something is wrong for good, whoever is to blame: ranks disagree, wait for each other, or one
    # has ended
    certain: bool = False
    summary: str  # the answer in one sentence
    explanation: str = ""  # where the culprit is, since when, and what the others wait for
    next_step: str = ""
    group: GroupRef | None = None
    collective: CollectiveRef | None = None
    source: str | None = None  # the culprit's own line: file name and line number
    source_file: str | None = None  # the same with the full path
    function: str | None = None
    evidence: list[str] = []  # sentences, the strongest first
    would_raise_confidence: str | None = None
    cause: AnyCause | None = None  # what was found, as data


class Verdict(msgspec.Struct, kw_only=True):
    """The complete diagnosis. The top level repeats the first finding; ``findings`` holds all, root
    causes first.
    """

    schema: str = SCHEMA
    # the fault; "waiting" claims none: the ranks wait for one that works, or may not be stuck
    kind: Kind = "healthy"
    why: Why = "unknown"  # the class of the cause
    root_cause: bool = False  # false: a consequence of another finding, or nothing is wrong
    # global ranks to blame, sorted; empty if nothing is wrong or no rank can be named
    culprits: list[Rank] = []
    victims: list[Rank] = []  # global ranks that wait or ended because of it, sorted
    confidence: Confidence = "high"
    # something is wrong for good, whoever is to blame: ranks disagree, wait for each other, or one
    # has ended
    certain: bool = False
    summary: str = ""  # the answer in one sentence
    explanation: str = ""
    group: GroupRef | None = None
    collective: CollectiveRef | None = None
    source: str | None = None  # the culprit's own line: file name and line number
    next_step: str = ""
    cause: AnyCause | None = None  # what was found, as data
    findings: list[Finding] = []  # all findings, root causes first
    missing_evidence: list[str] = []  # sentences about what could not be determined
    bypasses: list[Bypass] = []  # libraries that communicate past torch's dispatcher
    looked_at: str = ""  # "4 ranks, 812 collectives on 3 groups"
    # of several worlds: ranks in this verdict are numbers of these processes
    worlds: Worlds = ONE_WORLD
    action: Action | None = None  # what to do with the job; None: nothing, or not decided yet

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong. Waiting for a rank that visibly works is not a fault."""
        return self.kind not in (*NOTHING_FOUND, "waiting")

    def to_json(self) -> bytes:
        """Return the verdict as indented JSON that follows ``commlens.verdict/2``."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    def __str__(self) -> str:
        """Return the verdict in words, as ``print`` shows it."""
        return verdict_text(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return verdict_html(self)

    @classmethod
    def from_findings(cls, findings: list[Finding], **about: Any) -> Verdict:
        """Build a verdict from findings, the most important first. ``about`` sets the other fields,
        such as looked_at.
        """
        if not findings:
            return cls(**about)
        first = findings[0]
        top = {
            name: getattr(first, name)
            for name in Finding.__struct_fields__
            if name in cls.__struct_fields__
        }
        return cls(**{**top, "findings": findings, **about})
