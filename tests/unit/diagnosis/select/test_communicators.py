"""What NCCL told becomes part of the records of torch's calls, and groups of its own for all other
communicators. A hang in one of these is told by rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from builders import Job, Stay, all_reduce
from judging import judge

from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.select.communicators import hashes_of, with_communicators
from commlens.model.cause import Missing, StalledTransfer, StuckInside
from commlens.model.collective import (
    Channel,
    Collective,
    Frame,
    FrameKind,
    LearnedHow,
    ProcessGroup,
    State,
)
from commlens.model.nccl import NcclCommunicator, NcclOp, NcclRecord, NcclTransfer
from commlens.model.ranklog import RankLog

S = 1_000_000_000
SYNC = Stay(
    40,
    "decode",
    frames=(Frame("/site/torch/cuda/__init__.py", 900, "synchronize", FrameKind.TORCH),),
)
SLEEP = Stay(25, "wait_for_batch")


def training(last: Mapping[int, Stay], size: int = 4) -> list[RankLog]:
    """Ranks that do three all_reduces over gloo, and then stand still: at a line of their own, or
    where they wait for their devices.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, 100, line=10)
        yield last.get(rank, SYNC)

    return Job(size).run(program).logs()


def op(number: int, at_ns: int, *, thread: int = 77, **more: Any) -> NcclOp:
    return NcclOp(
        number,
        "AllReduce",
        "ncclBfloat16",
        4096,
        thread=thread,
        called_ns=at_ns,
        returned_ns=at_ns + 2_000,
        launched_ns=at_ns + 3_000,
        channels=2,
        **more,
    )


def told(
    log: RankLog, ops: list[NcclOp], *, hash: str = "ab12", called: int = -1, **more: Any
) -> RankLog:
    """Give a log a communicator of all its job's ranks with these operations."""
    number = max((one.number for one in ops), default=0) if called < 0 else called
    given = {"hash": hash, "name": "", "size": log.world_size, "rank": log.rank, "nodes": 1} | more
    comm = NcclCommunicator(**given, collectives=number, ops=tuple(ops))
    before = log.nccl.communicators if log.nccl is not None else ()
    level = "kernels" if any(one.with_kernels for one in ops) else "calls"
    record = NcclRecord(log.pid, 1, level, communicators=(*before, comm))
    return msgspec.structs.replace(log, nccl=record)


def hung(counts: Mapping[int, int], last: Mapping[int, Stay], **more: Any) -> list[RankLog]:
    """Ranks that have called so many collectives of a communicator past torch."""
    logs = training(last)
    start = logs[0].captured_ns - 29 * S
    return [
        told(log, [op(n, start + n * 1000_000, **more) for n in range(1, counts[log.rank] + 1)])
        for log in logs
    ]


def test_a_rank_that_never_called_it_is_named():
    verdict = judge(hung({0: 7, 1: 7, 2: 7, 3: 6}, {3: SLEEP}))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [3], [0, 1, 2])
    assert "rank 3 never reached all_reduce #7 of group NCCL communicator ab12" in verdict.summary
    assert verdict.confidence == "low", "nothing tells whether the devices wait"
    cause = verdict.cause
    assert isinstance(cause, Missing)


def test_with_kernels_it_is_certain_that_the_others_wait():
    logs = hung({0: 7, 1: 7, 2: 7, 3: 6}, {3: SLEEP}, with_kernels=True, stopped_on=2, started_on=2)
    for at, log in enumerate(logs[:3]):
        comm = log.nccl.communicators[0]
        ops = [*comm.ops[:-1], msgspec.structs.replace(comm.ops[-1], stopped_on=0)]
        logs[at] = told(msgspec.structs.replace(log, nccl=None), ops, finished=6)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("missing", [3])
    assert verdict.confidence != "low"


