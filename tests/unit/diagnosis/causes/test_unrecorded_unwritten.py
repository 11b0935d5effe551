"""Ranks that wait for a key of the job's store."""

from __future__ import annotations

import msgspec
import pytest
from builders import MS, START, S
from goldens import hold
from starting_ranks import WORLD, call, in_store, init, key, rank, verdict, wrote

from commlens.model.collective import Frame, FrameKind, State
from commlens.model.ops import STORE_CLIENT, STORE_SERVER
from commlens.model.ranklog import End, Observation, RankLog, StoreSeen


def test_the_rank_that_wrote_such_keys_before_is_missing() -> None:
    found = verdict(
        in_store(0, "rate-7"),
        wrote(rank(1, init(), inside=False), "rate-0"),
        rank(2, init(), inside=False),
        in_store(3, "rate-7"),
    )
    assert (found.kind, found.culprits, found.victims, found.source) == (
        "missing",
        [1],
        [0, 3],
        "train.py:57",
    )
    hold("missing/key-not-written", found)


def test_the_only_rank_that_does_not_wait_for_a_key_is_the_one_that_should_write_it() -> None:
    found = verdict(rank(0, init(), inside=False), *(in_store(n, "config") for n in (1, 2, 3)))
    assert (found.kind, found.culprits) == ("missing", [0])


def test_a_write_that_was_skipped_is_told_if_most_ranks_wait_for_it() -> None:
    writer = wrote(rank(2, init(), inside=False, issued="all_reduce"), "rate-0")
    found = verdict(in_store(0, "rate-7"), in_store(1, "rate-7"), writer, in_store(3, "rate-7"))
    assert (found.kind, found.why, found.culprits, found.victims) == (
        "missing",
        "skipped",
        [2],
        [0, 1, 3],
    )
    assert found.certain
    assert (found.source, found.cause.written_before) == ("train.py:20", True)
    assert sum(each.root_cause for each in found.findings) == 1
    hold("missing/key-skipped", found)


def test_nobody_is_blamed_if_most_ranks_are_with_the_one_that_writes() -> None:
    reducing = [rank(n, init(), inside=False, issued="all_reduce") for n in (0, 1, 2)]
    found = verdict(wrote(reducing[0], "rate-0"), *reducing[1:], in_store(3, "rate-7"))
    assert (found.kind, found.culprits) == ("cycle", [])
    hold("cycle/key-and-collective", found)


def test_a_result_of_a_command_that_was_not_sent() -> None:
    """Ranks 1 to 3 wait for the next command of rank 0, which waits for a result of rank 1."""
    workers = [rank(n, init(), inside=False, issued="broadcast", at=40) for n in (1, 2, 3)]
    for log in workers:
        op = log.collectives[0]
        log.collectives[0] = msgspec.structs.replace(
            op, args=msgspec.structs.replace(op.args, root=0)
        )
    found = verdict(in_store(0, "result-7"), wrote(workers[0], "result-0"), *workers[1:])
    assert (found.kind, found.culprits, found.victims) == ("cycle", [], [0, 1, 2, 3])
    awaited = found.cause.awaited_result
    assert (awaited.rank, awaited.writer, awaited.key) == (0, 1, "result-7")
    hold("cycle/result-of-no-command", found)


def test_nobody_is_blamed_for_a_key_of_an_unknown_writer() -> None:
    reducing = [rank(n, init(), inside=False, issued="all_reduce", at=40) for n in (0, 1, 3)]
    found = verdict(*reducing[:2], in_store(2, "config", op="store.wait"), reducing[2])
    assert (found.kind, found.culprits, found.victims, found.confidence) == (
        "missing",
        [],
        [0, 1, 2, 3],
        "low",
    )
    hold("missing/key-of-an-unknown-writer", found)


def test_ranks_that_all_wait_for_a_key_may_wait_for_another_program() -> None:
    logs = [in_store(n, "request-1") for n in range(WORLD)]
    for log in logs:
        log.stall_timeout_s = 30.0
    assert verdict(*logs).kind == "healthy"
    for log in logs:
        log.stall_timeout_s = 10.0
    assert (verdict(*logs).kind, verdict(*logs).confidence, verdict(*logs).culprits) == (
        "missing",
        "low",
        [],
    )


