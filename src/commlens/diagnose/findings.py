"""From the graph's sinks and cycles, the disagreements and the deaths to findings in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commlens.diagnose import why
from commlens.diagnose.graph import Edge, Graph, Instance, Node, edges_of
from commlens.diagnose.mismatch import Trouble
from commlens.diagnose.period import leaves_routine_at
from commlens.diagnose.why import Doing
from commlens.diagnose.words import capital, count, duration, group_phrase, instance, place, ranks_phrase, tensors, verb
from commlens.diagnose.world import View, World
from commlens.model.collective import Collective, Frame, State, user_frame
from commlens.model.verdict import CollectiveRef, Confidence, Finding, GroupRef, Kind, Why

_SURE = frozenset({"finished", "stopped", "holding-gil", "throttled", "uninterruptible-io", "exception", "exit", "killed", "out-of-memory"})


@dataclass
class Case:
    """A finding, with what decides its place among the others."""

    finding: Finding
    blocked: int = 0  # ranks that wait because of it
    order: tuple[int, ...] = ()  # deterministic, earliest first


class Findings:
    """Collects the findings of one job."""

    def __init__(self, world: World, troubles: list[Trouble], graph: Graph) -> None:
        self.world = world
        self.troubles = troubles
        self.graph = graph
        self.cases: list[Case] = []
        self._victims: dict[Node, list[int]] = {}

    def collect(self) -> list[Finding]:
        """All findings, root causes first, by how many ranks they block."""
        sinks = self.graph.sinks()
        self._disagreements({node.detail: node for node in sinks if node.kind == "trouble"})
        self._deaths({node.rank: node for node in sinks if node.kind == "dead"})
        self._cycles()
        self._absences([node for node in sinks if node.kind == "absent"])
        self._unrecorded([node for node in sinks if node.kind in ("no-record", "elsewhere")])
        for node in sinks:
            if node.kind == "stuck":
                self._stuck_inside(node)
        if not self.cases:
            self._starting()
        if not any(case.finding.root_cause for case in self.cases):
            self._ended_somehow()
        self._demote()
        self.cases.sort(key=lambda c: (not c.finding.root_cause, c.finding.kind == "waiting", -c.blocked, c.order, c.finding.culprits))
        return [case.finding for case in self.cases]

    # --- shared

    def _add(self, finding: Finding, node: Node | None = None, order: tuple[int, ...] = ()) -> None:
        blocked = len(self._blocked_by([node])) if node is not None else 0
        self.cases.append(Case(finding, blocked, order))

    def _blocked_by(self, nodes: Iterable[Node]) -> list[int]:
        return sorted({node.rank for node in self.graph.reaching(nodes) if node.kind == "wait"})

    def _name(self, rank: int) -> str:
        """``"rank 2 (host n03, pid 4121)"``."""
        log = self.world.views[rank].log
        about = [f"host {log.host}"] if log.host else []
        about += [f"pid {log.pid}"] if log.pid else []
        return f"rank {rank}" + (f" ({', '.join(about)})" if about else "")

    def _last(self, rank: int) -> str:
        """``"its last collective, all_reduce #40 of group dp [0-3], completed"``."""
        view = self.world.views[rank]
        op = view.last_op
        if op is None:
            return "it never issued a collective"
        state = {
            State.COMPLETED: "completed",
            State.FAILED: "failed",
            State.UNKNOWN: "was issued",
        }.get(op.state, "is in flight")
        return f"its last collective, {instance(op)}, {state}"

    def _edges_into(self, node: Node) -> list[Edge]:
        return [self.graph.edges[source][node] for source in sorted(self.graph.back.get(node, ()))]

    def _waiting_at(self, edges: Sequence[Edge]) -> str:
        """``"Ranks 0-1,3 have been waiting for 31 s at train.py:81 step, float32[1048576] SUM"``; by line where lines differ."""
        places: dict[str, list[int]] = defaultdict(list)
        for edge in edges:
            text = place(edge.op.source)
            places[text].append(edge.rank)
        parts = []
        for text, ranks in sorted(places.items(), key=lambda item: (-len(item[1]), item[1]))[:3]:
            where = f" at {text}" if text else ""
            waited = self._longest(ranks)
            length = f" for {duration(waited)}" if waited >= self.world.stalled_after_ns else ""
            has = verb(ranks, "has", "have")
            parts.append(f"{ranks_phrase(ranks)} {has} been waiting{length}{where}")
        what = tensors(edges[0].op) if edges else ""
        return "; ".join(parts) + (f", {what}" if what else "")

    def _longest(self, ranks: Iterable[int]) -> int:
        ages = [block.age_ns for rank in ranks if rank in self.world.views for block in self.world.views[rank].blocks.values()]
        return max(ages, default=0)

    def _behind(self, direct: Sequence[int], everybody: Sequence[int]) -> str:
        more = sorted(set(everybody) - set(direct))
        return f"{capital(ranks_phrase(more))} {verb(more, 'waits', 'wait')} behind {verb(direct, 'it', 'them')}. " if more else ""

    def _assumed(self, ranks: Iterable[int]) -> bool:
        """Whether that these ranks wait is only concluded from an op in flight."""
        blocks = [block for rank in ranks if rank in self.world.views for block in self.world.views[rank].blocks.values()]
        return bool(blocks) and all(block.how == "assumed" for block in blocks)

    # --- mismatch

    def _disagreements(self, sinks: dict[int, Node]) -> None:
        for i, trouble in enumerate(self.troubles):
            node = sinks.get(i)
            held = self._blocked_by([node]) if node is not None else []
            self._add(self._disagreement(trouble, held), node, (min(op.announced_ns for op in trouble.ops.values()),))
            self.cases[-1].order = (self._first_index(trouble), *self.cases[-1].order)

    def _first_index(self, trouble: Trouble) -> int:
        return min((trouble.ops[rank].index for rank in trouble.culprits if rank in trouble.ops), default=0)

    def _disagreement(self, trouble: Trouble, held: list[int]) -> Finding:
        culprits = sorted(trouble.culprits)
        first = next((trouble.ops[rank] for rank in culprits if rank in trouble.ops), next(iter(trouble.ops.values())))
        usual_rank = next((rank for rank in sorted(trouble.ops) if rank not in culprits), None)
        usual = trouble.ops[usual_rank] if usual_rank is not None else None
        members = [rank for rank in trouble.ops if rank not in culprits]
        failed = {r for r in trouble.key[2] if r in self.world.views and self.world.views[r].fate.failed} if not trouble.silent else set()
        aborted = sorted(r for r in failed if self.world.views[r].fate.kind == "own" and self._absorbed(r))
        held = sorted(set(held) - set(culprits))
        victims = sorted(({*held, *members} | failed) - set(culprits))
        skipped = trouble.shift is not None or trouble.habit
        kind: Kind = f"mismatch/{trouble.answer.aspect}" if trouble.answer is not None else "missing"  # type: ignore[assignment]
        reason: Why = "skipped" if skipped else "in-collective"
        op = first
        if trouble.shift is not None and trouble.answer is None:
            op = trouble.shift.skipped
        name = instance(op) if not trouble.pair else f"message #{trouble.number} from rank {first.channel and trouble.pair[0].peer}"
        if trouble.pair is not None:
            sender, receiver = sorted(trouble.ops, key=lambda r: trouble.ops[r] is not trouble.pair[0])  # type: ignore[index]
            name = f"message #{trouble.number} from rank {sender} to rank {receiver} in {group_phrase(trouble.channel.group)}"
        summary = self._disagreement_summary(trouble, name, culprits, first, usual)
        own = "; ".join(
            f"{self._name(rank)} is at {place(trouble.ops[rank].source) or 'an unknown line'} with "
            f"{trouble.ops[rank].op} {tensors(trouble.ops[rank])}".rstrip()
            for rank in culprits[:3]
            if rank in trouble.ops
        )
        explanation = f"{own}. " if own else ""
        skips = self._skip_evidence(trouble, culprits)
        if trouble.answer is None:
            explanation = " ".join(skips) + " "
            skips = []
        elif usual is not None and members:
            explanation += (
                f"{capital(ranks_phrase(members))} {verb(members, 'is', 'are')} at {place(usual.source) or 'an unknown line'} "
                f"with {usual.op} {tensors(usual)}".rstrip()
                + ". "
            )
        if trouble.silent:
            explanation += "Nothing hung: the result is wrong."
        elif held:
            explanation += f"{capital(ranks_phrase(held))} {verb(held, 'is', 'are')} held up by it."
        if aborted:
            explanation += f" {capital(ranks_phrase(aborted))} {self.world.views[aborted[0]].fate.text} because of it."
        evidence = []
        if trouble.answer is not None and (trouble.tie or len(trouble.answer.parties) > 2 or trouble.answer.aspect == "splits"):
            evidence.append(f"{name}: {trouble.answer.detail}.")
        evidence += skips
        if trouble.tie:
            evidence.append("No side has a majority, and no rank leaves its own routine: it cannot be told which is wrong.")
        elif trouble.by_history:
            evidence.append(
                f"No side has a majority: {ranks_phrase(culprits)} {verb(culprits, 'does', 'do')} here what it never did before in this place."
            )
        if trouble.again:
            evidence.append(f"The same happened {count(trouble.again, 'more time')} later.")
        confidence: Confidence = "high"
        more = None
        if trouble.uncertain:
            confidence, more = "low", "Issue the group's collectives from one thread: with several, their order is not sure."
        elif trouble.tie:
            confidence, more = "medium", "A third rank's record, or a run with more steps before the fault, would show which one is wrong."
        elif trouble.by_history or (trouble.answer is None and trouble.shift is not None and trouble.shift.matches < 2):
            confidence = "medium"
        return _finding(
            kind, reason, culprits, victims, confidence, summary, explanation.strip(),
            _mismatch_step(trouble, first, usual), op, first.source, evidence, more,
        )  # fmt: skip

    def _disagreement_summary(self, trouble: Trouble, name: str, culprits: list[int], first: Collective, usual: Collective | None) -> str:
        who = ranks_phrase(culprits)
        shift = trouble.shift
        if shift is not None and trouble.answer is None:
            if shift.by < 0:
                return f"{who} issued {count(-shift.by, 'collective')} too many, from {name} on; everything after pairs up wrongly"
            extra = f" and {shift.by - 1} more" if shift.by > 1 else ""
            return f"{who} skipped {name}{extra}; everything after it pairs up wrongly"
        answer = trouble.answer
        assert answer is not None
        if trouble.tie or usual is None:
            sides = " against ".join(f"{party.what} ({ranks_phrase(party.ranks)})" for party in answer.parties[:3])
            return f"ranks disagree in {name}: {sides}"
        odd, theirs = answer.parties[-1].what, answer.parties[0].what
        for party in answer.parties:
            if set(party.ranks) & set(culprits):
                odd = party.what
            elif usual is not None and set(party.ranks) - set(culprits):
                theirs = party.what if party.ranks else theirs
        if answer.aspect == "op":
            group = group_phrase(trouble.channel.group)
            looks = ": it looks like a skipped collective" if shift is not None or trouble.habit else ""
            return f"{who} issued {first.op} where the others issued {usual.op} (#{trouble.number} of {group}){looks}"
        if answer.aspect == "p2p":
            return f"{name} does not fit: {answer.detail}"
        words = {"reduce-op": "the reduce op", "dtype": "the dtype", "shape": "the shape", "layout": "the memory layout"}
        what = words.get(answer.aspect, f"the {answer.aspect}")
        skip = ": it looks like a skipped collective" if shift is not None or trouble.habit else ""
        return f"{who} {verb(culprits, 'disagrees', 'disagree')} on {what} of {name}: {odd}, the others {theirs}{skip}"

    def _skip_evidence(self, trouble: Trouble, culprits: list[int]) -> list[str]:
        shift = trouble.shift
        number = trouble.number
        who = ranks_phrase(culprits)
        if shift is not None and shift.by > 0:
            return [
                f"What {who} issued as #{number} ({place(shift.own.source)}) is what the others issue as #{number + shift.by}, and so on "
                f"for {count(shift.matches, 'collective')}; the others' #{number} is {shift.skipped.op} at {place(shift.skipped.source)}, "
                f"step {shift.skipped.step}."
            ]
        if shift is not None:
            return [f"From #{number} on, what {who} issues is what the others issued {-shift.by} before."]
        if trouble.habit:
            return [f"{capital(who)} used to issue this right after what the others wait in, and this time did not issue that."]
        return []

    # --- dead

    def _absorbed(self, rank: int) -> bool:
        """Whether a death follows from a disagreement: gloo aborts the process whose tensor does not fit."""
        fate = self.world.views[rank].fate
        if not fate.says_disagreement:
            return False
        return any(trouble.absorbs and rank in trouble.key[2] and self._reached(rank, trouble) for trouble in self.troubles)

    def _reached(self, rank: int, trouble: Trouble) -> bool:
        if trouble.pair is not None:
            return rank in trouble.ops
        track = self.world.views[rank].tracks.get(trouble.key)
        return track is not None and track.last >= trouble.number and not (trouble.silent and track.completed >= trouble.number)

    def _deaths(self, sinks: dict[int, Node]) -> None:
        groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for rank in sorted(self.world.views):
            fate = self.world.views[rank].fate
            if fate.kind == "own" or rank in sinks or fate.kind == "gone":
                if self._absorbed(rank):
                    continue
                groups[(fate.why, fate.text, fate.source.where if fate.source else "")].append(rank)
        moments = {key: min(self.world.views[r].fate.at_ns for r in ranks) for key, ranks in groups.items()}
        first = min((moment for moment in moments.values() if moment), default=0)
        for key, ranks in sorted(groups.items(), key=lambda item: (moments[item[0]] or 1 << 62, item[1])):
            nodes = [sinks[rank] for rank in ranks if rank in sinks]
            fate = self.world.views[ranks[0]].fate
            # An exception in user code stands for itself; a later signal or exit may follow from the first end.
            follows = bool(first) and moments[key] > first + 1_000_000_000 and fate.why != "exception"
            self._death(ranks, nodes, not follows)
            self.cases[-1].blocked = len(self._blocked_by(nodes))
            self.cases[-1].order = (moments[key],)

    def _death(self, ranks: list[int], nodes: list[Node], root: bool) -> None:
        views = [self.world.views[rank] for rank in ranks]
        fate = views[0].fate
        edges = [edge for node in nodes for edge in self._edges_into(node)]
        held = self._blocked_by(nodes)
        peers = [r for r, v in self.world.views.items() if v.fate.kind in ("peer", "told")]
        victims = sorted((set(held) | set(peers)) - set(ranks))
        op = edges[0].op if edges else views[0].last_op
        frame = fate.source or _last_line(views[0])
        who = ranks_phrase(ranks)
        summary = f"{who} {fate.text}"
        if fate.source is not None:
            summary += f" at {place(fate.source)}"
        waiting = sorted({edge.rank for edge in edges})
        if edges:
            summary += f"; {ranks_phrase(waiting)} {verb(waiting, 'was', 'were')} waiting for it in {instance(edges[0].op)}"
        explanation = f"{self._name(ranks[0])} {fate.text}; {self._last(ranks[0])}"
        if frame is not None and fate.source is None:
            explanation += (
                f", issued at {place(frame)}"
                if views[0].last_op is not None and frame == views[0].last_op.source
                else f"; it was last seen at {place(frame)}"
            )
        explanation += ". "
        if edges:
            explanation += capital(self._waiting_at(edges)) + ". "
        explanation += self._behind(waiting, sorted(set(held) - set(ranks)))
        if peers:
            explanation += f"{capital(ranks_phrase(peers))} ended because of it."
        evidence = [f"rank {r} {self.world.views[r].fate.text}." for r in sorted(peers)[:4]]
        confidence: Confidence = "high" if fate.kind == "own" else "medium"
        more = (
            None
            if fate.kind == "own"
            else "Start the job with `commlens launch`, or look into the system's log (dmesg, the scheduler): nobody saw how it ended."
        )
        self._add(
            _finding(
                "dead", fate.why, ranks, victims, confidence, summary, explanation.strip(), _death_step(views[0], frame), op, frame,
                evidence, more, root=root,
            )
        )  # fmt: skip

    # --- cycles

    def _cycles(self) -> None:
        for component in self.graph.cycles():
            path = edges_of(self.graph, component)
            ranks = sorted({node.rank for node in component})
            on_path = sorted({node.rank for node, _, _ in path})
            culprits, odd, how = self._odd_in_cycle(component, ranks, on_path)
            held = self._blocked_by(component)
            victims = sorted((set(held) | set(ranks)) - set(culprits))
            steps = [f"rank {a.rank} waits in {instance(edge.op)}{_at(edge.op)} for rank {b.rank}" for a, b, edge in path]
            op, usual = odd.get(culprits[0], (None, None))
            own = next((edge.op for node, _, edge in path if node.rank == culprits[0]), None)
            block = next((self.graph.blocks[node].op for node in component if node.rank == culprits[0]), None)
            op = op or own or block
            lost = None
            if usual is not None and usual.op == "send" and usual.peer in ranks:
                lost = usual.peer
            if lost is not None:
                summary = f"rank {culprits[0]} did not send to rank {lost}, as it did every time before; {ranks_phrase(ranks)} wait for each other"
            elif len(culprits) < len(ranks) and op is not None:
                instead = (
                    f", not {instance(usual)[: instance(usual).rfind(' #')] if usual.is_point_to_point else usual.op + _of_group(usual)} as before,"
                    if usual is not None
                    else ""
                )
                summary = f"{ranks_phrase(ranks)} wait for each other: {ranks_phrase(culprits)} went to {instance(op)}{instead} while the others wait elsewhere"
            else:
                summary = f"{ranks_phrase(ranks)} wait for each other" + (
                    " across groups" if len({e.instance.key for _, _, e in path}) > 1 else ""
                )
            evidence = list(steps)
            explanation = "; ".join(steps) + ". "
            if how == "history":
                evidence.append(
                    f"{capital(ranks_phrase(culprits))} {verb(culprits, 'leaves', 'leave')} its own routine here; the others keep to theirs."
                )
            elif how == "order":
                evidence.append(f"The order of {ranks_phrase(culprits)} differs from that of the others.")
            else:
                evidence.append("None of them leaves its own routine, and no order has a majority: it cannot be told which is wrong.")
            explanation += self._behind(ranks, held)
            if self._longest(ranks):
                evidence.append(f"They have been waiting for {duration(self._longest(ranks))}.")
            confidence: Confidence = {"history": "high", "order": "medium"}.get(how, "medium")  # type: ignore[assignment]
            more = None if how == "history" else "A run in which some steps succeed before the fault shows which rank leaves its routine."
            source = op.source if op is not None else None
            self._add(
                _finding(
                    "cycle", "in-collective", culprits, victims, confidence, summary, explanation.strip(), _cycle_step(culprits, op, usual),
                    op, source, evidence, more,
                ),
                component[0],
            )  # fmt: skip
            self.cases[-1].blocked = len(set(held) | set(ranks))

    def _odd_in_cycle(
        self, component: list[Node], ranks: list[int], on_path: list[int]
    ) -> tuple[list[int], dict[int, tuple[Collective | None, Collective | None]], str]:
        """Who left the routine; else whose place differs from the others'; else all."""
        odd: dict[int, tuple[Collective | None, Collective | None]] = {}
        for rank in ranks:
            found = leaves_routine_at(self.world.views[rank].log.collectives)
            if found is not None:
                odd[rank] = found
        if odd and len(odd) < len(ranks):
            return sorted(odd), odd, "history"
        at: dict[Instance, set[int]] = defaultdict(set)
        for node in component:
            op = self.graph.blocks[node].op
            if not op.is_point_to_point:
                at[Instance(op.channel.key, op.sequence_number)].add(node.rank)
        if len(at) > 1:
            sides = sorted(at.values(), key=len)
            if len(sides[0]) < len(sides[1]) and len(sides[0]) * 2 < len(ranks):
                return sorted(sides[0]), odd, "order"
        return on_path or ranks, odd, "tie"

    # --- missing and waiting

    def _absences(self, nodes: list[Node]) -> None:
        groups: dict[tuple[object, ...], list[tuple[Node, Doing]]] = defaultdict(list)
        for node in nodes:
            view = self.world.views[node.rank]
            what = why.doing(view.log, view.fate, quiet_ns=why.quiet_ns(view.log), stalled_after_ns=self.world.stalled_after_ns)
            edges = self._edges_into(node)
            first = _most_waited(edges)
            groups[(first.instance, what.works, what.why, what.frame)].append((node, what))
        for (_, works, _, _), members in sorted(groups.items(), key=lambda item: [m[0] for m in item[1]]):
            if works:
                self._waiting(members)
            else:
                self._missing(members)

    def _missing(self, members: list[tuple[Node, Doing]]) -> None:
        nodes = [node for node, _ in members]
        ranks = [node.rank for node in nodes]
        what = members[0][1]
        edges = [edge for node in nodes for edge in self._edges_into(node)]
        main = _most_waited(edges)
        same = [edge for edge in edges if edge.instance == main.instance]
        direct = sorted({edge.rank for edge in same})
        held = self._blocked_by(nodes)
        culprits = ranks
        views = [self.world.views[rank] for rank in ranks]
        op, frame = main.op, what.frame
        name = instance(op)
        verb_wait = f"{ranks_phrase(direct)} {verb(direct, 'waits', 'wait')} for {verb(ranks, 'it', 'them')}"
        alone = what.why == "finished" and not op.is_point_to_point and len(direct) < len(ranks)
        reason = what.why
        if alone:
            culprits = direct
            summary = f"{ranks_phrase(direct)} {verb(direct, 'issues', 'issue')} {name}, which {ranks_phrase(ranks)} {verb(ranks, 'has', 'have')} finished without"
            frame = op.source
        elif op.is_point_to_point:
            did = f"sent message #{op.sequence_number} to" if op.op == "recv" else f"received message #{op.sequence_number} from"
            summary = f"{ranks_phrase(ranks)} never {did} rank {main.rank}, which waits for it"
        elif what.why == "finished":
            summary = f"{ranks_phrase(ranks)} finished without {name}; {verb_wait}"
        else:
            summary = f"{ranks_phrase(ranks)} never reached {name}; {verb_wait}"
        if frame is None and what.why == "finished" and views[0].last_op is not None:
            frame = views[0].last_op.source
        explanation = f"{self._name(ranks[0])} {what.phrase}; {self._last(ranks[0])}. "
        if len(ranks) > 1 and not alone:
            explanation = f"{capital(ranks_phrase(ranks))}: " + explanation
        explanation += capital(self._waiting_at(same)) + ". "
        explanation += self._behind(direct, sorted(set(held) - set(ranks)))
        evidence = _signs(ranks, members)
        if what.why != "finished":
            evidence += self._stack_evidence(views[0])
        if self._longest(direct):
            evidence.append(
                f"{capital(ranks_phrase(direct))} {verb(direct, 'has', 'have')} been waiting for {duration(self._longest(direct))}."
            )
        failed = next((op for op in views[0].log.collectives[-1:] if op.state is State.FAILED), None)
        if failed is not None and failed.error:
            evidence.append(f"rank {ranks[0]}: {instance(failed)} failed with {failed.error.splitlines()[0][:160]}.")
        confidence: Confidence = "high" if what.observed or what.why in _SURE else "medium"
        more = None
        if confidence == "medium":
            more = "Whether it moves was not observed: run `commlens dump` on its node, which looks at the process for a while."
        if self._assumed(direct):
            confidence = "medium"
        if alone:
            confidence = "medium"
        victims = sorted(set(held) - set(culprits)) if not alone else sorted(set(held) - set(culprits))
        self._add(
            _finding(
                "missing", reason, sorted(culprits), victims, confidence, summary, explanation.strip(), _missing_step(what, sorted(culprits)), op,
                frame, evidence, more,
            ),
            nodes[0],
        )  # fmt: skip
        self.cases[-1].blocked = len(held)

    def _waiting(self, members: list[tuple[Node, Doing]]) -> None:
        nodes = [node for node, _ in members]
        ranks = [node.rank for node in nodes]
        what = members[0][1]
        edges = [edge for node in nodes for edge in self._edges_into(node)]
        main = _most_waited(edges)
        same = [edge for edge in edges if edge.instance == main.instance]
        direct = sorted({edge.rank for edge in same})
        held = sorted(set(self._blocked_by(nodes)) - set(ranks))
        label = {
            "checkpoint-io": "which handles a checkpoint",
            "compilation": "which is compiling",
            "initialising": "which is initialising",
            "data-loading": "which is loading data",
            "finished": "which is shutting down",
        }.get(what.why, "which is at work")
        expecting = self.world.views[ranks[0]].log.expecting
        if expecting is not None:
            label = f"which is in a block marked as slow ({expecting})"
        if len(ranks) > 1:
            label = label.replace("which is", "which are").replace("handles", "handle")
        length = f", {duration(self._longest(direct))} so far" if self._longest(direct) else ""
        summary = (
            f"{ranks_phrase(direct)} {verb(direct, 'waits', 'wait')} in {instance(main.op)} for {ranks_phrase(ranks)}, {label}{length}"
        )
        explanation = f"{self._name(ranks[0])} {what.phrase}; {self._last(ranks[0])}. {capital(self._waiting_at(same))}. "
        explanation += self._behind(direct, held)
        signs = _signs(ranks, members)
        step = f"wait; if {ranks_phrase(ranks)} should not take this long, look at {place(what.frame)}" if what.frame else "wait"
        finding = _finding(
            "waiting", what.why, [], held, "high" if what.observed else "medium", summary, explanation.strip(), step, main.op, what.frame,
            signs, None, root=False,
        )  # fmt: skip
        self._add(finding, nodes[0])

    def _stack_evidence(self, view: View) -> list[str]:
        stack = view.log.main_stack
        if stack is None:
            note = view.log.observation.stacks_note
            return [f"rank {view.rank}: there is no stack of it ({note})." if note else f"rank {view.rank}: there is no stack of it."]
        frames = [place(f) for f in stack.frames if f.kind.value == "user"][:4]
        return [f"rank {view.rank} is in " + ", called by ".join(frames) + "."] if len(frames) > 1 else []

    # --- no record

    def _unrecorded(self, nodes: list[Node]) -> None:
        by_instance: dict[tuple[Instance, str], list[Node]] = defaultdict(list)
        known = {case.finding.kind for case in self.cases if case.finding.root_cause}
        for node in nodes:
            by_instance[(_most_waited(self._edges_into(node)).instance, node.kind)].append(node)
        for (_, kind), members in sorted(by_instance.items()):
            ranks = [node.rank for node in members]
            edges = self._edges_into(members[0])
            main = _most_waited(edges)
            direct = sorted({edge.rank for edge in edges})
            held = self._blocked_by(members)
            name = instance(main.op)
            left = kind == "no-record"
            if left:
                summary = f"{ranks_phrase(ranks)} left no record; {ranks_phrase(direct)} {verb(direct, 'waits', 'wait')} in {name} for {verb(ranks, 'it', 'them')}"
                step = f"look into the output of {ranks_phrase(ranks)}: it ended before it could record anything, or its black box is lost"
            else:
                summary = f"{ranks_phrase(direct)} {verb(direct, 'waits', 'wait')} in {name}; all ranks with a record are there, and {ranks_phrase(ranks)} {verb(ranks, 'has', 'have')} none here"
                step = f"dump the node of {ranks_phrase(ranks)} too (`commlens dump`), and diagnose all nodes' dumps together"
            culprits = ranks if left or len(ranks) == 1 else []
            finding = _finding(
                "dead" if left else "missing", "unknown", culprits, sorted(set(held) - set(culprits)), "medium" if left else "low", summary,
                capital(self._waiting_at(edges)) + ". " + self._behind(direct, held), step, main.op, None,
                [f"There are records of {count(len(self.world.views), 'rank')} of {self.world.size}."],
                f"The records of {ranks_phrase(ranks)} would tell.", root=not known or left,
            )  # fmt: skip
            self._add(finding, members[0])
            self.cases[-1].blocked = len(held)

    # --- stuck inside

    def _stuck_inside(self, node: Node) -> None:
        which = self.graph.instances[node.detail]
        edges = self._edges_into(node)
        op = edges[0].op
        ranks = [r for r in (which.key[2] if which.sender < 0 else (which.sender, which.receiver)) if r in self.world.views]
        views = [self.world.views[r] for r in ranks]
        held = self._blocked_by([node])
        direct = sorted({edge.rank for edge in edges})
        failed = any(self.world.views[r].fate.failed for r in direct) or any(
            block.how == "failed" for r in direct for block in self.world.views[r].blocks.values()
        )
        if not failed and _since_last_arrival(views, which) < self.world.stalled_after_ns:
            return
        what = {v.rank: why.doing(v.log, v.fate, quiet_ns=why.quiet_ns(v.log), stalled_after_ns=self.world.stalled_after_ns) for v in views}
        culprits = [r for r in ranks if what[r].why in ("stopped", "uninterruptible-io", "throttled", "holding-gil") and not what[r].works]
        busy = [r for r in ranks if _burns_cpu(self.world.views[r]) and op.channel.device == "cpu"]
        name = instance(op) if which.sender < 0 else f"message #{which.number} from rank {which.sender} to rank {which.receiver}"
        waited = self._longest(direct)
        if busy and not culprits and not failed:
            summary = f"{ranks_phrase(ranks)} are in {name}, which still moves data, {duration(waited)} so far"
            finding = _finding(
                "waiting", "in-collective", [], held, "medium", summary, f"{capital(self._waiting_at(edges))}.", "wait", op, op.source,
                [f"{ranks_phrase(busy)} {verb(busy, 'uses', 'use')} CPU inside it."], None, root=False,
            )  # fmt: skip
            self._add(finding, node)
            return
        if culprits:
            summary = f"{ranks_phrase(culprits)} {what[culprits[0]].phrase} inside {name}; {ranks_phrase(direct)} {verb(direct, 'waits', 'wait')} there"
            reason = what[culprits[0]].why
            step = _missing_step(what[culprits[0]], culprits)
        else:
            done = [r for r in ranks if _completed(self.world.views[r], which)]
            rest = f"; {ranks_phrase(done)} completed it" if done else ", agree on it, and nobody has completed it"
            there = [r for r in ranks if r not in done]
            summary = f"{ranks_phrase(there)} {verb(there, 'is', 'are')} inside {name}{rest}"
            reason = "in-collective"
            step = "look at the network and the driver between these ranks (NCCL_DEBUG=INFO or GLOO logs, dmesg, link counters)"
        errors = sorted({(o.error or "").splitlines()[0][:160] for o in (_op_at(v, which) for v in views) if o is not None and o.error})
        evidence = [f"It failed with: {text}." for text in errors[:3]]
        explanation = f"{capital(self._waiting_at(edges))}. " + self._behind(direct, held)
        finding = _finding(
            "stuck-inside", reason, culprits, sorted(set(held) - set(culprits)), "high" if culprits else "medium", summary,
            explanation.strip(), step, op, op.source, evidence,
            None if culprits else "C++ stacks of these ranks (COMMLENS_CPP_STACK=1, py-spy --native) would show where inside.",
        )  # fmt: skip
        self._add(finding, node)

    # --- what the graph does not show

    def _starting(self) -> None:
        """Nobody is in a collective, but ranks are stuck while the job starts: the store has no records."""
        views = list(self.world.views.values())
        inside = [v for v in views if not v.fate.ended and _is_initialising(v)]
        outside = [v for v in views if not v.fate.ended and not v.log.initialised and v not in inside]
        if not inside or (not outside and not self.world.no_record):
            return
        limit = self.world.stalled_after_ns
        since = max((v.now_ns - (v.log.main_stack.taken_ns if v.log.main_stack else v.now_ns) for v in inside), default=0)
        del since
        still = [v for v in inside if v.log.observation.stack_moved is not True]
        if not still:
            return
        ranks = sorted(v.rank for v in inside)
        what = {v.rank: why.doing(v.log, v.fate, stalled_after_ns=limit) for v in outside}
        idle = sorted(r for r, doing in what.items() if doing.observed and not doing.works)
        if idle or (self.world.no_record and not outside):
            absent = idle or self.world.no_record
            doing = what.get(absent[0]) or Doing("unknown", False, "left no record")
            summary = f"{ranks_phrase(absent)} never came to init_process_group; {ranks_phrase(ranks)} {verb(ranks, 'waits', 'wait')} there"
            finding = _finding(
                "missing", doing.why, absent, ranks, "medium", summary, f"{capital(ranks_phrase(absent))} {doing.phrase}.",
                _missing_step(doing, absent), None, doing.frame, [], "The output of these ranks would tell.",
            )  # fmt: skip
            self._add(finding)
            self.cases[-1].blocked = len(ranks)
        elif what:
            absent = sorted(what)
            doing = what[absent[0]]
            summary = f"{ranks_phrase(ranks)} {verb(ranks, 'waits', 'wait')} in init_process_group for {ranks_phrase(absent)}"
            finding = _finding(
                "waiting", "initialising", [], ranks, "medium", summary, f"{capital(ranks_phrase(absent))} {doing.phrase}.", "wait", None,
                doing.frame, [], None, root=False,
            )  # fmt: skip
            self._add(finding)

    def _ended_somehow(self) -> None:
        """Processes that ended badly, and nothing that says why."""
        views = self.world.views
        bad = sorted(rank for rank, view in views.items() if view.fate.failed)
        if not bad or any(case.finding.kind == "dead" for case in self.cases):
            return
        told = [rank for rank in bad if views[rank].fate.kind == "told"]
        peers = [rank for rank in bad if views[rank].fate.kind == "peer"]
        moments = {rank: views[rank].fate.at_ns for rank in bad if views[rank].fate.at_ns}
        if peers:
            first = min(peers, key=lambda rank: (moments.get(rank, 1 << 62), rank))
            summary = f"{ranks_phrase(peers)} ended because a peer did, or did not answer; no record says which"
            step = "look into the output of all ranks and of the other nodes for the first error"
            explanation = f"{self._name(first)} was the first to end: it {views[first].fate.text}; {self._last(first)}."
            finding = _finding(
                "dead", "exception", [], bad, "low", summary, explanation, step, views[first].last_op, views[first].fate.source,
                [f"rank {rank} {views[rank].fate.text}." for rank in bad[:4]], "The records of the ranks that are not here would tell.",
            )  # fmt: skip
        else:
            summary = f"the job was ended from outside: {ranks_phrase(told)} {views[told[0]].fate.text}"
            step = "ask the scheduler (preemption, time limit), or look at who sent the signal"
            finding = _finding(
                "dead", "killed", [], told, "medium", summary, f"{self._name(told[0])} {views[told[0]].fate.text}; {self._last(told[0])}.", step,
                views[told[0]].last_op, None, [], None,
            )  # fmt: skip
        self._add(finding)

    def _demote(self) -> None:
        """Of several findings that blame the same ranks, the earliest is the cause: the others follow from it."""
        roots = [case for case in self.cases if case.finding.root_cause]
        disagreements = [c for c in roots if c.finding.kind.startswith("mismatch/") or c.finding.why == "skipped"]
        for case in roots:
            for other in disagreements:
                if other is case or not other.finding.root_cause or not set(case.finding.culprits) <= set(other.finding.culprits):
                    continue
                if not case.finding.culprits or (case.finding.kind == "dead" and case.finding.why != "exit"):
                    continue
                follows = case in disagreements and case.order > other.order
                stalls = (case not in disagreements and other.blocked > 0) or (
                    case.finding.why == "finished" and other.finding.why == "skipped"
                )
                if follows or stalls:
                    case.finding.root_cause = False
                    other.blocked = max(other.blocked, case.blocked)
                    other.finding.victims = sorted((set(other.finding.victims) | set(case.finding.victims)) - set(other.finding.culprits))
                    break


