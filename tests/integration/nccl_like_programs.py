"""Programs on the backend nccl_like: ``python nccl_like_programs.py NAME``, in each rank. They
print what test_nccl_like.py reads.
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn


def say(**what):
    os.write(1, (json.dumps(what) + "\n").encode())


def drawn(*sizes, dtype=torch.float32, key=0):
    """Small whole numbers, of which every sum is exact; others on every rank."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + key)
    return torch.randint(0, 20, sizes, generator=generator).to(dtype)


class Compared:
    """Each operation on the default group, and on a group of gloo."""

    def __init__(self):
        dist.init_process_group("nccl", timeout=timedelta(seconds=30))
        self.gloo = dist.new_group(backend="cpu:gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ranks = range(self.size)
        self.compared = 0

    def same(self, name, ours, theirs):
        ours, theirs = (
            list(each) if isinstance(each, (list, tuple)) else [each] for each in (ours, theirs)
        )
        for mine, wanted in zip(ours, theirs, strict=True):
            assert torch.equal(mine, wanted), f"{name}: {mine} instead of {wanted}"
        self.compared += 1

    def gathered(self, tensor):
        outputs = [torch.zeros_like(tensor) for _ in self.ranks]
        dist.all_gather(outputs, tensor, group=self.gloo)
        return outputs

    def reductions(self):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            for op in (
                dist.ReduceOp.SUM,
                dist.ReduceOp.MIN,
                dist.ReduceOp.MAX,
                dist.ReduceOp.PRODUCT,
            ):
                if op == dist.ReduceOp.PRODUCT and dtype in (torch.bfloat16, torch.uint8):
                    continue
                ours = drawn(3, 4, dtype=dtype)
                theirs = ours.clone()
                dist.all_reduce(ours, op)
                dist.all_reduce(theirs, op, group=self.gloo)
                self.same(f"all_reduce {dtype} {op}", ours, theirs)
        ours = drawn(4) * self.size
        theirs = ours.clone()
        dist.all_reduce(ours, dist.ReduceOp.AVG)
        dist.all_reduce(theirs, group=self.gloo)
        self.same("all_reduce AVG", ours, theirs / self.size)
        ours = drawn(6) > 15
        parts = self.gathered(ours.int())
        dist.all_reduce(ours)
        self.same("all_reduce of bool", ours, torch.stack(parts).sum(0) > 0)
        ours = torch.complex(drawn(4), drawn(4, key=1))
        theirs = ours.clone()
        dist.all_reduce(ours)
        dist.all_reduce(theirs, group=self.gloo)
        self.same("all_reduce of complex", ours, theirs)
        inputs = [drawn(3, key=i) for i in self.ranks]
        ours, theirs = torch.zeros(3), torch.zeros(3)
        dist.reduce_scatter(ours, [each.clone() for each in inputs])
        dist.reduce_scatter(theirs, inputs, group=self.gloo)
        self.same("reduce_scatter", ours, theirs)
        whole = drawn(4 * self.size)
        ours, theirs = torch.zeros(4), torch.zeros(4)
        dist.reduce_scatter_tensor(ours, whole)
        dist.reduce_scatter_tensor(theirs, whole, group=self.gloo)
        self.same("reduce_scatter_tensor", ours, theirs)
        uneven = [drawn(2 + i, key=i) for i in self.ranks]
        ours = torch.zeros(2 + self.rank)
        dist.reduce_scatter(ours, [each.clone() for each in uneven])
        for each in uneven:
            dist.all_reduce(each, group=self.gloo)
        self.same("reduce_scatter of uneven sizes", ours, uneven[self.rank])

    def rooted(self):
        for root in self.ranks:
            for name, call in (("broadcast", dist.broadcast), ("reduce", dist.reduce)):
                ours = drawn(4, key=root)
                theirs = ours.clone()
                call(ours, root)
                call(theirs, root, group=self.gloo)
                if name == "broadcast" or self.rank == root:
                    self.same(name, ours, theirs)
            source = drawn(4, key=root)
            outputs = [
                [torch.zeros(4) for _ in self.ranks] if self.rank == root else None
                for _ in range(2)
            ]
            dist.gather(source, outputs[0], dst=root)
            dist.gather(source, outputs[1], dst=root, group=self.gloo)
            self.same("gather", outputs[0] or [], outputs[1] or [])
            inputs = [drawn(3, key=10 + i) for i in self.ranks] if self.rank == root else None
            ours, theirs = torch.zeros(3), torch.zeros(3)
            dist.scatter(ours, inputs, src=root)
            dist.scatter(theirs, inputs, src=root, group=self.gloo)
            self.same("scatter", ours, theirs)

    def gathers(self):
        source = drawn(2, 3)
        ours = [torch.zeros(2, 3) for _ in self.ranks]
        dist.all_gather(ours, source)
        self.same("all_gather", ours, self.gathered(source))
        ours = [torch.zeros(3, 2).t() for _ in self.ranks]
        dist.all_gather(ours, source)
        self.same("all_gather into strided tensors", ours, self.gathered(source))
        flat = torch.zeros(2 * self.size, 3)
        dist.all_gather_into_tensor(flat, source)
        self.same("all_gather_into_tensor", flat, torch.cat(self.gathered(source)))
        ours = [torch.zeros(2 + i) for i in self.ranks]
        dist.all_gather(ours, drawn(2 + self.rank))
        theirs = [drawn(2 + i) if i == self.rank else torch.zeros(2 + i) for i in self.ranks]
        for i in self.ranks:
            dist.broadcast(theirs[i], i, group=self.gloo)
        self.same("all_gather of uneven sizes", ours, theirs)
        source = drawn(2 * self.size)
        ours, theirs = torch.zeros(2 * self.size), torch.zeros(2 * self.size)
        dist.all_to_all_single(ours, source)
        dist.all_to_all_single(theirs, source, group=self.gloo)
        self.same("all_to_all_single", ours, theirs)
        sends, receives = [self.rank + 1] * self.size, [i + 1 for i in self.ranks]
        source = drawn(sum(sends), 3)
        ours, theirs = torch.zeros(sum(receives), 3), torch.zeros(sum(receives), 3)
        dist.all_to_all_single(ours, source, receives, sends)
        dist.all_to_all_single(theirs, source, receives, sends, group=self.gloo)
        self.same("all_to_all_single of uneven splits", ours, theirs)
        parts = [torch.zeros(i + 1, 3) for i in self.ranks]
        dist.all_to_all(parts, [each.contiguous() for each in source.split(sends)])
        self.same("all_to_all", torch.cat(parts), theirs)

    def coalesced(self):
        ours = [drawn(3, key=i) for i in range(3)]
        theirs = [each.clone() for each in ours]
        with dist._coalescing_manager():
            for each in ours:
                dist.all_reduce(each)
        for each in theirs:
            dist.all_reduce(each, group=self.gloo)
        self.same("coalesced all_reduce", ours, theirs)
        inputs = [drawn(3, key=i) for i in range(3)]
        ours = [torch.zeros(3 * self.size) for _ in inputs]
        with dist._coalescing_manager(async_ops=True) as manager:
            for output, each in zip(ours, inputs, strict=True):
                dist.all_gather_into_tensor(output, each)
        manager.wait()
        self.same("coalesced all_gather", ours, [torch.cat(self.gathered(each)) for each in inputs])
        inputs = [drawn(2 * self.size, key=i) for i in range(3)]
        ours = [torch.zeros(2) for _ in inputs]
        with dist._coalescing_manager(async_ops=True) as manager:
            for output, each in zip(ours, inputs, strict=True):
                dist.reduce_scatter_tensor(output, each)
        manager.wait()
        torch.cpu.synchronize()  # operations of gloo do not wait for memory in flight
        for each in inputs:
            dist.all_reduce(each, group=self.gloo)
        self.same(
            "coalesced reduce_scatter", ours, [each.chunk(self.size)[self.rank] for each in inputs]
        )

    def messages(self):
        source, into = drawn(4), torch.zeros(4)
        all_of_them = self.gathered(source)
        if self.rank == 0:
            dist.send(source, 1)
        elif self.rank == 1:
            dist.recv(into, 0)
            self.same("send and recv", into, all_of_them[0])
        before = (self.rank - 1) % self.size
        for work in self.batch(
            (dist.isend, source, (self.rank + 1) % self.size), (dist.irecv, into, before)
        ):
            work.wait()
        self.same("a ring", into, all_of_them[before])
        if self.rank == 0:
            for work in self.batch((dist.isend, source, 1), (dist.isend, source + 1, 1)):
                work.wait()
        elif self.rank == 1:
            first, second = torch.zeros(4), torch.zeros(4)
            for each in (first, second):
                for work in self.batch((dist.irecv, each, 0)):
                    work.wait()
            self.same("a batch against two", [first, second], [all_of_them[0], all_of_them[0] + 1])
        for work in self.batch((dist.isend, source, self.rank), (dist.irecv, into, self.rank)):
            work.wait()
        self.same("to oneself", into, source)

    @staticmethod
    def batch(*operations):
        return dist.batch_isend_irecv([dist.P2POp(*operation) for operation in operations])

    def others(self):
        objects = [None] * self.size
        dist.all_gather_object(objects, {"rank": self.rank})
        assert objects == [{"rank": i} for i in self.ranks]
        told = [self.rank]
        dist.broadcast_object_list(told, 0)
        assert told == [0]
        source = drawn(3, 3)
        theirs = source.clone()
        dist.all_reduce(theirs, group=self.gloo)
        self.same(
            "functional all_reduce",
            functional.all_reduce(source, "sum", dist.group.WORLD) + 0,
            theirs,
        )
        assert functional.all_reduce(source, "sum", dist.group.WORLD).tolist() == theirs.tolist()
        dist.all_reduce(source)
        assert (source.numpy() == theirs.numpy()).all()
        dist.barrier()


def results():
    compared = Compared()
    for part in (
        compared.reductions,
        compared.rooted,
        compared.gathers,
        compared.coalesced,
        compared.messages,
        compared.others,
    ):
        part()
    say(compared=compared.compared)
    dist.destroy_process_group()


# --- training


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def batches(key=0):
    generator = torch.Generator().manual_seed(key)
    return [
        (torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator))
        for _ in range(3)
    ]


