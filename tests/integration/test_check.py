"""Tests of ``commlens check`` and ``commlens.testing.check``: real programs, run as each rank alone."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlens.errors import CommandError
from commlens.model.cause import LatentFault
from commlens.model.verdict import Verdict
from commlens.testing import check

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
    assert [finding.kind for finding in verdict.findings] == ["hazard"]


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
        (routes_tokens, "healthy", []),
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
    verdict = checked(trains_with_ddp, steps=3)
    assert verdict.kind == "healthy" and not verdict.findings
    assert verdict.summary == "no mismatch or deadlock in 3 steps of 2 ranks on gloo"
    assert gc.get_freeze_count() == 0, "The caller's garbage is collected again."


def test_ddp_on_a_rank_that_skips_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPED", "1")
    assert checked(trains_with_ddp).is_fault


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
    verdict = checked(shards, 4, fake_tensors=True)
    assert verdict.kind == "healthy" and not verdict.findings, verdict


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


# --- the command

SCRIPT = """
import sys
import torch, torch.distributed as dist
dist.init_process_group()
if dist.get_rank() == int(sys.argv[2]):
    dist.broadcast(torch.ones(4), 0)
dist.all_reduce(torch.ones(4))
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "commlens", "check", "--world-size", "3", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_a_script_without_a_fault(tmp_path: Path) -> None:
    done = command(tmp_path, "train.py", "--json", "9")
    assert done.returncode == 0, done.stderr
    first = " ".join(done.stdout.split("\n\n")[0].split())
    assert first == "VERDICT no mismatch or deadlock in 3 ranks on gloo."


def test_a_script_with_a_fault(tmp_path: Path) -> None:
    done = command(
        tmp_path, "--json", "--sarif", "found.sarif", "--html", "found.html", "train.py", "-x", "1"
    )
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
def test_wrong_usage(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = command(tmp_path, *arguments)
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