# --- helpers ---------------------------------------------------------------------------------------------------------


def _finding(
    kind: Kind, reason: Why, culprits: Sequence[int], victims: Sequence[int], confidence: Confidence, summary: str, explanation: str,
    next_step: str, op: Collective | None, frame: Frame | None, evidence: list[str], more: str | None, *, root: bool = True,
) -> Finding:  # fmt: skip
    group = reference = None
    if op is not None:
        known = op.channel.group
        group = GroupRef(known.name, known.label, list(known.ranks))
        reference = CollectiveRef(op.op, op.sequence_number, op.peer)
    return Finding(
        kind=kind, why=reason, root_cause=root, culprits=sorted(culprits), victims=sorted(victims), confidence=confidence, summary=summary,
        explanation=explanation.strip(), next_step=next_step, group=group, collective=reference,
        source=frame.where if frame is not None else None, source_file=f"{frame.file}:{frame.line}" if frame is not None else None,
        function=frame.function if frame is not None else None, evidence=evidence, would_raise_confidence=more,
    )  # fmt: skip


def _signs(ranks: Sequence[int], members: Sequence[tuple[Node, Doing]]) -> list[str]:
    """``"rank 2: its stack does not move, it uses no CPU."``, for ranks with the same signs once."""
    same: dict[str, list[int]] = defaultdict(list)
    for rank, (_, doing) in zip(ranks, members, strict=True):
        if doing.signs:
            same[", ".join(doing.signs)].append(rank)
    return [f"{ranks_phrase(who)}: {text}." for text, who in same.items()][:4]