def losses(model, parameters, key=0):
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    found = []
    for inputs, wanted in batches(key):
        loss = (model(inputs) - wanted).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(round(loss.item(), 4))
    return found


def training():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.001)
    say(ddp=losses(model, model.parameters(), key=rank))
    model = nn.parallel.DistributedDataParallel(network(), gradient_as_bucket_view=True)
    say(ddp_views=losses(model, model.parameters(), key=rank))
    if "fsdp2" in sys.argv:
        from torch.distributed.fsdp import fully_shard

        model = network()
        for layer in (*model[::2], model):
            fully_shard(layer, mesh=mesh)
        say(fsdp2=losses(model, model.parameters(), key=rank))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    say(tensor_parallel=losses(model, model.parameters()))
    say(pipeline=pipeline(rank))
    model = torch.compile(network(), backend="aot_eager")
    reduced = torch.compile(
        lambda loss: functional.all_reduce(loss * 2, "sum", dist.group.WORLD) + 1,
        backend="aot_eager",
    )
    say(compiled=losses(model, model.parameters()), reduced=reduced(torch.ones(2)).tolist())
    dist.destroy_process_group()


def pipeline(rank):
    stage = network()[:2] if rank == 0 else network()[2:]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    found = []
    for inputs, wanted in batches():
        if rank == 0:
            hidden = stage(inputs)
            gradient = torch.zeros_like(hidden)
            for work in Compared.batch((dist.isend, hidden.detach(), 1), (dist.irecv, gradient, 1)):
                work.wait()
            hidden.backward(gradient)
        else:
            hidden = torch.zeros(8, 32)
            for work in Compared.batch((dist.irecv, hidden, 0)):
                work.wait()
            hidden.requires_grad_()
            loss = (stage(hidden) - wanted).pow(2).mean()
            loss.backward()
            for work in Compared.batch((dist.isend, hidden.grad, 0)):
                work.wait()
            found.append(round(loss.item(), 4))
        optimizer.step()
        optimizer.zero_grad()
    return found


