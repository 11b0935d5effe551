"""Ranks that the errors in a log name."""

from __future__ import annotations

from pathlib import Path

import pytest
from goldens import hold
from torch_errors import ddp, detail

import commlens
from commlens.model.verdict import Verdict


def raised(rank: int, text: str, line: int = 26) -> str:
    """The traceback of a rank in a job's log."""
    lines = [
        "Traceback (most recent call last):",
        f'  File "/work/train.py", line {line}, in main',
        "    step()",
        *text.splitlines(),
    ]
    return "".join(f"[rank{rank}]: {one}\n" for one in lines)


def judge(folder: Path, *lines: str) -> Verdict:
    (folder / "job.log").write_text("".join(lines))
    return commlens.diagnose(folder / "job.log")


@pytest.mark.parametrize(
    ("ranks", "kind", "culprits", "victims"),
    [
        ({1: detail(1, 0), 2: detail(2, 0), 3: detail(3, 0)}, "mismatch/op", [0], [1, 2, 3]),
        ({0: detail(0, 1, "REDUCE", "BROADCAST"), 1: detail(1, 0)}, "mismatch/op", [], [0, 1]),
        # of a smaller group
        (
            {4: detail(0, 1, "REDUCE", "BROADCAST"), 5: detail(1, 0), 6: detail(2, 0)},
            "mismatch/op",
            [],
            [4, 5, 6],
        ),
        (
            {0: ddp(0, 5, 2, 4), 1: ddp(1, 5, 2, 4), 2: ddp(2, 4, 0, 5)},
            "mismatch/shape",
            [2],
            [0, 1],
        ),
        (
            {0: ddp(0, 5, 2, 4), 1: ddp(1, 5, 2, 4), 2: ddp(2, 4, 0, 5), 3: ddp(3, 4, 0, 5)},
            "mismatch/shape",
            [],
            [0, 1, 2, 3],
        ),
    ],
)
def test_the_rank_that_the_others_name_is_the_culprit_of_one_fault(
    tmp_path: Path, ranks: dict[int, str], kind: str, culprits: list[int], victims: list[int]
) -> None:
    verdict = judge(tmp_path, *(raised(rank, text) for rank, text in ranks.items()))
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.victims) == (
        kind,
        "exception",
        culprits,
        victims,
    )
    assert len(verdict.findings) == 1 and (verdict.confidence == "low") == (not culprits)
    hold(f"{kind}/told-by-errors-of-ranks-{'-'.join(map(str, ranks))}", verdict)


@pytest.mark.parametrize(
    "ranks",
    [
        {0: ddp(0, 382, 1, 0), 1: ddp(1, 382, 0, 0), 2: ddp(2, 382, 0, 0)},
        {0: ddp(0, 382, 1, 93911), 1: ddp(1, 382, 0, 5), 2: ddp(2, 382, 0, 5)},
        {0: ddp(0, 382, 1, 0)},
    ],
    ids=["nothing-arrived", "garbage", "one-rank"],
)
def test_counts_that_no_rank_has_tell_of_no_model_that_differs(
    tmp_path: Path, ranks: dict[int, str]
) -> None:
    verdict = judge(tmp_path, *(raised(rank, text) for rank, text in ranks.items()))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("dead", [], [*ranks])
    assert verdict.cause.report == "not-exchanged" and verdict.confidence == "low"
    if "inconsistent 5 params" in str(ranks):
        hold("dead/counts-that-no-rank-has", verdict)


def test_a_rank_that_failed_by_itself_did_not_send_its_counts(tmp_path: Path) -> None:
    failed = "RuntimeError: CUDA error: an illegal memory access was encountered"
    verdict = judge(tmp_path, raised(0, ddp(0, 382, 1, 0)), raised(1, failed))
    assert (verdict.kind, verdict.culprits) == ("dead", [1])


CHECKPOINT = """torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([1])
Traceback (most recent call last): (RANK 1)
  File "/site-packages/torch/serialization.py", line 807, in __init__
    super().__init__(torch._C.PyTorchFileReader(name_or_buffer))
RuntimeError: PytorchStreamReader failed reading zip archive
"""


@pytest.mark.parametrize(("ranks", "culprits"), [(range(3), [1]), ([4, 5], [])])
def test_the_rank_that_a_checkpoint_failed_on_and_its_error(
    tmp_path: Path, ranks: list[int], culprits: list[int]
) -> None:
    """The numbers are those of the checkpoint's group: where rank 1 raised nothing, it may be
    another one.
    """
    verdict = judge(tmp_path, *(raised(rank, CHECKPOINT) for rank in ranks))
    assert (verdict.kind, verdict.culprits, verdict.victims) == (
        "dead",
        culprits,
        sorted({*ranks} - {*culprits}),
    )
    assert len(verdict.findings) == 1
    hold(f"dead/in-a-checkpoint{'' if culprits else '-of-some-group'}", verdict)


