"""What changed in the hardware of the job's nodes, as the page shows it."""

from __future__ import annotations

import time
from typing import Final

from commlens.diagnosis.index.nodes import Node
from commlens.diagnosis.words.hardware import event_phrase
from commlens.model.cause import OfHardware
from commlens.model.health import HealthEvent
from commlens.reports.verdict_page.data import HardwareChange, HardwareMark, HardwareTable
from commlens.reports.verdict_page.job import PageJob
from commlens.text import capital, count, format_ranks

CHANGES_SHOWN: Final = 60
_Key = tuple[str, str, str, int]


def hardware(job: PageJob) -> HardwareTable | None:
    """Return the changes of all nodes in the order of their times; None if nothing changed."""
    marks = _marks(job)
    found = sorted(
        ((node, event) for node in job.index.nodes for event in node.health.events),
        key=lambda each: (each[1].at_ns, each[0].health.host),
    )
    if not found:
        return None
    # what explains the verdict is shown, however much happened after it
    newest = {id(event) for _, event in found[-CHANGES_SHOWN:]}
    shown = [
        (node, event) for node, event in found if id(event) in newest or _key(node, event) in marks
    ]
    left_out = len(found) - len(shown)
    return HardwareTable(
        changes=[_change(node, event, marks.get(_key(node, event), "")) for node, event in shown],
        left_out=f"{count(left_out, 'earlier change')} left out" if left_out else "",
    )


def _key(node: Node, event: HealthEvent) -> _Key:
    return (node.health.host, event.part, event.what, event.number)


def _marks(job: PageJob) -> dict[_Key, HardwareMark]:
    """Return what the verdict says of changes."""
    marks: dict[_Key, HardwareMark] = {}
    for finding in job.verdict.findings:
        for each in finding.cause.hardware if isinstance(finding.cause, OfHardware) else []:
            key = (each.node, each.event.part, each.event.what, each.event.number)
            if each.explains or key not in marks:
                marks[key] = "explains" if each.explains else "coincides"
    return marks


def _change(node: Node, event: HealthEvent, mark: HardwareMark) -> HardwareChange:
    return HardwareChange(
        node=node.health.host or "this host",
        ranks=format_ranks(node.places),
        at=_clock(event.at_ns),
        since=_clock(event.since_ns) if event.since_ns else "",
        what=capital(event_phrase(event)),
        mark=mark,
    )


def _clock(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_ns // 1_000_000_000))