def _at(op: Collective) -> str:
    return f" ({op.source.where})" if op.source is not None else ""


def _of_group(op: Collective) -> str:
    return f" of {group_phrase(op.channel.group)}"


def _most_waited(edges: Sequence[Edge]) -> Edge:
    """The edge that stands for all: of the instance in which most ranks wait, the one that was waited for first."""
    ranks: Counter[Instance] = Counter(edge.instance for edge in edges)
    return min(edges, key=lambda edge: (-ranks[edge.instance], edge.op.announced_ns, edge.instance, edge.rank))


def _last_line(view: View) -> Frame | None:
    """Where a rank that ended was last seen: its stack if it is newer than its last collective, else that one's line."""
    op, stack = view.last_op, view.log.main_stack
    latest = max(op.announced_ns, op.done_ns, op.wait_ended_ns) if op is not None else 0
    if stack is not None and stack.taken_ns > latest and user_frame(stack.frames) is not None:
        return user_frame(stack.frames)
    return op.source if op is not None else None


def _op_at(view: View, which: Instance) -> Collective | None:
    if which.sender < 0:
        track = view.tracks.get(which.key)
        return track.ops.get(which.number) if track is not None else None
    peer, direction = (which.receiver, "send") if view.rank == which.sender else (which.sender, "recv")
    return next((op for op in reversed(view.pairs.get((which.key, peer, direction), [])) if op.sequence_number == which.number), None)


