"""Collectives in which everybody is, and that do not complete, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from commlens.diagnosis import activity
from commlens.diagnosis.findings.context import Context, make_finding, op_at
from commlens.diagnosis.findings.next_steps import missing_step
from commlens.diagnosis.index import View
from commlens.diagnosis.wait_graph import Instance, Node
from commlens.model.collective import State
from commlens.model.ops import ROOTED
from commlens.text import capital, duration, op_phrase, ranks_phrase, verb


def find_stuck_inside(context: Context, node: Node) -> None:
    """All arrived and agree: one of them is stopped or starved, it still moves data, or the network is the suspect."""
    which = context.graph.instances[node.detail]
    edges = context.edges_into(node)
    op = edges[0].op
    ranks = [r for r in (which.key[2] if which.sender < 0 else (which.sender, which.receiver)) if r in context.world.views]
    views = [context.world.views[r] for r in ranks]
    held = context.blocked_by([node])
    direct = sorted({edge.rank for edge in edges})
    failed = any(context.world.views[r].fate.failed for r in direct) or any(
        block.how == "failed" for r in direct for block in context.world.views[r].blocks.values()
    )
    if not failed and not context.world.foreign and _since_last_arrival(views, which) < context.world.stalled_after_ns:
        return
    what = {view.rank: context.doing(view) for view in views}
    culprits = [r for r in ranks if what[r].why in ("stopped", "uninterruptible-io", "throttled", "holding-gil") and not what[r].works]
    busy = [r for r in ranks if _burns_cpu(context.world.views[r]) and op.channel.device == "cpu"]
    name = op_phrase(op) if which.sender < 0 else f"message #{which.number} from rank {which.sender} to rank {which.receiver}"
    waited = context.longest(direct)
    if busy and not culprits and not failed:
        summary = f"{ranks_phrase(ranks)} are in {name}, which still moves data, {duration(waited)} so far"
        finding = make_finding(
            "waiting", "in-collective", [], held, "medium", summary, f"{capital(context.waiting_at(edges))}.", "wait", op, op.source,
            [f"{ranks_phrase(busy)} {verb(busy, 'uses', 'use')} CPU inside it."], None, root=False,
        )  # fmt: skip
        context.add(finding, node)
        return
    if culprits:
        others = sorted(set(direct) - set(culprits)) or direct
        summary = f"{ranks_phrase(culprits)} {what[culprits[0]].phrase} inside {name}"
        summary += f"; {ranks_phrase(others)} {verb(others, 'waits', 'wait')} there"
        reason = what[culprits[0]].why
        step = missing_step(what[culprits[0]], culprits)
    else:
        done = [r for r in ranks if _has_completed(context.world.views[r], which)]
        rest = f"; {ranks_phrase(done)} completed it" if done else ", agree on it, and nobody has completed it"
        there = [r for r in ranks if r not in done]
        summary = f"{ranks_phrase(there)} {verb(there, 'is', 'are')} inside {name}{rest}"
        reason = "in-collective"
        step = "look at the network and the driver between these ranks (NCCL_DEBUG=INFO or GLOO logs, dmesg, link counters)"
    errors = sorted({(o.error or "").splitlines()[0][:160] for o in (op_at(v, which) for v in views) if o is not None and o.error})
    evidence = [f"It failed with: {text}." for text in errors[:3]]
    explanation = f"{capital(context.waiting_at(edges))}. " + context.behind(direct, held)
    unknown = None if culprits else "C++ stacks of these ranks (COMMLENS_CPP_STACK=1, py-spy --native) would show where inside."
    if unknown and context.world.foreign and not errors and not any(view.log.captured_ns for view in views):
        unknown += " If the job may still run, a second dump would show whether it moves (commlens compare BEFORE AFTER)."
    finding = make_finding(
        "stuck-inside", reason, culprits, sorted(set(held) - set(culprits)), "high" if culprits else "medium", summary,
        explanation.strip(), step, op, op.source, evidence, unknown,
    )  # fmt: skip
    context.add(finding, node)


def find_left_behind(context: Context, nodes: list[Node]) -> list[Node]:
    """Collectives that completed on other ranks: of several groups in the same place one finding. Returns the other nodes."""
    others: list[Node] = []
    found: dict[tuple[str, int, str], list[tuple[Node, list[int]]]] = defaultdict(list)
    for node in nodes:
        which = context.graph.instances[node.detail]
        op = context.edges_into(node)[0].op
        members = [r for r in which.key[2] if r in context.world.views] if which.sender < 0 else []
        left = [r for r in members if not _has_ended(context.world.views[r], which)]
        if op.op in ROOTED or not left or len(left) == len(members):
            others.append(node)
        else:
            found[(op.op, which.number, op.channel.group.label)].append((node, left))
    for several in found.values():
        _left_behind(context, [node for node, _ in several], sorted({rank for _, left in several for rank in left}))
    return others


def _left_behind(context: Context, nodes: list[Node], ranks: list[int]) -> None:
    """It takes everybody's part: where others came out of it, these ranks' own devices or processes do not get on."""
    op = context.edges_into(nodes[0])[0].op
    done = sorted({r for node in nodes for r in context.graph.instances[node.detail].key[2]} - set(ranks))
    held = sorted(set(context.blocked_by(nodes)) - set(ranks))
    who = ranks_phrase(ranks)
    name = op_phrase(op) if len(nodes) == 1 else f"{op.op} #{op.sequence_number} of {len(nodes)} groups {op.channel.group.label}"
    summary = f"{who} {verb(ranks, 'does', 'do')} not come out of {name}, which completed on {ranks_phrase(done)}"
    explanation = (
        f"It takes every rank's part, so all of it had arrived: {who} {verb(ranks, 'has', 'have')} a device, driver or process "
        "that does not get on. " + context.behind(ranks, held)
    )
    step = f"look at the GPU of {who} (dmesg for Xid errors, nvidia-smi -q), and at what its process printed"
    finding = make_finding("stuck-inside", "in-collective", ranks, held, "high", summary, explanation, step, op, op.source, [], None)
    context.add(finding, nodes[0])
    context.cases[-1].blocked = len(context.blocked_by(nodes))


def _has_ended(view: View, which: Instance) -> bool:
    """Whether another tool's dump says that the rank came out of a collective, if only by what is in flight behind it."""
    if which.sender >= 0:
        return False
    track = view.tracks.get(which.key)
    if track is None or which.number > track.last:
        return False
    return which.number not in track.open


def _has_completed(view: View, which: Instance) -> bool:
    op = op_at(view, which)
    return op is not None and op.state is State.COMPLETED


def _since_last_arrival(views: Sequence[View], which: Instance) -> int:
    ages = [view.now_ns - op.announced_ns for view in views if (op := op_at(view, which)) is not None]
    return min(ages, default=1 << 62)


def _burns_cpu(view: View) -> bool:
    seen = view.log.observation
    return bool(seen.cpu_s is not None and seen.window_s > 0.4 and seen.cpu_s / seen.window_s >= activity.CPU_WORKING)
