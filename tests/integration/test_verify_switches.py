"""The ways to switch strict verification on: launch --debug, commlens run, regions, one line of
code; and functions of the user's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chosen import long

pytest.importorskip("torch")

from harness import Harness
from launching import Bench
from zygote_client import Zygote

from commlens.config import Settings

PRELUDE = """
import collections, dataclasses, json, logging, os, pathlib, sys, time
logging.basicConfig(level=logging.WARNING, format="%(message)s", filename=f"log{os.environ['RANK']}.txt")
import torch, torch.distributed as dist
import commlens

RESULTS = {}

def attempt(name, function, *args, **kwargs):
    began = time.monotonic()
    try:
        function(*args, **kwargs)
        raised = None
    except commlens.DistributedOperationException as error:
        raised = [error.kind, str(error)]
    RESULTS[name] = {"raised": raised, "seconds": time.monotonic() - began}

def save():
    pathlib.Path(f"results{dist.get_rank()}.json").write_text(json.dumps(RESULTS))
    if torch.__version__.startswith("2.6."):
        time.sleep(0.2)  # it joins gloo's threads with the GIL held, for which they may still be waiting: a deadlock of its own

def bad():
    dist.broadcast(torch.ones(1, 5) if dist.get_rank() == 0 else torch.ones(1, 2, 5), 0)

def odd():
    # Only a verifier objects to this.
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)
"""

CASES = (
    PRELUDE
    + """
@dataclasses.dataclass
class Batch:
    tokens: object
    mask: object = None

Point = collections.namedtuple("Point", "x y")

@commlens.verify_operation
def gather_metrics(inputs):
    dist.all_reduce(torch.ones(1))

@commlens.verify_operation(values=["op"])
def reduce_metrics(inputs, op="mean"):
    dist.all_reduce(torch.ones(1))

@commlens.verify_operation(shapes=False)
def pad(inputs):
    dist.all_reduce(torch.ones(1))

def swap(first, second):
    (first if dist.get_rank() == 0 else second)(torch.ones(1))

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ones = torch.ones
    attempt("fine", dist.all_reduce, ones(2))
    attempt("seed", bad)
    attempt("usable", dist.all_reduce, ones(2))
    attempt("same", gather_metrics, {"tokens": ones(1, 5), "rest": [Point(1, ones(2)), None]})
    attempt("shape", gather_metrics, {"tokens": ones(1, 5) if rank == 0 else ones(1, 2, 5)})
    attempt("dtype", gather_metrics, [Point(1, ones(2, dtype=torch.int32) if rank else ones(2))])
    attempt("length", gather_metrics, [ones(1)] * (2 + rank))
    attempt("none", gather_metrics, Batch(ones(1), ones(1) if rank else None))
    attempt("device", gather_metrics, ones(1, device="meta") if rank else ones(1))
    attempt("order", gather_metrics, {"a": 1, "b": 2} if rank else {"b": 2, "a": 1})
    attempt("value", reduce_metrics, ones(1), op="sum" if rank else "mean")
    attempt("other value", gather_metrics, rank)
    attempt("padded", pad, ones(1 + rank))
    attempt("padded dims", pad, ones([1] * (1 + rank)))
    attempt("many", gather_metrics, [ones(1)] * 3000 + [ones(1 + rank)])
    attempt("functions", swap, gather_metrics, reduce_metrics)
    attempt("usable again", gather_metrics, ones(1))
    if not os.environ.get("CAUGHT"):
        save()
        bad()
    attempt("against a collective", lambda: gather_metrics(1) if rank else dist.all_reduce(ones(1)))
    save()
    dist.destroy_process_group()

main()
"""
)

REGIONS = (
    PRELUDE
    + """
def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sums = []
    def step():
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        sums.append(tensor[0].item())
    attempt("outside", odd)
    with commlens.verify():
        attempt("inside", bad)
        step()
    attempt("after", odd)
    for _ in range(50):
        with commlens.verify():
            pass
    # Messages that cross a region's border, and a receive from any source.
    sent = [dist.isend(torch.ones(i + 1), 1) for i in range(2)] if rank == 0 else []
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
    with commlens.verify():
        if rank == 1:
            attempt("crossed", dist.recv, torch.zeros(2), 0)
            attempt("from any source", dist.recv, torch.zeros(3))
            attempt("the next", dist.recv, torch.zeros(4), 0)
        else:
            dist.send(torch.ones(3), 1)
            dist.send(torch.ones(4), 1)
        step()
    for work in sent:
        work.wait()
    # A region on one rank only, entered while the other is inside a collective.
    began = time.monotonic()
    if rank == 0:
        with commlens.verify():
            step(); step()
    else:
        step(); step()
    RESULTS["alone"] = time.monotonic() - began
    RESULTS["sums"] = sums
    dist.barrier()
    commlens.enable(verify=True)
    attempt("from now on", bad)
    step()
    save()
    dist.destroy_process_group()

