"""Dumps that torch writes when it is asked."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from commlens.outside.torch_dumps import error_lines, take_dumps
from commlens.processes.ranks import RankProcess

DUMPER = """
import os, pathlib, select, sys
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
os.mkfifo(pipe)
reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # as torch's monitor does
print("ready", flush=True)
select.select([reader], [], [], 30)
pathlib.Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"]).write_bytes(b"a dump")
print("RuntimeError: [Rank 1] Watchdog caught collective operation timeout", file=sys.stderr, flush=True)
sys.stdin.read()
"""


@pytest.mark.launches
def test_a_pipe_makes_torch_dump_and_logs_are_read(tmp_path):
    environ = {
        **os.environ,
        "RANK": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/p",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/d",
    }
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", DUMPER],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        one = RankProcess(1, process.pid, 0, 2, 1, command="python train.py")
        dumps = take_dumps([one])
        lines = error_lines(one)
        process.kill()
    assert (dumps.files, dumps.notes) == ({"torch_dump_rank_1": b"a dump"}, [])
    assert lines == ["RuntimeError: [Rank 1] Watchdog caught collective operation timeout"]
