"""Text logs alone: what torch's watchdog printed is often all there is."""

from __future__ import annotations

import json
import pickle
import textwrap
from pathlib import Path

import pytest
from flight_recorder_dumps import dump, entry
from goldens import hold

import commlens
from commlens.commands import main
from commlens.model.cause import Ended

TIMEOUT = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE,"
    " NumelIn=1024, NumelOut=1024, Timeout(ms)=600000)"
)
HEAD = (
    "[rank{rank}]:[E1122 03:14:15.926535897 ProcessGroupNCCL.cpp:629] [PG ID 0 PG GUID"
    " 0(default_pg) Rank {rank}]"
)


def timed_out(rank: int) -> str:
    return (
        f"{HEAD.format(rank=rank)} {TIMEOUT} ran for 600029 milliseconds before timing out.\n"
        + progress(rank, 41, 40)
    )


def progress(rank: int, enqueued: int, completed: int) -> str:
    said = f"failure detected by watchdog at work sequence id: {enqueued} PG status:"
    return (
        f"{HEAD.format(rank=rank)}  {said} last enqueued work: {enqueued}, last completed work:"
        f" {completed}\n"
    )


def test_the_rank_that_did_not_come(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        "".join([timed_out(0), timed_out(1), progress(2, 40, 40), timed_out(3)])
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [2], [0, 1, 3])
    assert verdict.collective is not None and (
        verdict.collective.op,
        verdict.collective.sequence_number,
    ) == ("all_reduce", 41)
    hold("missing/told-by-logs", verdict)


def test_a_log_of_each_rank(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        (tmp_path / f"rank{rank}.log").write_text(timed_out(rank))
    (tmp_path / "rank2.log").write_text(progress(2, 40, 40))
    assert commlens.diagnose(tmp_path).culprits == [2]


def test_a_timeout_in_a_group_that_is_not_named_blames_nobody(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        f"[rank1]:[E ProcessGroupNCCL.cpp:587] [Rank 1] {TIMEOUT} ran for 600029 milliseconds"
        " before timing out.\n"
    )
    verdict = commlens.diagnose(log)
    assert (verdict.kind, verdict.culprits, verdict.victims, verdict.confidence) == (
        "missing",
        [],
        [1],
        "low",
    )
    assert verdict.is_fault
    hold("missing/told-by-logs-group-not-named", verdict)
    log.write_text(
        f"[E ProcessGroupNCCL.cpp:587] {TIMEOUT} ran for 600029 milliseconds before timing out.\n"
    )
    verdict = commlens.diagnose(log)
    assert (verdict.culprits, verdict.victims) == ([], [])
    hold("missing/told-by-logs-rank-not-named", verdict)


def test_beside_a_cause_it_is_told_as_what_is_not_known(tmp_path: Path) -> None:
    unplaced = (
        f"[rank5]:[E ProcessGroupNCCL.cpp:587] [Rank 5] {TIMEOUT} ran for 600029 milliseconds"
        " before timing out.\n"
    )
    (tmp_path / "job.log").write_text(
        "".join([timed_out(0), timed_out(1), progress(2, 40, 40), timed_out(3), unplaced])
    )
    verdict = commlens.diagnose(tmp_path)
    assert verdict.culprits[:1] == [2]
    hold("missing/told-by-logs-beside-a-cause", verdict)


@pytest.mark.parametrize("group", ["default_pg", "tp", "undefined"])
@pytest.mark.parametrize("ranks", [1, 3, 60])
def test_ranks_that_time_out_in_a_group_of_their_own_are_not_healthy(
    tmp_path: Path, ranks: int, group: str
) -> None:
    lines = []
    for rank in range(ranks):
        head = (
            f"[rank{rank}]:[E1122 03:14:15.926535897 ProcessGroupNCCL.cpp:629] [PG ID 0 PG GUID"
            f" g{rank}({group}) Rank {rank}]"
        )
        lines.append(
            f"{head} {TIMEOUT.replace('SeqNum=41', f'SeqNum={rank}')} ran for 600029 milliseconds"
            " before timing out.\n"
        )
    (tmp_path / "job.log").write_text("".join(lines))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("missing", [], "low")
    assert verdict.victims == list(range(ranks))
    assert len(verdict.findings) == 1


@pytest.mark.parametrize(
    ("op", "sizes", "kind", "not_compared"),
    [
        ("ALLTOALL_BASE", [(64, 64), (64, 32)], "mismatch/splits", None),
        ("ALLTOALL_BASE", [(64, 64), (32, 32)], "stuck-inside", ["splits"]),
        ("ALLTOALL", [(64, 64), (64, 32)], "stuck-inside", ["splits"]),
        ("BROADCAST", [(64, 64), (64, 64)], "stuck-inside", ["root"]),
        ("ALLREDUCE", [(64, 64), (64, 64)], "stuck-inside", []),
    ],
)
def test_the_watchdog_tells_sizes_but_no_splits_and_no_root(
    tmp_path: Path, op: str, sizes: list[tuple[int, int]], kind: str, not_compared: list[str] | None
) -> None:
    lines = []
    for rank, (sent, received) in enumerate(sizes):
        work = f"OpType={op}, NumelIn={sent}, NumelOut={received}"
        lines.append(timed_out(rank).replace("OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024", work))
    (tmp_path / "job.log").write_text("".join(lines))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits) == (kind, [])
    assert getattr(verdict.cause, "not_compared", None) == not_compared
    assert ("network" in verdict.next_step) == (op == "ALLREDUCE")
    hold(f"{kind}/told-by-logs-{op.lower().replace('_', '-')}", verdict)


def exits(codes: dict[int, int]) -> str:
    """Torchrun's list of failed workers."""
    lines = [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "train.py FAILED",
        "Failures:",
    ]
    for rank, code in codes.items():
        lines += [
            f"[{rank}]:",
            "  time      : 2025-11-22_03:14:17",
            "  host      : node-7",
            f"  rank      : {rank} (local_rank: {rank})",
        ]
        lines += [f"  exitcode  : {code} (pid: {100 + rank})", "  error_file: <N/A>"]
    return "\n".join(lines) + "\n"


ABORTED = {0: -6, 1: -6, 3: -6}


@pytest.mark.parametrize("ended", [ABORTED, {0: -6}, {**ABORTED, 2: -15}])
def test_a_rank_that_the_watchdog_aborts_is_a_victim(tmp_path: Path, ended: dict[int, int]) -> None:
    """NCCL's watchdog aborts the ranks that wait. The rank that stood elsewhere lives until its
    launcher ends it.
    """
    log = "".join([timed_out(0), timed_out(1), progress(2, 40, 40), timed_out(3), exits(ended)])
    (tmp_path / "job.log").write_text(log)
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [2], [0, 1, 3])
    assert [one.kind for one in verdict.findings] == ["missing"]
    if len(ended) > 1:
        hold(f"missing/told-by-logs-and-ended-{len(ended)}", verdict)


def test_a_rank_that_ended_by_itself_is_the_cause_not_those_that_the_watchdog_aborts(
    tmp_path: Path,
) -> None:
    raised = (
        '[rank2]: Traceback (most recent call last):\n[rank2]:   File "/w/train.py", line 5, in'
        " load\n[rank2]: ValueError: no batch\n"
    )
    (tmp_path / "job.log").write_text(
        "".join([timed_out(0), timed_out(1), timed_out(3), raised, exits({**ABORTED, 2: 1})])
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.victims) == (
        "dead",
        "exception",
        [2],
        [0, 1, 3],
    )
    assert [one.kind for one in verdict.findings] == ["dead"]


