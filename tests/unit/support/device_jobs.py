"""Simulated jobs whose hosts run ahead of their devices: only the arithmetic of who waits for whom.

Each rank has a host, which loads a batch and launches work, and a device, which does the work in
the order of the launches. A collective begins on a rank's device when its turn comes, and ends on
all members together, a transfer's time after the last one has come. Every time varies by chance.

    job = DeviceJob(8, tp=2, seed=1, fault=Fault("device", 3, 1.3, begins_s=30.0))
    for logs in job.looks(until_s=90.0):
        ...  # every 5 s, what the boxes hold: durations known until the last reading
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from builders import DISPATCHER, SCRIPT, START, S

from commlens.model.collective import (
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    ProcessGroup,
    Stack,
    State,
    TensorSpec,
)
from commlens.model.ranklog import Observation, RankLog

LINES = {"load": 12, "tp": 20, "experts": 24, "dp": 30, "pp": 40, "norm": 44}
LOOK_S = 5.0
RING = 2000  # records of a box, and entries of torch's recorder


_STACKS: dict[str, Stack] = {kind: (Frame(SCRIPT, line, "train"),) for kind, line in LINES.items()}


@functools.cache
def _args(op: str, numel: int) -> CollectiveArgs:
    spec = TensorSpec((numel,), "float32", "cuda")
    return CollectiveArgs(op, DISPATCHER.get(op, op), (spec,), (spec,))


@dataclass(frozen=True)
class Fault:
    """What makes a job slow.

    kind: "device": a rank's kernels take ``factor`` times as long; "stage": those of its pipeline stage; "host": a rank's host needs
    ``factor - 1`` of a step more to load a batch; "link": transfers of a rank's tp group take as
    much longer as makes the step ``factor`` times as long; "work": a rank has ``factor`` times as
    many tokens, and its kernels take as much longer.
    """

    kind: str
    rank: int
    factor: float
    begins_s: float = 0.0


@dataclass
class DeviceJob:
    """A job of ``tp`` x dp ranks; its tp groups hold neighbours."""

    ranks: int
    tp: int = 1
    seed: int = 0
    fault: Fault | None = None
    jitter: float = 0.04
    step_s: float = 0.1
    syncs: bool = True  # the host waits for its device once a step
    ahead: int = 3  # else it is so many steps ahead at most
    experts: bool = False  # an all_to_all over the world
    pauses_every: int = 0  # steps after which rank 0 writes a checkpoint of a second
    reading_s: float = 14.0
    load_s: float = 0.003
    logs: list[RankLog] = field(default_factory=list)
    # if somebody asks: the times of all ranks' kernels, and of their loading, one array for each
    timed: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        world = ProcessGroup("0", tuple(range(self.ranks)), "default_pg", "nccl", incarnation=1)
        tp = [
            ProcessGroup(str(1 + at), tuple(range(at * self.tp, (at + 1) * self.tp)), "tp", "nccl")
            for at in range(self.ranks // self.tp)
        ]
        dp = [
            ProcessGroup(str(100 + at), tuple(range(at, self.ranks, self.tp)), "dp", "nccl")
            for at in range(self.tp)
        ]
        self._groups = {"tp": tp, "dp": dp, "experts": [world]}
        self._channels = {
            (kind, rank): Channel(group, "cuda", runs_ahead=True)
            for kind, groups in self._groups.items()
            for group in groups
            for rank in group.ranks
        }
        self._numbers = dict.fromkeys(self._channels, 0)
        self.logs = [
            RankLog(rank=rank, world_size=self.ranks, host="node", pid=100 + rank)
            for rank in range(self.ranks)
        ]
        self._untimed: list[list[tuple[float, Collective, int]]] = [[] for _ in self.logs]
        # torch's recorder is read at moments that all ranks of a host share
        self._read_s = np.full(self.ranks, self._random.uniform(0, self.reading_s))
        self.step = 0

    # --- what happens

    def _varied(self, seconds: float) -> np.ndarray:
        return seconds * np.maximum(0.5, self._random.normal(1, self.jitter, self.ranks))

    def _compute(self, seconds: float, now_s: float) -> np.ndarray:
        times = self._varied(seconds)
        fault = self.fault
        if fault is not None and self._is_on(now_s):
            slow = {
                "device": [fault.rank],
                "work": [fault.rank],
                "stage": self.ranks_like(fault.rank),
            }
            times[slow.get(fault.kind, [])] *= fault.factor
        if "kernels" in self.timed:
            self.timed["kernels"].append(times)
        return times

    def _load(self, now_s: float) -> np.ndarray:
        times = self._varied(self.load_s)
        if self._is_on(now_s) and self.fault is not None and self.fault.kind == "host":
            times[self.fault.rank] += (self.fault.factor - 1) * self.step_s
        if "load_batch" in self.timed:
            self.timed["load_batch"].append(times)
        return times

    def _kind_of_links(self) -> str:
        return "tp" if self.tp > 1 else "dp"

    def ranks_like(self, rank: int) -> list[int]:
        """The ranks that do the same work."""
        return [*range(self.ranks)]

    def _is_on(self, now_s: float) -> bool:
        return self.fault is not None and now_s >= self.fault.begins_s

    def looks(self, until_s: float) -> Iterator[tuple[float, list[RankLog]]]:
        """Yield the time and the logs, every 5 s."""
        host, device = np.zeros(self.ranks), np.zeros(self.ranks)
        ends: list[np.ndarray] = []
        next_look = LOOK_S
        while host.min() < until_s:
            if self.syncs:
                host = np.maximum(host, device)
            elif len(ends) >= self.ahead:
                host = np.maximum(host, ends[-self.ahead])
            host, device = self._run_step(host, device)
            ends = [*ends[-self.ahead :], device]
            self.step += 1
            while host.min() > next_look:
                yield next_look, self._look(next_look)
                next_look += LOOK_S

    def _run_step(self, host: np.ndarray, device: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        now = float(host.min())
        host = host + self._load(now)
        if self.pauses_every and self.step % self.pauses_every == self.pauses_every - 1:
            host[0] += 1.0
        layers = 4
        for layer in range(layers):
            host = host + 0.0005
            device = np.maximum(host, device) + self._compute(0.8 * self.step_s / layers, now)
            if self.tp > 1:
                device = self._collective("tp", host, device, 0.01 * self.step_s, 1 << 16, now)
            if self.experts and layer == 1:
                device = self._collective("experts", host, device, 0.02 * self.step_s, 4096, now)
        return host, self._collective("dp", host, device, 0.06 * self.step_s, 1 << 20, now)

    def _collective(
        self,
        kind: str,
        host: np.ndarray,
        device: np.ndarray,
        transfer_s: float,
        numel: int,
        now: float,
    ) -> np.ndarray:
        starts, ended = np.maximum(host, device), np.empty(self.ranks)
        for group in self._groups[kind]:
            members = list(group.ranks)
            takes = transfer_s * max(0.5, self._random.normal(1, self.jitter))
            fault = self.fault
            if (
                fault is not None
                and fault.kind == "link"
                and self._is_on(now)
                and kind == self._kind_of_links()
                and fault.rank in members
            ):
                takes += (fault.factor - 1) * self.step_s / (4 if kind == "tp" else 1)
            ended[members] = starts[members].max() + takes
        for rank in range(self.ranks):
            self._record(kind, rank, host[rank], ended[rank] - starts[rank], ended[rank], numel)
        return ended

    def _record(
        self,
        kind: str,
        rank: int,
        issued: float,
        took: float,
        ended: float,
        numel: int,
        op: str = "all_reduce",
        **more: Any,
    ) -> None:
        self._numbers[kind, rank] += 1
        fault, op = self.fault, "all_to_all" if kind == "experts" else op
        if fault is not None and fault.kind == "work" and fault.rank == rank and kind == "experts":
            numel = int(numel * (fault.factor if self._is_on(issued) else 1.0))
        made = Collective(
            self._numbers[kind, rank] + 1_000_000 * len(kind),
            self._channels[kind, rank],
            self._numbers[kind, rank],
            _args(op, numel),
            State.UNKNOWN,
            START + int(issued * S),
            step=self.step,
            stack=_STACKS[kind],
            returned_ns=START + int(issued * S) + 1000,
            **more,
        )
        self.logs[rank].collectives.append(made)
        if ended < float("inf"):
            self._untimed[rank].append((ended, made, int(took * S)))

    # --- what is known of it

    def _look(self, now: float) -> list[RankLog]:
        for rank, log in enumerate(self.logs):
            if now >= self._read_s[rank]:
                done = [each for each in self._untimed[rank] if each[0] <= now]
                for _, made, took in done[-RING:]:
                    made.duration_ns = took
                self._untimed[rank] = [each for each in self._untimed[rank] if each[0] > now]
                self._read_s[rank] = now + self.reading_s
            del log.collectives[:-RING]
            log.captured_ns, log.steps = START + int(now * S), self.step
            log.observation = Observation(seen_ns=log.captured_ns)
        return self.logs


@dataclass
class PipelineJob(DeviceJob):
    """A job of ``pp`` stages with one forward and one backward pass in turn (1F1B); each stage has
    as many ranks, which reduce their gradients at the end of a step.
    """

    pp: int = 4
    microbatches: int = 8
    batched: bool = True  # messages are sent by batch_isend_irecv
    norm: bool = True  # all ranks reduce the norm of the gradients, too
    # a stage waits until each of its messages is received; all its forward passes are first
    waits_for_sends: bool = False
    data: float = 0.03  # of the time of a micro-batch, in which a message's data is transferred

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.ranks // self.pp
        world = ProcessGroup("0", tuple(range(self.ranks)), "default_pg", "nccl", incarnation=1)
        self._groups = {
            "dp": [
                ProcessGroup(str(100 + at), tuple(range(at * size, (at + 1) * size)), "dp", "nccl")
                for at in range(self.pp)
            ],
            "pp": [
                ProcessGroup(str(1 + at), tuple(range(at, self.ranks, size)), "pp", "nccl")
                for at in range(size)
            ],
            "norm": [world],
        }
        self._channels = {
            (kind, rank): Channel(group, "cuda", runs_ahead=True)
            for kind, groups in self._groups.items()
            for group in groups
            for rank in group.ranks
        }
        self._numbers = dict.fromkeys(self._channels, 0)

    def _kind_of_links(self) -> str:
        return "pp"

    def ranks_like(self, rank: int) -> list[int]:
        size = self.ranks // self.pp
        return [*range(rank // size * size, (rank // size + 1) * size)]

    def _order(self, stage: int) -> list[tuple[str, int]]:
        """The passes of a stage in their order."""
        number = self.microbatches
        warm_up = number if self.waits_for_sends else min(self.pp - 1 - stage, number)
        order = [("F", each) for each in range(warm_up)]
        for each in range(number - warm_up):
            order += [("F", warm_up + each), ("B", each)]
        return order + [("B", each) for each in range(number - warm_up, number)]

    def _run_step(self, host: np.ndarray, device: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        now, size = float(host.min()), self.ranks // self.pp
        host = host + self._load(now)
        device, part = np.maximum(host, device), 0.8 * self.step_s / self.microbatches / 3
        issued: list[tuple[int, float, str, int, float, float]] = []
        calls = np.zeros(self.ranks)
        for replica in range(size):
            left = {stage: self._order(stage) for stage in range(self.pp)}
            sent: dict[tuple[str, int, int], float] = {}  # when a pass of a stage was over
            sending: set[int] = set()  # stages whose newest message is not received
            while any(left.values()):
                for stage, order in left.items():
                    before = stage - 1 if order and order[0][0] == "F" else stage + 1
                    if (
                        not order
                        or (self.waits_for_sends and stage in sending)
                        or (0 <= before < self.pp and (*order[0], before) not in sent)
                    ):
                        continue
                    kind, number = order.pop(0)
                    rank, peer = stage * size + replica, before * size + replica
                    if 0 <= before < self.pp:
                        ready = sent[kind, number, before]
                        end = max(ready, device[rank]) + self._transfer_s(rank, peer, now)
                        for one, other, began, op in (
                            (rank, peer, device[rank], "recv"),
                            (peer, rank, ready, "send"),
                        ):
                            calls[one] += 1
                            moment = host[one] + 2e-5 * calls[one]
                            issued.append((one, moment, op, other, end - began, end))
                        device[rank] = end
                        sending.discard(before)
                        if self.waits_for_sends:
                            device[peer] = end
                    device[rank] += self._compute(part * (1 if kind == "F" else 2), now)[rank]
                    sent[kind, number, stage] = device[rank]
                    if 0 <= stage + (1 if kind == "F" else -1) < self.pp:
                        sending.add(stage)
        for rank, moment, op, peer, took, ended in sorted(issued):
            self._message(rank, moment, op, peer, took, ended)
        host = host + 2e-5 * (calls + 1)
        device = self._collective("dp", host, device, 0.06 * self.step_s, 1 << 20, now)
        if self.norm:
            device = self._collective("norm", host, device, 0.001 * self.step_s, 1, now)
        return host, device

    def _transfer_s(self, rank: int, peer: int, now: float) -> float:
        takes, fault = self.data * self.step_s / self.microbatches, self.fault
        if fault is not None and fault.kind == "link" and self._is_on(now):
            first = min(fault.rank, self.ranks - 1 - self.ranks // self.pp)
            if {rank, peer} == {first, first + self.ranks // self.pp}:
                takes += (fault.factor - 1) * self.step_s / self.microbatches
        return takes * max(0.5, self._random.normal(1, self.jitter))

    def _message(
        self, rank: int, issued: float, op: str, peer: int, took: float, ended: float
    ) -> None:
        waits: dict[str, int] = {}
        if self.waits_for_sends:
            waits = {"wait_began_ns": START + int(issued * S) + 20_000}
        if not self.batched:
            self._record("pp", rank, issued, took, ended, 1 << 16, op, peer=peer, **waits)
            return
        batch = self._numbers["pp", rank] + 1
        self._record(
            "pp", rank, issued, 0.0, float("inf"), 1 << 16, op, peer=peer, coalescing_id=batch
        )
        self._record(
            "pp", rank, issued, took, ended, 1 << 16, "coalesced", coalescing_id=batch, **waits
        )
        closing = self.logs[rank].collectives[-1]
        closing.sequence_number, closing.coalesced_members = 0, 1
