"""Incidents of hardware, as changes of the files of nodes: twelve that are why a job stopped or is
slow, and more that are not.

They are laid over the records of a job, simulated or real: four nodes with two ranks each, every
rank with a GPU of its own, and a third GPU of another job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec
from node_files import NodeFiles, RasServer, communicator, gpu_address

from commlens.health import ras
from commlens.health.changes import Look
from commlens.health.monitor import NodeRecord, NodeSampler
from commlens.health.places import RankOfNode
from commlens.model.health import NodeHealth, RasReport
from commlens.model.ranklog import RankLog

S = 1_000_000_000
BOOT_NS = 1_600_000_000 * S  # when the nodes were started, Unix ns
NODES, PER_NODE = 4, 2
RANKS = NODES * PER_NODE

Kind = Literal["stuck", "missing", "dead", "slow"]


@dataclass
class Scene:
    """The nodes of a job, and when it stopped."""

    nodes: list[NodeFiles]
    stalled_ns: int  # Unix ns
    pids: list[int]  # of the ranks
    ras: RasReport | None = None
    swapped: dict[int, float] = field(default_factory=dict)  # bytes of memory by rank

    def log(self, node: int, text: str, *, before_s: float) -> None:
        """The kernel of a node logs something, so long before the job stopped."""
        self.nodes[node].log(text, self.stalled_ns - int(before_s * S))

    def xid(self, node: int, gpu: int, number: int, *, before_s: float, rank: int = -1) -> None:
        """A GPU of a node reports an Xid."""
        pid = f"pid={self.pids[rank]}" if rank >= 0 else "pid='<unknown>'"
        address = gpu_address(gpu).removesuffix(".0")
        text = f"NVRM: Xid (PCI:{address}): {number}, {pid}, name=python, text"
        self.log(node, text, before_s=before_s)

    def answer_of_ras(
        self, counts: Sequence[int], *, silent: tuple[int, ...] = (), others: bool = False
    ) -> None:
        """NCCL's RAS service of the job, or of another one, tells how many collectives each rank
        has launched.
        """
        pids = [pid + 50_000 for pid in self.pids] if others else self.pids
        with RasServer([communicator(pids, list(counts), silent=silent)]) as server:
            self.ras = ras.ask(server.environment)


@dataclass
class Incident:
    """What happens, and what a verdict should say of it."""

    name: str
    kind: Kind
    happen: Callable[[Scene], None]
    fault: str = ""  # that explains; empty: nothing does
    nodes: Sequence[int] = ()  # where it is
    ranks: Sequence[int] = ()  # that are there, of the first node
    blamed: Sequence[int] | None = None  # the culprits; None: those of a job without the incident
    # what happens before the last but one look, long before the job stopped
    earlier: Callable[[Scene], None] = lambda _: None
    # whether the change is mentioned as a possible coincidence
    coincides: bool = False
    ras_says: str = ""
    # by how many seconds the clocks of nodes are set forward when it happens
    clock_set_s: Mapping[int, float] = field(default_factory=dict)


def _flap(scene: Scene) -> None:
    scene.log(2, "mlx5_core 0000:81:00.0 ibp129s0: Link down", before_s=2)
    scene.log(2, "mlx5_core 0000:81:00.0 ibp129s0: Link up", before_s=-3)
    scene.nodes[2].port("mlx5_1", link_downed="1")


def _cut(*nodes: int) -> Callable[[Scene], None]:
    def happen(scene: Scene) -> None:
        for node in nodes:
            scene.log(node, "mlx5_core 0000:80:00.0 ibp128s0: Link down", before_s=1.5)
            scene.nodes[node].port("mlx5_0", state="1: DOWN", phys_state="3: Disabled")

    return happen


def _gpu(node: int, gpu: int, **cells: str) -> Callable[[Scene], None]:
    return lambda scene: scene.nodes[node].gpu(gpu, **cells)


def _port(node: int, port: str, **counters: str) -> Callable[[Scene], None]:
    return lambda scene: scene.nodes[node].port(port, **counters)


def _mounts(timeouts: int, *nodes: int) -> Callable[[Scene], None]:
    """So many requests to a server of NFS have timed out on these nodes."""

    def happen(scene: Scene) -> None:
        for node in nodes:
            scene.nodes[node].mounts(timeouts)

    return happen


def _swap(node: int, *ranks: int) -> Callable[[Scene], None]:
    """Pages are read back on a node; so much memory of these ranks is in swap space."""

    def happen(scene: Scene) -> None:
        scene.nodes[node].write("proc/vmstat", "pswpin 90000\npswpout 90000\noom_kill 0\n")
        scene.swapped |= dict.fromkeys(ranks, 3e9)

    return happen


def _everywhere(port: str, **counters: str) -> Callable[[Scene], None]:
    def happen(scene: Scene) -> None:
        for node in scene.nodes:
            node.port(port, **counters)

    return happen


def _all(*what: Callable[[Scene], None]) -> Callable[[Scene], None]:
    def happen(scene: Scene) -> None:
        for each in what:
            each(scene)

    return happen


CAUSES = [
    Incident("link down and up", "stuck", _flap, "network-down", [2], [4, 5]),
    Incident(
        "errors rising",
        "stuck",
        _port(1, "mlx5_1", symbol_error="5000"),
        "network-errors",
        [1],
        [2, 3],
    ),
    Incident(
        "Xid 79",
        "stuck",
        _all(
            lambda scene: scene.xid(3, 1, 79, before_s=0.5, rank=7),
            lambda scene: scene.nodes[3].lose_gpu(1),
        ),
        "gpu-fault",
        [3],
        [7],
        blamed=[7],
    ),
    Incident(
        "Xid 48",
        "stuck",
        _all(
            lambda scene: scene.xid(0, 0, 48, before_s=1),
            lambda scene: scene.xid(0, 0, 45, before_s=0.5),
        ),
        "gpu-memory",
        [0],
        [0],
        blamed=[0],
    ),
    Incident(
        "Xid 31 on one GPU",
        "stuck",
        lambda scene: scene.xid(1, 0, 31, before_s=1, rank=2),
        "gpu-fault",
        [1],
        [2],
    ),
    Incident(
        "thermal throttle on one rank",
        "slow",
        _gpu(0, 1, clocks_event_reasons_active="0x0000000000000040"),
        "thermal",
        [0],
        [1],
        blamed=[1],
    ),
    Incident(
        "PCIe width lost",
        "slow",
        _gpu(0, 1, pcie_link_width_current="8"),
        "pcie",
        [0],
        [1],
        blamed=[1],
    ),
    Incident(
        "NFS gone",
        "missing",
        lambda scene: scene.log(
            1, "nfs: server 10.0.0.9 not responding, still trying", before_s=-20
        ),
        "storage",
        [1],
        [2, 3],
    ),
    Incident(
        "requests to a file server time out",
        "missing",
        _mounts(4, 1),
        "storage",
        [1],
        [2, 3],
    ),
    Incident(
        "OOM of a neighbour",
        "missing",
        lambda scene: scene.log(
            1, "Out of memory: Killed process 77 (loader) total-vm:8388608kB", before_s=1
        ),
        "host-memory",
        [1],
        [2, 3],
    ),
    Incident(
        "two nodes on one leaf cut",
        "stuck",
        _cut(1, 2),
        "network-down",
        [1, 2],
        [2, 3],
        [2, 3, 4, 5],
    ),
    Incident(
        "RAS agrees",
        "stuck",
        _all(_cut(3), lambda scene: scene.answer_of_ras([9] * RANKS, silent=(6, 7))),
        "network-down",
        [3],
        [6, 7],
        blamed=[6, 7],
        ras_says="agrees",
    ),
    Incident(
        "RAS contradicts",
        "stuck",
        _all(
            lambda scene: scene.xid(3, 0, 119, before_s=1),
            lambda scene: scene.answer_of_ras([9, 9, 8, 9, 9, 9, 9, 9]),
        ),
        "gpu-fault",
        [3],
        [6],
        blamed=[6],
        ras_says="disagrees",
    ),
    Incident(
        "a rank whose memory is swapped out", "slow", _swap(0, 1), "host-memory", [0], [1], [1]
    ),
    Incident(
        "a data loader whose memory is swapped out",
        "missing",
        _swap(1, 2),
        "host-memory",
        [1],
        [2],
    ),
    Incident(
        "Xid 79 written before the clock was set",
        "stuck",
        lambda scene: scene.xid(3, 1, 79, before_s=40.5, rank=7),
        "gpu-fault",
        [3],
        [7],
        blamed=[7],
        clock_set_s={3: 40.0},
    ),
    Incident(
        "Xid 79 before SIGABRT",
        "dead",
        lambda scene: scene.xid(1, 0, 79, before_s=1, rank=2),
        "gpu-fault",
        [1],
        [2],
    ),
]
"""Each is why the job stopped, died or is slow."""

NO_CAUSES = [
    Incident("Xid on the wrong GPU", "stuck", lambda scene: scene.xid(1, 2, 31, before_s=1)),
    Incident(
        "another job's GPU lost",
        "stuck",
        _all(
            lambda scene: scene.xid(1, 2, 79, before_s=1), lambda scene: scene.nodes[1].lose_gpu(2)
        ),
    ),
    Incident("an old Xid", "stuck", lambda scene: scene.xid(1, 0, 79, before_s=3000)),
    Incident(
        "an Xid that the job survived", "stuck", lambda scene: scene.xid(1, 0, 31, before_s=30)
    ),
    Incident("a sign only", "stuck", lambda scene: scene.xid(1, 0, 63, before_s=1), coincides=True),
    Incident(
        "errors rising everywhere",
        "stuck",
        _all(_everywhere("mlx5_0", symbol_error="900"), _everywhere("mlx5_1", symbol_error="900")),
    ),
    Incident(
        "errors rising as always",
        "stuck",
        _port(1, "mlx5_1", symbol_error="11000"),
        earlier=_port(1, "mlx5_1", symbol_error="10000"),
    ),
    Incident("congestion", "stuck", _port(1, "mlx5_1", port_xmit_wait="99999999")),
    Incident(
        "a link that was down before",
        "stuck",
        lambda _: None,
        earlier=_port(1, "mlx5_1", state="1: DOWN"),
    ),
    Incident(
        "a link that fell and came back long before",
        "stuck",
        lambda scene: scene.log(2, "mlx5_core 0000:81:00.0 ibp129s0: Link down", before_s=40),
    ),
    Incident(
        "heat on every GPU",
        "slow",
        _all(
            *(
                _gpu(node, gpu, clocks_event_reasons_active="0x0000000000000040")
                for node in range(NODES)
                for gpu in range(PER_NODE)
            )
        ),
    ),
    Incident(
        "heat on a GPU of another rank",
        "slow",
        _gpu(2, 0, clocks_event_reasons_active="0x0000000000000040"),
    ),
    Incident(
        "an OOM kill on a node without a missing rank",
        "missing",
        lambda scene: scene.log(
            3, "Out of memory: Killed process 77 (stress) total-vm:8388608kB", before_s=1
        ),
    ),
    Incident(
        "files that come late while all are in a collective",
        "stuck",
        lambda scene: scene.log(0, "nfs: server 10.0.0.9 not responding, timed out", before_s=1),
        coincides=True,
    ),
    Incident(
        "RAS of another job",
        "stuck",
        lambda scene: scene.answer_of_ras([9, 9, 8, 9, 9, 9, 9, 9], others=True),
    ),
    Incident("requests of another node to a file server time out", "missing", _mounts(4, 3)),
    Incident(
        "requests to a file server that timed out long ago",
        "missing",
        lambda _: None,
        earlier=_mounts(4, 1),
    ),
    Incident(
        "requests to a file server time out while all are in a collective",
        "stuck",
        _mounts(4, 1),
        coincides=True,
    ),
    Incident("memory of other processes is read back from swap space", "slow", _swap(0)),
    Incident("memory of a rank that is not slow is read back", "slow", _swap(0, 0)),
    Incident("memory is read back where no rank is missing", "missing", _swap(3, 6)),
    Incident(
        "memory is read back on every node",
        "slow",
        _all(*(_swap(node, 2 * node, 2 * node + 1) for node in range(NODES))),
    ),
    Incident(
        "a clock that is set forward",
        "stuck",
        lambda _: None,
        coincides=True,
        clock_set_s={2: 40.0},
    ),
    Incident(
        "a clock that is set back",
        "missing",
        lambda _: None,
        coincides=True,
        clock_set_s={1: -40.0},
    ),
    Incident("a clock that is corrected slowly", "stuck", lambda _: None, clock_set_s={2: 0.1}),
    Incident(
        "an OOM kill beside a rank that died of a signal",
        "dead",
        lambda scene: scene.log(
            1, "Out of memory: Killed process 77 (stress) total-vm:8388608kB", before_s=1
        ),
        coincides=True,
    ),
]
"""None of these is why."""


@dataclass
class _Node:
    files: NodeFiles
    sampler: NodeSampler
    record: NodeRecord
    ranks: list[int] = field(default_factory=list)


def tell(
    incident: Incident,
    logs: Sequence[RankLog],
    stalled_ns: int,
    until_ns: int,
    folder: Path,
    *,
    seen_late: bool = False,
) -> list[NodeHealth]:
    """Let an incident happen on the nodes of a job, and give its logs what the nodes tell.

    Args:
        incident: what happens.
        logs: of all ranks; each node's ranks are consecutive.
        stalled_ns: when the job stopped, Unix ns.
        until_ns: when its nodes were looked at last.
        folder: for the files of the nodes.
        seen_late: nobody has looked at the nodes before the incident.
    """
    pids = [log.pid for log in sorted(logs, key=lambda log: log.rank)]
    nodes = []
    for number in range(NODES):
        files = NodeFiles(folder / f"n{number}", gpus=PER_NODE + 1)
        ranks = list(range(number * PER_NODE, (number + 1) * PER_NODE))
        files.processes({pids[rank]: index for index, rank in enumerate(ranks)})
        sampler = NodeSampler(files.root, past=seen_late)
        nodes.append(_Node(files, sampler, NodeRecord(f"n{number}", past=seen_late), ranks))
    scene = Scene([node.files for node in nodes], stalled_ns, pids)
    behind_ns = {node: int(by_s * S) for node, by_s in incident.clock_set_s.items()}
    if not seen_late:
        _look(nodes, stalled_ns - 130 * S, behind_ns)
    incident.earlier(scene)
    if not seen_late:
        _look(nodes, stalled_ns - 70 * S, behind_ns)
        _look(nodes, stalled_ns - 10 * S, behind_ns)
    incident.happen(scene)
    if seen_late:
        _look(nodes, until_ns - 2 * S)
    _look(nodes, until_ns)
    return [
        _health(node, logs, scene, scene.ras if not number else None)
        for number, node in enumerate(nodes)
    ]


def _look(
    nodes: Iterable[_Node], at_ns: int, behind_ns: Mapping[int, int] = MappingProxyType({})
) -> None:
    for number, node in enumerate(nodes):
        values, logged = node.sampler.look(thorough=True)
        by_ns = behind_ns.get(number, 0)
        node.record.add(Look(at_ns - by_ns, values, BOOT_NS - by_ns), logged)


def _health(
    node: _Node, logs: Sequence[RankLog], scene: Scene, report: RasReport | None
) -> NodeHealth:
    processes = [
        RankOfNode(rank, scene.pids[rank], index, {}, scene.swapped.get(rank, 0.0))
        for index, rank in enumerate(node.ranks)
    ]
    assert node.sampler.gpus is not None
    health = node.record.health(processes, node.sampler.gpus.processes(), (), report)
    node.sampler.close()
    first = next(log for log in logs if log.rank == node.ranks[0])
    first.health = msgspec.convert(msgspec.to_builtins(health), NodeHealth)  # as from a dump
    return health
