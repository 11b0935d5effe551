"""A kernel's assertion that failed, in the verdict that is made while the job ends."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from harness import Harness, shown

pytestmark = pytest.mark.timeout(120)

# CUDA prints to the descriptor, once for each thread, before the next call raises the error.
PROGRAM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(5):
    if dist.get_rank() == 1 and step == 3:
        for thread in range(40):
            os.write(2, b"/src/cuda/Loss.cu:245: loss: block: [0,0,0], thread: [%d,0,0] Assertion `t < n` failed.\\n" % thread)
        raise RuntimeError("CUDA error: device-side assert triggered")
    dist.all_reduce(torch.ones(4))
"""


def test_a_rank_whose_stderr_is_a_file_tells_the_assertion(jobs: Harness, tmp_path: Path) -> None:
    result = jobs.run_program(PROGRAM.lstrip(), 2, tmp_path)
    assert result.verdict is not None, result
    assert (result.verdict.kind, result.verdict.culprits) == ("dead", [1]), result
    assert result.verdict.why == "exception"
    words = "An assertion failed in a kernel of rank 1: Loss.cu:245, loss: t < n."
    assert words in shown(result.verdict), result
    logs = {log.rank: log.device_assertion for log in result.logs()}
    assert logs == {0: "", 1: "Loss.cu:245, loss: t < n"}, "the dump holds it, too"
