"""The verdict as one HTML file that needs no network: see docs/pages.md."""

from __future__ import annotations

import time

from commlens.diagnosis.examine import ExaminedJob
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.words.next_steps import action_phrase
from commlens.diagnosis.words.phrases import exit_words
from commlens.model.ranklog import RankLog
from commlens.reports.page import render_page
from commlens.reports.step_table import step_table
from commlens.reports.terminal import render
from commlens.reports.verdict_page.data import Ranks, VerdictPage
from commlens.reports.verdict_page.hardware import hardware
from commlens.reports.verdict_page.job import PageJob, phrase
from commlens.reports.verdict_page.rank_grids import rank_grids
from commlens.reports.verdict_page.source_lines import culprits_lines, others_line
from commlens.reports.verdict_page.stacks import stacks
from commlens.reports.verdict_page.tables import tables
from commlens.reports.verdict_page.timeline import Index, timeline
from commlens.reports.verdict_page.wait_graph import wait_graph
from commlens.text import naming_worlds
from commlens.version import __version__

_FILES_NAMED = 3


def verdict_html(examined: ExaminedJob, *, has_times: bool = True) -> bytes:
    """Return the page of an examined job as HTML; ``has_times`` as in :class:`PageJob`."""
    verdict, page = examined.verdict, verdict_page(examined, has_times=has_times)
    return render_page(
        "verdict", title=f"{verdict.summary or verdict.kind} - commlens", data=page, text=page.text
    )


def verdict_page(examined: ExaminedJob, *, has_times: bool = True) -> VerdictPage:
    """Return the page's content as data; ``has_times`` as in :class:`PageJob`."""
    verdict = examined.verdict
    with naming_worlds(verdict.worlds):
        job = PageJob(examined, has_times=has_times)
        merged, stack_of = stacks(job)
        facts = _facts(job)
        times = examined.step_times() if has_times else None
        return VerdictPage(
            commlens=__version__,
            verdict=verdict,
            text="\n".join(
                [render(verdict, 100), *(f"{name}: {value}" for name, value in facts), ""]
            ),
            restart=action_phrase(verdict.action) if verdict.action is not None else "",
            facts=facts,
            ranks=_ranks(job, stack_of),
            classes=job.classes,
            graph=wait_graph(job),
            layouts=rank_grids(job),
            timeline=timeline(job),
            tables=tables(job),
            stacks=merged,
            step=step_table(times) if times is not None and times.steps else None,
            source=culprits_lines(job),
            others=others_line(job),
            hardware=hardware(job),
        )


def _facts(job: PageJob) -> list[tuple[str, str]]:
    views = job.index.views.values()
    if not views:
        return []
    logs = [view.log for view in views]
    captured = max(view.now_ns for view in views) / 1e9 if job.has_times else 0
    hosts = sorted({log.host for log in logs} - {""})
    found = {
        "Job": logs[0].job,
        "Script": next((log.script for log in logs if log.script), ""),
        "Ranks": f"{len(logs)} of {job.index.size}",
        "Hosts": f"{len(hosts)}: {hosts[0]} ... {hosts[-1]}"
        if len(hosts) > 4
        else ", ".join(hosts),
        "Recorded until": captured
        and time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(captured)),
        "Versions": ", ".join(f"{name} {each}" for name, each in sorted(logs[0].versions.items())),
        "Read from": _files(sorted({log.source for log in logs} - {""})),
    }
    return [(name, str(value)) for name, value in found.items() if value]


def _files(names: list[str]) -> str:
    folders = {name.rpartition("/")[0] for name in names}
    if len(folders) == 1 and len(names) > 1 and folders != {""}:
        return f"{len(names)} files in {folders.pop()}"
    more = f" and {len(names) - _FILES_NAMED} more" if len(names) > _FILES_NAMED else ""
    return ", ".join(names[:_FILES_NAMED]) + more


def _ranks(job: PageJob, stack_of: dict[int, int]) -> Ranks:
    texts, no_log = Index[str](), RankLog(-1, 0)
    views = [job.index.views.get(rank) for rank in job.all_ranks]
    logs = [view.log if view is not None else no_log for view in views]
    return Ranks(
        rank=job.all_ranks,
        role=list(map(job.role, job.all_ranks)),
        cls=[job.class_of[rank] for rank in job.all_ranks],
        host=[texts(log.host) for log in logs],
        pid=[log.pid for log in logs],
        steps=[log.steps for log in logs],
        issued=[
            max(view.log.issued, len(view.history)) if view is not None else 0 for view in views
        ],
        last=[texts(_last_op_phrase(view)) for view in views],
        end=[
            texts(exit_words(view.exit) if view is not None else "left no record") for view in views
        ],
        stack=[stack_of.get(rank, -1) for rank in job.all_ranks],
        source=[texts(log.source) for log in logs],
        texts=texts.values,  # after all columns that add to them
    )


def _last_op_phrase(view: RankView | None) -> str:
    op = view.last_op if view is not None else None
    if op is None:
        return ""
    return f"{phrase(op)}, {'in flight' if op.in_flight else op.state.value}"