def test_a_rank_that_made_the_communicator_and_called_nothing():
    verdict = judge(hung({0: 1, 1: 1, 2: 1, 3: 0}, {3: SLEEP}))
    assert (verdict.kind, verdict.culprits) == ("missing", [3])
    assert "never reached all_reduce #1" in verdict.summary


def test_nothing_is_said_of_a_mere_call():
    """All have called the same: nothing tells whether their devices are through."""
    logs = hung(dict.fromkeys(range(4), 7), dict.fromkeys(range(4), SLEEP))
    verdict = judge(logs)
    assert not verdict.culprits and not verdict.is_fault
    verdict = judge(hung(dict.fromkeys(range(4), 7), {}))
    assert (verdict.kind, verdict.culprits) == ("waiting", [])
    assert "is not known" in verdict.summary
    assert "nccl_profiler: kernels" in verdict.findings[0].explanation


def test_what_past_torch_was_called_is_counted():
    verdict = judge(hung({0: 7, 1: 7, 2: 7, 3: 6}, {3: SLEEP}))
    assert "Ranks 0-3 called NCCL past torch: 6 to 7 calls of each are recorded." in (
        verdict.missing_evidence
    )


def test_what_the_plugin_did_not_note_is_said():
    logs = training({0: SLEEP})
    logs[0].nccl = NcclRecord(1000, 1, nccl_version=23203, is_other_nccl=True)
    logs[1].nccl = NcclRecord(1001, 1, lost=12)
    said = judge(logs).missing_evidence
    assert (
        "Rank 0: NCCL 2.32.3 tells nothing, because commlens's plugin knows only 2.27 to 2.30."
    ) in said
    assert (
        "Rank 1: 12 events of NCCL could not be kept, because the plugin's tables were full."
    ) in said


DONE = {"with_kernels": True, "started_on": 2, "stopped_on": 2}


def replaying(
    counts: Mapping[int, int], last: Mapping[int, Stay], *, standing: bool = True, **more: Any
) -> list[RankLog]:
    """Ranks whose graphs have launched so many collectives of a communicator, each of which called
    two before; the newest one that a rank launched stands.
    """
    logs = training(last)
    start = logs[0].captured_ns - 29 * S
    made = []
    for log in logs:
        ops = [op(n, start + n * 1_000_000, stopped_ns=start + S, **DONE) for n in (1, 2)]
        ops.insert(0, op(1, start, captured=True))
        count = counts[log.rank]
        for n in range(max(1, count - 63), count + 1):
            stands = standing and n == max(counts.values())
            state = DONE | ({"stopped_on": 0} if stands else {"stopped_ns": start + S})
            ops.append(op(n, start + n * 1_000_000, captured=True, is_replay=True, **state))
        made.append(told(log, ops, called=2, finished=2, replayed=count, **more))
    return made


def test_a_rank_whose_graph_did_not_launch_it_is_named():
    verdict = judge(replaying({0: 301, 1: 301, 2: 301, 3: 300}, {3: SLEEP}))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [3], [0, 1, 2])
    group = "group NCCL communicator ab12 in CUDA graphs"
    assert f"rank 3 never reached all_reduce #301 of {group}" in verdict.summary
    assert verdict.confidence != "low"


def test_a_rank_that_never_replayed_is_named():
    verdict = judge(replaying({0: 1, 1: 1, 2: 1, 3: 0}, {3: SLEEP}))
    assert (verdict.kind, verdict.culprits) == ("missing", [3])
    assert "never reached all_reduce #1 of group" in verdict.summary


@pytest.mark.parametrize("count", [1, 300])
def test_replays_that_have_ended_are_no_fault(count: int):
    verdict = judge(replaying(dict.fromkeys(range(4), count), {3: SLEEP}, standing=False))
    assert not verdict.culprits and not verdict.is_fault