# --- the device


def begin(timeout_s=30.0):
    dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_s))
    dist.all_reduce(torch.ones(1))
    torch.cpu.synchronize()


def run_ahead():
    import nccl_like

    begin()
    tensor = torch.zeros(8)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["the other rank has issued all"])
    for _ in range(3000):
        dist.all_reduce(tensor)
    pending = nccl_like.pending()
    store.set("the other rank has issued all", "")
    torch.cpu.synchronize()
    say(
        pending=pending,
        left=nccl_like.pending(),
        works=nccl_like.works_alive(),
        queries=nccl_like.queries(),
    )
    work = dist.all_reduce(tensor, async_op=True)
    held = nccl_like.works_alive()
    work.is_completed()
    del work
    say(held=held, works=nccl_like.works_alive(), queries=nccl_like.queries())
    dist.destroy_process_group()


def replay_alone():
    """Rank 1 does not replay."""
    import nccl_like

    begin()
    tensor = torch.ones(4)
    with nccl_like.capture() as graph:
        dist.all_reduce(tensor)
    say(captured=tensor.tolist())
    graph.replay()
    say(replayed=tensor.tolist())
    if dist.get_rank() == 0:
        graph.replay()
        time.sleep(0.5)
        say(
            pending=nccl_like.pending(),
            number=dist.group.WORLD._get_backend(
                torch.device("cpu")
            )._get_sequence_number_for_group(),
        )


