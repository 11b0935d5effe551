"""Receives from any source, on real gloo ranks: which message they took is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from chosen import NATIVE_FIRST

pytest.importorskip("torch")

from harness import Harness, shown

from commlens.config import Settings

pytestmark = pytest.mark.timeout(120)

# In a group whose ranks are numbered otherwise than the job's.
RACE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, ones = dist.get_rank(), torch.ones(4)
group = dist.new_group([1, 2, 3])
if rank == 1:
    dist.recv(ones, group=group)  # line 6
    work = dist.irecv(ones, group=group)  # line 7
    work.wait()
    dist.recv(ones, src=2, group=group)  # line 9
elif rank == 2:
    dist.send(ones, 1, group=group)
    dist.send(ones, 1, group=group)  # line 12
elif rank == 3:
    import time
    time.sleep(1)
    dist.send(ones, 1, group=group)  # line 16
dist.barrier()
dist.destroy_process_group()
"""

LEGAL = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, total, one = dist.get_rank(), torch.zeros(1), torch.ones(1)
for step in range(20):
    if rank == 0:
        for _ in range(dist.get_world_size() - 1):  # a sum of all
            dist.recv(one, tag=1)
            total += one
        for _ in range(dist.get_world_size() - 1):  # a header, and the rest
            source = dist.recv(one, tag=2)
            dist.recv(one, source, tag=2)
        for source in range(1, dist.get_world_size()):
            dist.recv(one, source, tag=3)
    else:
        for tag in (1, 2, 2, 3):
            dist.send(torch.ones(1), 0, tag=tag)
    dist.all_reduce(one)
assert rank or total == 20 * (dist.get_world_size() - 1), total
dist.destroy_process_group()
"""


@NATIVE_FIRST
def test_the_message_that_another_receive_took(
    jobs: Harness, tmp_path: Path, engine_environment: dict[str, str]
) -> None:
    result = jobs.run_program(RACE.lstrip(), 4, tmp_path, environment=engine_environment)
    assert result.verdict is not None, result
    said = " ".join(shown(result.verdict).split())
    assert (
        "rank 1 waits for a message from rank 2 at train.py:9 <module>, but its receive from any"
        " source at train.py:7 <module> took that message."
    ) in said
    assert (
        "Rank 2 sent it at train.py:12 <module>. Rank 3 sent one, too, at train.py:16 <module>,"
        " which rank 1 does not receive. Nothing orders the two messages"
    ) in said


@NATIVE_FIRST
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_legal_programs_end(
    jobs: Harness, tmp_path: Path, engine_environment: dict[str, str], debug: bool
) -> None:
    result = jobs.run_program(
        LEGAL.lstrip(),
        3,
        tmp_path,
        settings=Settings(debug=debug),
        environment=engine_environment,
    )
    assert set(result.exits.values()) == {0}, result
    assert result.said == [], result
