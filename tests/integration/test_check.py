"""Tests of ``commlens check`` and ``commlens.testing.check``: real programs, run as each rank alone."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from chosen import long
from torch._C._distributed_c10d import ProcessGroupGloo

from commlens.check.api import check_plan
from commlens.check.run_rank import Plan
from commlens.errors import CommandError
from commlens.model.cause import LatentFault
from commlens.model.verdict import Verdict
from commlens.scenarios.registry import without_fsdp2
from commlens.testing import check
from conftest import RunCommlens

TIMEOUT_S = 100.0


def checked(program: Any, world_size: int = 2, **more: Any) -> Verdict:
    return check(program, world_size=world_size, timeout_s=TIMEOUT_S, **more)


def begin() -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


# --- collectives and messages


def one_rank_broadcasts() -> None:
    rank = begin()
    x = torch.ones(4)
    if rank == 1:
        dist.broadcast(x, 0)
    dist.all_reduce(x)


def both_receive_first() -> None:
    rank = begin()
    dist.recv(torch.ones(4), 1 - rank)
    dist.send(torch.ones(4), 1 - rank)


def one_raises() -> None:
    if begin() == 1:
        raise ValueError("bad sample")
    dist.barrier()


def one_leaves_at_once() -> None:
    if begin() == 1:
        os._exit(3)
    dist.barrier()


def nobody_waits() -> None:
    begin()
    dist.all_reduce(torch.ones(4), async_op=True)


def line_of(function: Any, text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    return next(n for n, line in enumerate(lines, 1) if n >= first and text in line)


@pytest.mark.parametrize(
    ("program", "kind", "culprits", "text"),
    [
        (one_rank_broadcasts, "mismatch/op", None, "dist.broadcast"),
        (both_receive_first, "cycle", [], ""),
        (one_raises, "dead", [1], "raise ValueError"),
        (one_leaves_at_once, "dead", [1], "os._exit"),
    ],
)
def test_a_fault_is_found(program: Any, kind: str, culprits: list[int] | None, text: str) -> None:
    verdict = checked(program, 3 if program is one_rank_broadcasts else 2)
    assert verdict.kind == kind
    assert culprits is None or verdict.culprits == culprits
    if text:
        assert verdict.source == f"test_check.py:{line_of(program, text)}"


def test_a_work_that_nobody_waits_for_is_a_hazard() -> None:
    verdict = checked(nobody_waits)
    assert not verdict.is_fault
    (finding,) = verdict.findings
    assert finding.kind == "hazard"
    first = f"nothing hangs in 2 ranks on gloo; 1 latent fault: {finding.summary}"
    assert verdict.summary == first


def touches_before_the_wait() -> None:
    begin()
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    x.add_(1)
    work.wait()
    x.add_(1)


def reduces_one_tensor_twice() -> None:
    begin()
    x = torch.ones(4)
    works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()


def makes_groups_again_and_again() -> None:
    begin()
    for _ in range(20):
        dist.all_reduce(torch.ones(4), group=dist.new_group())


def destroys_the_groups_it_makes() -> None:
    begin()
    for _ in range(20):
        group = dist.new_group()
        dist.all_reduce(torch.ones(4), group=group)
        dist.destroy_process_group(group)


def test_groups_that_pile_up_are_a_hazard() -> None:
    (finding,) = checked(makes_groups_again_and_again).findings
    assert isinstance(finding.cause, LatentFault)
    assert (finding.cause.what, finding.cause.times) == ("many-groups", 20)
    assert not checked(destroys_the_groups_it_makes).findings


@pytest.mark.parametrize("fake_tensors", [False, True])
def test_a_touch_of_a_buffer_in_flight_is_a_hazard(fake_tensors: bool) -> None:
    verdict = checked(touches_before_the_wait, fake_tensors=fake_tensors)
    assert verdict.kind == "healthy"
    (finding,) = verdict.findings
    cause = finding.cause
    assert isinstance(cause, LatentFault)
    assert (finding.kind, cause.what, cause.access) == ("hazard", "touched-in-flight", "written")
    line = line_of(touches_before_the_wait, "x.add_(1)")
    assert cause.touched_at == f"test_check.py:{line}"
    assert cause.culprits == [0, 1]


def test_two_collectives_on_one_tensor_are_a_hazard_where_they_run_in_any_order() -> None:
    (finding,) = checked(reduces_one_tensor_twice).findings
    assert isinstance(finding.cause, LatentFault) and finding.cause.what == "shared-in-flight"
    assert not checked(reduces_one_tensor_twice, backend="nccl").findings


def polls_until_it_is_done() -> None:
    begin()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    while not work.is_completed():
        time.sleep(0.01)


def test_a_loop_that_asks_whether_a_collective_is_done() -> None:
    verdict = checked(polls_until_it_is_done)
    assert verdict.kind == "healthy" and not verdict.findings
    assert len(verdict.missing_evidence) == 1


# --- what torch's fake backend refuses, and what gloo and NCCL refuse


def gives_nothing() -> None:
    rank, size = begin(), dist.get_world_size()
    gets = list(range(size))
    for _ in range(2):
        dist.all_to_all_single(
            torch.empty(sum(gets), 8), torch.ones(rank * size, 8), gets, [rank] * size
        )


def splits_on_one_side() -> None:
    begin()
    size = dist.get_world_size()
    dist.all_to_all_single(torch.empty(2 * size), torch.ones(2 * size), None, [2] * size)


def other_forms() -> None:
    begin()
    size = dist.get_world_size()
    dist.all_gather_into_tensor(torch.empty(6 * size), torch.ones(2, 3))
    dist.reduce_scatter_tensor(torch.empty(3), torch.ones(1, 3 * size))
    dist.all_to_all_single(torch.empty(2 * size), torch.ones(size, 2))


def gathers_unevenly() -> None:
    rank, size = begin(), dist.get_world_size()
    dist.all_gather([torch.empty(2 + each) for each in range(size)], torch.ones(2 + rank))
    dist.reduce_scatter(torch.empty(2 + rank), [torch.ones(2 + each) for each in range(size)])


def uses_a_group_of_a_former_world() -> None:
    begin()
    former = dist.group.WORLD
    dist.destroy_process_group()
    begin()
    former.allreduce([torch.ones(2)], dist.AllreduceOptions()).wait()


@pytest.mark.parametrize(
    ("program", "backend"),
    [
        (gives_nothing, ""),
        (splits_on_one_side, ""),
        (other_forms, ""),
        (gathers_unevenly, "nccl"),
        (uses_a_group_of_a_former_world, ""),
    ],
)
@pytest.mark.parametrize("fake_tensors", [False, long(True)])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_a_backend_takes_is_no_fault(program: Any, backend: str, fake_tensors: bool) -> None:
    verdict = checked(program, 3, backend=backend, fake_tensors=fake_tensors)
    assert verdict.kind == "healthy" and not verdict.findings, verdict


def reduces_short_integers() -> None:
    begin()
    dist.all_reduce(torch.ones(4, dtype=torch.int16))


def masks_fractions() -> None:
    begin()
    dist.reduce(torch.ones(4), 0, op=dist.ReduceOp.BAND)


def averages_counts() -> None:
    begin()
    dist.all_reduce(torch.ones(4, dtype=torch.int64), op=dist.ReduceOp.AVG)


def sends_short_integers() -> None:
    rank, x = begin(), torch.ones(4, dtype=torch.int16)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)


@pytest.mark.parametrize(
    ("program", "refused_by"),
    [
        long(reduces_short_integers, ["gloo", "nccl"]),
        long(masks_fractions, ["gloo", "nccl"]),
        (averages_counts, ["gloo"]),
        (sends_short_integers, ["nccl"]),
        (gathers_unevenly, ["gloo"]),
    ],
)
def test_what_a_backend_refuses_is_a_fault(program: Any, refused_by: list[str]) -> None:
    for backend in ("gloo", "nccl"):
        verdict = checked(program, backend=backend)
        assert verdict.is_fault is (backend in refused_by), verdict
        assert not verdict.is_fault or f"{backend} " in verdict.summary


# --- what ranks give each other


def size_from_rank_0() -> None:
    """Rank 0 tells the others how many collectives there are."""
    rank = begin()
    told: list[Any] = [3 if rank == 0 else None]
    dist.broadcast_object_list(told, 0)
    for _ in range(told[0]):
        dist.all_reduce(torch.ones(4))


def object_that_is_not_sent() -> None:
    if begin() == 1:
        dist.recv_object_list([None], 0)


def value_in_the_store() -> None:
    rank = begin()
    store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
    if rank == 0:
        store.set("steps", "2")
    for _ in range(int(store.get("steps"))):
        dist.all_reduce(torch.ones(4))


def key_that_is_not_written() -> None:
    rank = begin()
    store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
    if rank == 0:
        store.wait(["ready"])


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (size_from_rank_0, "healthy"),
        (object_that_is_not_sent, "missing"),
        (value_in_the_store, "healthy"),
        (key_that_is_not_written, "missing"),
    ],
)
def test_what_ranks_give_each_other(program: Any, kind: str) -> None:
    verdict = checked(program)
    assert verdict.kind == kind
    assert bool(verdict.findings) is (kind != "healthy")


def routes_tokens(wrong: bool = False) -> None:
    """Send tokens where they belong, as a mixture of experts does."""
    rank, size = begin(), dist.get_world_size()
    sends = torch.tensor([rank + other + 1 + rank * other for other in range(size)])
    gets = torch.empty_like(sends)
    dist.all_to_all_single(gets, sends)
    ins, outs = sends.tolist(), gets.tolist()
    if wrong and rank == 0:
        outs.reverse()
    dist.all_to_all_single(torch.empty(sum(outs), 2), torch.ones(sum(ins), 2), outs, ins)


def routes_tokens_wrongly() -> None:
    routes_tokens(wrong=True)


def pads_to_the_longest() -> None:
    rank, size = begin(), dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([rank + 3]))
    longest = int(max(lengths))
    dist.all_gather([torch.empty(longest) for _ in range(size)], torch.ones(longest))


def stops_when_one_has_no_data() -> None:
    rank = begin()
    for batch in range(9):
        more = torch.tensor(int(batch < rank + 2))
        dist.all_reduce(more, dist.ReduceOp.MIN)
        if not more:
            break
        dist.all_reduce(torch.ones(2))


def one_goes_on_after_the_shortest() -> None:
    rank = begin()
    batches = torch.tensor([rank + 2])
    dist.all_reduce(batches, dist.ReduceOp.MIN)
    for _ in range(int(batches) + (rank == 1)):
        dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize(
    ("program", "kind", "culprits"),
    [
        long(routes_tokens, "healthy", []),
        (routes_tokens_wrongly, "mismatch/splits", [0]),
        (pads_to_the_longest, "healthy", []),
        (stops_when_one_has_no_data, "healthy", []),
        (one_goes_on_after_the_shortest, "missing", None),
    ],
)
def test_small_tensors_that_decide(program: Any, kind: str, culprits: list[int] | None) -> None:
    verdict = checked(program, 3)
    assert verdict.kind == kind
    assert culprits is None or verdict.culprits == culprits
    assert not verdict.missing_evidence


def answers_whom_it_received_from() -> None:
    rank = begin()
    x = torch.ones(4)
    if rank == 0:
        for _ in range(2):
            dist.send(x, dist.recv(x))
    else:
        dist.send(x, 0)
        dist.recv(x, 0)


def test_a_fault_that_a_guess_leads_to_is_not_proven() -> None:
    verdict = checked(answers_whom_it_received_from, 3)
    assert verdict.kind == "undetermined"
    assert "test_check.py" in verdict.explanation


def one_broadcasts_if_the_sum_is_large() -> None:
    rank = begin()
    x = torch.zeros(4)
    dist.all_reduce(x)
    if x.sum() > 1 and rank == 1:
        dist.broadcast(x, 0)
    dist.all_reduce(x)


def test_answers_to_a_value_that_decides() -> None:
    place = f"test_check.py:{line_of(one_broadcasts_if_the_sum_is_large, 'x.sum()')}"
    assert checked(one_broadcasts_if_the_sum_is_large).kind == "healthy"
    verdict = checked(one_broadcasts_if_the_sum_is_large, branches={place: (False, True)})
    assert verdict.kind == "mismatch/op"
    assert verdict.summary.endswith(f"if {place} is true")


# --- libraries


def trains_with_ddp() -> None:
    rank = begin()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        if not (rank == 1 and step == int(os.environ.get("SKIPPED", "9"))):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_ddp() -> None:
    frozen = gc.get_freeze_count()  # Python 3.12 begins with some
    verdict = checked(trains_with_ddp, steps=3)
    assert verdict.kind == "healthy" and not verdict.findings
    assert verdict.summary == "no mismatch or deadlock in 3 steps of 2 ranks on gloo"
    assert gc.get_freeze_count() <= frozen, "The caller's garbage is collected again."


def test_ddp_on_a_rank_that_skips_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPED", "1")
    assert checked(trains_with_ddp).is_fault


def test_a_run_out_of_time_ends_at_its_next_step_and_says_so() -> None:
    found, _ = check_plan(Plan(trains_with_ddp, 2, cpu_s=0.0, timeout_s=TIMEOUT_S))
    assert found.verdict.summary == "no mismatch or deadlock in 1 step of 2 ranks on gloo"
    (limit,) = found.verdict.missing_evidence
    assert "over after 1 step:" in limit and "--steps" in limit


def shards() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fsdp2_with_tensor_parallelism() -> None:
    if why := without_fsdp2():
        pytest.skip(why)
    verdict = checked(shards, 4, fake_tensors=True)
    assert verdict.kind == "healthy" and not verdict.findings, verdict


def calls_by_keyword() -> None:
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(backend="nccl", device_id=None)
    init_device_mesh(mesh_shape=(2,), device_type="cuda")
    size, rank = dist.get_world_size(), dist.get_rank()
    store = dist.PrefixStore("mine", c10d._get_default_store())
    made, _ = c10d._new_process_group_helper(
        group_size=size,
        group_rank=rank,
        global_ranks_in_group=[0, 1],
        backend=c10d.Backend("gloo"),
        store=store,
        group_name="mine",
        timeout=timedelta(seconds=30),
    )
    with contextlib.suppress(TypeError):
        c10d._new_process_group_helper(2, rank)
    c10d._world.pg_group_ranks[made] = {0: 0, 1: 1}
    dist.all_gather_object(group=made, obj=rank, object_list=[None, None])
    model = DistributedDataParallel(torch.nn.BatchNorm1d(4), None, None, 0, False)
    assert not model.broadcast_buffers
    model._register_builtin_comm_hook(comm_hook_type=dist.BuiltinCommHookType.FP16_COMPRESS)


@pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated")
def test_calls_by_keyword_are_understood() -> None:
    verdict = checked(calls_by_keyword)
    assert verdict.kind == "healthy" and not verdict.findings, verdict


def meets_at_an_address_of_its_own() -> None:
    dist.init_process_group(
        "gloo",
        init_method="tcp://127.0.0.1:29511",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    dist.barrier()


def says_who_makes_the_store() -> None:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    meets_at_an_address_of_its_own()


def meets_at_the_launchers_address() -> None:
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=int(os.environ["RANK"]))
    dist.barrier()


def _spawned(rank: int) -> None:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29511", rank=rank, world_size=2)
    dist.barrier()


def starts_its_own_ranks() -> None:
    torch.multiprocessing.spawn(_spawned, nprocs=2)


@pytest.mark.parametrize(
    ("program", "proven"),
    [
        (meets_at_an_address_of_its_own, False),
        (says_who_makes_the_store, True),
        (meets_at_the_launchers_address, True),
        (starts_its_own_ranks, True),
    ],
)
def test_who_makes_a_store_at_an_address_of_its_own(program: Any, proven: bool) -> None:
    """Under torchrun, no rank does, and all ranks wait for one."""
    verdict = checked(program)
    assert verdict.kind == ("healthy" if proven else "undetermined"), verdict
    if not proven:
        assert "TORCHELASTIC_USE_AGENT_STORE" in verdict.summary
        assert f"test_check.py:{line_of(program, 'init_process_group')}" in verdict.summary


# --- what a program does that a check does not follow


def makes_its_own_store() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", 29599, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()


def lets_torch_make_a_store() -> None:
    rank = begin()
    address = "tcp://127.0.0.1:29512"
    store, *_ = next(torch.distributed.rendezvous(address, rank, 2))
    store.set("key", "value")


def lets_the_system_choose_the_port() -> None:
    port = [0]
    if begin() == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    if dist.get_rank() == 1:
        dist.TCPStore("127.0.0.1", port[0], 2, False)


def stores_at_the_launchers_address() -> None:
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def _helper(member: int, size: int) -> Any:
    """Make a group as vLLM does, past torch's bookkeeping."""
    store = dist.PrefixStore("sync", dist.HashStore())
    group = dist.ProcessGroup(store, member, size)
    backend = ProcessGroupGloo(store, member, size, timeout=timedelta(seconds=20))
    backend._set_sequence_number_for_group()
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def has_a_helper_with_a_rank_of_another_program() -> None:
    group = _helper(begin(), 3)
    group.allreduce([torch.ones(4)]).wait()
    dist.barrier()