def _completed(view: View, which: Instance) -> bool:
    op = _op_at(view, which)
    return op is not None and op.state is State.COMPLETED


def _since_last_arrival(views: Sequence[View], which: Instance) -> int:
    ages = [view.now_ns - op.announced_ns for view in views if (op := _op_at(view, which)) is not None]
    return min(ages, default=1 << 62)


def _burns_cpu(view: View) -> bool:
    seen = view.log.observation
    return bool(seen.cpu_s is not None and seen.window_s > 0.4 and seen.cpu_s / seen.window_s >= why.CPU_WORKING)


def _is_initialising(view: View) -> bool:
    if view.log.initialised or view.log.collectives:
        return False
    stack = view.log.main_stack
    return stack is not None and any(frame.function == "init_process_group" for frame in stack.frames)


def _missing_step(what: Doing, ranks: Sequence[int]) -> str:
    who = ranks_phrase(ranks)
    where = f"{what.frame.function} ({what.frame.where})" if what.frame is not None else "what it does"
    steps = {
        "data-loading": f"look at {where} on {who}: the storage or the data loader's workers do not deliver",
        "checkpoint-io": f"look at {where} on {who}, and at the file system that it writes to",
        "stopped": f"continue {who} (kill -CONT) and find out who stopped it",
        "holding-gil": f"look at {where} on {who}: the C code called there should release Python's lock",
        "throttled": f"give {who} more CPU: its cgroup's quota (cpu.max) starves it",
        "uninterruptible-io": f"look at the storage of {who}'s host: the kernel waits for it (dmesg, mount)",
        "memory-pressure": f"give {who} more memory: its cgroup is short of it",
        "finished": f"make {who} run as many iterations as the others (uneven data: Join, or drop the last batches)",
        "initialising": f"look at why {who} does not come out of {where}",
    }
    if what.why in steps:
        return steps[what.why]
    return f"look at {where} on {who}" if what.frame is not None else f"take a stack of {who} (py-spy dump) to see what it does"