def test_a_rank_that_ends_without_writing_a_key() -> None:
    ended = wrote(rank(1), "rate-0")
    ended.closed, ended.observation = True, Observation(End.CLEAN, 0, ended_ns=START + 2 * S)
    found = verdict(in_store(0, "rate-7"), ended, in_store(2, "rate-7"), in_store(3, "rate-7"))
    assert (found.kind, found.why, found.culprits) == ("missing", "finished", [1])
    hold("missing/finished-without-writing-a-key", found)


def test_a_writer_that_has_waited_for_less_than_the_others_is_in_the_cycle() -> None:
    writer = wrote(rank(2, init(), inside=False, issued="all_reduce"), "rate-0")
    op = writer.collectives[0]
    op.announced_ns = op.entered_ns = op.returned_ns = op.wait_began_ns = writer.captured_ns - MS
    found = verdict(in_store(0, "rate-7"), in_store(1, "rate-7"), writer, in_store(3, "rate-7"))
    assert (found.why, found.culprits, found.source) == ("skipped", [2], "train.py:20")


def test_a_rank_whose_other_threads_go_on_is_not_stuck_in_the_store() -> None:
    logs = [rank(n, init(), inside=False, issued="all_reduce") for n in range(WORLD)]
    for log in logs:
        log.stall_timeout_s = 10.0
        log.store_wait = key("store.get", "shutdown", 30, State.ISSUED)
        log.store_wait.issue_thread = log.pid
        op = log.collectives[0]
        op.state, op.issue_thread, op.announced_ns = (
            State.COMPLETED,
            log.pid + 1,
            log.captured_ns - MS,
        )
    assert verdict(*logs).kind == "healthy"


def in_constructor(number: int, *, listens: bool | None = False, server: bool = False) -> RankLog:
    log = in_store(number, "localhost:29600", op=STORE_SERVER if server else STORE_CLIENT)
    assert log.store_wait is not None
    log.store_wait.module = "3 clients" if server else None
    if listens is not None:
        seen = StoreSeen("localhost:29600", listens, agent=False)
        log.observation = msgspec.structs.replace(log.observation, store=seen)
    return log


def test_the_only_rank_in_no_call_is_to_make_the_store_that_a_client_waits_for() -> None:
    inside = rank(0, init(), inside=False, issued="all_reduce")
    late = rank(1, init(), inside=False)
    found = verdict(inside, late, in_constructor(2), in_constructor(3))
    assert (found.kind, found.culprits, found.victims) == ("missing", [1], [0, 2, 3])
    assert sum(each.root_cause for each in found.findings) == 1
    hold("missing/store-not-made", found)
    late.closed, late.observation = True, Observation(End.CLEAN, 0, ended_ns=START + 2 * S)
    hold(
        "missing/finished-without-making-a-store",
        verdict(late, in_constructor(2), in_constructor(3), inside),
    )


@pytest.mark.parametrize("listens", [False, True, None])
def test_nobody_is_blamed_for_a_store_that_another_process_may_make(listens: bool | None) -> None:
    reducing = [rank(n, init(), inside=False, issued="all_reduce") for n in (0, 1, 3)]
    client = in_constructor(2, listens=listens)
    client.stall_timeout_s = 10.0
    found = verdict(*reducing[:2], client, reducing[2])
    kind = "waiting" if listens else "missing"  # a client tries again after a pause
    assert (found.kind, found.culprits, found.victims) == (kind, [], [0, 1, 2, 3])
    assert found.cause.listens is listens
    hold(f"missing/store-of-an-unknown-process-{listens}".lower(), found)


