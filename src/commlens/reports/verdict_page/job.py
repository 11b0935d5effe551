"""The examined job as the page shows it: each rank's role, classes of ranks that do the same, and
the collectives in focus.
"""

from __future__ import annotations

from typing import NamedTuple

from commlens.diagnosis.examine import ExaminedJob
from commlens.diagnosis.index.job_index import BlockedThread, ChannelKey, JobIndex, RankView
from commlens.diagnosis.words.phrases import exit_words
from commlens.model.collective import Collective, Frame
from commlens.model.grouping import grouped
from commlens.model.verdict import Finding, Verdict
from commlens.reports.verdict_page.data import ROLES, RankClass, Role
from commlens.text import args_phrase, duration, format_ranks, frame_phrase, group_label, op_phrase

CLASSES_WANTED = 9  # with more, ranks are distinguished less finely
CLASSES_MAX = 24
_DETAILS = 4
"""How finely ranks are distinguished: 4 by the collective with its number, and the line; 3 messages
without peer and number; 2 collectives without their number; 1 without the line; 0 by the group
only.
"""

_WAIT = {
    "wait": ("waits in {}", "wait in {}"),
    "issue": ("waits in {}", "wait in {}"),
    "assumed": ("has {} in flight", "have {} in flight"),
    "enqueued": ("waits in {}", "wait in {}"),
    "failed": ("gave up waiting in {}", "gave up waiting in {}"),
    "unknown": ("may wait in {}", "may wait in {}"),
}
"""The verb for one rank in a collective, and for several."""
_REFUSED = ("was refused {}", "were refused {}")  # by strict verification, before anything was sent
_SEVERAL = (0, 1)  # any ranks: the verb is plural


class RankActivity(NamedTuple):
    """A rank's activity; ranks with equal ones form a class."""

    role: Role
    one: str  # in words
    several: str
    place: str = ""


class PageJob:
    """An examined job, with its ranks in classes.

    Args:
        examined: the job.
        has_times: whether the times in its records are those of a clock. In those of ranks that
            did not run together, only the order counts.
    """

    def __init__(self, examined: ExaminedJob, *, has_times: bool = True) -> None:
        self.examined, self.has_times = examined, has_times
        self.verdict, self.index, self.mismatches, self.graph = examined
        self.all_ranks = sorted(
            {
                *self.index.views,
                *self.index.no_record,
                *self.index.elsewhere,
                *self.verdict.culprits,
            }
        )
        self.roles = _roles(self.verdict, self.index)
        self.classes, self.class_of = self._fold()
        self.focus = self._focus()

    @property
    def knows_capture_time(self) -> bool:
        """Whether each rank's records say when they were copied; if not, how long an op has been in
        flight is unknown.
        """
        return self.has_times and (
            not self.index.foreign
            or all(view.log.captured_ns for view in self.index.views.values())
        )

    def role(self, rank: int) -> Role:
        """Return a rank's role in the fault."""
        return self.roles.get(rank, "none")

    def op_of(self, rank: int, channel: ChannelKey, number: int) -> Collective | None:
        """Return what a rank issued on a channel under a number, if that is known."""
        view = self.index.views.get(rank)
        return view.op_at(channel, number) if view is not None else None

    def _focus(self) -> list[tuple[ChannelKey, int, Finding]]:
        """Return the collectives that the findings name, root causes first: channel, number,
        finding.
        """
        found: list[tuple[ChannelKey, int, Finding]] = []
        for finding in self.verdict.findings:
            group, op = finding.group, finding.collective
            if group is None or op is None or op.peer is not None:
                continue
            named = (group.name, tuple(group.ranks))
            keys = [key for key in self.index.channels if key[1:3] == named]
            # A group has a channel for each device type: prefer the one with that collective.
            number = op.sequence_number
            keys.sort(
                key=lambda key: not any(self.op_of(rank, key, number) for rank in self.index.views)
            )
            if keys and all(known[:2] != (keys[0], number) for known in found):
                found.append((keys[0], number, finding))
        return found

    # --- classes of ranks

    def _fold(self) -> tuple[list[RankClass], dict[int, int]]:
        for detail in range(_DETAILS, -1, -1):
            doing = grouped((self._activity(rank, detail), rank) for rank in self.all_ranks)
            if len(doing) <= CLASSES_WANTED:
                break
        found = sorted(
            doing.items(), key=lambda item: (ROLES.index(item[0].role), -len(item[1]), item[1])
        )
        rest: list[int] = []
        if len(found) > CLASSES_MAX:
            rest = sorted(rank for _, ranks in found[CLASSES_MAX - 1 :] for rank in ranks)
            found = found[: CLASSES_MAX - 1]
        classes = [self._class(what, ranks) for what, ranks in found]
        class_of = {rank: number for number, (_, ranks) in enumerate(found) for rank in ranks}
        if rest:
            class_of |= dict.fromkeys(rest, len(classes))
            classes.append(
                RankClass(
                    ranks=format_ranks(rest),
                    count=len(rest),
                    role="none",
                    doing="are in other places",
                    each="is elsewhere",
                )
            )
        return classes, class_of

    def _class(self, what: RankActivity, ranks: list[int]) -> RankClass:
        blocks = [(rank, block) for rank in ranks if (block := self.block_of(rank)) is not None]
        detail = ""
        if blocks:
            waits = [block.age_ns for rank, block in blocks if not self._is_refused(rank, block)]
            longest = max(waits, default=0) if self.knows_capture_time else 0
            kinds = {args_phrase(block.op) for _, block in blocks}
            parts = [f"for {duration(longest)}"] if longest else []
            parts += [next(iter(kinds))] if len(kinds) == 1 and kinds != {""} else []
            detail = ", ".join(parts)
        return RankClass(
            ranks=format_ranks(ranks),
            count=len(ranks),
            role=what.role,
            doing=what.several if len(ranks) > 1 else what.one,
            each=what.one,
            place=what.place,
            detail=detail,
        )

    def _activity(self, rank: int, detail: int) -> RankActivity:
        role = self.role(rank)
        if role in ("culprit", "awaited"):
            detail = _DETAILS
        view = self.index.views.get(rank)
        if view is None:
            if rank in self.index.no_record:
                return _same(role, "left no record")
            return RankActivity(role, "has no records here", "have no records here")
        block = self.block_of(rank)
        if view.exit.kind == "clean":
            return _same(role, "finished")
        if view.exit.kind in ("own", "gone") or (view.exit.ended and block is None):
            one, several = exit_words(view.exit), exit_words(view.exit, _SEVERAL)
            return RankActivity(
                role, one, several, _place(view.exit.source or _main_frame(view), detail)
            )
        if block is not None:
            one, several = _REFUSED if self._is_refused(rank, block) else _WAIT[block.how]
            name, place = phrase(block.op, detail), _place(block.op.source, detail)
            return RankActivity(role, one.format(name), several.format(name), place)
        if (frame := _main_frame(view)) is not None:
            where = frame.function or frame.where
            return RankActivity(role, f"is in {where}", f"are in {where}", _place(frame, detail))
        return self._at_rest(view, role, detail)

    def _at_rest(self, view: RankView, role: Role, detail: int) -> RankActivity:
        """Return what a rank without a stack and without an op in flight did last."""
        if view.last_op is not None:
            words = f"issued {phrase(view.last_op, detail)} last"
            return _same(role, words, _place(view.last_op.source, detail))
        if view.lost_newest:
            return _same(role, "left no readable record")
        if not self.index.foreign:
            return _same(role, "issued nothing")
        return RankActivity(role, "has nothing in flight", "have nothing in flight")

    def _is_refused(self, rank: int, block: BlockedThread) -> bool:
        """Return whether strict verification refused the collective before it was issued."""
        return block.how == "failed" and self.index.views[rank].exit.refused

    def block_of(self, rank: int) -> BlockedThread | None:
        """Return what blocks a rank: the block of its main thread, else the oldest one."""
        view = self.index.views.get(rank)
        if view is None or not view.blocks:
            return None
        stuck = {
            thread: block for thread, block in view.blocks.items() if block.stuck
        } or view.blocks
        return stuck.get(view.main_thread) or min(
            stuck.values(), key=lambda block: (block.since_ns, block.thread)
        )


