"""Logs of jobs that hang: what torch's watchdog, Python and torchrun say of each rank."""

from __future__ import annotations

import calendar
import io
import time
from types import SimpleNamespace

import pytest
from chosen import examples
from flight_recorder_dumps import operation
from hypothesis import given, settings
from hypothesis import strategies as st

from commlens.diagnosis.index.columns import reduce_all
from commlens.dumps import detect
from commlens.formats.columns import STARTED
from commlens.formats.torch_log import lines, read_torch_log
from commlens.formats.torch_log.lines import (
    parse_group,
    parse_origin,
    parse_progress,
    parse_time,
    parse_timeout,
)
from commlens.model.ranklog import End

CAUGHT = "Watchdog caught collective operation timeout: "
WORK = (
    "WorkNCCL(SeqNum={}, OpType={}, NumelIn={}, NumelOut={}, Timeout(ms)=600000) ran for 600020"
    " milliseconds before timing out."
)


def read(*lines: str):
    return {
        rows.rank: rows
        for rows in read_torch_log(io.BytesIO("\n".join(lines).encode() + b"\n"), "job.log")
    }


def ranks_3(
    prefix: str = "[rank{}]:[E626 06:24:4{}.903881913 ProcessGroupNCCL.cpp:616] ",
) -> list[str]:
    """Torch 2.5 and 2.6: ranks 0 and 1 wait for rank 2."""
    lines = []
    for rank in (0, 1):
        lines.append(
            prefix.format(rank, rank)
            + f"[Rank {rank}] {CAUGHT}{WORK.format(808, 'ALLREDUCE', 9801523, 9801523)}"
        )
        lines.append(
            prefix.format(rank, rank)
            + f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Exception (either an error or timeout)"
            " detected by watchdog at work: 808, last enqueued NCCL work: 811, last completed"
            " NCCL work: 807."
        )
    lines.append(
        prefix.format(2, 2)
        + "[PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a collective"
        " timeout from rank 0 and we will try our best to dump the debug info. Last enqueued NCCL"
        " work: 807, last completed NCCL work: 807.This is most likely"
    )
    return lines


def test_who_timed_out_in_what_and_who_had_not_come():
    found = read("some chatter", *ranks_3(), "epoch 3")
    assert sorted(found) == [0, 1, 2]
    stuck = operation(found[1], 0)
    assert (stuck.op, stuck.sequence_number, stuck.in_flight) == ("all_reduce", 808, True)
    assert stuck.args.inputs[0].numel == 9801523 and stuck.channel.group.description == "default_pg"
    assert found[1].created_ns[0] - found[0].created_ns[0] == 1_000_000_000
    assert {rank: rows.status["0"] for rank, rows in found.items()} == {
        0: (811, -1, 807),
        1: (811, -1, 807),
        2: (807, -1, 807),
    }
    assert len(found[2]) == 0 and all(
        rows.origin == "torch-log" and not rows.timeouts for rows in found.values()
    )


def test_newer_words_a_subgroup_and_the_stack_of_the_failed_collective():
    begin = "[rank5]:[E1002 16:04:30.860963433 ProcessGroupNCCL.cpp:2252] "
    found = read(
        begin + f"[Rank 1] {CAUGHT}{WORK.format(1116, '_ALLGATHER_BASE', 16, 64)}",
        begin
        + "[PG ID 1 PG GUID 3(mesh_tp) Rank 1]  failure detected by watchdog at work sequence id:"
        " 1116 PG status: last enqueued work: 1118, last started work: 1116, last completed work:"
        " 1115",
        begin + "Stack trace of the failed collective: ",
        "#0 all_gather_into_tensor from"
        " /x/site-packages/torch/distributed/distributed_c10d.py:3709",
        "#1 forward from /work/model.py:88",
        "",
        "[rank5]:[E1002 16:04:31.860963433 ProcessGroupNCCL.cpp:2252] [Rank 1] To avoid data"
        " inconsistency, it goes down.",
    )
    (rows,) = found.values()
    assert (
        rows.rank == 5
        and rows.state.tolist() == [STARTED]
        and rows.status == {"3": (1118, 1116, 1115)}
    )
    stuck = operation(rows, 0)
    assert (stuck.op, stuck.channel.group.name, stuck.channel.group.label) == (
        "all_gather",
        "3",
        "mesh_tp",
    )
    assert stuck.source is not None and stuck.source.where == "model.py:88"


