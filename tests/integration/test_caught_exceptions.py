"""Ray Train runs the training function in a thread, catches its exception, destroys the groups and
ends all workers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Bench
from ports import free_port
from zygote_client import Zygote

pytest.importorskip("torch")

# Ray's module, with the names of Ray 2.60, and the end that it gives to its workers.
WORKERS = """
import os, signal, subprocess, sys, threading, time, types

runner = types.ModuleType("ray.train.v2._internal.execution.worker_group.thread_runner")
runner.construct_user_exception_with_traceback = lambda error, exclude_frames=0: print("caught", error, flush=True)
sys.modules[runner.__name__] = runner

import torch, torch.distributed as dist

def train():
    for step in range(5):
        if dist.get_rank() == 1 and step == 3:
            raise ValueError("a bad batch")
        dist.all_reduce(torch.ones(4))

def run(target):
    try:
        target()
    except BaseException as error:
        runner.construct_user_exception_with_traceback(error, exclude_frames=3)

def worker():
    signal.signal(signal.SIGUSR1, lambda *_: (dist.destroy_process_group(), os._exit(1)))
    dist.init_process_group("gloo")
    threading.Thread(target=run, args=(train,), daemon=True).start()
    while True:
        time.sleep(0.05)

def main():
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1], "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    pipes = [None, subprocess.PIPE]
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=pipes[rank])
        for rank in range(2)
    ]
    assert b"caught a bad batch" in ranks[1].stdout.readline()
    time.sleep(0.5)
    for rank in reversed(ranks):
        rank.send_signal(signal.SIGUSR1 if rank is ranks[1] else signal.SIGKILL)
    for rank in ranks:
        rank.wait()

worker() if "RANK" in os.environ else main()
"""


def test_an_exception_that_ray_train_catches_is_named_with_the_users_line(
    zygote: Zygote, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, zygote)
    bench.script.write_text(WORKERS)
    bench.boxes.mkdir()
    try:
        program = bench.start(str(bench.script), str(free_port()), COMMLENS="1")
        assert program.end() == 0, program.report()
    finally:
        bench.close()
    words = " ".join(program.error.split())
    assert (
        "VERDICT rank 1 raised ValueError: a bad batch at train.py:13 train; rank 0 was waiting for"
        " it in all_reduce #4" in words
    )
    assert bench.dumped == ["rank0", "rank1"] and not bench.boxes_left