def test_all_ranks_aborted_in_one_collective_are_inside_of_it(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        "".join(timed_out(rank) for rank in range(4)) + exits(dict.fromkeys(range(4), -6))
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("stuck-inside", [], [0, 1, 2, 3])


@pytest.mark.parametrize("ended", [ABORTED, {1: -6}])
def test_the_list_of_failed_workers_alone_does_not_tell_why_a_rank_aborted(
    tmp_path: Path, ended: dict[int, int]
) -> None:
    (tmp_path / "job.log").write_text(exits(ended))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims, verdict.confidence) == (
        "dead",
        [],
        sorted(ended),
        "low",
    )
    if len(ended) == 1:
        hold("dead/told-by-the-list-of-failed-workers", verdict)


def test_dumps_beside_the_launchers_log_show_where_the_others_stood(tmp_path: Path) -> None:
    for rank in range(4):
        entries = [entry(number) for number in range(7)]
        if rank != 2:
            entries.append(
                entry(7, state="scheduled", retired=False, time_discovered_completed_ns=None)
            )
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(entries), 2))
    (tmp_path / "torchrun.log").write_text(exits({**ABORTED, 2: -15}))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [2], [0, 1, 3])
    assert [one.kind for one in verdict.findings] == ["missing"]


def of_torch_2_1(rank: int, number: int, op: str = "ALLREDUCE") -> str:
    """A line without a prefix and a group: only ``[Rank 3]``, which is the rank in that group."""
    work = (
        f"WorkNCCL(SeqNum={number}, OpType={op}, Timeout(ms)=1800000) ran for 1800713 milliseconds"
        " before timing out."
    )
    return (
        f"[E ProcessGroupNCCL.cpp:458] [Rank {rank}] Watchdog caught collective operation timeout:"
        f" {work}\n"
    )


@pytest.mark.parametrize("name", ["slurm-48213.out", "job_17.log", "train.log"])
def test_ranks_come_from_the_lines_and_not_from_the_jobs_number_in_the_name(
    tmp_path: Path, name: str
) -> None:
    lines = [of_torch_2_1(rank, 64088 if rank == 5 else 96120) for rank in range(8)]
    (tmp_path / name).write_text("".join([of_torch_2_1(0, 96117), *lines]))
    verdict = commlens.diagnose(tmp_path / name)
    assert (verdict.kind, verdict.culprits, verdict.victims, verdict.confidence) == (
        "missing",
        [5],
        [0, 1, 2, 3, 4, 6, 7],
        "low",
    )
    hold("missing/told-by-logs-one-behind", verdict)


@pytest.mark.parametrize(
    "odd", [[(5, 96125)], [(5, 64088), (6, 64088)], [(5, 64088), (5, 96125)], []]
)
def test_without_one_rank_that_is_behind_nobody_is_named(
    tmp_path: Path, odd: list[tuple[int, int]]
) -> None:
    others = [rank for rank in range(8) if rank not in {rank for rank, _ in odd}]
    (tmp_path / "slurm-48213.out").write_text(
        "".join(of_torch_2_1(*one) for one in [*odd, *((rank, 96120) for rank in others)])
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("missing", [])
    if not odd:
        hold("missing/told-by-logs-all-at-one", verdict)


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["rank_3.log"], [3]),
        ([f"attempt_0/{rank}/stderr.log" for rank in range(4)], [0, 1, 2, 3]),
        ([f"log.{rank}" for rank in range(3, 7)], [3, 4, 5, 6]),
    ],
)
def test_the_log_of_one_rank_has_its_rank_in_its_name(
    tmp_path: Path, names: list[str], ranks: list[int]
) -> None:
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(of_torch_2_1(3, 41))
    assert commlens.diagnose(tmp_path).victims == ranks


STUCK_WATCHDOG = (
    "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring"
    " enqueued collectives.\n"
)


@pytest.mark.parametrize(
    ("line", "reason", "confidence"),
    [
        (f"{HEAD.format(rank=3)} {STUCK_WATCHDOG}", "watchdog-stuck", "medium"),
        ("[rank3]: epoch 1, loss 2.5\n", "silent", "low"),
        ("2025-11-22T03:14:15Z [rank3]: epoch 1\n", "silent", "low"),
        (exits({3: -15}), "silent", "low"),
    ],
)
def test_a_rank_that_did_not_time_out_with_the_others_is_the_suspect(
    tmp_path: Path, line: str, reason: str, confidence: str
) -> None:
    (tmp_path / "job.log").write_text("".join(timed_out(rank) for rank in range(3)) + line)
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims, verdict.confidence) == (
        "missing",
        [3],
        [0, 1, 2],
        confidence,
    )
    assert verdict.cause.reason == reason
    assert not any("node" in text for text in verdict.missing_evidence)
    if not line.startswith(("2025", "torch")):
        hold(f"missing/told-by-logs-{reason}", verdict)


def test_of_several_ranks_without_a_line_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("".join(timed_out(rank) for rank in (0, 3)))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [], [0, 3])
    hold("missing/told-by-logs-several-without-a-line", verdict)


def test_a_group_is_not_made_of_those_that_timed_out(tmp_path: Path) -> None:
    lines = "".join(
        timed_out(rank).replace("PG GUID 0(default_pg)", "PG GUID 5(tp)") for rank in (0, 1)
    )
    (tmp_path / "job.log").write_text(lines + "[rank2]: loss 2.5\n")
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.culprits, verdict.confidence) == ([], "low")
    hold("missing/told-by-logs-perhaps-not-a-member", verdict)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ranks", "[rank0]: loss 2.5\n[rank1]: loss 2.5\n"),
        (
            "torchrun",
            "E1122 03:14:15 torch/distributed/elastic/agent/server/api.py:719] something new\n",
        ),
        ("nccl", "n1:5:7 [0] NCCL INFO Bootstrap: Using eth0\n"),
    ],
)
def test_the_log_of_a_distributed_job_that_tells_no_fault_is_undetermined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.log").write_text(text)
    verdict = commlens.diagnose("job.log")
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("undetermined", [], "low")
    hold(f"undetermined/log-without-a-fault-of-{name}", verdict)