def has_a_helper_of_its_last_ranks() -> None:
    if begin():
        _helper(dist.get_rank() - 1, 2).broadcast([torch.ones(4)]).wait()
    dist.barrier()


def lets_torch_make_the_helper() -> None:
    rank = begin()
    store = dist.PrefixStore("sync", dist.HashStore())
    backend = c10d.Backend("gloo")
    group, _ = c10d._new_process_group_helper(
        3, rank, [], backend, store, group_name="sync", timeout=timedelta(seconds=20)
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(3)}
    group.allreduce([torch.ones(4)]).wait()


def asks_for_more_ranks() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=3)
    dist.barrier()


def makes_worlds_of_two() -> None:
    os.environ["WORLD_SIZE"] = "2"
    os.environ["RANK"] = str(int(os.environ["RANK"]) % 2)
    begin()
    dist.barrier()


def changes_places() -> None:
    dist.init_process_group("gloo", rank=1 - int(os.environ["RANK"]), world_size=2)
    dist.barrier()


def _captures() -> torch.Tensor:
    begin()
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        assert torch.cuda.is_current_stream_capturing()
        x += 1
    graph.replay()
    assert not torch.cuda.is_current_stream_capturing()
    return x


def captures_collectives() -> None:
    x = _captures()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    dist.all_reduce(x)
    graph.capture_end()
    for _ in range(1 + dist.get_rank()):
        graph.replay()


