"""Accelerate's operations under strict verification: its own faults gone, its names and its
exception kept.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("accelerate") is None:  # an import here would take each worker 2 s
    pytest.skip("accelerate is not installed", allow_module_level=True)

from launching import Bench, Program, says_whether_a_call_waits
from zygote_client import Zygote

PROGRAM = """
import json, os, pathlib, sys, time
import torch, torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import operations
from accelerate.utils.operations import DistributedOperationException, broadcast
import commlens

RESULTS = {}

def attempt(name, function):
    began = time.monotonic()
    try:
        function()
        raised = None
    except DistributedOperationException as error:
        ours = error if isinstance(error, commlens.DistributedOperationException) else error.__cause__
        raised = [getattr(ours, "kind", "Accelerate's own"), str(error), str(ours)]
    except Exception as error:
        raised = [type(error).__name__, str(error), ""]
    RESULTS[name] = {"raised": raised, "seconds": time.monotonic() - began}

def main():
    state = PartialState(cpu=True)
    rank = state.process_index
    ones = torch.ones
    attempt("gather", lambda: operations.gather({"a": [ones(2 + rank)]}))
    attempt("broadcast", lambda: broadcast(ones(1, 5) if rank == 0 else ones(1, 2, 5)))
    attempt("reduce", lambda: operations.reduce(ones(2 + rank)))
    attempt("pad", lambda: operations.pad_across_processes(ones([2] * (1 + rank))))
    if not state.debug:
        attempt("object", lambda: operations.gather_object([1]) if rank else operations.reduce(ones(2)))
    attempt("fine", lambda: operations.reduce(ones(2)))
    attempt("dtype", lambda: broadcast(ones(2, dtype=torch.float64) if rank else ones(2)))
    attempt("root", lambda: broadcast(ones(2), from_process=rank))
    attempt("lines",
            lambda: broadcast(ones(2 + rank)))
    attempt("other operation", lambda: operations.reduce(ones(2)) if rank else operations.gather(ones(2)))
    attempt("fine again", lambda: operations.gather([ones(2)]))
    from commlens.capture import session
    RESULTS["collectives"] = session.recording().recorder.writer.last_index
    pathlib.Path(f"results{rank}.json").write_text(json.dumps(RESULTS))
    if len(sys.argv) > 1:
        tensor = ones(1, 5) if rank == 0 else ones(1, 2, 5)
        began = time.time()
        try:
            broadcast(tensor)
        finally:
            pathlib.Path(f"seconds{rank}").write_text(str(time.time() - began))
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


class Ran:
    """A job of two ranks, and the refusals that each raised."""

    def __init__(self, folder: Path, program: Program, code: int) -> None:
        self.folder, self.program, self.code = folder, program, code
        assert (folder / "results1.json").exists(), program.report()
        self.by_rank = [json.loads((folder / f"results{rank}.json").read_text()) for rank in (0, 1)]

    def both(self, name: str) -> list[str] | None:
        """Kind, text, and commlens's text, the same on both ranks."""
        first, second = (results[name]["raised"] for results in self.by_rank)
        assert first == second, f"{name}: {first}\n{second}"
        return first


def run(zygote: Zygote, folder: Path, *command: str, **environ: str) -> Ran:
    bench = Bench(folder, zygote)
    try:
        script = folder / "train.py"
        script.write_text(PROGRAM)
        program = bench.start(
            "-m", *[str(script) if part == "SCRIPT" else part for part in command], **environ
        )
        return Ran(folder, program, program.end())
    finally:
        bench.close()


LAUNCH = ("commlens", "launch", "--nproc-per-node", "2", "--standalone")