def test_the_file_is_named_where_the_rank_that_failed_on_it_tells_it(tmp_path: Path) -> None:
    """The black box of that rank holds it beside the rank's number."""
    begin = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException"
    texts = [
        f"{begin} ranks:dict_keys([1]) (RANK 1){file} EOFError: Ran out of input. No more."
        for file in ("", " (file /ckpt/__1_0.distcp)", "")
    ]
    verdict = judge(tmp_path, *(raised(rank, text) for rank, text in enumerate(texts)))
    assert verdict.culprits == [1]
    assert verdict.summary.endswith("EOFError: Ran out of input")
    assert verdict.next_step.startswith("look at the file /ckpt/__1_0.distcp")


def test_errors_that_differ_in_numbers_are_one_fault(tmp_path: Path) -> None:
    texts = {
        rank: f"RuntimeError: rank {rank}: bad pointer 0x7f{rank}a of size {100 + rank}"
        for rank in range(3)
    }
    verdict = judge(
        tmp_path,
        *(raised(rank, text) for rank, text in texts.items()),
        raised(3, "ValueError: another one", 40),
    )
    assert [(one.kind, one.culprits) for one in verdict.findings] == [
        ("dead", [0, 1, 2]),
        ("dead", [3]),
    ]
    hold("dead/errors-that-differ-in-numbers", verdict)


CLOSED = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    " [127.0.0.1]:3211{}"
)


@pytest.mark.parametrize(("ranks", "culprits"), [([0, 1, 3], [2]), ([0, 1, 2], []), ([0, 4], [])])
def test_of_ranks_whose_connection_was_closed_the_one_without_a_line_is_the_suspect(
    tmp_path: Path, ranks: list[int], culprits: list[int]
) -> None:
    verdict = judge(tmp_path, *(raised(rank, CLOSED.format(rank)) for rank in ranks))
    assert (verdict.kind, verdict.culprits, verdict.victims, verdict.confidence) == (
        "dead",
        culprits,
        ranks,
        "low",
    )
    assert len(verdict.findings) == 1
    hold(f"dead/connection-closed-on-{len(ranks)}-of-{ranks[-1] + 1}", verdict)


def test_a_data_loaders_worker_that_was_killed(tmp_path: Path) -> None:
    verdict = judge(
        tmp_path,
        raised(1, "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "),
        "[rank0]: step 1\n",
    )
    assert (verdict.kind, verdict.culprits) == ("dead", [1])
    hold("dead/data-loaders-worker-killed", verdict)


@pytest.mark.parametrize("prefix", ["[default1]:[rank1]: ", "[rank1]: "])
def test_the_receiver_of_a_message_that_is_too_large_need_not_be_wrong(
    tmp_path: Path, prefix: str
) -> None:
    enforce = (
        "[enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <="
        " op.nbytes. 8 vs 4"
    )
    lines = [
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        f"  what():  {enforce}",
    ]
    verdict = judge(tmp_path, *(f"{prefix}{line}\n" for line in lines), raised(0, CLOSED.format(0)))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("mismatch/shape", [], [1])
    hold("mismatch/shape-told-by-gloo", verdict)


def not_passed(*ranks: int) -> str:
    named = f"Ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"Rank {ranks[0]}"
    return (
        f"RuntimeError: [Rank 0]: {named} failed to pass monitoredBarrier in 4000 ms"
        "\n Original exception: \n[/gloo/unbound_buffer.cc:82] Timed out waiting 4000ms for recv"
        " operation to complete"
    )


def passed(rank: int) -> str:
    return (
        f"RuntimeError: Rank {rank} successfully reached monitoredBarrier, but received errors"
        " while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank."
    )


@pytest.mark.parametrize(
    ("ranks", "culprits", "victims", "named"),
    [
        ({0: not_passed(2), 1: passed(1), 3: passed(3)}, [2], [0, 1, 3], "rank 2 did"),
        ({0: not_passed(2, 3), 1: passed(1)}, [2, 3], [0, 1], "ranks 2-3 did"),
        # of a smaller group
        ({0: not_passed(1), 4: passed(2)}, [], [0, 4], "rank 1 of their group did"),
    ],
)
def test_ranks_that_a_monitored_barrier_names(
    tmp_path: Path, ranks: dict[int, str], culprits: list[int], victims: list[int], named: str
) -> None:
    verdict = judge(tmp_path, *(raised(rank, text) for rank, text in ranks.items()))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", culprits, victims)
    assert verdict.summary.startswith(f"{named} not come to the monitored barrier at train.py:26")
    hold(f"missing/monitored-barrier-of-{'-'.join(map(str, ranks))}", verdict)
    assert [finding.root_cause for finding in verdict.findings].count(True) == 1


def test_the_ranks_that_passed_the_barrier_name_nobody(tmp_path: Path) -> None:
    verdict = judge(tmp_path, *(raised(rank, passed(rank)) for rank in (1, 3)))
    assert verdict.culprits == []
    assert "monitored barrier" not in verdict.summary
