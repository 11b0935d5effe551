"""Every fault that is injected, and what is true of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dumpgen.mesh import WORLD, Mesh
from dumpgen.program import Op

Edit = Callable[[list[Op]], list[Op]]


@dataclass(frozen=True)
class Truth:
    """The verdict that is right. Where several kinds are, each of them is here."""

    kinds: tuple[str, ...]
    culprits: tuple[int, ...] = ()
    also: tuple[tuple[int, ...], ...] = ()  # other sets of culprits that are as right
    twin: int = -1  # who cannot be told from the culprit by those who do not know what came before


@dataclass
class Injection:
    """What a fault does to a job whose ranks would run the same steps."""

    truth: Truth
    edits: dict[int, Edit] = field(default_factory=dict)  # rank to what becomes of its step
    stops: dict[int, int] = field(default_factory=dict)  # rank to the op that its host never calls
    # (rank, op of each step) to seconds
    late: dict[tuple[int, int], float] = field(default_factory=dict)
    jams: frozenset[tuple[str, int, int]] = frozenset()
    no_dump: frozenset[int] = frozenset()
    steps: int = 2  # that are executed with the fault
    runs: bool = False  # the dump is of a job that goes on
    spread_s: float = 0.0  # how far apart the dumps of the ranks are
    syncs: bool = True
    run_ahead: int = 1000


Inject = Callable[["Site"], Injection]


@dataclass(frozen=True)
class Site:
    """Where a fault can be put."""

    mesh: Mesh
    steps: dict[int, list[Op]]  # by stage

    @property
    def culprit(self) -> int:
        """In the middle of the mesh, neither first nor last in any of its groups where that is
        possible.
        """
        return self.at(self.stage, self.mesh.dp // 2, self.mesh.tp // 2)

    @property
    def stage(self) -> int:
        """The culprit's."""
        return min(self.mesh.pp // 2, max(1, self.mesh.pp - 2)) if self.mesh.pp > 1 else 0

    def at(self, stage: int, dp: int, tp: int) -> int:
        """The rank there."""
        return self.mesh.rank(stage % self.mesh.pp, dp % self.mesh.dp, tp % self.mesh.tp)

    def index(self, role: str, name: str, number: int, stage: int | None = None) -> int:
        """Where in the step the ``number``-th op of this role and name is; negative numbers count
        from the end.
        """
        ops = self.steps[self.stage if stage is None else stage]
        return [i for i, op in enumerate(ops) if op.role == role and op.name == name][number]

    def message(self, name: str, stage: int, number: int) -> int:
        """The ``number``-th op of the culprit that sends to this stage or receives from it, alone
        or in a batch.
        """
        ops = self.steps[self.stage]
        return [
            i
            for i, op in enumerate(ops)
            if any(m.name == name and m.stage == stage for m in op.members or (op,))
        ][number]

    def neighbour(self, towards: int) -> int:
        """The culprit's in its pipeline."""
        stage, dp, tp = self.mesh.place(self.culprit)
        return self.at(stage + towards, dp, tp)

    def twin(self, role: str) -> int:
        """The other member of the culprit's group, where there is only one."""
        others = [
            rank for rank in self.mesh.group(role, self.culprit).ranks if rank != self.culprit
        ]
        return others[0] if len(others) == 1 else -1


def replaced(ops: list[Op], index: int, op: Op) -> list[Op]:
    """The step with another op there."""
    return [*ops[:index], op, *ops[index + 1 :]]


def without(ops: list[Op], index: int) -> list[Op]:
    """The step with an op left out; nobody waits for it."""
    kept = [replace(op, waits=tuple(w - (w > index) for w in op.waits if w != index)) for op in ops]
    if index + 1 < len(kept):  # what it had waited for, the next one waits for
        kept[index + 1] = replace(
            kept[index + 1], waits=tuple(sorted({*kept[index + 1].waits, *kept[index].waits}))
        )
    return [*kept[:index], *kept[index + 1 :]]


def inserted(ops: list[Op], index: int, op: Op) -> list[Op]:
    """The step with one op more, which is waited for."""
    shifted = [replace(o, waits=tuple(w + (w >= index) for w in o.waits)) for o in ops]
    following = replace(shifted[index], waits=(*shifted[index].waits, index))
    return [
        *shifted[:index],
        replace(op, waits=shifted[index].waits, host_syncs=False),
        following,
        *shifted[index + 1 :],
    ]


def swapped(ops: list[Op], index: int) -> list[Op]:
    """The step with two neighbours the other way round, each waited for."""
    first, second = ops[index], ops[index + 1]
    ops = replaced(ops, index, replace(second, waits=first.waits, host_syncs=first.host_syncs))
    return replaced(ops, index + 1, replace(first, waits=(index,), host_syncs=second.host_syncs))


def _stuck(role: str, name: str, number: int) -> Inject:
    def inject(site: Site) -> Injection:
        return Injection(
            Truth(("missing",), (site.culprit,)),
            stops={site.culprit: site.index(role, name, number)},
        )

    return inject


def _stuck_at_the_start(site: Site) -> Injection:
    return Injection(
        Truth(("missing",), (site.culprit,)), stops={site.culprit: len(site.steps[site.stage])}
    )


def _dead(role: str, name: str, number: int) -> Inject:
    def inject(site: Site) -> Injection:
        stuck = _stuck(role, name, number)(site)
        return replace(
            stuck,
            truth=Truth(("dead", "missing"), (site.culprit,)),
            no_dump=frozenset({site.culprit}),
        )

    return inject


def _mismatch(
    kind: str, role: str, name: str, number: int, change: Callable[[Op], Op], *others: str
) -> Inject:
    def inject(site: Site) -> Injection:
        index = site.index(role, name, number)
        return Injection(
            Truth((f"mismatch/{kind}", *others), (site.culprit,), twin=site.twin(role)),
            edits={site.culprit: lambda ops: replaced(ops, index, change(ops[index]))},
        )

    return inject


def _shorter(op: Op) -> Op:
    return replace(
        op,
        inputs=tuple((s[0] // 2, *s[1:]) for s in op.inputs),
        outputs=tuple((s[0] // 2, *s[1:]) for s in op.outputs),
    )


def _swap(site: Site) -> Injection:
    """The two last reductions of the step: over the pipeline or data parallel group, and over
    everybody.
    """
    index = site.index(WORLD, "all_reduce", -1) - 1
    return Injection(
        Truth(("cycle",), (site.culprit,)), edits={site.culprit: lambda ops: swapped(ops, index)}
    )


def _skip(role: str, name: str, number: int) -> Inject:
    def inject(site: Site) -> Injection:
        index = site.index(role, name, number)
        return Injection(
            Truth(
                ("mismatch/op", "mismatch/shape", "missing", "cycle"),
                (site.culprit,),
                twin=site.twin(role),
            ),
            edits={site.culprit: lambda ops: without(ops, index)},
        )

    return inject


def _extra(role: str, name: str, number: int) -> Inject:
    def inject(site: Site) -> Injection:
        index = site.index(role, name, number)
        return Injection(
            Truth(
                ("mismatch/op", "mismatch/shape", "missing", "cycle"),
                (site.culprit,),
                twin=site.twin(role),
            ),
            edits={site.culprit: lambda ops: inserted(ops, index, ops[index])},
        )

    return inject


_P2P = ("missing", "cycle", "mismatch/p2p")


def _lost_message(name: str, towards: int) -> Inject:
    """A send (or receive) that is left out."""

    def inject(site: Site) -> Injection:
        other = site.stage + towards
        index = site.message(name, other, 2)

        def edit(ops: list[Op]) -> list[Op]:
            left = tuple(m for m in ops[index].members if not (m.name == name and m.stage == other))
            return (
                replaced(ops, index, replace(ops[index], members=left))
                if left
                else without(ops, index)
            )

        return Injection(
            Truth(_P2P, (site.culprit,), twin=site.neighbour(towards)), edits={site.culprit: edit}
        )

    return inject


def _wrong_peer(site: Site) -> Injection:
    """It waits for a message from the stage after it that the stage before it sends."""
    index = site.message("recv", site.stage - 1, 2)

    def edit(ops: list[Op]) -> list[Op]:
        op = ops[index]
        members = tuple(
            replace(m, stage=site.stage + 1) if m.name == "recv" else m for m in op.members
        )
        return replaced(
            ops, index, replace(op, members=members, stage=op.stage if members else site.stage + 1)
        )

    return Injection(
        Truth(_P2P, (site.culprit,), twin=site.neighbour(1)), edits={site.culprit: edit}
    )


def _jammed(role: str, name: str, number: int) -> Inject:
    """Everybody is in it, and it does not complete."""

    def inject(site: Site) -> Injection:
        index = site.index(role, name, number)
        count = sum(op.role == role for op in site.steps[site.stage][:index])
        return Injection(Truth(("stuck-inside",)), jams=frozenset({(role, site.culprit, count)}))

    return inject


def _straggler(site: Site) -> Injection:
    return Injection(Truth(("straggler",), (site.culprit,)), late={(site.culprit, 0): 0.4}, steps=6)


def _healthy(*, runs: bool, spread_s: float = 0.0) -> Inject:
    def inject(site: Site) -> Injection:
        return Injection(Truth(("healthy",)), runs=runs, spread_s=spread_s)

    return inject


def _two(first: Inject, second: Inject) -> Inject:
    """Two faults far from each other, in groups of their own; neither waits for the other.

    The second is in the first pipeline stage, so late that what the first one's stage needs has
    been sent.
    """

    def inject(site: Site) -> Injection:
        a = first(site)
        elsewhere = _Elsewhere(site.mesh, site.steps)
        b = second(elsewhere)
        return Injection(
            Truth(
                (*a.truth.kinds, *b.truth.kinds),
                tuple(sorted((*a.truth.culprits, *b.truth.culprits))),
                twin=b.truth.twin,
            ),
            edits={**a.edits, **b.edits},
            stops={**a.stops, **b.stops},
        )

    return inject


class _Elsewhere(Site):
    """Another pipeline, another stage."""

    @property
    def stage(self) -> int:
        return 0

    @property
    def culprit(self) -> int:
        return self.at(0, 0, 1)


def _several(site: Site) -> Injection:
    """All ranks of a host, that is one tensor parallel group, load data."""
    _, dp, _ = site.mesh.place(site.culprit)
    ranks = tuple(site.at(site.stage, dp, tp) for tp in range(site.mesh.tp))
    index = site.index("tp", "_all_gather_base", 4)
    return Injection(Truth(("missing",), ranks), stops=dict.fromkeys(ranks, index))


def _several_apart(site: Site) -> Injection:
    """Two ranks with the same trouble in one collective."""
    ranks = tuple(sorted((site.culprit, site.at(site.stage, 0, 1))))
    index = site.index("dp", "all_reduce", -1)
    return Injection(Truth(("missing",), ranks), stops=dict.fromkeys(ranks, index))


def _far_behind(site: Site) -> Injection:
    """Nothing ever waits on the host, so that the others enqueue step after step."""
    stuck = _stuck("tp", "_all_gather_base", 6)(site)
    return replace(stuck, steps=8, syncs=False, run_ahead=1700)


def _overwritten(site: Site) -> Injection:
    """So far that the rings of the others have lost what they are stuck in."""
    stuck = _stuck("tp", "_all_gather_base", 6)(site)
    return replace(stuck, steps=20, syncs=False, run_ahead=2600)


def _with_lost_dumps(site: Site) -> Injection:
    """The culprit's dump is there, those of two others in other pipelines are not."""
    stuck = _stuck("tp", "_reduce_scatter_base", 5)(site)
    last = site.mesh.dp - 1
    lost = {site.at(0, last, 0), site.at(site.mesh.pp - 1, last, 1)} - {site.culprit}
    return replace(stuck, no_dump=frozenset(lost))


def _partial(site: Site) -> Injection:
    """Only the dumps of the culprit's replica are there, as of one node or one rack."""
    stuck = _stuck("tp", "_reduce_scatter_base", 5)(site)
    mine = site.mesh.place(site.culprit)[1]
    return replace(
        stuck, no_dump=frozenset(r for r in range(site.mesh.size) if site.mesh.place(r)[1] != mine)
    )


@dataclass(frozen=True)
class Fault:
    """One way in which a job goes wrong, or does not."""

    name: str
    summary: str
    inject: Inject
    stages: int = 1  # it needs at least so many


FAULTS: tuple[Fault, ...] = (
    Fault(
        "stuck-before-tp",
        "a rank is stuck in its own code in the middle of a forward",
        _stuck("tp", "_all_gather_base", 7),
    ),
    Fault(
        "stuck-before-dp",
        "a rank is stuck before it reduces its gradients",
        _stuck("dp", "_reduce_scatter_base", 1),
    ),
    Fault(
        "stuck-before-world",
        "a rank is stuck before the last reduction of the step",
        _stuck(WORLD, "all_reduce", -1),
    ),
    Fault("stuck-at-the-start", "a rank never begins the next step", _stuck_at_the_start),
    Fault(
        "dead",
        "a rank died in the middle of a forward: no dump",
        _dead("tp", "_all_gather_base", 7),
    ),
    Fault(
        "dead-before-world",
        "a rank died before the last reduction: no dump",
        _dead(WORLD, "all_reduce", -1),
    ),
    Fault(
        "mismatch-shape",
        "a rank's gradient is shorter",
        _mismatch("shape", "dp", "_reduce_scatter_base", 1, _shorter),
    ),
    Fault(
        "mismatch-shape-tp",
        "a rank's activation is shorter",
        _mismatch("shape", "tp", "_all_gather_base", 9, _shorter),
    ),
    Fault(
        "mismatch-dtype",
        "a rank reduces another dtype",
        _mismatch("dtype", "dp", "all_reduce", -1, lambda op: replace(op, dtype="BFloat16")),
    ),
    Fault(
        "mismatch-op",
        "a rank reduces where the others reduce and scatter",
        _mismatch(
            "op",
            "tp",
            "_reduce_scatter_base",
            6,
            lambda op: replace(op, name="all_reduce", outputs=op.inputs),
        ),
    ),
    Fault("swap", "a rank calls two reductions in the other order", _swap),
    Fault(
        "skipped-tp",
        "a rank leaves out a collective of its forward",
        _skip("tp", "_reduce_scatter_base", 5),
    ),
    Fault(
        "skipped-dp",
        "a rank leaves out a reduction of gradients",
        _skip("dp", "_reduce_scatter_base", 1),
    ),
    Fault(
        "skipped-last",
        "a rank leaves out the last reduction of the step",
        _skip(WORLD, "all_reduce", -1),
    ),
    Fault("extra-tp", "a rank calls a collective twice", _extra("tp", "_all_gather_base", 5)),
    Fault("extra-world", "a rank calls the last reduction twice", _extra(WORLD, "all_reduce", -1)),
    Fault(
        "lost-send",
        "a pipeline stage leaves out a send of activations",
        _lost_message("send", 1),
        stages=3,
    ),
    Fault(
        "lost-send-backward",
        "a pipeline stage leaves out a send of gradients",
        _lost_message("send", -1),
        stages=2,
    ),
    Fault(
        "lost-recv", "a pipeline stage leaves out a receive", _lost_message("recv", -1), stages=2
    ),
    Fault("wrong-peer", "a pipeline stage receives from the wrong one", _wrong_peer, stages=3),
    Fault(
        "stuck-inside-tp",
        "everybody is in a tensor parallel collective that does not complete",
        _jammed("tp", "_all_gather_base", 8),
    ),
    Fault(
        "stuck-inside-dp",
        "everybody is in a reduction of gradients that does not complete",
        _jammed("dp", "_reduce_scatter_base", 1),
    ),
    Fault(
        "stuck-inside-world",
        "everybody is in the last reduction, which does not complete",
        _jammed(WORLD, "all_reduce", -1),
    ),
    Fault(
        "two-stuck",
        "two ranks are stuck, independently",
        _two(_stuck("tp", "_all_gather_base", 7), _stuck("tp", "_reduce_scatter_base", 10)),
    ),
    Fault(
        "stuck-and-mismatch",
        "one rank is stuck, another's activation is shorter, independently",
        _two(
            _stuck("tp", "_all_gather_base", 7),
            _mismatch("shape", "tp", "_all_gather_base", 10, _shorter),
        ),
    ),
    Fault("several-stuck", "all ranks of one host are stuck", _several),
    Fault("several-apart", "two ranks are stuck before the same reduction", _several_apart),
    Fault("far-behind", "a rank is stuck and the others have enqueued 1,700 more", _far_behind),
    Fault(
        "overwritten", "a rank is stuck and the rings of the others have lost where", _overwritten
    ),
    Fault("lost-dumps", "a rank is stuck, and the dumps of two others are lost", _with_lost_dumps),
    Fault("partial", "a rank is stuck, and only one replica's dumps are there", _partial),
    Fault("straggler", "healthy but slow: a rank is late in every step", _straggler),
    Fault("healthy-done", "healthy: everything has completed", _healthy(runs=False)),
    Fault("healthy-running", "healthy: dumped in the middle of a step", _healthy(runs=True)),
    Fault(
        "healthy-spread",
        "healthy: dumped in the middle of a step, the ranks one after the other within 50 ms",
        _healthy(runs=True, spread_s=0.05),
    ),
)
"""Every fault, healthy jobs last."""


def by_name(name: str) -> Fault:
    """The fault of this name."""
    return next(fault for fault in FAULTS if fault.name == name)


def possible(mesh: Mesh) -> Sequence[Fault]:
    """Those that this mesh can have."""
    return [fault for fault in FAULTS if fault.stages <= mesh.pp]
