"""What one rank of a job asks for in a step: its collectives, in order, and what waits for what."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dumpgen.mesh import WORLD, Mesh

HIDDEN = 4096
SEQUENCE = 2048


@dataclass(frozen=True)
class Op:
    """One call. A batch of sends and receives is one with members."""

    role: str  # of its group
    name: str  # as in the profiling name: "_all_gather_base"
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    dtype: str = "BFloat16"
    site: str = ""  # the line of the program that calls it
    stage: int = -1  # the other end of a send or receive, as a pipeline stage
    members: tuple[Op, ...] = ()
    # indices of earlier ops of the step whose results the compute stream needs before this one
    waits: tuple[int, ...] = ()
    host_syncs: bool = False  # the host waits for everything before it calls this one
    gap_us: int = 60  # of host time before the call
    takes_us: int = 150  # on the device, once everybody is there

    @property
    def is_p2p(self) -> bool:
        """Whether it is a send or a receive."""
        return self.name in ("send", "recv")

    @property
    def signature(self) -> tuple[object, ...]:
        """What the members of the group must agree on."""
        return (
            self.name,
            self.dtype,
            *((self.inputs, self.outputs) if self.name != "all_to_all" else ()),
        )


@dataclass
class Builder:
    """Collects the ops of a step."""

    ops: list[Op] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    sync_next: bool = False

    def add(self, op: Op, *, wait: bool = True) -> int:
        """Issue it; with ``wait`` the compute stream needs it at once."""
        index = len(self.ops)
        self.ops.append(replace(op, waits=tuple(self.pending), host_syncs=self.sync_next))
        self.pending, self.sync_next = [], False
        if wait:
            self.wait(index)
        return index

    def wait(self, index: int) -> None:
        """The compute stream needs this op before anything that is issued from here on."""
        self.pending.append(index)

    def synchronise(self) -> None:
        """The host waits for all."""
        self.sync_next = True


@dataclass(frozen=True)
class Shape:
    """How much a step does."""

    layers: int = 3  # of each stage
    microbatches: int = 8
    batched_p2p: bool = False  # batch_isend_irecv instead of single calls
    sync_each_step: bool = True  # as loss.item() does


def step(mesh: Mesh, stage: int, shape: Shape, expert: int = 0) -> list[Op]:
    """The ops of one training step on a pipeline stage: one forward, one backward in turns, as soon
    as the pipeline is full.

    ``expert`` is the rank's place among its experts: each gets another number of tokens.
    """
    b = Builder(sync_next=shape.sync_each_step)
    first = True
    weights: dict[int, int] = {}
    for kind, number in _one_forward_one_backward(stage, mesh.pp, shape.microbatches):
        last = number == shape.microbatches - 1
        if kind == "F":
            if stage > 0:
                _p2p(b, "recv", stage - 1, "recv_forward", shape)
            for layer in range(shape.layers):
                if first:
                    _gather_ahead(b, mesh, layer, shape.layers, weights)
                _layer(b, mesh, "forward", expert)
            if stage < mesh.pp - 1:
                _p2p(b, "send", stage + 1, "send_forward", shape)
            first = False
        else:
            if stage < mesh.pp - 1:
                _p2p(b, "recv", stage + 1, "recv_backward", shape)
            for _ in range(shape.layers):
                _layer(b, mesh, "backward", expert)
                if last:
                    b.add(_fsdp(mesh, "_reduce_scatter_base", "reduce_gradients"), wait=False)
            if stage > 0:
                _p2p(b, "send", stage - 1, "send_backward", shape)
    for index in range(max(0, len(b.ops) - 40), len(b.ops)):  # the optimizer needs the gradients
        if b.ops[index].name == "_reduce_scatter_base":
            b.wait(index)
    small = {"inputs": ((1,),), "outputs": ((1,),), "dtype": "Float", "takes_us": 60}
    b.add(Op("tp", "all_reduce", site="clip_gradients", gap_us=200, **small))
    b.add(Op("dp", "all_reduce", site="clip_gradients", **small))
    if mesh.pp > 1:
        b.add(Op("pp", "all_reduce", site="clip_gradients", **small))
    if mesh.megatron and stage in (0, mesh.pp - 1):
        table = ((32000, HIDDEN // mesh.tp),)
        b.add(Op("embedding", "all_reduce", table, table, site="reduce_embedding"))
    b.add(Op(WORLD, "all_reduce", site="average_loss", gap_us=120, **small))
    return b.ops


def _one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    warm = min(stages - stage - 1, microbatches)
    order = [("F", i) for i in range(warm)]
    for i in range(microbatches - warm):
        order += [("F", warm + i), ("B", i)]
    return order + [("B", i) for i in range(microbatches - warm, microbatches)]


def _gather_ahead(b: Builder, mesh: Mesh, layer: int, layers: int, weights: dict[int, int]) -> None:
    """Weights are gathered one layer ahead."""
    for wanted in (layer, layer + 1):
        if wanted < layers and wanted not in weights:
            weights[wanted] = b.add(_fsdp(mesh, "_all_gather_base", "gather_weights"), wait=False)
    b.wait(weights[layer])


def _fsdp(mesh: Mesh, name: str, site: str) -> Op:
    shard = -(-HIDDEN * HIDDEN // mesh.dp)
    whole, part = ((shard * mesh.dp,),), ((shard,),)
    inputs, outputs = (part, whole) if name == "_all_gather_base" else (whole, part)
    return Op("dp", name, inputs, outputs, site=site, takes_us=700)


def _layer(b: Builder, mesh: Mesh, direction: str, expert: int) -> None:
    part, whole = ((SEQUENCE // mesh.tp, 1, HIDDEN),), ((SEQUENCE, 1, HIDDEN),)
    b.add(Op("tp", "_all_gather_base", part, whole, site=f"attention_{direction}"))
    if mesh.ep > 1:
        # of all ranks together, as much as they send
        uneven = ((SEQUENCE + 16 * (2 * expert - (mesh.ep - 1)), HIDDEN),)
        b.add(Op("ep", "all_to_all", ((SEQUENCE, HIDDEN),), uneven, site=f"experts_{direction}"))
    b.add(Op("tp", "_reduce_scatter_base", whole, part, site=f"mlp_{direction}"))


def _p2p(b: Builder, name: str, stage: int, site: str, shape: Shape) -> None:
    sizes = ((SEQUENCE, 1, HIDDEN),)
    op = Op("pp", name, sizes, sizes, site=site, stage=stage)
    last = b.ops[-1] if b.ops else op
    if not shape.batched_p2p:
        b.add(op, wait=name == "recv")
    elif (
        name == "recv"
        and [m.name for m in last.members] == ["send"]
        and last.members[0].stage == stage
    ):
        # send there, receive from there: one batch
        b.ops[-1] = replace(last, members=(*last.members, op))
        b.wait(len(b.ops) - 1)
    else:
        b.add(Op("pp", "coalesced", members=(op,), site=site), wait=name == "recv")
