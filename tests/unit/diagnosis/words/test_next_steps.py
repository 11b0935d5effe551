"""The recommended step never names what the evidence has excluded."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from builders import Die, Job, Stay, Step, all_reduce, recv
from goldens import hold
from judging import judge

from commlens.diagnosis.words.next_steps import recomputed_step
from commlens.model.cause import CollectiveRef, Recomputed
from commlens.model.collective import Frame, FrameKind, State
from commlens.model.ranklog import End, Observation
from commlens.model.worlds import JobWorld, Worlds
from commlens.text import naming_worlds


def training(fault: object = None, extra: bool = False, backend: str = "gloo") -> object:
    def program(job: Job, rank: int) -> Iterator[object]:
        group = job.group("0", range(job.size), "default_pg", backend)
        for i in range(5):
            if fault is not None and (rank, i) == (1, 4):
                yield fault
            yield all_reduce(group, line=20)
            yield Step()
        if extra and rank == 0:
            yield all_reduce(group, line=70, function="evaluate")

    return program


@pytest.mark.parametrize("size", [2, 4])
def test_one_more_iteration_is_not_advised_where_the_line_is_new(size: int) -> None:
    verdict = judge(Job(size).run(training(extra=True)).logs())
    assert "iterations" not in verdict.next_step
    hold(f"missing/evaluates-alone-of-{size}", verdict)


def test_fewer_steps_are_told() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(6):
            if rank != 1 or i < 4:
                yield Step()
            if rank != 1 or i < 5:
                yield all_reduce(job.world, line=20)

    verdict = judge(Job(4).run(program).logs())
    hold("missing/fewer-steps", verdict)


@pytest.mark.parametrize(
    ("hosts", "backend", "device", "said", "not_said"),
    [
        (["n1"], "gloo", "cpu", "py-spy dump --native", "link counters"),
        (["n1", "n2"], "gloo", "cpu", "between n1, n2", "NCCL"),
        (["n1"], "nccl", "cuda", "NCCL_DEBUG", "link counters"),
        (["n1", "n2"], "nccl", "cuda", "NCCL_DEBUG=INFO, dmesg, link counters", "GLOO"),
    ],
)
def test_no_network_within_a_host_and_no_other_backends_log(
    hosts: list[str], backend: str, device: str, said: str, not_said: str
) -> None:
    logs = Job(4).run(training(backend=backend)).logs()
    for log in logs:
        log.host, log.closed = hosts[log.rank % len(hosts)], False
        log.observation = Observation(End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False)
        for op in log.collectives:
            op.channel = msgspec.structs.replace(op.channel, device=device)
        op.state, op.done_ns, op.wait_ended_ns = State.ISSUED, 0, 0
    verdict = judge(logs)
    assert verdict.kind == "stuck-inside"
    assert said in verdict.next_step and not_said not in verdict.next_step


@pytest.mark.parametrize(
    ("seen", "said", "not_said"),
    [
        (Observation(End.KILLED, signal="SIGKILL"), "dmesg", "crashed"),
        (
            Observation(End.KILLED, signal="SIGKILL", oom_killed=False),
            "for the sender of the signal",
            "dmesg",
        ),
        (Observation(End.KILLED, signal="SIGBUS"), "before it crashed", "sender"),
        (Observation(End.KILLED, signal="SIGSEGV"), "before it crashed", "aborted"),
        (Observation(End.KILLED, signal="SIGABRT"), "before it aborted", "sender"),
    ],
)
def test_the_signal_decides_where_to_look(seen: Observation, said: str, not_said: str) -> None:
    verdict = judge(Job(4).run(training(Die(seen))).logs())
    assert said in verdict.next_step and not_said not in verdict.next_step


@pytest.mark.parametrize(
    ("function", "inner", "said"),
    [
        ("load_batch", (), "look at load_batch (train.py:57) on rank 1"),
        ("save_checkpoint", (), "look at save_checkpoint (train.py:57) on rank 1"),
        (
            "step",
            ("/env/lib/torch/utils/data/dataloader.py", 700, "_next_data"),
            "and at the storage and the workers of its data loader",
        ),
        (
            "step",
            ("/env/lib/torch/serialization.py", 70, "save"),
            "the file system that it writes to",
        ),
    ],
)
def test_only_a_librarys_frame_tells_a_cause(
    function: str, inner: tuple[str, int, str], said: str
) -> None:
    """A function's name is the user's: load_batch may as well compute."""
    frames = (Frame("/home/me/train.py", 57, function), Frame("/home/me/train.py", 90, "main"))
    library = (Frame(*inner, FrameKind.TORCH),) if inner else ()
    seen = Observation(End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False)
    logs = Job(4).run(training(Stay(57, function, seen, (*library, *frames)))).logs()
    verdict = judge(logs)
    if verdict.kind != "waiting":  # of a checkpoint that is written, none is sure
        assert verdict.next_step.endswith(said)
        assert ("storage" in verdict.next_step) == ("storage" in said)


def test_no_advice_about_a_job_that_is_being_ended() -> None:
    """Ctrl-C ends the ranks one by one: there is no process left to watch or to take a stack of."""
    logs = Job(4).run(training(Stay(57, "tune", Observation(End.RUNNING)))).logs()
    running = judge(logs)
    assert "commlens dump" in (running.findings[0].would_raise_confidence or "")
    logs[1].exception, logs[1].observation = (
        "KeyboardInterrupt",
        Observation(End.KILLED, signal="SIGINT"),
    )
    ended = judge(logs)
    assert (ended.culprits, ended.source) == (running.culprits, running.source)
    assert "py-spy" not in ended.next_step
    hold("missing/not-observed-and-ended", ended)


def test_a_debugger_is_not_resumed_by_a_signal() -> None:
    for state, said in (("t", "detach the debugger from rank 1"), ("T", "kill -CONT")):
        stopped = Stay(
            61, "tune", Observation(End.RUNNING, window_s=5, proc_state=state, stopped_fraction=1.0)
        )
        assert said in judge(Job(4).run(training(stopped)).logs()).next_step


def test_ranks_that_only_receive_are_told_to_send() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        yield recv(job.world, 1 - rank, line=30 + rank)

    verdict = judge(Job(2).run(program).logs())
    assert (verdict.kind, verdict.culprits) == ("cycle", [])
    hold("cycle/all-receive", verdict)


def test_the_peer_of_a_recomputed_message_is_named_by_its_world() -> None:
    again = Recomputed(0, CollectiveRef("recv", 2, peer=2), 1, "train.py:13")
    worlds = Worlds((JobWorld("trainer", 0, 2), JobWorld("rollout", 2, 2)))
    with naming_worlds(worlds):
        assert "let rollout 0 send again" in recomputed_step(again)
    assert "let rank 2 send again" in recomputed_step(again)