@pytest.mark.parametrize(
    "line",
    [
        (
            f"[E ProcessGroupNCCL.cpp:458] [Rank 7] {CAUGHT}WorkNCCL(SeqNum=64, OpType=ALLREDUCE,"
            " Timeout(ms)=1800000) ran for 1 milliseconds"
        ),
        (
            "[rank4]:[E318 07:39:53.792630246 ProcessGroupNCCL.cpp:616] [Rank 4]"
            f" {CAUGHT}{WORK.format(64, 'ALLREDUCE', 1, 1)}"
        ),
        "[rank1]:[E ProcessGroupNCCL.cpp:1414] [PG 1 Rank 1] Process group watchdog thread"
        f" terminated with exception: [Rank 1] {CAUGHT}" + WORK.format(64, "ALLREDUCE", 1, 1),
    ],
)
def test_a_group_that_is_not_named_is_told_but_no_row_says_it(line):
    (rows,) = read(line).values()
    assert len(rows) == 0 and rows.status == {} and rows.channels == []
    assert rows.timeouts[0].startswith("all_reduce #64 timed out after ")


@pytest.mark.parametrize("op", ["SEND", "RECV", "COALESCED"])
def test_messages_are_told_but_no_row_says_them(op):
    (rows,) = read(
        f"[rank1]: [Rank 1] {CAUGHT}{WORK.format(9, op, 4, 4)}",
        "[rank1]: [PG ID 2 PG GUID 9(pp) Rank 1] Timeout at NCCL work: 9, last enqueued NCCL work:"
        " 9, last completed NCCL work: 8.",
    ).values()
    assert len(rows) == 0 and rows.timeouts == [
        f"{op.lower()} #9 timed out after 600 s in group pp"
    ]


@pytest.mark.parametrize(
    ("prefix", "ranks"),
    [
        ("[default{0}]:[rank{0}]:[E626 06:24:4{1}.903881913 ProcessGroupNCCL.cpp:616] ", [0, 1, 2]),
        ("{0}: [rank{0}]:[E626 06:24:4{1}.903881913 ProcessGroupNCCL.cpp:616] ", [0, 1, 2]),
        (
            (
                "\x1b[36m(RayWorkerWrapper pid=4009)\x1b[0m [rank{0}]:[E"
                " ProcessGroupNCCL.cpp:1537]{1} "
            ),
            [0, 1, 2],
        ),
        (
            "dinov2.node [stderr] [rank{0}]:[E909 09:55:4{1}.996672294 ProcessGroupNCCL.cpp:1709] ",
            [0, 1, 2],
        ),
        ("{0}: [E ProcessGroupNCCL.cpp:563{1}] ", [0, 1, 2]),
        ("[default{0}]:[E ProcessGroupNCCL.cpp:563{1}] ", [0, 1, 2]),
    ],
)
def test_prefixes(prefix, ranks):
    found = read(*ranks_3(prefix))
    assert sorted(found) == ranks
    assert found[0].sequence.tolist() == [808] and found[2].status["0"] == (807, -1, 807)


def test_local_ranks_become_global_ones_where_some_line_has_both():
    found = read(
        "[default3]:[rank11]: hello PG ID 0",
        f"[default3]:[Rank 3] {CAUGHT}{WORK.format(1, 'ALLREDUCE', 1, 1)}",
    )
    assert list(found) == [11] and not found[11].problems


def test_an_exception_and_the_line_that_raised_it():
    found = read(
        *ranks_3(),
        "[rank2]: Traceback (most recent call last):",
        '[rank2]:   File "/work/train.py", line 57, in <module>',
        "[rank2]:     main()",
        "[rank0]:   interleaved",
        '[rank2]:   File "/work/train.py", line 31, in main',
        "[rank2]:     batch = load(step)",
        "[rank2]:             ^^^^^^^^^^",
        "[rank2]: ValueError: no such batch",
        "Traceback (most recent call last):",
        '  File "/usr/bin/torchrun", line 8, in <module>',
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    )
    assert sorted(found) == [0, 1, 2]
    log = found[2]
    assert log.exception == "ValueError: no such batch"
    assert [frame.where for frame in log.exception_stack] == ["train.py:31", "train.py:57"]


