"""Small programs with one fault of a class of the MPI Bugs Initiative each, ported to
torch.distributed, and correct ones; each with the right verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

_BEGIN = """
import time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=90))
rank, size = dist.get_rank(), dist.get_world_size()
t, o = torch.ones(8) * rank, torch.zeros(8)
for _ in range(3):
    dist.all_reduce(t.clone())
"""
_END = """
dist.barrier()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Case:
    """A program, and what may be said about it."""

    name: str
    size: int  # of its world
    body: str
    area: str = ""  # the class of its fault; empty: it is correct
    kinds: str = ""  # of the verdict that are right, or "hazard" for a latent fault
    culprits: tuple[int, ...] | None = ()  # None: there is no single right answer
    leaves_early: bool = False  # without the barrier at the end

    @property
    def source(self) -> str:
        """The script."""
        return _BEGIN + self.body + ("" if self.leaves_early else _END)


CASES = (
    # --- order of calls
    Case(
        "order-1",
        3,
        """
if rank == 1: dist.broadcast(t, 0); dist.all_reduce(t)
else: dist.all_reduce(t); dist.broadcast(t, 0)
""",
        "order of calls",
        "mismatch/op",
        (1,),
    ),
    Case(
        "order-2",
        3,
        """
if rank == 2: dist.barrier(); dist.all_reduce(t)
else: dist.all_reduce(t); dist.barrier()
""",
        "order of calls",
        "mismatch/op missing cycle",
        (2,),
    ),
    Case(
        "order-3",
        2,
        """
a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
for g in ((a, b) if rank == 0 else (b, a)):
    dist.all_reduce(t, group=g)
""",
        "order of calls",
        "cycle",
        None,
    ),
    # --- deadlocks between messages
    Case(
        "p2p-recv-recv",
        2,
        """
dist.recv(o, 1 - rank)
dist.send(t, 1 - rank)
""",
        "deadlocks between messages",
        "cycle",
        None,
    ),
    Case(
        "p2p-ring-recv",
        3,
        """
dist.recv(o, (rank - 1) % size)
dist.send(t, (rank + 1) % size)
""",
        "deadlocks between messages",
        "cycle",
        None,
    ),
    Case(
        "p2p-send-send",
        2,
        """
big = torch.ones(4_000_000)
dist.send(big, 1 - rank)
dist.recv(big, 1 - rank)
""",
        "deadlocks between messages",
        "cycle",
        None,
    ),
    Case(
        "p2p-coll",
        2,
        """
if rank == 0: dist.recv(o, 1); dist.all_reduce(t)
else: dist.all_reduce(t); dist.send(t, 0)
""",
        "deadlocks between messages",
        "cycle missing mismatch/p2p",
        None,
    ),
    # --- missing calls
    Case(
        "missing-send",
        3,
        """
for i in range(3):
    if rank == 0 and i < 2: dist.send(t, 1)
    if rank == 1: dist.recv(o, 0)
""",
        "missing calls",
        "missing cycle",
        (0,),
    ),
    Case(
        "missing-recv",
        2,
        """
big = torch.ones(4_000_000)
if rank == 0: dist.send(big, 1)
""",
        "missing calls",
        "missing cycle",
        None,
    ),
    Case(
        "missing-coll",
        4,
        """
for i in range(4):
    if not (rank == 3 and i == 3): dist.all_reduce(t)
dist.destroy_process_group()
""",
        "missing calls",
        "missing mismatch/op",
        (3,),
        leaves_early=True,
    ),
    Case(
        "missing-barrier",
        3,
        """
if rank: dist.barrier()
dist.destroy_process_group()
""",
        "missing calls",
        "missing",
        (0,),
        leaves_early=True,
    ),
    Case(
        "missing-bcast-root",
        3,
        """
if rank: dist.broadcast(t, 0)
""",
        "missing calls",
        "missing mismatch/op",
        (0,),
    ),
    # --- arguments that differ
    Case(
        "root-1",
        3,
        """
dist.broadcast(t, 1 if rank == 2 else 0)
""",
        "arguments that differ",
        "mismatch/root",
        (2,),
    ),
    Case(
        "root-2",
        4,
        """
dist.reduce(t, 2 if rank == 1 else 0)
""",
        "arguments that differ",
        "mismatch/root",
        (1,),
    ),
    Case(
        "root-3",
        3,
        """
out = [torch.zeros(8) for _ in range(3)]
dist.gather(t, out if rank == (0 if rank == 0 else 1) else None, dst=0 if rank == 0 else 1)
""",
        "arguments that differ",
        "mismatch/root",
        (0,),
    ),
    Case(
        "op-1",
        3,
        """
dist.all_reduce(t, op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)
""",
        "arguments that differ",
        "mismatch/reduce-op",
        (1,),
    ),
    Case(
        "op-2",
        4,
        """
dist.reduce(t, 0, op=dist.ReduceOp.MIN if rank == 3 else dist.ReduceOp.SUM)
""",
        "arguments that differ",
        "mismatch/reduce-op",
        (3,),
    ),
    Case(
        "op-3",
        3,
        """
x = [torch.ones(8) for _ in range(3)]
dist.reduce_scatter(o, x, op=dist.ReduceOp.PRODUCT if rank == 0 else dist.ReduceOp.SUM)
""",
        "arguments that differ",
        "mismatch/reduce-op",
        (0,),
    ),
    Case(
        "type-1",
        3,
        """
dist.all_reduce(t.long() if rank == 2 else t)
""",
        "arguments that differ",
        "mismatch/dtype",
        (2,),
    ),
    Case(
        "type-2",
        3,
        """
dist.broadcast(t.double() if rank == 1 else t, 0)
""",
        "arguments that differ",
        "mismatch/dtype",
        (1,),
    ),
    Case(
        "type-3",
        2,
        """
if rank == 0: dist.send(t.double(), 1)
else: dist.recv(o, 0)
""",
        "arguments that differ",
        "mismatch/p2p mismatch/dtype",
        None,
    ),
    Case(
        "size-1",
        3,
        """
dist.all_reduce(torch.ones(9 if rank == 1 else 8))
""",
        "arguments that differ",
        "mismatch/shape",
        (1,),
    ),
    Case(
        "size-2",
        4,
        """
x = torch.ones(7 if rank == 2 else 8)
dist.all_gather([torch.zeros_like(x) for _ in range(4)], x)
""",
        "arguments that differ",
        "mismatch/shape",
        (2,),
    ),
    Case(
        "size-3",
        2,
        """
if rank == 0: dist.send(torch.ones(16), 1)
else: dist.recv(o, 0)
""",
        "arguments that differ",
        "mismatch/p2p mismatch/shape",
        None,
    ),
    Case(
        "splits",
        3,
        """
ins = [1, 2, 3] if rank else [2, 2, 2]
dist.all_to_all_single(torch.zeros(6), torch.ones(6), [2, 2, 2], ins)
""",
        "arguments that differ",
        "mismatch/splits",
        None,
    ),
    # --- receives from any rank
    Case(
        "race-1",
        3,
        """
if rank == 0:
    time.sleep(0.5)
    dist.recv(o); dist.recv(o, src=1)
else: dist.send(t, 0)
""",
        "receives from any rank",
        "mismatch/p2p",
        (0,),
    ),
    Case(
        "race-2",
        4,
        """
if rank == 0:
    time.sleep(0.5)
    dist.recv(o); dist.recv(o); dist.recv(o, src=1)
else: dist.send(t, 0)
""",
        "receives from any rank",
        "mismatch/p2p",
        (0,),
    ),
    Case(
        "race-3",
        3,
        """
if rank == 2:
    time.sleep(0.5)
    w = dist.irecv(o, tag=4); w.wait(); dist.recv(o, src=0, tag=4)
else: dist.send(t, 2, tag=4)
""",
        "receives from any rank",
        "mismatch/p2p",
        (2,),
    ),
    # --- ranks that do not exist
    Case(
        "peer-1",
        2,
        """
if rank == 0: dist.send(t, 2)
""",
        "ranks that do not exist",
        "mismatch/p2p",
        (0,),
    ),
    Case(
        "peer-2",
        3,
        """
if rank == 1: dist.recv(o, 5)
""",
        "ranks that do not exist",
        "mismatch/p2p",
        (1,),
    ),
    Case(
        "peer-3",
        3,
        """
g = dist.new_group([0, 1])
if rank == 2: dist.send(t, 7)
""",
        "ranks that do not exist",
        "mismatch/p2p dead",
        (2,),
    ),
    # --- tags
    Case(
        "tag-1",
        2,
        """
if rank == 0: dist.send(torch.ones(4_000_000), 1, tag=1)
else: dist.recv(torch.ones(4_000_000), 0, tag=2)
""",
        "tags",
        "mismatch/p2p",
        None,
    ),
    # --- Works that nobody waits for (latent faults)
    Case(
        "wait-1",
        2,
        """
w = dist.all_reduce(t, async_op=True)
""",
        "Works that nobody waits for (latent faults)",
        "hazard",
        (0, 1),
    ),
    Case(
        "wait-2",
        2,
        """
if rank == 0: w = dist.isend(t, 1)
else: dist.recv(o, 0)
""",
        "Works that nobody waits for (latent faults)",
        "hazard",
        (0,),
    ),
    Case(
        "wait-3",
        3,
        """
dist.broadcast(t, 0, async_op=True)
""",
        "Works that nobody waits for (latent faults)",
        "hazard",
        (0, 1, 2),
    ),
    # --- groups
    Case(
        "group-1",
        3,
        """
if rank < 2: g = dist.new_group([0, 1])
""",
        "groups",
        "missing mismatch/group hazard",
        (2,),
    ),
    Case(
        "group-2",
        3,
        """
g = dist.new_group([0, 1])
dist.all_reduce(t, group=g)
""",
        "groups",
        "hazard",
        (2,),
    ),
    Case(
        "group-3",
        3,
        """
g = dist.new_group([0, 2] if rank == 1 else [0, 1, 2])
""",
        "groups",
        "mismatch/group",
        (1,),
    ),
    # --- exits, exceptions, a rank that sleeps
    Case(
        "exit-1",
        3,
        """
if rank == 1: raise SystemExit(3)
dist.all_reduce(t)
""",
        "exits, exceptions, a rank that sleeps",
        "dead",
        (1,),
    ),
    Case(
        "exc-1",
        3,
        """
if rank == 2: raise ValueError("bad sample")
dist.all_reduce(t)
""",
        "exits, exceptions, a rank that sleeps",
        "dead",
        (2,),
    ),
    Case(
        "hang-1",
        3,
        """
if rank == 1: time.sleep(60)
dist.all_reduce(t)
""",
        "exits, exceptions, a rank that sleeps",
        "missing",
        (1,),
    ),
    # --- correct
    Case(
        "all-reduce",
        3,
        """
dist.all_reduce(t)
""",
    ),
    Case(
        "broadcast-reduce",
        4,
        """
dist.broadcast(t, 0); dist.reduce(t, 1)
""",
    ),
    Case(
        "pairs",
        3,
        """
if rank % 2 == 0 and rank + 1 < size: dist.send(t, rank + 1)
elif rank % 2: dist.recv(o, rank - 1)
""",
    ),
    Case(
        "ring",
        4,
        """
w = dist.isend(t, (rank + 1) % size); dist.recv(o, (rank - 1) % size); w.wait()
""",
    ),
    Case(
        "any-source",
        3,
        """
if rank == 0:
    for _ in range(size - 1): dist.recv(o)
else: dist.send(t, 0)
""",
    ),
    Case(
        "answers-any-source",
        4,
        """
if rank == 0:
    for _ in range(size - 1):
        s = dist.recv(o); dist.recv(o, s)
else: dist.send(t, 0); dist.send(t, 0)
""",
    ),
    Case(
        "group",
        3,
        """
g = dist.new_group([0, 1])
if rank < 2: dist.all_reduce(t, group=g)
""",
    ),
    Case(
        "two-groups-of-the-same-ranks",
        4,
        """
a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
if rank < 2:
    for g in (a, b): dist.all_reduce(t, group=g)
""",
    ),
    Case(
        "all-gather",
        3,
        """
dist.all_gather([torch.zeros(8) for _ in range(size)], t)
""",
    ),
    Case(
        "all-to-all",
        4,
        """
ins = [rank + 1] * size
outs = [i + 1 for i in range(size)]
dist.all_to_all_single(torch.zeros(sum(outs)), torch.ones(sum(ins)), outs, ins)
""",
    ),
    Case(
        "waits-in-reverse",
        3,
        """
ws = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(5)]
for w in reversed(ws): w.wait()
""",
    ),
    Case(
        "polls",
        4,
        """
w = dist.all_reduce(t, async_op=True)
while not w.is_completed(): time.sleep(0.01)
""",
    ),
    Case(
        "broadcast-from-0",
        3,
        """
if rank == 0: dist.broadcast(t, 0)
else: dist.broadcast(o, 0)
""",
    ),
    Case(
        "gathers-objects",
        4,
        """
x = [None] * size
dist.all_gather_object(x, {"r": "a" * rank})
""",
    ),
    Case(
        "scatter",
        3,
        """
y = [torch.ones(rank + 1)]
dist.scatter(o, [torch.ones(8)] * size if rank == 0 else None, src=0)
""",
    ),
    Case(
        "rank-0-is-late",
        4,
        """
if rank == 0: time.sleep(2)
dist.all_reduce(t)
""",
    ),
    Case(
        "tags",
        3,
        """
if rank == 0: dist.send(t, 1, tag=1); dist.send(t, 1, tag=2)
elif rank == 1: dist.recv(o, 0, tag=1); dist.recv(o, 0, tag=2)
""",
    ),
    Case(
        "batch",
        4,
        """
ops = [dist.P2POp(dist.isend, t, (rank + 1) % size), dist.P2POp(dist.irecv, o, (rank - 1) % size)]
for w in dist.batch_isend_irecv(ops): w.wait()
""",
    ),
    Case(
        "monitored-barrier",
        3,
        """
dist.monitored_barrier()
""",
    ),
    Case(
        "reduce-scatter",
        4,
        """
for i in range(10): dist.reduce_scatter(o, [t] * size); dist.all_reduce(o)
""",
    ),
)