def computes_by_a_graph() -> None:
    _captures()
    inputs = (torch.ones(2, 4, device="cuda", requires_grad=True),)
    model = torch.cuda.make_graphed_callables(torch.nn.Linear(4, 4).cuda(), inputs)
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    dist.all_reduce(model.weight.grad)


def _compiles() -> None:
    begin()
    torch.compile(torch.sin, backend="eager")(torch.ones(4))
    dist.barrier()


def exchanges_sizes_as_it_compiles() -> None:
    import torch._dynamo

    torch._dynamo.config.enable_compiler_collectives = True
    _compiles()


def exchanges_guards() -> None:
    torch.compiler.set_enable_guard_collectives(True)
    _compiles()


@pytest.mark.parametrize(
    ("program", "world_size", "at", "reason"),
    [
        (makes_its_own_store, 2, "dist.TCPStore", "the store at 127.0.0.1:29599"),
        (lets_torch_make_a_store, 2, "rendezvous", "the store at 127.0.0.1:29512"),
        (has_a_helper_with_a_rank_of_another_program, 2, ".allreduce", "by hand"),
        long(has_a_helper_of_its_last_ranks, 3, ".broadcast", "by hand"),
        long(lets_torch_make_the_helper, 2, ".allreduce", "by hand"),
        (asks_for_more_ranks, 2, "init_process_group", "a world of 3 ranks, but this check runs 2"),
        (makes_worlds_of_two, 4, "", "a world of 2 ranks, but this check runs 4"),
        (changes_places, 2, "", "rank 0, but this check runs another rank there"),
        (captures_collectives, 2, "dist.all_reduce", "at each replay"),
        (exchanges_sizes_as_it_compiles, 2, "", "exchanges sizes between ranks"),
        pytest.param(
            *(exchanges_guards, 2, "", "its guards exchange"),
            marks=pytest.mark.skipif(
                not hasattr(torch.compiler, "set_enable_guard_collectives"), reason="torch 2.8"
            ),
        ),
    ],
)
def test_what_is_not_followed_is_not_proven(
    program: Any, world_size: int, at: str, reason: str
) -> None:
    verdict = checked(program, world_size)
    assert verdict.kind == "undetermined", verdict
    assert verdict.summary.startswith("not proven: ")
    known = [each for each in verdict.missing_evidence if reason in each]
    assert known, verdict
    if at:
        assert f"test_check.py:{line_of(program, at)}" in known[0]


