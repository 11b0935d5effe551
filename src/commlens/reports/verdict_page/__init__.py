"""The verdict as one HTML file that needs no network: see docs/pages.md."""

from __future__ import annotations

import time

from commlens.diagnosis.examine import ExaminedJob
from commlens.diagnosis.words.exits import exit_words
from commlens.model.collective import Collective
from commlens.reports.page import render_page
from commlens.reports.step_table import StepTable, step_table
from commlens.reports.terminal import render
from commlens.reports.verdict_page.data import Ranks, VerdictPage
from commlens.reports.verdict_page.hardware import hardware
from commlens.reports.verdict_page.job import Job, phrase
from commlens.reports.verdict_page.rank_grids import rank_grids
from commlens.reports.verdict_page.source_lines import culprits_lines, others_line
from commlens.reports.verdict_page.stacks import stacks
from commlens.reports.verdict_page.tables import tables
from commlens.reports.verdict_page.timeline import Index, timeline
from commlens.reports.verdict_page.wait_graph import wait_graph
from commlens.version import __version__

_FILES_NAMED = 3


def verdict_html(examined: ExaminedJob, *, has_times: bool = True) -> bytes:
    """Return the page of an examined job as HTML; ``has_times`` as in :class:`Job`."""
    page = verdict_page(examined, has_times=has_times)
    verdict = examined.verdict
    return render_page(
        "verdict", title=f"{verdict.summary or verdict.kind} - commlens", data=page, text=page.text
    )


def verdict_page(examined: ExaminedJob, *, has_times: bool = True) -> VerdictPage:
    """Return the page's content as data; ``has_times`` as in :class:`Job`."""
    job = Job(examined, has_times=has_times)
    merged, stack_of = stacks(job)
    return VerdictPage(
        commlens=__version__,
        verdict=examined.verdict,
        text=_ticket(job),
        facts=_facts(job),
        ranks=_ranks(job, stack_of),
        classes=job.classes,
        graph=wait_graph(job),
        layouts=rank_grids(job),
        timeline=timeline(job),
        tables=tables(job),
        stacks=merged,
        step=_step(examined),
        source=culprits_lines(job),
        others=others_line(job),
        hardware=hardware(job),
    )


def _step(examined: ExaminedJob) -> StepTable | None:
    times = examined.step_times()
    return step_table(times) if times.steps else None


def _ticket(job: Job) -> str:
    """Return the verdict and the facts as plain text, for a ticket."""
    facts = "".join(f"{name}: {value}\n" for name, value in _facts(job))
    return f"{render(job.verdict, 100)}\n{facts}"


def _facts(job: Job) -> list[tuple[str, str]]:
    logs = [view.log for view in job.index.views.values()]
    if not logs:
        return []
    hosts = sorted({log.host for log in logs if log.host})
    captured = max(view.now_ns for view in job.index.views.values()) if job.has_times else 0
    versions = dict(pair for log in logs[:1] for pair in log.versions.items())
    sources = sorted({log.source for log in logs if log.source})
    folders = {source.rpartition("/")[0] for source in sources}
    folder = folders.pop() if len(folders) == 1 and len(sources) > 1 else ""
    found = [
        ("Job", logs[0].job),
        ("Script", next((log.script for log in logs if log.script), "")),
        ("Ranks", f"{len(logs)} of {job.index.size}"),
        (
            "Hosts",
            ", ".join(hosts) if len(hosts) <= 4 else f"{len(hosts)}: {hosts[0]} ... {hosts[-1]}",
        ),
        (
            "Recorded until",
            time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(captured / 1e9)) if captured else "",
        ),
        ("Versions", ", ".join(f"{name} {value}" for name, value in sorted(versions.items()))),
        ("Read from", f"{len(sources)} files in {folder}" if folder else _some(sources)),
    ]
    return [(name, value) for name, value in found if value]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _FILES_NAMED} more" if len(names) > _FILES_NAMED else ""
    return ", ".join(names[:_FILES_NAMED]) + more


def _ranks(job: Job, stack_of: dict[int, int]) -> Ranks:
    texts = Index[str]()
    made = Ranks()
    for rank in job.all_ranks:
        view = job.index.views.get(rank)
        log = view.log if view is not None else None
        made.rank.append(rank)
        made.role.append(job.role(rank))
        made.cls.append(job.class_of[rank])
        made.host.append(texts(log.host if log is not None else ""))
        made.pid.append(log.pid if log is not None else 0)
        made.steps.append(log.steps if log is not None else 0)
        made.issued.append(
            max(log.issued, len(view.history)) if view is not None and log is not None else 0
        )
        made.last.append(texts(_last(view.last_op) if view is not None else ""))
        made.end.append(texts(exit_words(view.exit) if view is not None else "left no record"))
        made.stack.append(stack_of.get(rank, -1))
        made.source.append(texts(log.source if log is not None else ""))
    made.texts = texts.values
    return made


def _last(op: Collective | None) -> str:
    if op is None:
        return ""
    state = "in flight" if op.in_flight else op.state.value
    return f"{phrase(op)}, {state}"