@pytest.mark.parametrize(
    ("line", "signal"),
    [
        (
            "elastic/agent/server/api.py:719] Received 1 death signal, shutting down workers",
            "SIGHUP",
        ),
        (
            (
                "elastic/agent/server/api.py:719] Received Signals.SIGTERM death signal, shutting"
                " down workers"
            ),
            "SIGTERM",
        ),
        (
            (
                "torch.distributed.elastic.multiprocessing.api.SignalException: Process 84933 got"
                " signal: 2"
            ),
            "SIGINT",
        ),
    ],
)
def test_a_signal_that_ended_the_launcher_ended_the_job(
    tmp_path: Path, line: str, signal: str
) -> None:
    (tmp_path / "job.log").write_text(
        f"  58%|#####8    | 1663/2840 [6:59:31<4:51:53]W0920 09:10:41.194000 84933 {line}\n"
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("dead", "killed", [])
    assert signal in verdict.summary
    hold(f"dead/launcher-ended-by-{signal.lower()}", verdict)


def test_a_fault_counts_more_than_the_signal_that_ended_the_launcher_after_it(
    tmp_path: Path,
) -> None:
    late = "elastic/agent/server/api.py:719] Received 15 death signal, shutting down workers\n"
    (tmp_path / "job.log").write_text(
        "".join([timed_out(0), timed_out(1), progress(2, 40, 40), timed_out(3), late])
    )
    assert commlens.diagnose(tmp_path).culprits == [2]


def test_memory_is_the_usual_reason_for_sigkill(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(exits({5: -9}))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("dead", [5])
    hold("dead/told-by-logs-sigkill", verdict)


@pytest.mark.parametrize("own", [(9, 900), (9, 8)])
def test_the_counter_of_messages_is_not_compared_with_that_of_collectives(
    tmp_path: Path, own: tuple[int, int]
) -> None:
    """Of a group that also sends messages, the last enqueued work is numbered by one of two
    counters.
    """
    lines = [timed_out(0), timed_out(1), progress(2, *own)]
    if own == (9, 8):
        lines.append(
            timed_out(1)
            .replace("SeqNum=41, OpType=ALLREDUCE", "SeqNum=9, OpType=COALESCED")
            .replace(": 41", ": 9")
        )
    (tmp_path / "job.log").write_text("".join(lines))
    verdict = commlens.diagnose(tmp_path)
    assert "never reached" not in verdict.summary and verdict.confidence == "low"


def wrapped(log: str, width: int, *, spaces: bool) -> str:
    """Wrap the lines like a terminal, or like a collector that breaks at spaces and drops them."""
    lines = []
    for line in log.splitlines():
        parts = (
            textwrap.wrap(line, width, break_on_hyphens=False)
            if spaces
            else [line[i : i + width] for i in range(0, len(line), width)]
        )
        lines += parts
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("width", [100, 120, 160, 200])
@pytest.mark.parametrize("spaces", [True, False])
def test_lines_that_were_wrapped(tmp_path: Path, width: int, spaces: bool) -> None:
    log = "".join([timed_out(0), timed_out(1), progress(2, 40, 40), timed_out(3)])
    (tmp_path / "job.log").write_text(wrapped(log, width, spaces=spaces))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [2], [0, 1, 3])
    assert (verdict.collective.op, verdict.collective.sequence_number) == ("all_reduce", 41)


@pytest.mark.parametrize(
    "prefix",
    [
        "2025-11-22T03:14:15.926535897Z stderr F {}",
        "trainer-worker-0-1  | {}",
        "[pod/job-worker-0/pytorch] {}",
        "> {}",
        "2025-11-22 03:14:15,926 {}",
        "json",
    ],
)
def test_lines_with_the_prefix_of_a_collector(tmp_path: Path, prefix: str) -> None:
    failed = (
        '[rank2]: Traceback (most recent call last):\n[rank2]:   File "/w/train.py", line 5, in'
        " load\n[rank2]: ValueError: no batch\n"
    )
    log = "".join([timed_out(0), timed_out(1), timed_out(3), failed, exits({**ABORTED, 2: 1})])
    lines = [
        (
            prefix.format(line)
            if prefix != "json"
            else json.dumps({"log": line + "\n", "stream": "stderr"})
        )
        for line in log.splitlines()
    ]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims, verdict.source) == (
        "dead",
        [2],
        [0, 1, 3],
        "train.py:5",
    )


RAS = """Warnings
#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  1 rank has launched up to operation 6649
  Rank 3 -- GPU 3 managed by process 12345 on node 172.16.64.210
"""
RAS_WITHOUT_LIST = RAS[: RAS.index("  Rank 3")]
VLLM = (
    "INFO 11-22 03:14:15 [shm_broadcast.py:466] No available shared memory broadcast block found in"
    " 60 second(s).\n"
)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/w/train.py", line 5, in load\n   '
    " read()\nValueError: no batch\n"
)


@pytest.mark.parametrize(
    ("name", "log", "kind"),
    [
        ("ras", RAS, "missing"),
        ("ras-without-list", RAS_WITHOUT_LIST, "missing"),
        ("vllm", VLLM, "undetermined"),
        ("traceback", TRACEBACK, "dead"),
    ],
)
def test_what_a_log_tells_of_no_rank_names_nobody(
    tmp_path: Path, name: str, log: str, kind: str
) -> None:
    (tmp_path / "job.log").write_text(log)
    verdict = commlens.diagnose(tmp_path / "job.log")
    assert (verdict.kind, verdict.culprits, verdict.confidence) == (kind, [], "low")
    assert verdict.next_step
    hold(f"{kind}/told-by-logs-{name}", verdict)


def timed_out_with(rank: int, fields: str) -> str:
    """A timeout with other fields, and the progress."""
    head = HEAD.format(rank=rank)
    told = (
        f"{head} Watchdog caught collective operation timeout: WorkNCCL({fields}) ran for 600029"
        " milliseconds before timing out.\n"
    )
    return told + progress(rank, 41, 40)


@pytest.mark.parametrize(
    "fields",
    [
        (
            "SeqNum=41, OpType=ALLREDUCE, NumelIn=18446744073709551615,"
            " NumelOut=18446744073709551615, Timeout(ms)=600000"
        ),
        "SeqNum=41, OpType=ALLREDUCE, NumelIn=-1, NumelOut=?, Timeout(ms)=600000",
        (
            "SeqNum=41, OpType=ALLREDUCE, Stream=7, Shapes=[[1, 2], [3]], Timeout(ms)=600000,"
            " NumelIn=4"
        ),
        "SeqNum=41, OpType=ALLREDUCE, Timeout(ms)=never",
    ],
)
def test_a_timeout_is_told_whatever_its_other_fields_are(tmp_path: Path, fields: str) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        "".join([timed_out_with(0, fields), timed_out_with(1, fields), progress(2, 40, 40)])
    )
    verdict = commlens.diagnose(log)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [2], [0, 1])
    assert verdict.collective is not None and (
        verdict.collective.op,
        verdict.collective.sequence_number,
    ) == ("all_reduce", 41)


def test_a_timeout_of_unknown_size_is_no_agreement_on_it(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    fields = (
        "SeqNum=41, OpType=ALLREDUCE, NumelIn=18446744073709551615, NumelOut=18446744073709551615,"
        " Timeout(ms)=600000"
    )
    log.write_text("".join(timed_out_with(rank, fields) for rank in range(2)))
    verdict = commlens.diagnose(log)
    assert verdict.is_fault and verdict.kind == "stuck-inside"
    assert verdict.cause.agreement == "unknown"
    hold("stuck-inside/told-by-logs-size-unknown", verdict)


UNREAD = [
    (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=99999999999999999999999,"
        " OpType=ALLREDUCE, Timeout(ms)=6) ran for 1 s"
    ),
    (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, OpType=, Timeout(ms)=6)"
        " ran for 7 milliseconds"
    ),
    "Watchdog caught collective operation timeout: Work[41]",
    (
        "failure detected by watchdog at work sequence id: 41 PG status: last enqueued work: many,"
        " last completed work: 40"
    ),
]


