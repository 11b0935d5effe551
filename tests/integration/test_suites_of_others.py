"""What a test suite does to ranks: groups in the parent first, then ranks forked again and again,
which end in several ways.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launching import Bench

from commlens.blackbox import job_dirs

SUITE = """
import multiprocessing, os
import torch, torch.distributed as dist, torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

def in_one_process():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)  # never waited for
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/own", rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()

def rank_main(turn, rank, file):
    where = {"store": dist.PrefixStore("tests", dist.FileStore(file, 2))} if turn % 2 else {"init_method": f"file://{file}"}
    dist.init_process_group("gloo", rank=rank, world_size=2, **where)
    tensor = torch.ones(2 + turn)
    for _ in range(1 + turn):
        (dist.all_reduce, lambda t: dist.broadcast(t, 0), lambda t: dist.all_gather([t.clone(), t.clone()], t))[turn % 3](tensor)
    if turn == 0:
        from commlens.capture import session
        print("RECORDED" if session.recording().is_recording else "NOT RECORDED", flush=True)
    if turn < 2:
        dist.destroy_process_group()
    if turn == 2:
        os._exit(0)

def suite(file):
    in_one_process()
    for turn in range(5):
        name = file if turn > 2 else f"{file}{turn}"
        if os.path.exists(name):
            os.unlink(name)
        ranks = [multiprocessing.get_context("fork").Process(target=rank_main, args=(turn, rank, name)) for rank in range(2)]
        [rank.start() for rank in ranks]
        [rank.join() for rank in ranks]
        assert [rank.exitcode for rank in ranks] == [0, 0]

if __name__ == "__main__":
    suite(f"{os.getcwd()}/meeting")
    print("DONE")
"""


@pytest.mark.long
def test_ranks_of_a_test_suite_are_recorded_without_a_word_and_leave_nothing(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.script.write_text(SUITE)
    bench.boxes.mkdir()
    try:
        program = bench.start(str(bench.script), COMMLENS="1", COMMLENS_STALL_TIMEOUT="5")
        assert program.end() == 0, program.report()
    finally:
        bench.close()
    assert program.out == ["RECORDED", "RECORDED", "DONE"], program.report()
    words = [line for line in program.err if "commlens" in line or "VERDICT" in line]
    assert not words, program.report()
    until = time.monotonic() + 10
    while left := [
        box for job in job_dirs.live_jobs(str(bench.boxes)) for box in job_dirs.boxes(job)
    ]:
        assert time.monotonic() < until, left
        time.sleep(0.1)