def test_a_rank_that_is_told_only_of_calls_is_not_blamed_for_graphs():
    logs = replaying({0: 9, 1: 9, 2: 9, 3: 0}, {3: SLEEP})
    logs[3].nccl = msgspec.structs.replace(logs[3].nccl, level="calls")
    verdict = judge(logs)
    assert verdict.culprits == []
    assert "member 3" in " ".join(verdict.missing_evidence)


def mixing(calls: Mapping[int, tuple[int, int, bool]], **changed: Any) -> list[RankLog]:
    """Ranks with so many calls and launches, the newest of them a call or not; the one with number
    20 of both together stands, changed on rank 1.
    """
    logs = replaying(dict.fromkeys(range(4), 0), {0: SLEEP})
    start = logs[0].captured_ns - 29 * S
    for at, log in enumerate(logs):
        called, launched, is_call = calls[at]
        ops = [
            op(n, start, stopped_ns=start + n, started_ns=n, **DONE) for n in range(1, called + 1)
        ]
        ops += [
            op(n, start, stopped_ns=start + 9, started_ns=n, captured=True, is_replay=True, **DONE)
            for n in range(1, launched + 1)
        ]
        newest = called - 1 if is_call else len(ops) - 1
        stands = called + launched == 20
        more = {"stopped_ns": start + S, "started_ns": start + S}
        more |= {"stopped_on": 0, "stopped_ns": 0} if stands else {}
        more |= changed if at == 1 else {}
        ops[newest] = msgspec.structs.replace(ops[newest], **more)
        finished = called - (is_call and stands)
        bare = msgspec.structs.replace(log, nccl=None)
        logs[at] = told(bare, ops, called=called, finished=finished, replayed=launched)
    return logs


def test_calls_in_place_of_launches_are_counted_together():
    """Rank 1 called twice what the others' graphs launched, and rank 0 did not come to the next."""
    calls = {0: (3, 16, False), 1: (6, 14, True), 2: (4, 16, True), 3: (4, 16, True)}
    verdict = judge(mixing(calls))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [0], [1, 2, 3])
    assert "rank 0 never reached all_reduce #20 of group NCCL communicator ab12" in verdict.summary


def test_a_call_in_place_of_a_launch_of_another_size():
    calls = {0: (3, 17, False), 1: (4, 16, True), 2: (3, 17, False), 3: (3, 17, False)}
    assert judge(mixing(calls)).culprits == [], "they agree"
    verdict = judge(mixing(calls, count=48))
    assert (verdict.kind, verdict.culprits) == ("mismatch/shape", [1])


@pytest.mark.parametrize("why", ["lost", "torn", "without kernels", "which is first", "no launch"])
def test_what_is_not_whole_is_not_counted_together(why: str):
    calls = {0: (3, 16, False), 1: (6, 14, True), 2: (4, 16, True), 3: (4, 16, True)}
    logs = mixing(calls)
    for log in logs[1:]:
        (comm,) = log.nccl.communicators
        ops = list(comm.ops)
        if why == "without kernels":
            ops[0] = msgspec.structs.replace(ops[0], with_kernels=False)
        if why == "no launch":
            ops = [
                msgspec.structs.replace(each, started_on=0) if each.is_replay else each
                for each in ops
            ]
        if why == "which is first":
            at = len(ops) - 1
            for n in (comm.collectives - 1, at):
                ops[n] = msgspec.structs.replace(ops[n], started_on=0, stopped_on=0)
        changed = (msgspec.structs.replace(comm, ops=tuple(ops)),)
        counts = {why: 1} if why in ("lost", "torn") else {}
        log.nccl = msgspec.structs.replace(log.nccl, communicators=changed, **counts)
    assert judge(logs).culprits == []


