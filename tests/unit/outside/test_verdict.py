"""The verdict on stacks that are seen from outside: which rank is named, and when none is."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flight_recorder_dumps import dump, entry
from seen_ranks import C10D, FUNCTIONAL, GROUP, call, frame, sample, seen_on, stay

from commlens.commands import main
from commlens.model.stack_classes import merge_stacks
from commlens.outside.calls import SeenFrame, find_call
from commlens.outside.find_ranks import FoundJob, RankProcess, script_of, short_command_of
from commlens.outside.hosts import named_hosts
from commlens.outside.look import why_refused
from commlens.outside.sample import HostSamples
from commlens.outside.torch_dumps import error_lines, take_dumps
from commlens.outside.verdict import judge
from commlens.outside.verdict_with_dumps import judge_with_dumps


def verdict(*frames: list[SeenFrame], **options: object):
    return judge(seen_on(*frames, **options))


def test_a_rank_that_is_in_no_call():
    found = verdict(*[call("all_reduce", 81)] * 2, stay("load_batch", 57), call("all_reduce", 81))
    assert (found.kind, found.why, found.culprits, found.victims, found.source) == (
        "missing",
        "data-loading",
        [2],
        [0, 1, 3],
        "train.py:57",
    )
    assert found.confidence == "high"
    assert (
        found.looked_at
        == "4 ranks of 4 of train.py (pids 100, 101, 102 and 103 on n1) from outside, for 2.5 s"
    )
    assert (
        found.summary
        == "rank 2 is in train.py:57 load_batch; ranks 0-1,3 wait in all_reduce of the default"
        " group at train.py:81 step"
    )


def test_a_group_that_is_not_known_makes_it_less_sure():
    waits = call("all_reduce", 81, passed=GROUP)
    found = verdict(waits, waits, stay("load_batch", 57), waits)
    assert (found.culprits, found.confidence) == ([2], "medium")


def test_a_rank_that_works_is_not_blamed():
    samples = [sample(rank, call("all_reduce", 81)) for rank in range(3)] + [
        sample(3, stay("evaluate", 57), cpu_s=2.4)
    ]
    found = judge([HostSamples("n1", samples, 4, [], window_s=2.5)])
    assert (found.kind, found.culprits, found.is_fault) == ("waiting", [3], False)


def test_a_stopped_rank_is_named_wherever_it_stands():
    samples = [
        sample(rank, call("all_reduce", 81), state="T" if rank == 1 else "S") for rank in range(4)
    ]
    found = judge([HostSamples("n1", samples, 4, [], window_s=2.5)])
    assert (found.why, found.culprits) == ("stopped", [1])


def test_the_majority_decides_where_all_ranks_must_meet():
    found = verdict(*[call("all_reduce", 81)] * 3, call("all_gather", 85))
    assert (found.kind, found.culprits, found.source, found.confidence) == (
        "mismatch/op",
        [3],
        "train.py:85",
        "medium",
    )


def test_a_key_of_the_store(tmp_path: Path):
    """The methods of stores are written in C++ and have no frame: the line shows them, and the
    local variable's type.
    """
    file = tmp_path / "train.py"
    file.write_text('rate = float(rates.get("rate"))\n')
    waiting = [frame("share", 1, str(file), rates="<PrefixStore at 0x7f>")]
    assert find_call([frame("share", 1, str(file), rates={"rate": 1})], os.getpid()) is None
    found = verdict(*[waiting] * 3, call("all_reduce", 81))
    assert (found.kind, found.culprits, found.source) == ("missing", [3], "train.py:81")
    assert "ranks 0-2 wait in store.get at train.py:1" in found.summary
    alone = verdict(*[call("all_reduce", 81)] * 3, waiting)
    assert (alone.culprits, alone.confidence) == (
        [],
        "low",
    ), "any rank may have been to set the key"


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([*[call("all_reduce", 81)] * 2, *[call("all_gather", 85)] * 2], id="tie"),
        pytest.param(
            [*[call("all_reduce", 81, passed=GROUP)] * 3, call("all_reduce", 85, passed=GROUP)],
            id="unknown groups",
        ),
        pytest.param(
            [*[call("all_reduce", 81)] * 3, call("recv", 85, src=0)],
            id="message whose sender went on",
        ),
        pytest.param(
            [*[call("all_reduce", 81)] * 2, call("recv", 85, src=3), call("recv", 85, src=2)],
            id="two receive first",
        ),
        pytest.param([call("all_reduce", 81)] * 4, id="all at one line"),
        pytest.param(
            [
                *[[frame("wait_tensor", 9, FUNCTIONAL), frame("step", 2)]] * 3,
                call("all_reduce", 81),
            ],
            id="unknown operations",
        ),
    ],
)
def test_no_rank_is_named_where_stacks_do_not_decide(frames: list[list[SeenFrame]]):
    found = verdict(*frames)
    assert found.culprits == []
    assert found.is_fault and found.confidence in ("low", "medium")


@pytest.mark.parametrize("verb", ["status", "top", "dump"])
def test_a_job_that_nothing_records_gets_the_command_that_looks_at_it(
    verb: str, tmp_path: Path, monkeypatch, capsys
):
    def ranks(first: int, numbers: list[int]) -> FoundJob:
        return FoundJob(
            [
                RankProcess(rank, 2, rank, first + at, 1, "python train.py", ())
                for at, rank in enumerate(numbers)
            ],
            [],
        )

    monkeypatch.setenv("COMMLENS_BOX_DIR", str(tmp_path))
    for jobs, said in (
        (
            [ranks(41, [0, 1])],
            (
                "Ranks 0-1 of train.py (pid 41) run here without commlens, so nothing is recorded:"
                " `commlens attach 41` says"
            ),
        ),
        (
            [ranks(41, [1])],
            (
                "Rank 1 of train.py (pid 41) runs here without commlens, so nothing is recorded:"
                " `commlens attach 41` says"
            ),
        ),
        (
            [ranks(41, [0]), ranks(51, [-1, -1])],
            "2 processes of train.py (pid 51). `commlens attach PID` says whether one is stuck",
        ),
        ([], "Start one with `commlens launch`"),
    ):
        monkeypatch.setattr("commlens.outside.find_ranks.find_jobs", lambda jobs=jobs: jobs)
        assert main([verb]) == 3
        assert said in capsys.readouterr().err
    monkeypatch.setattr("commlens.outside.find_ranks.find_job", lambda wanted: ranks(41, [0, 1]))
    assert main([verb, str(os.getpid())]) == 3
    assert "`commlens attach 41` says whether they are stuck, and where" in capsys.readouterr().err


def test_of_two_that_wait_for_each_other_the_one_ahead_left_something_out():
    found = verdict(
        call("recv", 53, src=1),
        call("recv", 53, src=2),
        call("recv", 21, src=1, step=7),
        call("recv", 21, src=2, step=7),
    )
    assert (found.kind, found.culprits, found.source) == ("cycle", [2], "train.py:21")
    assert "Rank 2 is in step 7, the others in step 6" in found.explanation


def test_a_rank_in_another_round_of_the_loop():
    found = verdict(*[call("all_reduce", 81)] * 3, call("all_reduce", 81, step=7))
    assert (found.culprits, found.confidence) == ([3], "low")


def test_a_job_that_moves():
    found = verdict(*[call("all_reduce", 81)] * 4, moved=True)
    assert (found.kind, found.is_fault) == ("healthy", False)
    assert found.summary == "nothing is wrong: the job moves (step 6)"


def test_a_rank_whose_stack_cannot_be_read_is_not_blamed():
    samples = [
        sample(rank, call("all_reduce", 81) if rank else [], moved=False if rank else None)
        for rank in range(4)
    ]
    found = judge([HostSamples("n1", samples, 4, [], window_s=2.5)])
    assert (found.culprits, found.confidence) == ([], "low")
    assert found.summary.startswith(
        "the stack of rank 0 could not be read; ranks 1-3 wait in all_reduce"
    )


def test_a_rank_without_a_process():
    samples = [sample(rank, call("all_reduce", 81)) for rank in (0, 1, 3)]
    found = judge([HostSamples("n1", samples, 4, [0, 1, 2, 3], window_s=2.5)])
    assert (found.kind, found.culprits) == ("dead", [2])
    of_two_hosts = judge(
        [
            HostSamples("n1", samples[:2], 4, [0, 1]),
            HostSamples("n2", notes=["n2 could not be asked: no route to host."]),
        ]
    )
    assert of_two_hosts.culprits == [] and "Ranks 2-3 were not seen" in " ".join(
        of_two_hosts.missing_evidence
    )


@pytest.mark.parametrize(
    ("frames", "phrase"),
    [
        (call("all_reduce", 1), "all_reduce of the default group"),
        (
            [frame("all_reduce", 1, C10D, group=GROUP), frame("step", 2, rows=GROUP)],
            "all_reduce of group `rows`",
        ),
        (call("broadcast", 1, src=3), "broadcast of the default group from rank 3"),
        (call("recv", 1, src=3), "recv from rank 3"),
        (call("isend", 1, dst=0), "send to rank 0"),
        (
            [frame("_engine_run_backward", 9, "/x/torch/autograd/graph.py"), frame("step", 2)],
            "backward",
        ),
        (
            [frame("wait_tensor", 9, FUNCTIONAL), frame("f", 2)],
            "wait_tensor() for an earlier operation",
        ),
        ([frame("init_process_group", 9, C10D), frame("main", 2)], "init_process_group"),
        (stay("load_batch", 5), None),
        ([frame("mm", 9, "/x/torch/functional.py"), frame("step", 2)], None),
    ],
)
def test_the_call_that_a_stack_waits_in(frames: list[SeenFrame], phrase: str | None):
    found = find_call(frames, os.getpid())
    assert (found.phrase if found is not None else None) == phrase


def test_equal_stacks_are_one_class_and_the_odd_ones_come_first():
    logs = [
        sample(rank, stay("load_batch", 57) if rank == 7 else call("all_reduce", 81)).log
        for rank in range(10_000)
    ]
    classes = merge_stacks(logs, [""] * len(logs))
    assert [(len(each.ranks), each.frames[0].function) for each in classes] == [
        (1, "load_batch"),
        (9_999, "all_reduce"),
    ]


def test_hosts_come_from_the_option_and_a_file(tmp_path):
    (tmp_path / "hosts").write_text("# nodes\nn1 slots=8\nn2:4\n\nn1\n")
    assert named_hosts("n0, n1", str(tmp_path / "hosts")) == ["n0", "n1", "n2"]


def test_a_refusal_names_the_capability_or_the_setting():
    assert (
        "ptrace_scope" in (text := why_refused(os.getpid(), "Permission Denied"))
        or "SYS_PTRACE" in text
    )
    assert (
        why_refused(os.getpid(), "Error: no such process")
        == "py-spy failed: Error: no such process"
    )


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
        one = RankProcess(1, 2, 1, process.pid, 0, "python train.py", ())
        dumps = take_dumps([one])
        lines = error_lines(one)
        process.kill()
    assert (dumps.files, dumps.notes) == ({"torch_dump_rank_1": b"a dump"}, [])
    assert lines == ["RuntimeError: [Rank 1] Watchdog caught collective operation timeout"]


def test_sequence_numbers_in_torch_dumps_decide_what_stacks_cannot():
    """All ranks wait at one line; rank 2's dump shows that it has not issued the last collective."""

    def rank_dump(last: int) -> bytes:
        waits = {"state": "scheduled", "time_discovered_completed_ns": None, "retired": False}
        return pickle.dumps(
            dump([entry(number, **(waits if number == 5 else {})) for number in range(last + 1)]),
            protocol=2,
        )

    samples = [sample(rank, call("all_reduce", 81)) for rank in range(4)]
    files = {f"torch_dump_rank_{rank}": rank_dump(4 if rank == 2 else 5) for rank in range(4)}
    host = HostSamples(
        "n1",
        samples,
        4,
        [0, 1, 2, 3],
        dumps=files,
        log_lines=["rank 0's log: NCCL WARN"],
        window_s=2.5,
    )
    found = judge_with_dumps([host])
    assert (found.kind, found.culprits) == ("missing", [2])
    assert "torch's own dumps" in found.looked_at
    assert found.findings[-1].summary.startswith("seen from outside: ranks 0-3 wait in all_reduce")
    assert judge([host]).culprits == []
    broken = HostSamples("n1", samples, 4, [0, 1, 2, 3], dumps={"torch_dump_rank_0": b"nothing"})
    assert "could not be read" in " ".join(judge_with_dumps([broken]).missing_evidence)