main()
"""
)

LATE = (
    PRELUDE
    + """
def main():
    dist.init_process_group("gloo")
    for _ in range(1 + dist.get_rank()):
        pass
    dist.all_reduce(torch.ones(1))
    if sys.argv[1] == "all" or dist.get_rank() == 0:
        commlens.enable(verify=True, verify_timeout=2)
    dist.all_reduce(torch.ones(1))
    attempt("late", odd)
    save()
    dist.destroy_process_group()

main()
"""
)

TABLE = """Cannot apply desired operation due to shape mismatches. All shapes across devices must be valid.

Operation: `torch.distributed.broadcast`  (default group, ranks 0-1, #{number}, src 0)
Input shapes:
  - Process 0: [1, 5]     float32   {script}.py:{line} in bad
  - Process 1: [1, 2, 5]  float32   {script}.py:{line} in bad"""
BAD_LINE = 1 + next(i for i, line in enumerate(PRELUDE.splitlines()) if "dist.broadcast" in line)


class Outcome:
    """The refusals that a program's two ranks raised, and their logs."""

    def __init__(self, folder: Path, code: int, error: str, report: str) -> None:
        self.code = code
        self.error = error  # the launcher's
        self.report = report  # of all that was printed
        assert (folder / "results1.json").exists(), report
        self.by_rank = [json.loads((folder / f"results{rank}.json").read_text()) for rank in (0, 1)]
        self.logs = [(folder / f"log{rank}.txt").read_text() for rank in (0, 1)]

    def both(self, name: str) -> tuple[str, str] | None:
        """Kind and text, the same on both ranks."""
        first, second = (results[name]["raised"] for results in self.by_rank)
        assert first == second, f"{name}: {first}\n{second}"
        return None if first is None else (first[0], first[1])


def run(
    zygote: Zygote, folder: Path, text: str, *command: str, launcher: str = "launch", **environ: str
) -> Outcome:
    bench = Bench(folder, zygote)
    try:
        script = folder / "cases.py"
        script.write_text(text)
        program = getattr(bench, launcher)(
            *[str(script) if part == "SCRIPT" else part for part in command], **environ
        )
        return Outcome(folder, program.end(), program.error, program.report())
    finally:
        bench.close()


def run_forked(jobs: Harness, folder: Path, text: str, *arguments: str, **options: Any) -> Outcome:
    """Run a program without a launcher."""
    text = f"import os; os.chdir({str(folder)!r})" + text  # which starts with an empty line
    result = jobs.run_program(text, 2, folder, arguments=arguments, **options)
    return Outcome(folder, max(result.exits.values(), key=abs), "", str(result))


@pytest.fixture(scope="module")
def debugged(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("debugged")
    return run(zygote, folder, CASES, "--debug", "SCRIPT", COMMLENS_DEBUG_MODE="0")


@pytest.fixture(scope="module")
def regions(jobs: Harness, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("regions")
    return run_forked(jobs, folder, REGIONS, settings=Settings(verify_timeout=1.5))


class TestLaunchDebug:
    def test_both_ranks_raise_the_table_at_once(self, debugged: Outcome):
        assert debugged.both("fine") is None
        assert debugged.both("seed") == (
            "mismatch/shape",
            TABLE.format(number=2, script="cases", line=BAD_LINE),
        )
        assert all(results["seed"]["seconds"] < 10 for results in debugged.by_rank)
        assert debugged.both("usable") is None

    def test_the_job_ends_with_an_error_and_torchruns_summary_shows_the_table(
        self, debugged: Outcome
    ):
        assert debugged.code != 0
        text = debugged.error
        summary = text[text.index("Root Cause (first observed failure)") :]
        assert (
            "Operation: `torch.distributed.broadcast`" in summary
            and "- Process 1: [1, 2, 5]  float32   cases.py:" in summary
        )
        printed = [
            line for line in text.splitlines() if "]:   - Process 0: [1, 5]     float32 " in line
        ]
        assert len(printed) == 1, debugged.report
        assert text.count("(The whole message is in the output of rank ") == 2, (
            "of the other rank: its traceback, and torchrun's summary"
        )

    def test_the_traceback_has_no_line_of_the_verifier(self, debugged: Outcome):
        assert "commlens/verification/" not in debugged.error


class TestOwnFunctions:
    def test_a_call_with_equal_arguments_runs(self, debugged: Outcome):
        assert debugged.both("same") is None
        assert debugged.both("other value") is None  # values are compared only on request
        assert debugged.both("padded") is None
        assert debugged.both("usable again") is None

    @pytest.mark.parametrize(
        ("name", "kind", "lines"),
        [
            (
                "shape",
                "mismatch/shape",
                [
                    'Input shapes of inputs["tokens"]:',
                    "  - Process 1: [1, 2, 5]  float32   cases.py:",
                ],
            ),
            (
                "dtype",
                "mismatch/dtype",
                ["Input dtypes of inputs[0].y:", "  - Rank 1: int32    [2]   cases.py:"],
            ),
            (
                "length",
                "mismatch/structure",
                ["Structure of inputs:", "  - Rank 1: list of 3   cases.py:"],
            ),
            (
                "none",
                "mismatch/structure",
                ["Structure of inputs.mask:", "  - Rank 0: None                 cases.py:"],
            ),
            (
                "device",
                "mismatch/device",
                ["Devices of inputs:", "  - Rank 1: meta  [1]   cases.py:"],
            ),
            (
                "order",
                "mismatch/structure",
                ["Structure of inputs:", "  - Rank 0: dict with 'b', 'a'   cases.py:"],
            ),
            ("value", "mismatch/value", ["Values of op:", "  - Rank 1: 'sum'    cases.py:"]),
            ("padded dims", "mismatch/shape", ["  - Process 1: [2]  float32   cases.py:"]),
            (
                "many",
                "mismatch/shape",
                ["Input shapes of inputs[3000]:", "  - Process 1: [2]  float32   cases.py:"],
            ),
            ("functions", "mismatch/op", ["  - Rank 0: `cases.gather_metrics`   cases.py:"]),
        ],
    )
    def test_a_difference_is_named_by_function_and_path_on_all_ranks(
        self, debugged: Outcome, name: str, kind: str, lines: list[str]
    ):
        raised = debugged.both(name)
        assert raised is not None and raised[0] == kind
        for line in lines:
            assert line in raised[1], raised[1]
        if kind != "mismatch/op":
            function = {"value": "reduce_metrics", "padded dims": "pad"}.get(name, "gather_metrics")
            assert f"Operation: `cases.{function}`  (default group, ranks 0-1, #" in raised[1]


class TestRegions:
    def test_collectives_are_verified_inside_only(self, regions: Outcome):
        assert regions.code == 0, regions.report
        assert regions.both("outside") is None
        assert regions.both("inside") == (
            "mismatch/shape",
            TABLE.format(number=2, script="train", line=BAD_LINE),
        )
        assert regions.both("after") is None

    def test_messages_that_cross_the_border_of_a_region_are_not_compared(self, regions: Outcome):
        assert [
            regions.by_rank[1][name]["raised"]
            for name in ("crossed", "from any source", "the next")
        ] == [None] * 3

    def test_a_region_that_one_rank_lacks_is_logged_and_the_job_goes_on(self, regions: Outcome):
        assert "rank 1 did not reach the point where verification begins" in regions.logs[0]
        assert regions.logs[0].count("\n") == 1 and regions.logs[1] == ""
        for results in regions.by_rank:
            assert 1 < results["alone"] < 5
            assert set(results["sums"]) == {2.0}

    def test_a_job_that_records_can_be_switched_to_verifying(self, regions: Outcome):
        raised = regions.both("from now on")
        assert raised is not None and raised[0] == "mismatch/shape"


@pytest.mark.long
def test_no_debug_wins_over_the_environment_and_the_file(zygote: Zygote, tmp_path: Path):
    (tmp_path / "settings.yaml").write_text("debug: true\n")
    arguments = ("--no-debug", "--config-file", str(tmp_path / "settings.yaml"), "SCRIPT")
    outcome = run(
        zygote,
        tmp_path,
        LATE.replace("commlens.enable(verify=True, verify_timeout=2)", "pass"),
        *arguments,
        "all",
        COMMLENS_DEBUG_MODE="1",
    )
    assert outcome.both("late") is None and outcome.code == 0


@pytest.mark.long
def test_under_torchrun(zygote: Zygote, tmp_path: Path):
    outcome = run(
        zygote,
        tmp_path,
        CASES,
        "-m",
        "commlens",
        "run",
        "--debug",
        "SCRIPT",
        launcher="torchrun",
        CAUGHT="1",
    )
    assert outcome.code == 0, outcome.report
    assert outcome.both("seed") == (
        "mismatch/shape",
        TABLE.format(number=2, script="cases", line=BAD_LINE),
    )
    crossed = outcome.both("against a collective")
    assert crossed is not None and crossed[0] == "cycle"
    assert (
        "  - Rank 0: waits in all_reduce #" in crossed[1]
        and "  - Rank 1: waits in cases.gather_metrics #" in crossed[1]
    )


@pytest.mark.parametrize("who", ["all", long("one")])
def test_enabling_in_the_middle_of_a_job_that_was_not_recorded(
    jobs: Harness, tmp_path: Path, who: str
):
    outcome = run_forked(jobs, tmp_path, LATE, who, recorded=False)
    assert outcome.code == 0, outcome.report
    if who == "all":
        late = outcome.both("late")
        assert late is not None and late[0] == "mismatch/reduce-op"
        assert outcome.logs == ["", ""]
    else:
        assert outcome.both("late") is None
        wanted = (
            "collectives are not verified here: rank 1 did not switch verification on at the same"
            " point of the program"
        )
        assert outcome.logs[0] == f"commlens: {wanted}\n"