@pytest.fixture(scope="module")
def ours(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Commlens alone."""
    if not says_whether_a_call_waits():
        pytest.skip(
            "on this torch a fault is found once operations are with gloo already, and those after"
            " it do not fit any more"
        )
    return run(zygote, tmp_path_factory.mktemp("ours"), *LAUNCH, "--debug", "SCRIPT", "uncaught")


@pytest.fixture(scope="module")
def together(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Accelerate's own debug mode, which switches commlens's on as well."""
    return run(
        zygote, tmp_path_factory.mktemp("together"), *LAUNCH, "SCRIPT", ACCELERATE_DEBUG_MODE="yes"
    )


def line_of(text: str) -> int:
    return 1 + next(number for number, line in enumerate(PROGRAM.splitlines()) if text in line)


def test_the_table(ours: Ran):
    raised = ours.both("broadcast")
    line = line_of('attempt("broadcast"')
    assert raised is not None and raised[0] == "mismatch/shape"
    assert (
        raised[1]
        == "Cannot apply desired operation due to shape mismatches. All shapes across devices must"
        " be valid.\n\nOperation: `accelerate.utils.operations.broadcast` "
        " (torch.distributed.broadcast, default group, ranks 0-1, #1, src 0)\nInput shapes:\n "
        f" - Process 0: [1, 5]     float32   train.py:{line} in <lambda>\n  - Process 1: [1, 2,"
        f" 5]  float32   train.py:{line} in <lambda>"
    )


def test_uncaught_one_rank_prints_it_and_the_job_ends_at_once(ours: Ran):
    assert ours.code != 0
    text = ours.program.error
    table = (
        "[1, 2, 5]  float32   train.py:"
        + str(line_of("            broadcast(tensor)"))
        + " in main"
    )
    assert text.count(f"]:   - Process 1: {table}") == 1, ours.program.report()
    for rank in (0, 1):
        assert float((ours.folder / f"seconds{rank}").read_text()) < 10
    assert table in text[text.index("Root Cause (first observed failure)") :]


@pytest.mark.parametrize(
    ("name", "kind", "operation"),
    [
        ("gather", "mismatch/shape", "gather`  (torch.distributed.all_gather, "),
        ("reduce", "mismatch/shape", "reduce`  (torch.distributed.all_reduce, "),
        ("pad", "mismatch/shape", "pad_across_processes`  (torch.distributed.all_gather, "),
        ("dtype", "mismatch/dtype", "broadcast`  (torch.distributed.broadcast, "),
        ("root", "mismatch/root", "broadcast`  (torch.distributed.broadcast, "),
        ("lines", "mismatch/shape", "broadcast`  (torch.distributed.broadcast, "),
    ],
)
def test_accelerates_function_is_named_and_its_exception_catches_ours(
    ours: Ran, name: str, kind: str, operation: str
):
    raised = ours.both(name)
    assert raised is not None and raised[0] == kind
    assert f"Operation: `accelerate.utils.operations.{operation}" in raised[2]
    assert (
        f"train.py:{line_of('lambda: broadcast(ones(2 + rank))' if name == 'lines' else f'attempt({json.dumps(name)}')}"
        in raised[2]
    )


def test_different_operations_are_shown_with_both_names(ours: Ran):
    raised = ours.both("object")
    assert raised is not None and raised[0] == "mismatch/op"
    assert "`all_reduce` SUM of accelerate.utils.operations.reduce" in raised[1]
    assert "`all_gather` of accelerate.utils.operations.gather_object" in raised[1]


@pytest.mark.parametrize("name", ["fine", "fine again"])
def test_after_a_refusal_the_group_can_be_used(ours: Ran, together: Ran, name: str):
    assert ours.both(name) is None and together.both(name) is None


class TestTogether:
    def test_the_first_to_find_the_fault_speaks_and_it_knows_the_line(self, together: Ran):
        assert together.code == 0, together.program.report()
        raised = together.both("gather")
        assert raised is not None and raised[0] == "mismatch/shape"
        assert (
            "Operation: `accelerate.utils.operations.gather`  (default group, ranks 0-1, #1)"
            in raised[1]
        )
        assert (
            'Input shapes of tensor["a"][0]:\n  - Process 0: [2]  float32   train.py:' in raised[1]
        )

    def test_what_accelerate_misses_is_found(self, together: Ran):
        for name, kind in (
            ("dtype", "mismatch/dtype"),
            ("root", "mismatch/root"),
            ("other operation", "mismatch/op"),
        ):
            raised = together.both(name)
            assert raised is not None and raised[0] == kind, name

    def test_its_own_check_communicates_nothing(self, ours: Ran, together: Ran):
        # What its check refuses is not issued, so that there are fewer collectives with it; there
        # would be two more for each operation.
        for without, with_it in zip(ours.by_rank, together.by_rank, strict=True):
            assert with_it["collectives"] <= without["collectives"]


@pytest.mark.long
def test_accelerate_launch_with_several_processes_on_a_cpu(tmp_path: Path):
    command = (
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--debug",
        "-m",
        "commlens",
        "run",
        "SCRIPT",
    )
    ran = run(tmp_path, *command, ACCELERATE_USE_CPU="true", HF_HOME=str(tmp_path))
    assert ran.code == 0, ran.program.report()
    assert ran.both("fine") is None
    raised = ran.both("dtype")
    assert raised is not None and raised[0] == "mismatch/dtype"