def test_torchruns_summary_says_how_each_worker_ended():
    found = read(
        "train.py FAILED",
        "Failures:",
        "[1]:",
        "  time      : 2024-01-26_05:13:33",
        "  host      : node-7",
        "  rank      : 9 (local_rank: 1)",
        "  exitcode  : -9 (pid: 233)",
        "  error_file: <N/A>",
        "  traceback : Signal 9 (SIGKILL) received by PID 233",
        "[2]:",
        "  time      : 2024-01-26_05:13:34",
        "  host      : node-8",
        "  rank      : 12 (local_rank: 4)",
        "  exitcode  : 1 (pid: 234)",
    )
    assert sorted(found) == [9, 12]
    assert (found[9].observation.end, found[9].observation.signal, found[9].host) == (
        End.KILLED,
        "SIGKILL",
        "node-7",
    )
    assert (found[12].observation.end, found[12].observation.exit_code) == (End.FAILED, 1)
    assert found[12].observation.ended_ns - found[9].observation.ended_ns == 1_000_000_000


def test_an_error_of_the_device():
    text = (
        "[PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with"
        " exception: CUDA error: no luck"
    )
    (rows,) = read(f"[rank3]:[E1002 16:04:30.86 ProcessGroupNCCL.cpp:1895] {text}").values()
    assert rows.exception == "CUDA error: no luck"


REMOTE_ERROR = (
    "[rank0]:[E1127 00:44:59.954526528 ProcessGroupNCCL.cpp:612] [Rank 0] Collective"
    " WorkNCCL(SeqNum=61, OpType=_ALLGATHER_BASE, NumelIn=16512, NumelOut=33024,"
    " Timeout(ms)=300000) raised the following async exception: NCCL error: remote process exited"
    " or there was a network error, NCCL version 2.28.9",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
    " prematurely.",
    "Last error:",
    "socketProgress: Connection closed by remote peer localhost<41476>",
    "Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2770",
    "[rank0]:[E1127 00:44:59.955811149 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg)"
    " Rank 0]  failure detected by watchdog at work sequence id: 61 PG status: last enqueued work:"
    " 75, last completed work: 60",
)
ASSERTION = (
    "/pytorch/aten/src/ATen/native/cuda/IndexKernelUtils.cu:16: vectorized_gather_kernel: block:"
    ' [93,0,0], thread: [{},0,0] Assertion `ind >=0 && ind < ind_dim_size && "vectorized gather'
    ' kernel index out of bounds"` failed.'
)


def test_an_error_of_nccl_before_the_timeout_is_no_timeout():
    rows = read(*REMOTE_ERROR)[0]
    assert (rows.timed_out, rows.timeouts, rows.problems) == (False, [], [])
    assert [(one.op, number) for one, number in zip(rows.args, rows.sequence, strict=True)] == [
        ("all_gather", 61)
    ]
    told = ["NCCL error: remote process exited", "peer localhost<41476>"]
    assert [text in rows.exception for text in told] == [True, True]
    unnamed = read(*REMOTE_ERROR[:4])[0]  # without the line that names the group
    assert (unnamed.timed_out, unnamed.timeouts) == (False, [])


def test_the_first_failed_assertion_of_a_kernel():
    """The device prints it for each thread, and without the rank."""
    asserted = [ASSERTION.format(thread) for thread in range(40)]
    first = (
        "IndexKernelUtils.cu:16, vectorized_gather_kernel: ind >=0 && ind < ind_dim_size &&"
        ' "vectorized gather kernel index out of bounds"'
    )
    raised = (
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/home/me/train.py", line 117, in step',
        "[rank1]: torch.AcceleratorError: CUDA error: device-side assert triggered",
    )
    thrown = "  what():  CUDA error: device-side assert triggered"
    rows = read(*asserted, *raised, "terminate called after throwing an instance", thrown)
    assert list(rows) == [1]
    assert rows[1].device_assertion == first
    assert rows[1].exception == "torch.AcceleratorError: CUDA error: device-side assert triggered"
    prefixed = read(*(f"[default1]:{line}" for line in asserted))[1]
    told = (prefixed.device_assertion, prefixed.exception)
    assert told == (first, "CUDA error: device-side assert triggered")
    assert read("terminate called after throwing an instance", thrown)[-1].exception == told[1]
    of_rank_1 = [f"[rank1]: {asserted[0]}", *raised]
    assert read(*of_rank_1, "torch.distributed: a line of no rank")[1].device_assertion == first