def test_graphs_whose_kernels_are_never_told_of_are_no_fault():
    """As of an NCCL that tells of a launch only as a graph is captured."""
    logs = replaying(dict.fromkeys(range(4), 2), {})
    for log in logs:
        comm = log.nccl.communicators[0]
        ops = tuple(
            msgspec.structs.replace(each, started_on=0, stopped_on=0) if each.is_replay else each
            for each in comm.ops
        )
        changed = msgspec.structs.replace(comm, ops=ops)
        log.nccl = msgspec.structs.replace(log.nccl, communicators=(changed,))
    verdict = judge(logs)
    assert not verdict.culprits and not verdict.is_fault


def test_ranks_that_replay_other_graphs_are_told():
    logs = replaying(dict.fromkeys(range(4), 8), {})
    record = logs[2].nccl
    comm = record.communicators[0]
    ops = (*comm.ops[:-1], msgspec.structs.replace(comm.ops[-1], count=64))
    logs[2].nccl = msgspec.structs.replace(
        record, communicators=(msgspec.structs.replace(comm, ops=ops),)
    )
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("mismatch/shape", [2])
    assert "all_reduce #8 of group NCCL communicator ab12 in CUDA graphs" in verdict.summary


@pytest.mark.parametrize(
    ("changed", "kind"),
    [({"count": 64}, "mismatch/shape"), ({"func": "AllGather"}, "mismatch/op")],
)
def test_calls_that_differ_are_told(changed: dict[str, Any], kind: str):
    logs = hung(dict.fromkeys(range(4), 7), {}, **DONE)
    for at, log in enumerate(logs):
        comm = log.nccl.communicators[0]
        more = {"stopped_on": 0, **(changed if at == 1 else {})}
        ops = [*comm.ops[:-1], msgspec.structs.replace(comm.ops[-1], **more)]
        logs[at] = told(msgspec.structs.replace(log, nccl=None), ops, finished=6)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == (kind, [1])
    assert "of group NCCL communicator ab12" in verdict.summary


@pytest.mark.parametrize("count", [7, 1])
def test_a_member_without_a_record_is_out_of_sight_and_not_blamed(count: int):
    logs = hung(dict.fromkeys(range(4), count), {}, **DONE)
    for at, log in enumerate(logs):
        comm = log.nccl.communicators[0]
        ops = [*comm.ops[:-1], msgspec.structs.replace(comm.ops[-1], stopped_on=0)]
        logs[at] = told(msgspec.structs.replace(log, nccl=None), ops, finished=count - 1, size=5)
    verdict = judge(logs)
    assert verdict.culprits == []
    assert "1 of 5 members of group NCCL communicator ab12" in " ".join(verdict.missing_evidence)
    assert "member 4" in " ".join(verdict.missing_evidence)


def test_a_rank_whose_plugin_told_nothing_is_not_presumed_to_be_missing():
    logs = hung(dict.fromkeys(range(4), 7), {3: SLEEP}, **DONE)
    logs[3].nccl = None
    verdict = judge(logs)
    assert verdict.culprits == []
    assert "member 3" in " ".join(verdict.missing_evidence)


def kernels(
    started: Mapping[int, int], transfers: Mapping[int, tuple[NcclTransfer, ...]] = {}
) -> list[RankLog]:
    logs = training({})
    at_ns = logs[0].captured_ns - 29 * S
    return [
        told(
            log,
            [
                op(1, at_ns, with_kernels=True, started_on=2, stopped_on=2, stopped_ns=at_ns + S),
                op(
                    2,
                    at_ns + S,
                    with_kernels=True,
                    started_on=started[log.rank],
                    transfers=transfers.get(log.rank, ()),
                ),
            ],
            finished=1,
            nodes=2,
        )
        for log in logs
    ]


def test_a_kernel_that_never_started():
    verdict = judge(kernels({0: 2, 1: 2, 2: 1, 3: 0}))
    assert (verdict.kind, verdict.culprits) == ("stuck-inside", [3])
    assert "rank 3 enqueued all_reduce #2" in verdict.summary
    cause = verdict.cause
    assert isinstance(cause, StuckInside)
    assert (cause.not_started_on, cause.started_on) == ([3], [0, 1, 2])
    most = judge(kernels({0: 2, 1: 0, 2: 0, 3: 0}))
    assert (most.kind, most.culprits) == ("stuck-inside", [])