def _main_frame(view: RankView) -> Frame | None:
    stack = view.log.main_stack
    return stack.source if stack is not None else None


def _place(frame: Frame | None, detail: int) -> str:
    return frame_phrase(frame) if detail > 1 else ""


def phrase(op: Collective, detail: int = _DETAILS) -> str:
    """``"all_reduce #41 of dp"``: without the ranks, so that it is equal for the groups of one mesh
    dimension.
    """
    if op.is_point_to_point:
        if detail < _DETAILS:
            return "a send or receive" if detail < 2 else f"a {op.op}"
        return op_phrase(op)
    if op.is_store_wait:
        return op_phrase(op) if detail else "the store"
    if detail == 0:
        return f"collectives of {label(op)}"
    return (
        f"{op.op} #{op.sequence_number} of {label(op)}" if detail > 2 else f"{op.op} of {label(op)}"
    )


def label(op: Collective) -> str:
    """Return the group's label; ``"the default group"`` for the default group."""
    return group_label(op.channel.group, "the default group")


def _same(role: Role, words: str, place: str = "") -> RankActivity:
    return RankActivity(role, words, words, place)


def _roles(verdict: Verdict, index: JobIndex) -> dict[int, Role]:
    roles: dict[int, Role] = dict.fromkeys([*index.no_record, *index.elsewhere], "unknown")
    findings = verdict.findings
    for finding in findings:
        if not finding.root_cause:
            roles |= dict.fromkeys(finding.culprits, "involved")
    for finding in findings:
        # ranks with other numbers hold up nobody
        if (finding.root_cause and finding.kind != "diverged") or finding.kind == "waiting":
            roles |= dict.fromkeys(finding.victims, "victim")
        if finding.kind == "waiting" and finding.group is not None and not finding.culprits:
            roles |= dict.fromkeys(set(finding.group.ranks) - set(finding.victims), "awaited")
    for finding in findings:
        if finding.root_cause:
            roles |= dict.fromkeys(
                finding.culprits, "awaited" if finding.kind == "waiting" else "culprit"
            )
    return roles