def test_text_that_speaks_of_something_else_says_nothing():
    assert read("epoch 1", "loss 2.5", "the watchdog barks", "rank: 3") == {}
    assert detect.detect_kind(b"epoch 1\nloss 2.5\n") is detect.TEXT


def test_single_lines():
    assert parse_origin("[default3]:[rank11]: text") == (11, 3, "text")
    assert parse_origin("12: text") == (None, 12, "text")
    assert parse_origin("no prefix") == (None, None, "no prefix")
    assert parse_group("[PG 0 (default_pg) Rank 3] x") == ("", "0", "default_pg", 3)
    assert parse_group("[PG ID 2 PG GUID 9 Rank 4] x") == ("9", "2", "", 4)
    assert parse_group("[Rank 4] x") is None
    assert parse_timeout("WorkNCCL(SeqNum=1, OpType=BARRIER, Timeout(ms)=5)") == (
        1,
        "BARRIER",
        None,
        None,
        5,
        -1,
        None,
        False,
    )
    assert parse_progress(
        "Timeout at NCCL work: 5, last enqueued NCCL work: 7, last completed NCCL work: 4."
    ) == (5, 7, -1, 4)
    assert parse_progress("Last enqueued NCCL work: 7, last completed NCCL work: -1.") == (
        None,
        7,
        -1,
        -1,
    )
    assert parse_time("E1206 18:44:12.715298746 x") % 1_000_000_000 == 715298746
    assert parse_time("E9999 99:99:99.5") == 0


@pytest.mark.parametrize(
    ("read_at", "first", "second"),
    [
        ((2027, 1, 5, 0), "1231 23:59:50.0", "0101 00:00:10.0"),
        # of a node whose time zone is ahead of UTC, read at once
        ((2026, 12, 31, 20), "1231 23:59:50.0", "0101 00:00:10.0"),
        ((2026, 11, 30, 20), "1130 23:59:50.0", "1201 00:00:10.0"),
    ],
)
def test_times_go_on_over_the_end_of_a_month_and_a_year(
    read_at: tuple[int, int, int, int], first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = calendar.timegm((*read_at, 0, 0))
    clock = SimpleNamespace(time=lambda: now_s, gmtime=lambda at_s=now_s: time.gmtime(at_s))
    monkeypatch.setattr(lines, "time", clock)
    assert parse_time(f"E{second} x") - parse_time(f"E{first} x") == 20 * 1_000_000_000


PARTS = [
    *(
        "[rank1]:",
        "3: ",
        "PG ID 0 PG GUID 0(default_pg) Rank 1]",
        "[",
        CAUGHT,
        "Traceback (most recent call last):",
        "\n",
        "\x1b[0m",
        "\udcff",
    ),
    *(
        '  File "x", line 3, in f',
        "last enqueued work: 3, last completed work: 2",
        "  rank      : 1 (local_rank: 1)",
        "9" * 30,
        "#0 f from x:3",
    ),
    *(
        "  exitcode  : -9 (pid: 2)",
        "E1206 18:44:12.7",
        "Stack trace of the failed collective: ",
        "  time  : 2024-13-26_05:13:33",
        *WORK.split(),
    ),
]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=30))
def test_any_text_is_read(parts):
    for rows in read_torch_log(io.BytesIO("".join(parts).encode("utf-8", "surrogateescape")), "x"):
        assert reduce_all([rows])[0].source == "x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[E1122 07:21:08 ProcessGroupNCCL.cpp:632] [Rank 1] last words", "last words"),
        ("last words of ranks [0, 2]", "last words of ranks [0, 2]"),
        ("[c10d] cannot connect to [::1]:29500", "cannot connect to [::1]:29500"),
    ],
)
def test_only_the_head_of_a_line_is_left_out(text: str, expected: str):
    assert lines.without_head(text) == expected