def test_no_rank_makes_the_store_that_torch_takes_for_the_launchers() -> None:
    """As by ``init_rpc(init_method="tcp://...")`` under torchrun."""
    logs = [in_constructor(number) for number in range(4)]
    for log in logs:
        log.stall_timeout_s = 10.0
        store = StoreSeen("localhost:29600", listens=False, agent=True)
        log.observation = msgspec.structs.replace(log.observation, store=store)
    assert not verdict(*logs).cause.agent
    for log in logs:
        frame = Frame(
            "/torch/distributed/rendezvous.py", 190, "_create_c10d_store", FrameKind.TORCH
        )
        [stack] = log.stacks
        log.stacks = [msgspec.structs.replace(stack, frames=(frame, *stack.frames))]
    found = verdict(*logs)
    assert found.culprits == [] and found.cause.agent
    hold("missing/store-of-the-launcher", found)


@pytest.mark.parametrize(
    ("stray", "culprits"), [([1], [1]), ([1, 3], []), ([0, 1, 3], [2])], ids=["1", "tie", "3"]
)
def test_a_rank_that_looks_for_the_store_at_another_address(
    stray: list[int], culprits: list[int]
) -> None:
    """The other members of the group wait for it where most ranks meet."""

    def logs(store: str) -> list[RankLog]:
        made = [call("new_group", range(WORLD), 10, name=f"{store}/dp") for _ in range(WORLD)]
        return [in_constructor(n) if n in stray else rank(n, init(), made[n]) for n in range(WORLD)]

    assert verdict(*logs("n03:29600")).cause.elsewhere is None
    found = verdict(*logs("n03:1"))
    assert (found.kind, found.culprits) == ("missing", culprits)
    assert found.cause.elsewhere.name == "n03:1/dp"
    if stray == [1]:
        hold("missing/store-at-another-address", found)


def test_a_client_is_not_kept_by_an_idle_rank_if_a_process_listens() -> None:
    others = [rank(n, init(), inside=False, issued="all_reduce") for n in (0, 3)]
    found = verdict(
        others[0], rank(1, init(), inside=False), in_constructor(2, listens=True), others[1]
    )
    assert [each.culprits for each in found.findings if each.root_cause] == [[1], []]


def test_localhost_is_another_store_on_each_host() -> None:
    reducing = [rank(n, init(), inside=False, issued="all_reduce") for n in (0, 1)]
    clients = [in_constructor(2, listens=False), in_constructor(3, listens=True)]
    for log, host in zip([*reducing, *clients], ("n1", "n1", "n1", "n2"), strict=True):
        log.host = host
    found = verdict(*reducing, *clients)
    assert [(one.cause.ranks, one.cause.listens) for one in found.findings if one.cause] == [
        ([2], False),
        ([3], True),
    ]
    assert "for the server at n1:29600, where nobody listens" in found.summary


def test_one_store_has_several_names() -> None:
    """A rank calls its own host localhost, the ranks of another host call it by its name."""
    clients = [in_constructor(2, listens=False), in_store(3, "n1:29600", op=STORE_CLIENT)]
    reducing = [rank(n, init(), inside=False, issued="all_reduce") for n in (0, 1)]
    for log, host in zip([*reducing, *clients], ("n1", "n1", "n1", "n2"), strict=True):
        log.host = host
    found = verdict(*reducing, *clients)
    assert [(one.cause.ranks, one.cause.listens) for one in found.findings if one.cause] == [
        ([2, 3], False)
    ], "the store's own host sees whether a process listens"


def test_a_server_waits_for_its_clients() -> None:
    reducing = [rank(n, init(), inside=False, issued="all_reduce") for n in (1, 2, 3)]
    found = verdict(in_constructor(0, listens=None, server=True), *reducing)
    assert (found.kind, found.culprits) == ("missing", [])
    hold("missing/clients-of-a-store", found)
    idle = [
        in_constructor(0, listens=None, server=True),
        *reducing[:2],
        rank(3, init(), inside=False),
    ]
    assert verdict(*idle).culprits == [3]
    idle = [in_constructor(n) for n in (0, 1, 2)]
    found = verdict(*idle, rank(3, init(), inside=False))
    assert (found.culprits, found.confidence, found.certain) == ([3], "medium", False)
    assert found.cause.doubt == "store-elsewhere"