def occupied():
    """Collectives behind a compute kernel never start."""
    import nccl_like

    begin()
    nccl_like.launch_kernel()
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    time.sleep(0.4)
    c10d = torch._C._distributed_c10d
    text = (
        c10d._dump_fr_trace_json(includeCollectives=True, backend="nccl2")
        if os.environ[nccl_like.ENGINE] == nccl_like.NCCL2
        else c10d._dump_nccl_trace_json(includeCollectives=True)
    )
    entry = json.loads(text)["entries"][-1]
    pending = nccl_like.pending()
    nccl_like.end_kernels()
    say(state=entry["state"], pending=pending, then=tensor.tolist())
    dist.destroy_process_group()


def leave():
    """End with a collective in flight, and without destroy_process_group."""
    begin()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4))
    else:
        time.sleep(0.5)
    say(left=True)


def peer_dies():
    begin()
    if dist.get_rank() == 1:
        os._exit(7)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    result = work.get_future_result()
    result.wait()
    say(result=result.value())
    time.sleep(20)


# --- hangs, which the watchdog ends


def skipped():
    begin(timeout_s=2)
    if dist.get_rank() == 1:
        time.sleep(30)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    say(ran_on=True)
    tensor.sum().item()


def sizes():
    begin(timeout_s=2)
    dist.all_reduce(torch.ones(4 + dist.get_rank()))
    say(ran_on=True)
    torch.cpu.synchronize()


def swapped():
    begin(timeout_s=2)
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=2)) for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.ones(2), group=group)
    torch.cpu.synchronize()
    for group in groups if dist.get_rank() == 0 else groups[::-1]:
        dist.all_reduce(torch.ones(3), group=group)
    say(ran_on=True)
    torch.cpu.synchronize()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
