"""The verdict as one HTML file that needs no network: see docs/pages.md."""

from __future__ import annotations

import time
from collections.abc import Sequence

from commlens.diagnosis.index import World, build
from commlens.diagnosis.select_job import choose
from commlens.model.collective import Collective
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict
from commlens.reports.page import render_page
from commlens.reports.terminal import render
from commlens.reports.verdict_page.layouts import layouts
from commlens.reports.verdict_page.model import Ranks, VerdictPage
from commlens.reports.verdict_page.scene import Scene, phrase
from commlens.reports.verdict_page.stacks import stacks
from commlens.reports.verdict_page.tables import tables
from commlens.reports.verdict_page.timeline import Texts, timeline
from commlens.reports.verdict_page.waiting import wait_graph
from commlens.version import __version__

_FILES_NAMED = 3


def verdict_html(verdict: Verdict, logs: Sequence[RankLog], world: World | None = None, *, stalled_after_s: float = 1.0) -> bytes:
    """Make the file.

    Args:
        verdict: what was found.
        logs: what it was found in.
        world: the same, indexed; without, the logs are indexed here.
        stalled_after_s: what the verdict was made with.
    """
    page = verdict_page(verdict, logs, world, stalled_after_s=stalled_after_s)
    return render_page("verdict", title=f"{verdict.summary or verdict.kind} - commlens", data=page, text=page.text)


def verdict_page(verdict: Verdict, logs: Sequence[RankLog], world: World | None = None, *, stalled_after_s: float = 1.0) -> VerdictPage:
    """What the page shows, as data: a pure function of the verdict and the logs."""
    scene = Scene(verdict, world if world is not None else build(choose(logs)[0], stalled_after_s))
    merged, stack_of = stacks(scene)
    return VerdictPage(
        commlens=__version__,
        verdict=verdict,
        text=_ticket(scene),
        facts=_facts(scene),
        ranks=_ranks(scene, stack_of),
        classes=scene.classes,
        graph=wait_graph(scene),
        layouts=layouts(scene),
        timeline=timeline(scene),
        tables=tables(scene),
        stacks=merged,
    )


def _ticket(scene: Scene) -> str:
    """The verdict as plain text, with what a reader of a ticket asks first."""
    facts = "".join(f"{name}: {value}\n" for name, value in _facts(scene))
    return f"{render(scene.verdict, 100)}\n{facts}"


def _facts(scene: Scene) -> list[tuple[str, str]]:
    logs = [view.log for view in scene.world.views.values()]
    if not logs:
        return []
    hosts = sorted({log.host for log in logs if log.host})
    captured = max(view.now_ns for view in scene.world.views.values())
    versions = dict(pair for log in logs[:1] for pair in log.versions.items())
    sources = sorted({log.source for log in logs if log.source})
    folders = {source.rpartition("/")[0] for source in sources}
    folder = folders.pop() if len(folders) == 1 and len(sources) > 1 else ""
    found = [
        ("Job", logs[0].job),
        ("Script", next((log.script for log in logs if log.script), "")),
        ("Ranks", f"{len(logs)} of {scene.world.size}"),
        ("Hosts", ", ".join(hosts) if len(hosts) <= 4 else f"{len(hosts)}: {hosts[0]} ... {hosts[-1]}"),
        ("Recorded until", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(captured / 1e9)) if captured else ""),
        ("Versions", ", ".join(f"{name} {value}" for name, value in sorted(versions.items()))),
        ("Read from", f"{len(sources)} files in {folder}" if folder else _some(sources)),
    ]
    return [(name, value) for name, value in found if value]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _FILES_NAMED} more" if len(names) > _FILES_NAMED else ""
    return ", ".join(names[:_FILES_NAMED]) + more


def _ranks(scene: Scene, stack_of: dict[int, int]) -> Ranks:
    texts = Texts()
    made = Ranks()
    for rank in scene.everybody:
        view = scene.world.views.get(rank)
        log = view.log if view is not None else None
        made.rank.append(rank)
        made.role.append(scene.role(rank))
        made.cls.append(scene.class_of[rank])
        made.host.append(texts(log.host if log is not None else ""))
        made.pid.append(log.pid if log is not None else 0)
        made.steps.append(log.steps if log is not None else 0)
        made.issued.append(max(log.issued, len(view.history)) if view is not None and log is not None else 0)
        made.last.append(texts(_last(view.last_op) if view is not None else ""))
        made.end.append(texts((view.fate.text or _FATES.get(view.fate.kind, "")) if view is not None else "left no record"))
        made.stack.append(stack_of.get(rank, -1))
        made.source.append(texts(log.source if log is not None else ""))
    made.texts = texts.texts
    return made


_FATES = {"alive": "runs", "leaving": "is leaving", "clean": "finished", "gone": "ended, nobody knows how", "told": "was told to stop"}


def _last(op: Collective | None) -> str:
    if op is None:
        return ""
    state = "in flight" if op.in_flight else op.state.value
    return f"{phrase(op)}, {state}"