def ring(
    done: Mapping[int, int], state: str = "in-network", **more: Any
) -> dict[int, tuple[NcclTransfer, ...]]:
    """Both sides of each transfer of a ring, by the sender's steps."""

    def side(rank: int) -> tuple[NcclTransfer, ...]:
        before, after = (rank - 1) % 4, (rank + 1) % 4
        return (
            NcclTransfer(after, 2, True, 64, done[rank], state, **more),
            NcclTransfer(before, 2, False, 64, done[before], "waits-for-data", **more),
        )

    return {rank: side(rank) for rank in range(4)}


def test_the_transfer_that_stands():
    verdict = judge(kernels(dict.fromkeys(range(4), 2), ring({0: 45, 1: 44, 2: 43, 3: 41})))
    cause = verdict.cause
    assert isinstance(cause, StuckInside) and verdict.kind == "stuck-inside"
    assert cause.transfer == StalledTransfer(3, 0, 2, 41, 64, "in-network", "waits-for-data")
    assert verdict.culprits == [], "a link has two ends"
    assert (
        "NCCL's transfer from rank 3 to rank 0 stands at step 41 of 64, on channel 2"
        in verdict.summary
    )
    assert "The collective's kernel has started on all of these ranks, and ended on none." in (
        verdict.findings[0].evidence
    )
    assert any("handed its data to the network" in said for said in verdict.findings[0].evidence)


@pytest.mark.parametrize(
    "why", ["equal", "one side", "moves", "no such peer", "more steps", "twice"]
)
def test_no_transfer_is_named_without_evidence(why: str):
    transfers = ring({0: 45, 1: 41 if why == "equal" else 44, 2: 43, 3: 41})
    if why == "one side":
        del transfers[3]
    if why == "no such peer":
        transfers[3] = (msgspec.structs.replace(transfers[3][0], peer=9), transfers[3][1])
    if why == "more steps":
        transfers[0] = tuple(msgspec.structs.replace(each, steps=96) for each in transfers[0])
    if why == "twice":
        transfers[0] += (msgspec.structs.replace(transfers[0][0], done=60),)
    logs = kernels(dict.fromkeys(range(4), 2), transfers)
    if why == "moves":
        logs = kernels(
            dict.fromkeys(range(4), 2),
            ring({0: 45, 1: 44, 2: 43, 3: 41}, moved_ns=logs[0].captured_ns - 1000),
        )
    cause = diagnose_logs(logs).cause
    assert isinstance(cause, StuckInside) and cause.transfer is None


def on_device(log: RankLog, *, in_flight: bool) -> RankLog:
    """A log whose collectives are calls that enqueue on a device, of 1 ms each."""
    group = ProcessGroup("7", tuple(range(log.world_size)), "dp", "nccl")
    channel = Channel(group, "cuda", runs_ahead=True)
    ops: list[Collective] = []
    for record in log.collectives:
        changed = msgspec.structs.replace(
            record,
            channel=channel,
            issue_thread=77,
            returned_ns=record.announced_ns + S // 1000,
            state=State.COMPLETED,
        )
        ops.append(changed)
    if in_flight:
        ops[-1].state, ops[-1].learned_how, ops[-1].done_ns = State.ISSUED, LearnedHow.NOT_YET, 0
    return msgspec.structs.replace(log, collectives=ops)


def in_calls(log: RankLog, **more: Any) -> list[NcclOp]:
    return [
        op(n, record.announced_ns + 50_000, **more) for n, record in enumerate(log.collectives, 1)
    ]