@pytest.mark.parametrize("line", UNREAD)
@pytest.mark.parametrize(
    "head", [HEAD, "[E ProcessGroupNCCL.cpp:587]"], ids=["of a rank", "of no rank"]
)
def test_a_line_of_the_watchdog_that_cannot_be_read_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, head: str
) -> None:
    log = tmp_path / "job.log"
    log.write_text("".join(f"{head.format(rank=rank)} {line}.\n" for rank in range(2)))
    assert main(["diagnose", str(log)]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "of torch's watchdog could not be read: " in out and line[:40] in out
    assert "nothing is wrong" not in out


def test_a_rank_is_not_missing_whose_line_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        "".join(
            [
                timed_out(0),
                timed_out(1),
                progress(2, 40, 40),
                f"{HEAD.format(rank=2)} {UNREAD[0]}.\n",
            ]
        )
    )
    verdict = commlens.diagnose(tmp_path)
    assert verdict.culprits == []
    hold("missing/told-by-logs-line-unreadable", verdict)


def desync(rank: int, *lines: str) -> str:
    """Torch 1.13, which names no group, with NCCL_DESYNC_DEBUG=1."""
    report = "".join(f"\t{line}\n" for line in lines)
    return (
        f"[E ProcessGroupNCCL.cpp:821] [Rank {rank}] {TIMEOUT} ran for 600029 milliseconds before"
        f" timing out.\n\t - [{rank}] Timeout at collective: ALLREDUCE, #41\n{report}"
    )


BEHIND = (
    " - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:",
    "   - [3] joined but didn't finish collective #40 (count from 1)",
    "     [2, 4] finished collective #40, but didn't join collective #41 (count from 1)",
    " - Snapshot of ranks' latest states:",
    "   #40 finished ranks:",
    "     [2, 4] finished ALLREDUCE",
    "   #41 started ranks:",
    "     [0, 1] started ALLREDUCE",
)
NEVER = (
    " - To our best knowledge, ranks [2, 4] are the lagging ranks that caused this timeout. They"
    " never joined any collectives",
)


@pytest.mark.parametrize("lines", [BEHIND, NEVER])
def test_the_ranks_that_torchs_desync_report_names(tmp_path: Path, lines: tuple[str, ...]) -> None:
    (tmp_path / "job.log").write_text(desync(0, *lines) + desync(1, *lines))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("missing", [2, 4])
    assert verdict.summary.startswith("ranks 2,4 did not join the collective")
    assert "all_reduce #41" in " ".join(verdict.findings[0].evidence)


SLURM = "slurmstepd: error: *** JOB 581234 ON node01 CANCELLED AT 2025-03-02T09:14:55"
STEP = "step 100 | loss 2.1\n"
SIGTERM = (
    "W0302 09:14:55.604000 88123 torch/distributed/elastic/agent/server/api.py:719] Received 15"
    " death signal, shutting down workers\n"
)


@pytest.mark.parametrize(
    ("line", "ending", "confidence"),
    [
        (f"{SLURM} DUE TO TIME LIMIT ***", "time-limit", "high"),
        (f"{SLURM} DUE TO PREEMPTION ***", "preemption", "high"),
        (f"{SLURM} DUE TO NODE FAILURE, SEE LOG ***", "node-failure", "high"),
        (f"{SLURM} ***", "cancelled", "high"),
        ("srun: error: node07: task 3: Out Of Memory", "out-of-memory", "high"),
        ("  Warning  Evicted  3m  kubelet  The node was low on resource: x", "evicted", "high"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "gpu-error", "medium"),
        ("run.sh: line 14: 20311 Killed   python train.py --rank 0", "killed", "medium"),
        ("srun: error: n2: task 9: Exited with exit code 1", "process-failed", "medium"),
    ],
)
def test_a_scheduler_tells_why_the_job_ended(
    tmp_path: Path, line: str, ending: str, confidence: str
) -> None:
    """Also where the launcher tells only the signal, and where the file's name has a number."""
    (tmp_path / "slurm-3.out").write_text(f"{STEP}{line}\n" + SIGTERM * (ending == "time-limit"))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("dead", [], confidence)
    assert verdict.looked_at == "1 text log"
    assert getattr(verdict.cause, "ending", None) == ending
    hold(f"dead/told-by-logs-{ending}", verdict)


STEP_ABORTED = "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.\n"
CLOSED = "".join(
    f"[rank{rank}]: Traceback (most recent call last):\n"
    f'[rank{rank}]:   File "/home/me/train.py", line 10, in <module>\n'
    f"[rank{rank}]:     dist.all_reduce(x)\n"
    f"[rank{rank}]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer\n"
    for rank in (0, 2)
)


@pytest.mark.parametrize(
    ("log", "kind", "ending"),
    [
        (f"{SLURM} ***\n{CLOSED}", "dead", "cancelled"),
        (f"{CLOSED}{SLURM} ***\n", "dead", None),
        (f"{STEP_ABORTED}{CLOSED}{SLURM} ***\n", "dead", "cancelled"),
        (f"{CLOSED}{STEP_ABORTED}{SLURM} ***\n", "dead", None),
        (f"{STEP_ABORTED}{CLOSED}", "dead", None),
    ],
    ids=["before", "after", "step-before", "step-after", "step-alone"],
)
def test_a_job_that_was_cancelled_before_a_rank_raised(
    tmp_path: Path, log: str, kind: str, ending: str | None
) -> None:
    """Somebody may cancel a job whose ranks have failed before: then that tells nothing."""
    (tmp_path / "slurm-3.out").write_text(log)
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, getattr(verdict.cause, "ending", None)) == (kind, ending)


