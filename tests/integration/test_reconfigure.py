"""Groups that get other members while they live: ``reconfigure`` of torch 2.15, which gloo has."""

from __future__ import annotations

from pathlib import Path

import pytest
from chosen import NATIVE_FIRST

pytest.importorskip("torch")

from processes import Ranks
from zygote_client import Zygote

from commlens.blackbox import job_dirs
from commlens.blackbox.reader import read_box
from commlens.diagnosis.examine import diagnose_logs

PROGRAM = """
from datetime import timedelta

dist.init_process_group("gloo", enable_reconfigure=True, timeout=timedelta(seconds=30))
store, t = dist.distributed_c10d._get_default_store(), torch.ones(4)

def meet(generation, members):
    store.set(f"{generation}/{rank}", dist._get_reconfigure_handle())
    handles = [store.get(f"{generation}/{member}").decode() for member in members]
    dist._reconfigure(uuid=generation, handles=handles).wait()

meet(1, range(world_size))
for _ in range(5):
    dist.all_reduce(t)
if rank == 1:
    os._exit(0)  # without a goodbye
meet(2, [0, 2])
for _ in range(3):
    dist.all_reduce(t)
if rank == 0:
    dist.all_reduce(t, async_op=True)  # rank 2 never issues it
    time.sleep(1)
os._exit(0)
"""


@pytest.fixture(scope="module")
def ranks(zygote: Zygote) -> Ranks:
    return Ranks(zygote)


@NATIVE_FIRST
def test_a_generation_of_a_group_has_members_and_numbers_of_its_own(
    ranks: Ranks, engine_environment: dict[str, str], tmp_path: Path
) -> None:
    import torch.distributed as dist

    if not hasattr(dist.ProcessGroup, "reconfigure"):
        pytest.skip("torch has no reconfigure before 2.15")
    ranks.run(PROGRAM, tmp_path, world_size=3, RECORD="1", **engine_environment)
    boxes = job_dirs.boxes(job_dirs.user_folder(tmp_path) / "job")
    logs = sorted(map(read_box, boxes), key=lambda log: log.rank)
    seen = [
        [
            (made.store, made.member, made.size, op.sequence_number)
            for op in log.collectives
            if (made := op.channel.group.hand_made) is not None
        ]
        for log in logs
    ]
    first = [[("0/generation-1", rank, 3, number) for number in range(1, 6)] for rank in range(3)]
    second = [[("0/generation-2", rank, 2, number) for number in range(1, 4)] for rank in range(2)]
    assert seen[0] == [*first[0], *second[0], ("0/generation-2", 0, 2, 4)]
    assert seen[1] == first[1]
    assert seen[2] == [*first[2], *second[1]]
    # rank 1 is in no later generation, so nothing waits for it
    said = diagnose_logs(logs).summary
    assert "rank 1 " not in said and "generation-2 [0,2]" in said
