"""Ranks that wait for processes that they started, such as those that write checkpoints. These meet
in a process group of their own, whose calls are not recorded: their stacks tell where they are.

Say ranks 0-2 wait for their writers, which are in an all_gather, and the writer of rank 3 waits for
a request: then rank 3, which waits for ranks 0-2 in another collective, did not ask its writer for
the checkpoint, and is to blame.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from commlens.diagnosis.causes.context import Case, Context, waits_of
from commlens.diagnosis.causes.missing import Absence, absence_of
from commlens.diagnosis.graph.wait_graph import WaitNode
from commlens.diagnosis.index.activity import may_wait_for_child
from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.cause import HelperCall, HelpersAwaited
from commlens.model.collective import Stack

# in which a process waits for the next request
_REQUESTS: Final = re.compile(r"/multiprocessing/(connection|queues)\.py$|/(queue|selectors)\.py$")
_CALLS: Final = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/c10d_logger.py")


@dataclass(kw_only=True)
class HelpersCase(Case[HelpersAwaited]):
    """Ranks that wait for processes that they started."""

    absence: Absence


def find_awaited_helpers(context: Context, nodes: list[WaitNode]) -> list[WaitNode]:
    """Find the ranks that wait for a process and whose helper processes are in a collective: they
    are presumed to wait for these. Return the nodes of the other ranks.

    A rank whose helper waits for a request while most others' are in a collective has not asked it
    for what they asked theirs: it is to blame if it waits for the ranks of those.
    """
    if not any(context.job.views[node.rank].log.observation.helpers for node in nodes):
        return nodes
    others = nodes
    for calls in helper_groups(context.job).values():
        inside = {call.rank: call for call in calls if call.op}
        members = [
            (node, doing)
            for node in others
            if node.rank in inside
            and (view := context.job.views[node.rank])
            and may_wait_for_child(view.log, doing := context.doing(view))
        ]
        if members:
            _add(context, absence_of(context, members), calls)
            found = {node for node, _ in members}
            others = [node for node in others if node not in found]
    return others


def helper_groups(job: JobIndex) -> dict[str, list[HelperCall]]:
    """Return where the helper processes stand, by the group in which they meet."""
    groups: dict[str, list[HelperCall]] = defaultdict(list)
    for rank, view in job.views.items():
        for helper in view.log.observation.helpers:
            if helper.stack:
                op, source = _call_in(helper.stack)
                is_idle = _REQUESTS.search(helper.stack[0].file) is not None
                groups[helper.group].append(HelperCall(rank, helper.pid, op, source, is_idle))
    return groups


def _call_in(stack: Stack) -> tuple[str, str]:
    """Return the collective that a stack stands in, empty if in none, and the line that called
    it, or the innermost line.
    """
    calls = takewhile(lambda frame: frame.file.endswith(_CALLS), stack)
    functions = [frame.function.rpartition(".")[2] for frame in calls]
    caller = stack[min(len(functions), len(stack) - 1)]
    named = [name for name in functions if name != "wrapper" and not name.startswith("_")]
    return (named[-1] if named else ""), caller.where


def _add(context: Context, absence: Absence, calls: Sequence[HelperCall]) -> None:
    outside = [call for call in calls if not call.op]
    culprits = _not_asking(absence, calls)
    cause = HelpersAwaited(
        kind="missing",
        why="in-collective",
        root_cause=True,
        culprits=culprits,
        blamed_by="absence" if culprits else "unknown",
        victims=sorted({*absence.blocked, *absence.ranks}.difference(culprits)),
        confidence="medium" if culprits else "low",
        ranks=absence.ranks,
        waits=waits_of(context, absence.all_edges),
        inside=[call for call in calls if call.op and call.rank in absence.ranks],
        outside=outside,
    )
    op = absence.edge.op
    frame = op.source if culprits else absence.doing.frame
    context.cases.append(HelpersCase(cause, op, frame, blocked=absence.blocked, absence=absence))


def _not_asking(absence: Absence, calls: Sequence[HelperCall]) -> list[int]:
    """Return the ranks that did not ask their helpers for the collective; none if that is not
    clear.

    It is clear if these helpers wait for requests and are fewer than those in the collective, and
    if the ranks of the latter wait for them. Else the helpers may stay in a collective, say, until
    the one of rank 0 gets a request.
    """
    inside = {call.rank for call in calls if call.op}
    outside = {call.rank: call.is_idle for call in calls if not call.op}
    were_asked = len(outside) < len(inside) and inside <= set(absence.ranks)
    are_idle = all(outside.values()) and set(outside) <= set(absence.blocked)
    return sorted(outside) if were_asked and are_idle else []