def test_the_strongest_reason_is_told_and_a_rank_that_failed_before_it(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    out_of_memory = "srun: error: node07: task 3: Out Of Memory\n"
    log.write_text(f"{SLURM} ***\n{out_of_memory}")
    assert getattr(commlens.diagnose(log).cause, "ending", None) == "out-of-memory"

    log.write_text(f"{HEAD.format(rank=2)} {TRACEBACK}{exits({2: 1})}{SLURM} DUE TO TIME LIMIT ***")
    verdict = commlens.diagnose(log)
    assert verdict.culprits == [2]
    assert [(one.culprits, one.root_cause) for one in verdict.findings] == [
        ([2], True),
        ([], False),
    ]

    log.write_text("".join(timed_out(rank) for rank in (0, 1)) + f"[rank2]: step\n{out_of_memory}")
    verdict = commlens.diagnose(log)
    assert getattr(verdict.cause, "ending", None) == "out-of-memory"
    assert [one.kind for one in verdict.findings] == ["dead", "missing"]


def test_a_job_that_hung_until_its_time_limit_hung(tmp_path: Path) -> None:
    hung = "".join([timed_out(0), timed_out(1), progress(2, 40, 40)])
    (tmp_path / "job.log").write_text(f"{hung}{SLURM} DUE TO TIME LIMIT ***\n")
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("missing", [2])
    assert [one.kind for one in verdict.findings] == ["missing", "dead"]


def test_a_watchdog_that_got_stuck_is_told_though_no_rank_timed_out(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(f"{HEAD.format(rank=3)} {STUCK_WATCHDOG}")
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("stuck-inside", [], [3])
    assert verdict.confidence == "low"
    hold("stuck-inside/told-by-logs-watchdog-stuck", verdict)


LAUNCHER = """Traceback (most recent call last):
  File "/v/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py", line 117, in _call
    return getattr(self._store, store_op)(*args, **kwargs)
torch.distributed.DistNetworkError: failed to recv, got 0 bytes

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/v/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection has failed.
"""


def test_an_exception_of_the_launcher_is_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "job-3.log").write_text(LAUNCHER)
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("dead", [], [])
    assert verdict.summary.startswith("the launcher raised") and "torchrun:8" not in verdict.summary
    hold("dead/told-by-logs-launcher-raised", verdict)
    (tmp_path / "job-3.log").write_text(TRACEBACK + LAUNCHER)
    assert "ValueError: no batch" in commlens.diagnose(tmp_path).summary


SOCKET = "[{level}1122 07:21:08.120000 socket.cpp:957] [c10d] The {text}.\n"
GAVE_UP = SOCKET.format(
    level="E",
    text="client socket has timed out after 60000ms while trying to connect to (n0, 29500)",
)
REFUSED = SOCKET.format(
    level="W",
    text="client socket has failed to connect to [n0]:29500 (errno: 111 - Connection refused)",
)
NO_NAME = SOCKET.format(
    level="W",
    text="IPv6 network addresses of (n0, 29500) cannot be retrieved"
    " (gai error: -2 - Name or service not known)",
)
NO_ADDRESS = SOCKET.format(
    level="E", text="client socket has failed to connect to any network address of (n0, 29500)"
)
TAKEN = "".join(
    SOCKET.format(level=level, text=f"server socket has failed to {text}")
    for level, text in (
        ("W", "bind to [::]:29500 (errno: 98 - Address already in use)"),
        ("E", "listen on any local network address"),
    )
)


@pytest.mark.parametrize(
    ("name", "lines", "kind", "summary"),
    [
        ("refused", REFUSED * 30 + GAVE_UP, "missing", "(n0, 29500): Connection refused"),
        ("no-name", NO_NAME * 30 + NO_ADDRESS, "missing", "(n0, 29500): Name or service not known"),
        ("taken", TAKEN, "missing", "listen for torch's store: Address already in use"),
        ("no-reason", GAVE_UP, "missing", "to torch's store at (n0, 29500)"),
        # IPv4 may do, and the next try may succeed
        ("awaited", NO_NAME * 30, "undetermined", "(n0, 29500): Name or service not known"),
    ],
)
def test_the_sockets_of_a_store(
    tmp_path: Path, name: str, lines: str, kind: str, summary: str
) -> None:
    (tmp_path / "job.log").write_text(lines)
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits) == (kind, [])
    assert verdict.summary.endswith(summary)
    assert verdict.is_fault == (kind == "missing")
    hold(f"missing/told-by-logs-store-{name}", verdict)


def test_the_rank_of_a_socket_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(f"[rank3]:{REFUSED}[rank3]:{GAVE_UP}")
    verdict = commlens.diagnose(tmp_path)
    assert verdict.summary == (
        "rank 3 could not connect to torch's store at (n0, 29500): Connection refused"
    )


def test_only_the_rank_that_hosts_a_store_could_not_listen_for_it(tmp_path: Path) -> None:
    taken = TAKEN.replace("[E", "[rank0]:[E").replace("[W", "[rank0]:[W")
    others = "".join(f"[rank{rank}]:{REFUSED}[rank{rank}]:{GAVE_UP}" for rank in (1, 2))
    (tmp_path / "job.log").write_text(others + taken)
    verdict = commlens.diagnose(tmp_path)
    assert verdict.victims == [0, 1, 2]
    assert verdict.summary == ("rank 0 could not listen for torch's store: Address already in use")
    assert "end the process that still listens" in (verdict.next_step or "")
    assert not any("client socket" in text for text in verdict.findings[0].evidence)


def test_a_bind_that_failed_once_is_no_reason_of_those_that_gave_up(tmp_path: Path) -> None:
    bind = TAKEN.splitlines(keepends=True)[0]  # to IPv6; IPv4 may do
    (tmp_path / "job.log").write_text(
        f"[rank0]:{bind}[rank1]:{REFUSED}[rank1]:{GAVE_UP}[rank2]:{NO_NAME}"
    )
    assert commlens.diagnose(tmp_path).summary == (
        "rank 1 could not connect to torch's store at (n0, 29500): Connection refused"
    )


def test_a_store_that_was_reached_later_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(f"{NO_NAME}{GAVE_UP}[rank0]: step 1, loss 2.3\n")
    verdict = commlens.diagnose(tmp_path)
    assert not verdict.is_fault and verdict.summary == "no line tells a fault of rank 0"


def test_the_retries_of_a_store_do_not_hide_how_the_job_ended(tmp_path: Path) -> None:
    retries = "".join(REFUSED.replace("[n0]", f"[10.0.0.{host}]") for host in range(30))
    (tmp_path / "job.log").write_text(f"{retries}{SLURM} DUE TO TIME LIMIT ***\n")
    assert "time limit" in commlens.diagnose(tmp_path).summary


def test_the_launchers_error_names_its_cause(tmp_path: Path) -> None:
    lost = "The client socket has timed out after 60s while trying to connect to (n0, 29400)."
    (tmp_path / "job.log").write_text(
        LAUNCHER.replace(
            "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
            f"TimeoutError: {lost}",
        ).replace(
            "The connection has failed.",
            "The connection to the C10d store has failed. See inner exception for details.",
        )
    )
    verdict = commlens.diagnose(tmp_path)
    assert f"store has failed, because of TimeoutError: {lost.rstrip('.')}" in verdict.summary
    assert "--rdzv-endpoint" in (verdict.next_step or "")


def test_an_exception_without_a_rank_is_of_the_only_one_that_failed(tmp_path: Path) -> None:
    summary = (
        "  rank      : {0} (local_rank: {0})\n  exitcode  : {1} (pid: 41)\n  error_file: <N/A>\n"
    )
    ended = summary.format(0, -15) + summary.format(1, 1)
    (tmp_path / "job.log").write_text(TRACEBACK + ended)
    verdict = commlens.diagnose(tmp_path)
    assert verdict.culprits == [1] and "rank 1 raised ValueError: no batch" in verdict.summary
    both = summary.format(0, 1) + summary.format(1, 1)
    (tmp_path / "job.log").write_text(TRACEBACK + both)
    assert "ValueError" not in commlens.diagnose(tmp_path).summary


def nccl_error(rank: int, error: str, last: str) -> str:
    """The traceback of torch, with the lines that NCCL's error has."""
    raised = (
        f"torch.distributed.DistBackendError: NCCL error in: /t/NCCLUtils.hpp:268, {error} (run with"
        " NCCL_DEBUG=WARN for details), NCCL version 2.21.5"
    )
    frames = ['  File "/w/train.py", line 22, in main', "    dist.barrier()"]
    lines = ["Traceback (most recent call last):", *frames, raised]
    lines += ["ncclInvalidUsage: This usually reflects invalid usage.", "Last error:", last]
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


def test_the_last_error_of_nccl_tells_what_happened(tmp_path: Path) -> None:
    duplicate = "Duplicate GPU detected : rank {} and rank {} both on CUDA device 34000"
    (tmp_path / "job.log").write_text(
        "".join(
            nccl_error(rank, "invalid usage", duplicate.format(rank, int(rank == 0)))
            for rank in range(4)
        )
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.source) == ("dead", [0, 1, 2, 3], "train.py:22")
    assert len(verdict.findings) == 1
    hold("dead/told-by-logs-duplicate-gpu", verdict)


