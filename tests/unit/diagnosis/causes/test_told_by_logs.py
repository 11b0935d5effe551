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