@pytest.mark.parametrize(
    "program", [lets_the_system_choose_the_port, stores_at_the_launchers_address, _compiles]
)
def test_what_is_followed_is_proven(program: Any) -> None:
    verdict = checked(program)
    assert verdict.kind == "healthy" and not verdict.missing_evidence, verdict


def fails_after_a_graph() -> None:
    _captures()
    assert dist.get_rank() == 0, "the values that a replay computes are other ones"
    dist.barrier()


def test_what_runs_in_a_graph_leaves_a_fault_after_it_open() -> None:
    verdict = checked(computes_by_a_graph)
    assert verdict.kind == "healthy" and "captures a CUDA graph" in verdict.missing_evidence[0]
    verdict = checked(fails_after_a_graph)
    assert verdict.kind == "undetermined" and "captures a CUDA graph" in verdict.explanation


def uses_a_gpu() -> None:
    begin()
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda", pin_memory=True)
    with torch.cuda.stream(side), torch.cuda.nvtx.range("copy"):
        x.record_stream(side)
        y = torch.randn(4, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    for generator in (torch.default_generator, torch.Generator("cuda").clone_state()):
        assert isinstance(generator, torch.Generator)
    assert not isinstance(x, torch.Generator)
    torch.Event(device="cuda").record(torch.Stream(device="cuda"))
    torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.nccl.version() > (2,)
    dist.all_reduce(x + y)


def needs_a_gpu_that_is_no_fake() -> None:
    begin()
    torch.cuda.memory._dump_snapshot("/dev/null")
    dist.barrier()


def needs_a_type_of_gpus() -> None:
    begin()
    torch.cuda.FloatTensor(2)
    dist.barrier()


def test_a_program_that_uses_a_gpu() -> None:
    verdict = checked(uses_a_gpu)
    assert verdict.kind == "healthy" and not verdict.missing_evidence, verdict


@pytest.mark.parametrize("program", [needs_a_gpu_that_is_no_fake, needs_a_type_of_gpus])
def test_what_the_fake_gpu_lacks_is_no_fault(program: Any) -> None:
    verdict = checked(program)
    assert verdict.kind == "undetermined" and "fake GPU" in verdict.explanation, verdict


def meets_a_barrier_in_ddp() -> None:
    rank = begin()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(2):
        model(torch.ones(2, 4)).sum().backward()
        if rank == 1 and step == 0:
            dist.barrier()


def test_the_step_of_a_library_is_named() -> None:
    verdict = checked(meets_a_barrier_in_ddp)
    assert verdict.kind == "mismatch/op"
    assert "for DDP's rebuilding of its buckets" in verdict.explanation, verdict


# --- limits


def never_ends() -> None:
    begin()
    while True:
        pass


def test_a_run_that_takes_too_long_proves_nothing() -> None:
    verdict = check(never_ends, world_size=2, timeout_s=3.0)
    assert verdict.kind == "undetermined"
    assert f"test_check.py:{line_of(never_ends, 'while True')}" in str(verdict)


@pytest.mark.parametrize("wrong", [{"world_size": 0}, {"backend": "mpi"}])
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(CommandError):
        check(begin, **{"world_size": 2, **wrong})


def test_a_test_that_fails_shows_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = checked(one_raises)
    assert capsys.readouterr().out == f"{verdict}\n"
    assert not checked(values_in_order).is_fault
    assert not capsys.readouterr().out


def values_in_order() -> None:
    begin()
    dist.all_reduce(torch.ones(4))


# --- the command

SCRIPT = """
import sys
import torch, torch.distributed as dist
dist.init_process_group()
if dist.get_rank() == int(sys.argv[2]):
    dist.broadcast(torch.ones(4), 0)
dist.all_reduce(torch.ones(4))
"""


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(tmp_path: Path, call_commlens: RunCommlens) -> Command:
    (tmp_path / "train.py").write_text(SCRIPT)
    return functools.partial(call_commlens, "check", "--world-size", "3")


def test_a_script_without_a_fault(command: Command) -> None:
    done = command("train.py", "--json", "9")
    assert done.returncode == 0, done.stderr
    first = " ".join(done.stdout.split("\n\n")[0].split())
    assert first == "VERDICT no mismatch or deadlock in 3 ranks on gloo."


LATE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
for step in range(9):
    dist.all_reduce(torch.ones(4))
    optimizer.step()
    if step == 6 and dist.get_rank() == 1:
        dist.barrier()
"""


def test_a_fault_in_a_later_step(tmp_path: Path, command: Command) -> None:
    (tmp_path / "late.py").write_text(LATE)
    assert command("late.py").returncode == 1
    assert command("--steps", "6", "late.py").returncode == 0


LATENT = """
import torch, torch.distributed as dist
dist.init_process_group()
dist.all_reduce(torch.ones(4), async_op=True)
"""


def test_latent_faults_change_the_exit_status_only_if_they_shall(
    tmp_path: Path, command: Command
) -> None:
    (tmp_path / "latent.py").write_text(LATENT)
    done = command("latent.py")
    assert done.returncode == 0, done.stderr
    assert "nothing hangs in 3 ranks on gloo; 1 latent fault: " in done.stdout
    assert command("--strict", "latent.py").returncode == 1
    assert command("--strict", "train.py", "-x", "9").returncode == 0


def test_a_script_with_a_fault(tmp_path: Path, run_commlens: RunCommlens) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    reports = ("--json", "--sarif", "found.sarif", "--html", "found.html")
    done = run_commlens("check", "--world-size", "3", *reports, "train.py", "-x", "1")
    assert done.returncode == 1, done.stderr
    verdict = json.loads(done.stdout)
    assert (verdict["kind"], verdict["culprits"]) == ("mismatch/op", [1])
    log = json.loads((tmp_path / "found.sarif").read_text())
    result = log["runs"][0]["results"][0]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "train.py" and place["region"]["startLine"] == 6
    assert (tmp_path / "found.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "arguments", [("no_such.py",), ("--steps", "0", "train.py"), ("--backend", "mpi", "train.py")]
)
def test_wrong_usage(command: Command, arguments: tuple[str, ...]) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stdout == "" and "Traceback" not in done.stderr


def gathers_objects_of_different_sizes() -> None:
    rank = begin()
    found: list[Any] = [None] * 3
    dist.all_gather_object(found, "x" * (10 + 7 * rank))
    dist.gather_object(len(found[rank - 1]), found if rank == 0 else None)
    if rank == 0:
        assert found == [24, 10, 17]
    dist.barrier()


def one_does_more_after_it_has_gathered_objects() -> None:
    rank = begin()
    found: list[Any] = [None] * 3
    dist.all_gather_object(found, rank)
    if found.index(2) == rank:
        dist.barrier()


def gathers_what_no_two_runs_give() -> None:
    begin()
    found: list[Any] = [None] * 3
    dist.all_gather_object(found, "x" * (os.getpid() % 97))
    if found[0] == found[1]:
        dist.barrier()


def test_gathered_objects_are_those_of_the_others() -> None:
    assert checked(gathers_objects_of_different_sizes, 3).kind == "healthy"
    assert checked(one_does_more_after_it_has_gathered_objects, 3).culprits == [2]
    verdict = checked(gathers_what_no_two_runs_give, 3)
    assert any("gathers objects" in limit for limit in verdict.missing_evidence)


def raises_after_it_has_logged_the_loss() -> None:
    rank = begin()
    loss = torch.ones(4)
    dist.all_reduce(loss)
    print(f"loss {float(loss.sum()):.3f}")
    if rank == 1:
        raise ValueError("bad sample")
    dist.barrier()


def raises_if_the_loss_explodes() -> None:
    rank = begin()
    loss = torch.ones(4)
    dist.all_reduce(loss)
    dist.recv(loss, 0) if rank else dist.send(loss, 1)
    if rank == 1 and not float(loss.sum()) > 1e3:
        raise ValueError("the loss should have exploded by now")
    dist.barrier()


def test_a_number_that_is_only_logged_leaves_nothing_open() -> None:
    assert checked(raises_after_it_has_logged_the_loss).culprits == [1]
    assert checked(raises_if_the_loss_explodes).kind == "undetermined"


def meets_in_a_store_first() -> None:
    store = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]), 2, is_master=False)
    if os.environ["RANK"] == "0":
        store.set("port", "29600")
    store.wait(["port"])
    assert store.get("port") == b"29600"
    begin()
    dist.all_reduce(torch.ones(4))


def test_a_store_may_be_used_before_init_process_group() -> None:
    assert checked(meets_in_a_store_first).kind == "healthy"