def test_a_full_dev_shm_ends_each_rank_by_itself(tmp_path: Path) -> None:
    full = "Error while creating shared memory segment /dev/shm/nccl-{} (size 9637888), error: {}"
    (tmp_path / "job.log").write_text(
        "".join(
            nccl_error(rank, "unhandled system error", full.format(name, "No space left on device"))
            for rank, name in enumerate(["wWkVpg", "0vRkQz"])
        )
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.culprits, len(verdict.findings)) == ([0, 1], 1)
    assert "--shm-size" in verdict.next_step


def test_an_error_of_nccl_in_the_watchdogs_line_names_the_peers_host(tmp_path: Path) -> None:
    """The lines that follow have no prefix."""
    (tmp_path / "job.log").write_text(
        f"{HEAD.format(rank=3)} Process group watchdog thread terminated with exception: NCCL error:"
        " remote process exited or there was a network error, NCCL version 2.21.5\n"
        "ncclRemoteError: A call failed possibly due to a network error.\nLast error:\n"
        "socketProgress: Connection closed by remote peer gpu-01.cluster<51234>\n"
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("dead", [], [3])
    assert "gpu-01.cluster" in verdict.next_step


def test_the_signal_that_killed_a_worker_is_told_by_the_exception_before(tmp_path: Path) -> None:
    loader = 'Traceback (most recent call last):\n  File "/v/torch/utils/data/dataloader.py", line 1, in x\n'
    (tmp_path / "rank_2.log").write_text(
        f"{loader}RuntimeError: DataLoader worker (pid 4502) is killed by signal: Bus error. It is"
        " possible that\n\nThe above exception was the direct cause of the following exception:\n\n"
        f"{loader}RuntimeError: DataLoader worker (pid(s) 4502) exited unexpectedly\n"
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("dead", [2])
    assert "/dev/shm" in verdict.next_step


@pytest.mark.parametrize(
    ("prefix", "culprits"),
    [
        ("[1,2]<stderr>:", [2]),
        ("(VllmWorker rank=2 pid=4021) ", [2]),
        ("(WorkerDict pid=4021, ip=10.0.0.4) [rank2]: ", [2]),
        ("(WorkerDict pid=4021) ", []),
    ],
)
def test_the_prefixes_of_mpirun_and_actors(
    tmp_path: Path, prefix: str, culprits: list[int]
) -> None:
    (tmp_path / "job.log").write_text(
        "".join(f"{prefix}{line}\n" for line in TRACEBACK.splitlines())
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("dead", culprits)
    assert "ValueError: no batch" in verdict.summary


def test_an_exception_of_torch_without_its_traceback_counts(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        "[rank1]: torch.distributed.DistBackendError: [1] is setting up NCCL communicator, but"
        " store->get('0') got error: Connection reset by peer.\n[rank0]: step 1\n"
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.victims) == ("dead", [1])


@pytest.mark.parametrize(
    ("line", "culprits", "why"),
    [
        (
            "mpirun noticed that process rank 3 with PID 0 on node n2 exited on signal 9",
            [3],
            "killed",
        ),
        ("[rank: 1] Child process with PID 3481 terminated with code 1. Forcefully", [1], "exit"),
        (
            '[rank2]: Traceback (most recent call last):\n[rank2]:   File "/w/t.py", line 5, in f\n'
            "[rank2]: StopIteration",
            [2],
            "exception",
        ),
        (
            '[rank2]: Traceback (most recent call last):\n[rank2]:   File "/w/t.py", line 5, in f\n'
            "[rank2]: queue.Empty: no batch",
            [2],
            "exception",
        ),
    ],
)
def test_a_launcher_or_a_traceback_names_the_rank(
    tmp_path: Path, line: str, culprits: list[int], why: str
) -> None:
    (tmp_path / "job.log").write_text(f"{STEP}{line}\n")
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("dead", why, culprits)


def test_spawn_tells_which_of_its_processes_raised(tmp_path: Path) -> None:
    spawn = "torch.multiprocessing.spawn.ProcessRaisedException: \n\n"
    head = "-- Process 3 terminated with the following error:\n"
    (tmp_path / "job.log").write_text(
        f"{TRACEBACK.replace('ValueError: no batch', spawn)}{head}{TRACEBACK}"
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.source) == ("dead", [3], "train.py:5")
    assert any("local ranks" in text for text in verdict.missing_evidence)


def test_a_store_that_is_gone_may_be_the_end_of_the_job(tmp_path: Path) -> None:
    """Ranks tell it, too, when rank 0 has finished before them."""
    (tmp_path / "job.log").write_text(
        "".join(
            f'{HEAD.format(rank=rank)} Failed to check the "should dump" flag on TCPStore, (maybe'
            " TCPStore server has shut down too early), with error: Broken pipe\n"
            for rank in (1, 2)
        )
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("undetermined", [], [1, 2])
    hold("undetermined/told-by-logs-store-lost", verdict)


def test_torchruns_list_holds_the_traceback_of_a_recorded_worker(tmp_path: Path) -> None:
    """It is indented, and torchelastic's record() is its first frame."""
    trace = """  traceback : Traceback (most recent call last):
    File "/v/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 355, in wrapper
      return f(*args, **kwargs)
    File "/work/train.py", line 88, in main
      raise ValueError("bad shard 7")
  ValueError: bad shard 7

============================================================
"""
    (tmp_path / "job.log").write_text(exits({2: 1}) + trace)
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("dead", "exception", [2])
    assert verdict.source == "train.py:88" and "ValueError: bad shard 7" in verdict.summary


REMOTE_ERROR = (
    "[rank0]:[E1127 00:44:59.954526528 ProcessGroupNCCL.cpp:612] [Rank 0] Collective"
    " WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=300000)"
    " raised the following async exception: NCCL error: remote process exited or there was a"
    " network error, NCCL version 2.28.9\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
    " prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer n0<41476>\n"
    + progress(0, 41, 40)
)
ASSERTED = (
    "/pytorch/aten/src/ATen/native/cuda/IndexKernelUtils.cu:16: vectorized_gather_kernel: block:"
    " [93,0,0], thread: [{},0,0] Assertion `ind >=0 && ind < ind_dim_size` failed.\n"
)
THROWN = (
    "[rank1]: For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "terminate called after throwing an instance of 'c10::AcceleratorError'\n"
    "  what():  CUDA error: device-side assert triggered\n"
)


def test_the_log_of_a_rank_whose_kernel_failed(tmp_path: Path) -> None:
    """Its peer's NCCL error is no timeout, and C++ prints no rank."""
    asserted = "".join(ASSERTED.format(thread) for thread in range(32))
    (tmp_path / "rank0.log").write_text(REMOTE_ERROR)
    (tmp_path / "rank1.log").write_text(asserted + THROWN)
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("dead", "exception", [1])
    hold("dead/told-by-logs-device-assert", verdict)


@pytest.mark.parametrize("printed", ["[rank1]: saved\n", ""])
def test_a_rank_that_tells_nothing_beside_an_error_of_its_peer(
    printed: str, tmp_path: Path
) -> None:
    """A rank that was killed prints nothing; torchrun makes its files all the same."""
    for rank, text in enumerate([REMOTE_ERROR.replace(" n0<", " localhost<"), printed]):
        folder = tmp_path / f"attempt_0/{rank}"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(text)
        (folder / "stdout.log").write_text("")
    verdict = commlens.diagnose(tmp_path)
    assert isinstance(verdict.cause, Ended)
    assert (verdict.cause.how, verdict.culprits) == ("after-a-peer", [1])
    assert verdict.next_step == "look at the output of rank 1 for the first error"


def raised(rank: int, *error: str) -> str:
    """The traceback of a rank; ``error`` is its last lines."""
    lines = [
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 12, in step',
        '  File "/env/site-packages/torch/distributed/distributed_c10d.py", line 2, in all_reduce',
        *error,
    ]
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


NCCL_SAID = "torch.distributed.DistBackendError: NCCL error in: /p/NCCLUtils.cpp:77, {}, NCCL version 2.20.5"
INTERNAL = NCCL_SAID.format("internal error - please report this issue to the NCCL developers")
SYSTEM = NCCL_SAID.format("unhandled system error (run with NCCL_DEBUG=INFO for details)")
REMOTE = NCCL_SAID.format("remote process exited or there was a network error")
CUDA = NCCL_SAID.format("unhandled cuda error (run with NCCL_DEBUG=INFO for details)")
VICTIMS = {
    "nccl-internal": (INTERNAL, "ncclInternalError: Internal check failed.", "Last error:", ""),
    "nccl-proxy": (INTERNAL, "Last error:", "Socket recv failed while polling for opId=0x55a"),
    "nccl-system": (SYSTEM, "ncclSystemError: System call (e.g. socket, malloc) failed."),
    "nccl-remote": (REMOTE, "ncclRemoteError: A call failed possibly due to a network error."),
    "nccl2-async": (
        "RuntimeError: NCCL Async Error: unhandled system error (run with NCCL_DEBUG=INFO) ",
        "NCCL Last Error: ",
    ),
    "nccl2-remote": (
        "RuntimeError: NCCL Async Error: remote process exited or there was a network",
    ),
    "nccl2-op": ("RuntimeError: NCCL AllReduce failed: internal error ", "NCCL Last Error: "),
    "nccl2-failed": ("torch.distributed.DistBackendError: NCCL operation failed",),
    "nccl2-aborted": ("RuntimeError: NCCL communicator was aborted after a previous error",),
    "nccl2-timeout": (
        "torch.distributed.DistBackendError: Watchdog caught collective operation timeout: NCCL"
        " operation timed out",
    ),
    "rccl": ("RuntimeError: RCCL error: internal error - please report this issue to the RCCL",),
    "gloo-closed": ("RuntimeError: [/p/gloo/transport/tcp/pair.cc:525] Connection closed by peer",),
    "gloo-read": (
        "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Read timeout [10.0.0.5]:4711",
    ),
    "hccl": (
        "RuntimeError: [ERROR] HCCL error in: torch_npu/csrc/distributed/ProcessGroupHCCL.cpp:64",
        "[ERROR] 2024-05-21-11:57:54 (PID:927000, Device:3, RankID:3) ERR02200 DIST call hccl api"
        " failed.",
        "EI0006: 2024-05-21-11:57:54.167.645 Getting socket times out. Reason: Remote Rank did not"
        " send the data in time.",
    ),
}
CULPRITS = {
    "calloc": (CUDA, "Last error:", "Failed to CUDA calloc 6291456 bytes"),
    "torch-memory": ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",),
    "ecc": ("RuntimeError: CUDA error: uncorrectable ECC error encountered",),
    "own": ("ValueError: loss is not finite",),
    "npu-memory": ("RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB",),
}


@pytest.mark.parametrize("culprit", CULPRITS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_consequence_is_never_the_cause(tmp_path: Path, victim: str, culprit: str) -> None:
    (tmp_path / "job.log").write_text(
        raised(0, *VICTIMS[victim]) + raised(1, *VICTIMS[victim]) + raised(2, *CULPRITS[culprit])
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.why) == ("dead", "exception")
    assert (verdict.culprits, verdict.victims) == ([2], [0, 1])
    assert [finding.culprits for finding in verdict.findings if finding.root_cause] == [[2]]


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_signal_is_the_cause_of_the_errors_of_others(tmp_path: Path, victim: str) -> None:
    (tmp_path / "job.log").write_text(
        raised(0, *VICTIMS[victim]) + raised(1, *VICTIMS[victim]) + exits({0: 1, 1: 1, 2: -11})
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("dead", [2], [0, 1])


@pytest.mark.parametrize("victim", VICTIMS)
def test_consequences_alone_blame_nobody(tmp_path: Path, victim: str) -> None:
    (tmp_path / "job.log").write_text(raised(0, *VICTIMS[victim]) + raised(1, *VICTIMS[victim]))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("dead", [], [0, 1])
    assert verdict.confidence == "low"
    if victim in ("nccl-internal", "hccl"):
        hold(f"dead/consequences-alone-{victim}", verdict)


@pytest.mark.parametrize("victim", ["gloo-closed", "nccl-remote", "nccl2-timeout"])
def test_of_consequences_the_one_that_tells_no_peer_is_nearest_to_the_cause(
    tmp_path: Path, victim: str
) -> None:
    (tmp_path / "job.log").write_text(
        raised(0, *VICTIMS[victim]) + raised(1, *VICTIMS["nccl-internal"])
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("dead", [1], [0])


def test_ranks_that_hold_no_memory_for_nccl_end_those_that_meet_them(tmp_path: Path) -> None:
    """Rank 0 tells its error first, rank 3 its own: NCCL's proxy on rank 0 lost its peer."""
    (tmp_path / "job.log").write_text(
        raised(0, *VICTIMS["nccl-proxy"]) + raised(3, *CULPRITS["calloc"])
    )
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("dead", [3], [0])
    hold("dead/no-memory-for-nccl", verdict)


def timed_out_at(rank: int, number: int, op: str, elements: int, on: tuple[int, int]) -> str:
    """The timeout of a rank, and the last work that it enqueued and completed."""
    sizes = f"NumelIn={elements}, NumelOut={elements}"
    work = f"WorkNCCL(SeqNum={number}, OpType={op}, {sizes}, Timeout(ms)=3000000)"
    said = f"failure detected by watchdog at work sequence id: {number} PG status:"
    return (
        f"{HEAD.format(rank=rank)} Watchdog caught collective operation timeout: {work} ran for"
        " 3000097 milliseconds before timing out.\n"
        f"{HEAD.format(rank=rank)}  {said} last enqueued work: {on[0]}, last completed work:"
        f" {on[1]}\n"
    )


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize(
    ("other", "elements", "kind"),
    [("BROADCAST", 24084544, "mismatch/shape"), ("ALLGATHER", 64, "mismatch/op")],
)
def test_ranks_that_disagree_while_one_has_gone_on(
    tmp_path: Path, ahead: int, other: str, elements: int, kind: str
) -> None:
    """The rank ahead tells of another number, so that its line is compared with no other."""
    lines = {rank: timed_out_at(rank, 7219, "BROADCAST", 64, (7220, 7218)) for rank in range(4)}
    odd = 2 if ahead != 2 else 1
    lines[odd] = timed_out_at(odd, 7219, other, elements, (7219, 7218))
    lines[ahead] = timed_out_at(ahead, 7221, "ALLREDUCE", 593920, (7223, 7220))
    (tmp_path / "job.log").write_text("".join(lines.values()))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits) == (kind, [])
    assert verdict.cause.number == 7219 and verdict.cause.gone_on == [ahead]
    assert [one.ranks for one in verdict.cause.issued if one.ranks == [odd]] == [[odd]]
    assert verdict.next_step
    if ahead == 0:
        hold(f"{kind}/told-by-logs-one-has-gone-on", verdict)


def in_group(rank: int, number: int, group: str, sequence: int) -> str:
    """The timeout of a rank in a smaller group, whose lines tell its number in that group."""
    return timed_out_at(rank, sequence, "ALLREDUCE", 64, (sequence, sequence - 1)).replace(
        f"PG GUID 0(default_pg) Rank {rank}]", f"PG GUID {group} Rank {number}]"
    )


@pytest.mark.parametrize("files", ["one", "each"])
@pytest.mark.parametrize(
    ("ranks", "absent", "culprits"),
    [
        ({0: 4, 1: 5, 3: 7}, (2, 6), [6]),  # a row of a mesh
        ({0: 1, 1: 5, 3: 13}, (2, 9), [9]),  # a column
        ({1: 5, 2: 6, 3: 7}, (0, 4), [4]),  # its first
        ({0: 4, 1: 5}, (2, 6), []),  # the size of the group is not known
        ({0: 0, 2: 8}, (1, 4), []),  # it may be any rank between them
        ({0: 0, 1: 3, 3: 4}, (2, 9), []),  # irregular
    ],
)
def test_a_ranks_number_in_its_group_tells_which_one_is_missing(
    tmp_path: Path, ranks: dict[int, int], absent: tuple[int, int], culprits: list[int], files: str
) -> None:
    """The rank that is missing waits in another group, of which only it is known."""
    lines = {rank: in_group(rank, number, "5(tp)", 41) for number, rank in ranks.items()}
    lines[absent[1]] = in_group(absent[1], 1, "9(dp)", 8801)
    for rank, text in lines.items():
        name = "job.log" if files == "one" else f"rank{rank}.log"
        with (tmp_path / name).open("a") as log:
            log.write(text)
    verdict = commlens.diagnose(tmp_path)
    assert verdict.culprits == culprits
    if culprits:
        assert (verdict.kind, verdict.victims) == ("missing", sorted(ranks.values()))
        assert verdict.collective is not None and verdict.collective.sequence_number == 41
    if culprits == [6] and files == "one":
        hold("missing/told-by-logs-in-another-group", verdict)


WARNINGS = {
    "locked-memory": (
        SYSTEM,
        "misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate"
        " memory",
        "ulimit -l",
    ),
    "gpu-direct": (
        SYSTEM,
        "misc/ibvwrap.cc:153 NCCL WARN Call to ibv_reg_mr failed with error Bad address",
        "nvidia_peermem",
    ),
    "nvls": (
        CUDA,
        "transport/nvls.cc:287 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size"
        " 2097152 : CUDA error 401 'the operation cannot be performed in the present state'.",
        "NCCL_NVLS_ENABLE=0",
    ),
    "nvls-argument": (
        CUDA,
        "transport/nvls.cc:598 NCCL WARN Cuda failure 1 'invalid argument'",
        "NCCL_NVLS_ENABLE=0",
    ),
    "peer-access": (
        CUDA,
        "transport/p2p.cc:548 NCCL WARN failed to open CUDA IPC handle : 11 invalid argument",
        "NCCL_P2P_DISABLE=1",
    ),
    "gpu-memory": (
        CUDA,
        "include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
        "GPU",
    ),
}
ROLES = {1: ("hgx-a", 0), 5: ("hgx-b", 1)}


def printed(rank: int, text: str, level: str = "") -> str:
    host, gpu = ROLES[rank]
    return f"{host}:{9000 + rank}:{9100 + rank} [{gpu}] {level}{text}\n"


@pytest.mark.parametrize("by", ["communicator", "prefix", "launcher", "last-error"])
@pytest.mark.parametrize("kind", WARNINGS)
def test_what_nccl_printed_before_the_exception_names_node_and_setting(
    tmp_path: Path, kind: str, by: str
) -> None:
    """The line of the program is not at fault."""
    error, warning, setting = WARNINGS[kind]
    text = warning.partition("NCCL WARN ")[2]
    prefix = "[rank5]: " if by == "prefix" else ""
    lines = [f"{prefix}{printed(5, warning)}"]
    lines.append(printed(1, "misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by x"))
    if by == "communicator":
        lines += [
            printed(rank, f"comm 0x55{rank} rank {rank} nranks 8 cudaDev 1", "NCCL INFO ")
            for rank in ROLES
        ]
    lines.append(raised(1, INTERNAL))
    lines.append(raised(5, error, *(["Last error:", text] if by == "last-error" else [])))
    if by == "launcher":
        listed = exits({5: 1}).replace("pid: 105", "pid: 9005")
        lines.append(listed.replace("node-7", "hgx-b"))
    (tmp_path / "job.log").write_text("".join(lines))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("dead", "exception", [5])
    assert text[:40] in verdict.summary
    assert setting in verdict.next_step and "hgx-b" in verdict.next_step
    if by == "communicator" and kind in ("locked-memory", "nvls", "peer-access"):
        hold(f"dead/warned-of-{kind}", verdict)


def test_a_warning_of_nccl_is_not_the_cause_of_another_error(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        f"[rank5]: {printed(5, WARNINGS['nvls'][1])}" + raised(5, "ValueError: no batch")
    )
    verdict = commlens.diagnose(tmp_path)
    assert verdict.culprits == [5] and "no batch" in verdict.summary
    assert "NVLS" not in verdict.next_step


def of_nccl2(rank: int, text: str, name: str = "default_pg", number: int | None = None) -> str:
    """A line of torch 2.15's NCCL backend."""
    number = rank if number is None else number
    head = "E1122 03:14:15.926535 4711 ProcessGroupNCCLUtils.cpp:218]"
    return f"{head} [TC][rank={number}][name={name}] {text}\n"


EXPIRED = "Operation timed out after 600000 ms"
ABORTS = "Aborting process on rank {} due to timeout - timeout watchdog detected operation timeout"


@pytest.mark.parametrize("ended", [{}, {0: -6, 1: -6}])
def test_ranks_whose_operation_timed_out_in_torch_2_15_are_victims(
    tmp_path: Path, ended: dict[int, int]
) -> None:
    """Its lines name neither the operation nor its number."""
    lines = [of_nccl2(rank, EXPIRED) + of_nccl2(rank, ABORTS.format(rank)) for rank in (0, 1)]
    (tmp_path / "job.log").write_text("".join(lines) + (exits(ended) if ended else ""))
    verdict = commlens.diagnose(tmp_path)
    assert verdict.culprits == [] and verdict.victims == [0, 1]
    assert not any("could not be read" in text for text in verdict.missing_evidence)
    if not ended:
        hold("missing/told-by-logs-of-torch-2-15", verdict)


def test_a_rank_that_raised_by_itself_ends_the_waits_of_torch_2_15(tmp_path: Path) -> None:
    timeout = VICTIMS["nccl2-timeout"]
    lines = [of_nccl2(rank, EXPIRED) + raised(rank, *timeout) for rank in (0, 1)]
    (tmp_path / "job.log").write_text("".join(lines) + raised(2, "ValueError: no batch"))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("dead", [2], [0, 1])


def test_the_rank_in_a_line_of_torch_2_15_is_that_in_the_group(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        "".join(f"[rank{rank}]:{of_nccl2(rank, EXPIRED, 'tp', rank - 4)}" for rank in (4, 5))
    )
    verdict = commlens.diagnose(tmp_path)
    assert verdict.culprits == [] and verdict.victims == [4, 5]
    assert "group tp" in verdict.summary
