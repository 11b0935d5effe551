"""Jobs that stop while they make groups: in ``init_process_group``, of the first life of their processes or of a
later one, and in ``new_group``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chosen import long
from harness import Harness
from ports import free_port

from commlens.model.cause import Ended, GroupsDiffer, StuckInside

torch = pytest.importorskip("torch")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = pytest.mark.timeout(180)

NOBODY_LISTENS = """
import sys
import torch.distributed as dist, os
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=int(os.environ["RANK"]), world_size=2)
"""

SECOND_LIFE = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist

how, file = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(3):
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
if how == "alone":  # work of one process, longer than the stall timeout
    until = time.monotonic() + 7
    while time.monotonic() < until:
        torch.ones(100, 100) @ torch.ones(100, 100)
if how == "asleep":
    time.sleep(7)
if how == "polls" and rank == 2:
    while not os.path.exists(file + "-ready"):
        time.sleep(0.05)
if how == "dead" and rank == 2:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
if how == "late" and rank == 2:
    time.sleep(1)
method = "env://" if how == "late" else f"file://{file}"
dist.init_process_group("gloo", init_method=method, rank=rank, world_size=3)
if how == "group" and rank == 2:
    while not os.path.exists(file + "-ready"):
        time.sleep(0.05)
group = dist.new_group([0, 1, 2])
dist.all_reduce(torch.ones(4), group=group)
dist.destroy_process_group()
"""


LOCAL_NAMES = """
import sys
import torch.distributed as dist
from datetime import timedelta
from torch.distributed import distributed_c10d as c10d
dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]
pair = dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)
if how == "shared" and rank in (0, 3):
    dist.new_group([0, 3], use_local_synchronization=True)  # more
if how == "helper" and rank == 1:
    store = dist.PrefixStore("mine", c10d._get_default_store())
    c10d._new_process_group_helper(1, 0, [], c10d.Backend("gloo"), store, group_name="mine", timeout=timedelta(seconds=9))  # more
if how == "destroyed" and rank == 3:
    dist.destroy_process_group(pair)
dist.new_group([0, 1, 2, 3], use_local_synchronization=True)  # waits
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("how", "sides", "made"),
    [
        ("shared", [[0, 3], [1, 2]], [0, 3]),
        long("helper", [[0, 2, 3], [1]], [1]),
        long("destroyed", [[0, 1, 2], [3]], []),
    ],
)
def test_a_group_of_two_names(
    jobs: Harness, tmp_path: Path, how: str, sides: list[list[int]], made: list[int]
) -> None:
    if TORCH >= (2, 14) and how != "shared":
        pytest.skip("torch gives the group one name there, and the job ends well")
    result = jobs.run_program(LOCAL_NAMES.lstrip(), 4, tmp_path, arguments=[how], timeout_s=60)
    verdict = result.verdict
    assert verdict is not None and not result.timed_out, str(result)
    cause = verdict.cause
    assert isinstance(cause, GroupsDiffer), str(result)
    assert (verdict.kind, cause.culprits, cause.difference) == ("mismatch/group", [], "name")
    assert sorted(each.ranks for each in cause.names) == sides, str(result)
    before = {each.ranks[0]: each.groups_before for each in cause.names}
    assert sorted(filter(None, before.values())) == ([1, 2] if how == "destroyed" else [2, 3])
    assert [rank for each in cause.one_more for rank in each.made_by] == made, str(result)
    line = next(
        n for n, text in enumerate(LOCAL_NAMES.lstrip().splitlines(), 1) if "# waits" in text
    )
    assert verdict.source == f"train.py:{line}"


def test_local_names_that_agree(jobs: Harness, tmp_path: Path) -> None:
    result = jobs.run_program(LOCAL_NAMES.lstrip(), 4, tmp_path, arguments=["well"], timeout_s=60)
    assert set(result.exits.values()) == {0} and not result.said, str(result)


@pytest.mark.skipif(
    TORCH >= (2, 14), reason="rank 0 listens there: torchrun's store serves its own address only"
)
def test_all_ranks_come_and_nobody_listens(jobs: Harness, tmp_path: Path) -> None:
    port = free_port()
    result = jobs.run_program(
        NOBODY_LISTENS.lstrip(), 2, tmp_path, arguments=[str(port)], timeout_s=60
    )
    assert result.verdict is not None and not result.timed_out, str(result)
    assert (result.verdict.kind, result.verdict.culprits) == ("stuck-inside", []), str(result)
    assert f"nobody listens at 127.0.0.1:{port}" in result.verdict.summary
    assert result.verdict.source == "train.py:3"


@pytest.mark.parametrize(
    ("how", "kind", "waits_in"),
    [
        ("polls", "missing", "init_process_group"),
        long("dead", "dead", "init_process_group"),
        ("group", "missing", "new_group"),
    ],
)
def test_a_rank_that_does_not_come_in_a_second_life(
    jobs: Harness, tmp_path: Path, how: str, kind: str, waits_in: str
) -> None:
    result = jobs.run_program(
        SECOND_LIFE.lstrip(), 3, tmp_path, arguments=[how, str(tmp_path / "meet")], timeout_s=40
    )
    verdict = result.verdict
    assert verdict is not None and not result.timed_out, str(result)
    assert (verdict.kind, verdict.culprits) == (kind, [2]), str(result)
    assert verdict.collective is not None and verdict.collective.op == waits_in, str(result)


def test_an_address_that_the_store_kept(jobs: Harness, tmp_path: Path) -> None:
    """Both lives meet at one store, in which the addresses of the first stay. A late rank is not to
    blame. The order of the addresses, which is random, decides whether a rank is refused at one or
    waits for a connection from there.
    """
    result = jobs.run_program(
        SECOND_LIFE.lstrip(), 3, tmp_path, arguments=["late", "-"], timeout_s=60
    )
    if set(result.exits.values()) == {0}:  # a torch that gives each life keys of its own
        assert not result.said, str(result)
        return
    verdict = result.verdict
    assert verdict is not None and not verdict.culprits, str(result)
    if isinstance(verdict.cause, StuckInside):
        assert verdict.cause.init is not None and verdict.cause.init.again, str(result)
        return
    assert isinstance(verdict.cause, Ended), str(result)
    assert verdict.cause.how == "kept-address", str(result)
    assert verdict.cause.addresses[0].startswith("127.0.0.1:")


@pytest.mark.parametrize("how", [long("well"), long("alone"), "asleep"])
def test_a_second_life_that_goes_well(jobs: Harness, tmp_path: Path, how: str) -> None:
    result = jobs.run_program(
        SECOND_LIFE.lstrip(), 3, tmp_path, arguments=[how, str(tmp_path / "meet")], timeout_s=60
    )
    assert set(result.exits.values()) == {0}, str(result)
    assert not result.said, str(result)
