"""Process groups and meshes as grids of ranks."""

from __future__ import annotations

from collections import defaultdict

from commlens.reports.verdict_page.data import Layout, LayoutRow
from commlens.reports.verdict_page.job import Job
from commlens.text import format_ranks, group_label

_LAYOUTS_MAX = 12


def rank_grids(job: Job) -> list[Layout]:
    """Return one grid for each group label, and one by host."""
    by_label: dict[str, dict[tuple[int, ...], bool]] = defaultdict(dict)
    faults = {
        (key[1], key[2])
        for key, _, finding in job.focus
        if finding.root_cause or len(job.focus) == 1
    }
    for channel in job.index.channels.values():
        group = channel.group
        if not group.ranks:
            continue
        name = group_label(group, "the default group")
        fault = (group.name, group.ranks) in faults
        by_label[name][group.ranks] = by_label[name].get(group.ranks, False) or fault
    found = [_layout(name, groups) for name, groups in by_label.items()]
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
    hosts: dict[str, list[int]] = defaultdict(list)
    for rank, view in job.index.views.items():
        hosts[view.log.host or "an unnamed host"].append(rank)
    rows = [
        LayoutRow(host, sorted(ranks))
        for host, ranks in sorted(hosts.items(), key=lambda item: min(item[1]))
    ]
    missing = [rank for rank in job.all_ranks if rank not in job.index.views]
    if missing:
        rows.append(LayoutRow("no records", missing))
    if rows:
        found.insert(
            _LAYOUTS_MAX - 1,
            Layout(
                "hosts",
                f"{len(hosts)} hosts, a row each." if len(hosts) > 1 else "All on one host.",
                rows,
            ),
        )
    return found[:_LAYOUTS_MAX]


def _layout(name: str, groups: dict[tuple[int, ...], bool]) -> Layout:
    rows = [
        LayoutRow(format_ranks(ranks), list(ranks), fault)
        for ranks, fault in sorted(groups.items())
    ]
    sizes = {len(ranks) for ranks in groups}
    each = f"{sizes.pop()} ranks each" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)} ranks"
    about = (
        f"{len(rows)} groups of {each}, a row each."
        if len(rows) > 1
        else f"One group of {len(rows[0].ranks)} ranks."
    )
    return Layout(name, about, rows)