@pytest.mark.parametrize("name", ["", "7", "dp:7", "else"])
def test_a_call_of_torch_is_one_record(name: str):
    log = on_device(training({})[0], in_flight=True)
    ops = in_calls(log, with_kernels=True, started_on=1)
    (joined,) = with_communicators([told(log, ops, name=name)])
    assert len(joined.collectives) == len(log.collectives) and joined.issued == log.issued
    assert [one.nccl for one in joined.collectives] == [(one,) for one in ops]
    assert joined.collectives[-1].learned_how is LearnedHow.STARTED
    assert joined.collectives[0].state is State.COMPLETED, "what torch knows stays"


def test_the_end_of_a_kernel_completes_its_record():
    log = on_device(training({})[0], in_flight=True)
    done_ns = log.collectives[-1].announced_ns + S
    ops = in_calls(
        log, with_kernels=True, started_on=2, stopped_on=2, stopped_ns=done_ns, device_ns=9
    )
    (joined,) = with_communicators([told(log, ops)])
    last = joined.collectives[-1]
    assert (last.state, last.done_ns) == (State.COMPLETED, done_ns)


@pytest.mark.parametrize("stopped_on", [0, 1, 2])
def test_a_replay_is_not_what_a_captured_call_did(stopped_on: int):
    """The record is of the capture, perhaps hours ago."""
    log = on_device(training({})[0], in_flight=False)
    for record in log.collectives:
        record.captured, record.state = True, State.UNKNOWN
    ops = in_calls(log, captured=True, with_kernels=True, started_on=2, stopped_on=stopped_on)
    (joined,) = with_communicators([told(log, ops)])
    assert [one.nccl for one in joined.collectives] == [(one,) for one in ops]
    assert {(one.state, one.done_ns) for one in joined.collectives} == {
        (State.UNKNOWN, record.done_ns) for record in log.collectives
    }


@pytest.mark.parametrize(
    ("numbers", "called", "ends"),
    [
        (range(1, 9), 8, True),
        (range(9, 17), 16, True),
        (range(10, 17), 16, False),  # the first one is overwritten
        ([9, 10, 12, 13], 13, False),
        (range(9, 15), 16, False),
    ],
)
def test_a_batch_of_which_a_part_is_lost_is_not_completed(
    numbers: list[int], called: int, ends: bool
):
    log = on_device(training({})[0], in_flight=True)
    at_ns = log.collectives[-1].announced_ns + 50_000
    done = {"with_kernels": True, "started_on": 2, "stopped_on": 2, "stopped_ns": at_ns + S}
    ops = [op(n, at_ns + n, is_message=True, **done) for n in numbers]
    if numbers[0] > 1:
        ops.insert(0, op(8, log.collectives[0].announced_ns, is_message=True, **done))
    (joined,) = with_communicators([told(log, ops, called=0, messages=called)])
    assert len(joined.collectives[-1].nccl) == len(numbers)
    assert (joined.collectives[-1].state is State.COMPLETED) == ends
    waiting = [msgspec.structs.replace(each, started_on=0, stopped_on=0) for each in ops]
    (joined,) = with_communicators([told(log, waiting, called=0, messages=called)])
    how = LearnedHow.ENQUEUED if ends else LearnedHow.NATIVE_RECORDER
    assert joined.collectives[-1].learned_how is how, "what is lost may have started"


def test_calls_of_another_thread_time_or_size_are_not_torchs():
    log = on_device(training({})[0], in_flight=False)
    for changed in (
        {"thread": 78},
        {"called_ns": log.collectives[-1].returned_ns + 5_000_000},
    ):
        ops = [msgspec.structs.replace(in_calls(log)[-1], **changed)]
        (joined,) = with_communicators([told(log, ops)])
        assert len(joined.collectives) == len(log.collectives) + 1, changed
    (joined,) = with_communicators([told(log, in_calls(log), size=8)])
    assert len(joined.collectives) == 2 * len(log.collectives)
    made = joined.collectives[-1].channel
    assert made.group.hand_made is not None and made.library == "NCCL past torch"
    assert [one.index for one in joined.collectives] == list(range(1, 7))