def test_of_many_ranks_some_pids_tell_the_job_from_others():
    found = verdict(*[call("all_reduce", 81)] * 9)
    assert found.looked_at.startswith(
        "9 ranks of 9 of train.py (pids 100, 101, 102, 103, 104, 105, 106 and 107 on n1, ...) from"
        " outside"
    )


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("/usr/bin/python -u /home/me/train.py --lr 0.1", "train.py --lr 0.1"),
        ("python -m train.main --lr 0.1", "train.main --lr 0.1"),
        ("python -c import torch\\nprint(-m) --lr 0.1", "python -c '...'"),
        ("python -u -Bc import torch", "python -c '...'"),
        ("python train.py -c config.yaml", "train.py -c config.yaml"),
    ],
)
def test_the_script_of_a_command_line(command, script):
    assert script_of(command) == script


def test_code_on_a_command_line_is_not_repeated_in_messages():
    code = "import sys\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-u", "-c", code], stdin=subprocess.PIPE) as child:
        assert until_executed(child) == f"{sys.executable} -u -c '...'"
        child.communicate()
    with subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE) as child:
        assert until_executed(child) == f"{sys.executable} -"
        child.communicate()


def until_executed(child: subprocess.Popen[bytes]) -> str:
    """Return the command line once the kernel shows it: for a moment after exec, there is none."""
    end = time.monotonic() + 10
    while not (found := short_command_of(child.pid)) and time.monotonic() < end:
        time.sleep(0.01)
    return found
