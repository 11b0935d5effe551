"""Process groups and meshes as grids of ranks."""

from __future__ import annotations

from commlens.model.grouping import grouped
from commlens.reports.verdict_page.data import Layout, LayoutRow
from commlens.reports.verdict_page.job import PageJob
from commlens.text import group_label, members_text

_LAYOUTS_MAX = 12


def rank_grids(job: PageJob) -> list[Layout]:
    """Return one grid for each group label, and one by host."""
    faults = {
        (name, ranks)
        for (_, name, ranks, *_), _, finding in job.focus
        if finding.root_cause or len(job.focus) == 1
    }
    by_label = grouped(
        (group_label(group, "the default group"), group)
        for group in (channel.group for channel in job.index.channels.values())
        if group.ranks
    )
    found = []
    for label, groups in by_label.items():
        at_fault = {group.ranks for group in groups if (group.name, group.ranks) in faults}
        found.append(_layout(label, {group.ranks: group.ranks in at_fault for group in groups}))
    # Labels with several groups first, the one with the fault before the others, then the finest;
    # one group of all ranks shows little.
    found.sort(
        key=lambda layout: (
            len(layout.rows) == 1,
            not any(row.fault for row in layout.rows),
            -len(layout.rows),
            layout.name,
        )
    )
    if job.all_ranks:
        found.insert(_LAYOUTS_MAX - 1, _by_host(job))
    return found[:_LAYOUTS_MAX]


def _by_host(job: PageJob) -> Layout:
    hosts = grouped(
        (view.log.host or "an unnamed host", rank) for rank, view in sorted(job.index.views.items())
    )
    about = f"{len(hosts)} hosts, a row each." if len(hosts) > 1 else "All on one host."
    rows = [LayoutRow(host, ranks) for host, ranks in hosts.items()]
    missing = [rank for rank in job.all_ranks if rank not in job.index.views]
    return Layout("hosts", about, [*rows, *([LayoutRow("no records", missing)] if missing else [])])


def _layout(name: str, groups: dict[tuple[int, ...], bool]) -> Layout:
    rows = [
        LayoutRow(members_text(ranks), list(ranks), fault)
        for ranks, fault in sorted(groups.items())
    ]
    sizes = {len(ranks) for ranks in groups}
    each = f"{sizes.pop()} ranks each" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)} ranks"
    about = (
        f"{len(rows)} groups of {each}, a row each."
        if len(rows) > 1
        else f"One group of {len(rows[0].ranks)} ranks: {rows[0].name}."
    )
    return Layout(name, about, rows)