def _mismatch_step(trouble: Trouble, first: Collective, usual: Collective | None) -> str:
    culprits = ranks_phrase(trouble.culprits)
    if trouble.shift is not None or trouble.habit:
        expected = trouble.shift.skipped if trouble.shift is not None and trouble.shift.by > 0 else usual
        where = f" at {place(expected.source)}" if expected is not None and expected.source is not None else ""
        return f"find the branch by which {culprits} left out {expected.op if expected else 'it'}{where}"
    return f"compare {place(first.source) or 'the line'} on {culprits} with {place(usual.source) if usual is not None else 'the others'} on the others"


def _cycle_step(culprits: Sequence[int], op: Collective | None, usual: Collective | None) -> str:
    where = f" at {place(op.source)}" if op is not None and op.source is not None else ""
    if usual is not None and usual.op == "send":
        return f"find out why rank {culprits[0]} left out its send at {place(usual.source)}"
    return f"make all ranks use these groups (or send and receive) in the same order: look at {ranks_phrase(culprits)}{where}"


def _death_step(view: View, frame: Frame | None) -> str:
    fate = view.fate
    if fate.why == "out-of-memory":
        return f"give rank {view.rank} more memory, or use less: the kernel killed it (dmesg)"
    if fate.why == "exception":
        return f"look at {place(frame)} on rank {view.rank}" if frame is not None else f"look at rank {view.rank}'s traceback"
    if fate.why == "killed":
        return f"look into dmesg and the scheduler's log for who sent it, and at rank {view.rank}'s last lines" + (
            f" ({place(frame)})" if frame is not None else ""
        )
    return f"look at rank {view.rank}'s output" + (f", after {place(frame)}" if frame is not None else "")