def test_an_operation_of_too_many_channels_has_not_ended():
    """Its counts stand at 255, perhaps since its first kernel has ended."""
    log = training({})[0]
    at_ns = log.captured_ns - 29 * S
    ended = {"with_kernels": True, "started_on": 255, "stopped_on": 255, "stopped_ns": at_ns + S}
    many = msgspec.structs.replace(op(2, at_ns, **ended), channels=255)
    ops = [op(1, at_ns, with_kernels=True), many]
    (joined,) = with_communicators([told(log, ops, finished=2)])
    assert [each.state for each in joined.collectives[-2:]] == [State.COMPLETED, State.ISSUED]
    assert not many.has_stopped


def test_only_the_newest_call_of_a_thread_may_go_on():
    log = on_device(training({})[0], in_flight=True)
    later_ns = [record.announced_ns + 2_000_000 for record in log.collectives]
    for record in log.collectives:
        record.returned_ns = 0
    (joined,) = with_communicators([told(log, [op(1, later_ns[0]), op(2, later_ns[-1])])])
    placed = [one for one in joined.collectives if one.nccl]
    assert [one.nccl[0].number for one in placed] == [2]


def test_what_one_ranks_records_place_is_torchs_on_all_ranks():
    """The other rank's records of the same calls are overwritten."""
    logs = [on_device(log, in_flight=False) for log in training({}, 2)]
    logs = [told(log, in_calls(log)) for log in logs]
    logs[1].collectives = []
    assert [len(log.collectives) for log in with_communicators(logs)] == [3, 0]


def test_calls_before_the_oldest_record_tell_nothing():
    log = on_device(training({})[0], in_flight=False)
    ops = [op(1, log.collectives[0].announced_ns - S)]
    log.issued = 50
    (joined,) = with_communicators([told(log, ops)])
    assert joined.collectives == log.collectives


def test_a_communicator_without_a_collective_is_no_group():
    """Torch makes one for each pair of ranks that exchange messages."""
    message = msgspec.structs.replace(op(1, 5 * S), is_message=True)
    logs = [told(log, [message], called=0) for log in training({})]
    assert with_communicators(logs) == logs


@pytest.mark.parametrize("more", [{"rank": 9}, {"rank": -1}, {"size": 1 << 21, "rank": 0}])
def test_a_communicator_without_a_sound_place_is_left_out(more: dict[str, int]):
    """The file may come from anywhere."""
    log = on_device(training({})[0], in_flight=False)
    ops = [*in_calls(log), op(9, log.captured_ns)]
    assert with_communicators([told(log, ops, **more)])[0].collectives == log.collectives


def test_ended_and_lone_communicators_are_left_out():
    log = training({})[0]
    for more in ({"closed_ns": 5}, {"size": 1, "rank": 0}):
        (joined,) = with_communicators([told(log, [op(1, log.captured_ns)], **more)])
        assert joined.collectives == log.collectives


def test_the_communicators_of_ranks_by_hash():
    logs = {log.rank: told(log, [], hash="c0ffee") for log in training({})}
    logs[1] = told(logs[1], [], hash="beef")  # one more
    assert hashes_of([[0, 1, 2, 3]], logs.values()) == {"c0ffee"}
    assert hashes_of([[0, 1], [1, 0, 2, 3]], logs.values()) == set()
    logs[3].nccl = None  # the others' may be of another group, with another rank
    assert hashes_of([[0, 1, 2, 3]], logs.values()) == set()
    assert hashes_of([[0, 1, 2, 3], []], []) == set()


def test_a_closed_communicator_is_no_groups_hash():
    logs = [told(log, [], hash="c0ffee", closed_ns=5) for log in training({})]
    assert hashes_of([[0, 1, 2, 3]], logs) == set()
