"""Claims about NCCL on which commlens builds, each with a check that runs on the emulation and on a
real GPU.

    # on the emulation
    python tests/nccl_like/facts.py
    # on real NCCL, each rank on a GPU of its own; two on one GPU, if there is one only
    python tests/nccl_like/facts.py --backend nccl --json FILE
    # with torch 2.15: write the table in docs/nccl.md from the results of all
    python tests/nccl_like/facts.py --engine nccl nccl2 --write
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "nccl.md"
# what runs on a real GPU said, if there were any
REAL = {engine: HERE / f"facts_on_{engine}.json" for engine in ("nccl", "nccl2")}
sys.path.insert(0, str(HERE.parent))

from nccl_like.facts_runner import (  # noqa: E402
    OCCUPIED_S,
    Answer,
    Ended,
    Fact,
    Here,
    prepare,
    run,
    timed,
    until,
)

ABORTED = -signal.SIGABRT
ENGINES = tuple(REAL)
BARRIER = {"nccl": ("nccl:all_reduce_barrier", [[1]]), "nccl2": ("nccl2:barrier", [])}
OF_NCCL, OF_NCCL2 = ({"engines": (name,)} for name in ENGINES)

FACTS: list[Fact] = []


def fact(
    claim: str, **options: Any
) -> Callable[[Callable[[Here], Answer]], Callable[[Here], Answer]]:
    def add(check: Callable[[Here], Answer]) -> Callable[[Here], Answer]:
        FACTS.append(Fact(check.__name__, claim, check, **options))
        return check

    return add


# --- what a call returns, and when


@fact(
    "A synchronous collective returns no Work: the backend's call returns None (torch 2.8 and"
    " later).",
    **OF_NCCL,
)
def sync_returns_no_work(here: Here) -> Answer:
    here.init()
    options = here.torch._C._distributed_c10d.AllreduceOptions()
    options.asyncOp = False
    work = here.backend.allreduce([here.tensor()], options)
    return work is None, f"returned {type(work).__name__}"


@fact("An asynchronous collective returns a Work.")
def async_returns_work(here: Here) -> Answer:
    here.init()
    work = here.dist.all_reduce(here.tensor(), async_op=True)
    return isinstance(work, here.dist.Work), f"returned {type(work).__name__}"


@fact("A synchronous collective returns before it has run.")
def sync_returns_before_it_runs(here: Here) -> Answer:
    here.init()
    here.occupy()
    seconds, _ = timed(lambda: here.dist.all_reduce(here.tensor()))
    behind, _ = timed(here.synchronize)
    return (
        seconds < OCCUPIED_S / 2 < behind,
        f"the call took {seconds:.2f} s, synchronize() after it {behind:.2f} s",
    )


@fact(
    "The host runs ahead without a bound: 2,000 synchronous calls return while the device is"
    " occupied."
)
def host_runs_ahead(here: Here) -> Answer:
    here.init()
    tensor = here.tensor()
    here.occupy(3 * OCCUPIED_S)

    def issue() -> None:
        for _ in range(2000):
            here.dist.all_reduce(tensor)

    seconds, _ = timed(issue)
    behind, _ = timed(here.synchronize)
    return behind > 0.1, f"the calls took {seconds:.2f} s, synchronize() after them {behind:.2f} s"


@fact("Work.wait() returns at once, while the collective has not run.")
def wait_returns_at_once(here: Here) -> Answer:
    here.init()
    here.occupy()
    work = here.dist.all_reduce(here.tensor(), async_op=True)
    seconds, _ = timed(work.wait)
    done = work.is_completed()
    return (
        seconds < OCCUPIED_S / 2 and not done,
        f"wait() took {seconds:.2f} s, is_completed() then: {done}",
    )


@fact("Work.is_completed() is true when the kernel is done, without a wait().")
def is_completed_is_true_when_done(here: Here) -> Answer:
    here.init()
    work = here.dist.all_reduce(here.tensor(), async_op=True)
    came = until(work.is_completed)
    return came, f"is_completed(): {came}"


@fact("Work.get_future() is done at once, while the collective has not run.")
def future_is_done_at_once(here: Here) -> Answer:
    here.init()
    here.occupy()
    work = here.dist.all_reduce(here.tensor(), async_op=True)
    future, ran = work.get_future().done(), work.is_completed()
    return future and not ran, f"get_future().done(): {future}, is_completed(): {ran}"


@fact(
    "Work.get_future_result() is marked SUCCESS (0) by the watchdog, soon after the kernel is done"
    " and not before.",
    **OF_NCCL,
)
def future_result_comes_from_the_watchdog(here: Here) -> Answer:
    here.init()
    here.occupy()
    result = here.dist.all_reduce(here.tensor(), async_op=True).get_future_result()
    early = result.done()
    came = until(result.done)
    value = result.value() if came else None
    return (
        not early and came and int(value) == 0,
        f"done at once: {early}, later: {came}, value {value}",
    )


@fact("The thread that reads a result stands in .item() until the collective has run.")
def item_blocks(here: Here) -> Answer:
    here.init()
    tensor = here.tensor()
    here.occupy()
    call, _ = timed(lambda: here.dist.all_reduce(tensor))
    seconds, _ = timed(lambda: tensor.sum().item())
    return call < OCCUPIED_S / 2 < seconds, f"the call took {call:.2f} s, .item() {seconds:.2f} s"


@fact(
    "A thread that waits for the device spins: it uses the CPU, and other Python threads run"
    " meanwhile."
)
def waiting_thread_spins(here: Here) -> Answer:
    here.init()
    counted = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.wait(0.01):
            counted[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    here.occupy()
    here.dist.all_reduce(here.tensor())
    used = time.thread_time()
    seconds, _ = timed(here.synchronize)
    used = time.thread_time() - used
    stop.set()
    counter.join()
    return (
        used > 0.05 * seconds and counted[0] > 5,
        (
            f"{used / seconds:.0%} of a core for {seconds:.2f} s; another thread woke {counted[0]}"
            " times"
        ),
    )


# --- barrier


@fact(
    "barrier() blocks the caller until the device is done; it is an all_reduce of one element with"
    " a number of its own. (nccl2 records it as a barrier without tensors.)"
)
def barrier_blocks(here: Here) -> Answer:
    here.init()
    before = here.backend._get_sequence_number_for_group()
    here.occupy()
    seconds, _ = timed(here.dist.barrier)
    last = here.entries()[-1]
    numbers = here.backend._get_sequence_number_for_group() - before
    said = f"took {seconds:.2f} s; {last['profiling_name']} {last['input_sizes']}, {numbers} number"
    return (
        seconds > OCCUPIED_S / 2
        and numbers == 1
        and (last["profiling_name"], last["input_sizes"]) == BARRIER[here.engine],
        said,
    )


@fact("barrier(async_op=True) returns at once; wait() of its Work blocks the caller.", **OF_NCCL)
def async_barrier_blocks_in_wait(here: Here) -> Answer:
    here.init()
    here.occupy()
    call, work = timed(lambda: here.dist.barrier(async_op=True))
    seconds, _ = timed(work.wait)
    return call < OCCUPIED_S / 2 < seconds, f"the call took {call:.2f} s, wait() {seconds:.2f} s"


# --- what keeps memory


@fact("A Work keeps its tensors alive; its get_future_result() alone does not.")
def future_result_keeps_no_tensor(here: Here) -> Answer:
    here.init()
    storage = here.torch.UntypedStorage
    tensor = here.tensor(1000)
    known = tensor.untyped_storage()._weak_ref()
    work = here.dist.all_reduce(tensor, async_op=True)
    result = work.get_future_result()
    work.wait()
    del tensor
    until(result.done)
    time.sleep(0.3)  # the watchdog forgets it
    here.dist.all_reduce(here.tensor())  # and the next call frees what it kept
    here.synchronize()
    held = not storage._expired(known)
    del work
    here.dist.all_reduce(here.tensor())
    freed = storage._expired(known)
    return (
        held and freed and bool(result.done()),
        f"alive with the Work: {held}, freed with only the result: {freed}",
    )


# --- numbers and identities


@fact(
    "The backend object calls itself nccl, coalesces, and has a small number, uid: 0 for the first"
    " group, 1 for the second.",
    **OF_NCCL,
)
def uid_counts_backends(here: Here) -> Answer:
    here.init()
    second = here.backend_of(here.dist.new_group(list(range(here.ranks))))
    found = (here.backend.name(), here.backend.supports_coalescing, here.backend.uid, second.uid)
    return found == ("nccl", True, 0, 1), str(found)


@fact(
    "The recorder's status is keyed by uid, as text in JSON, and entries carry it as pg_id.",
    **OF_NCCL,
)
def status_is_keyed_by_uid(here: Here) -> Answer:
    here.init()
    second = here.dist.new_group(list(range(here.ranks)))
    here.dist.all_reduce(here.tensor(), group=second)
    here.synchronize()
    keys = sorted(here.recorded(collectives=False)["pg_status"])
    ids = sorted({entry["pg_id"] for entry in here.entries()})
    return keys == ["0", "1"] and ids == [0, 1], f"keys {keys}, pg_id {ids}"


@fact("The backend's sequence number counts collectives, not messages.")
def sequence_number_counts_collectives(here: Here) -> Answer:
    here.init()
    before = here.backend._get_sequence_number_for_group()
    for _ in range(3):
        here.dist.all_reduce(here.tensor())
    between = here.backend._get_sequence_number_for_group()
    for work in here.send_to_self():
        work.wait()
    after = here.backend._get_sequence_number_for_group()
    return (between - before, after - between) == (
        3,
        0,
    ), f"+{between - before} for three all_reduce, +{after - between} for a batch of messages"


@fact(
    "A group that was used by nobody yet is neither in the recorder's status nor in its list of"
    " groups.",
    **OF_NCCL,
)
def unused_group_is_unknown(here: Here) -> Answer:
    here.begin()
    found = here.recorded()
    return (
        not found["pg_status"] and not found["pg_config"],
        f"pg_status {found['pg_status']}, pg_config {found['pg_config']}",
    )


@fact(
    "The status says what is enqueued at once, and what is complete within a second; started stays"
    " -1 without timing.",
    **OF_NCCL,
)
def status_follows(here: Here) -> Answer:
    here.init()
    here.occupy()
    here.dist.all_reduce(here.tensor())
    early = here.status()
    came = until(lambda: here.status()["completed"] == 2)
    return (
        early == {"enqueued": 2, "started": -1, "completed": 1}
        and came
        and here.status()["started"] == -1,
        f"{early}, then {here.status()}",
    )


@fact(
    "With TORCH_NCCL_ENABLE_TIMING=1 the status says what has started, and entries have durations.",
    environment={"TORCH_NCCL_ENABLE_TIMING": "1"},
    **OF_NCCL,
)
def timing_gives_starts(here: Here) -> Answer:
    here.init()
    here.occupy()
    here.dist.all_reduce(here.tensor())
    early = here.status()
    until(lambda: here.status()["completed"] == 2)
    last = here.entries()[-1]
    return (
        early["started"] == 1 and here.status()["started"] == 2 and "duration_ms" in last,
        f"{early}, then {here.status()}; {sorted(last)}",
    )


@fact("An entry becomes retired and completed within a second after its kernel is done.")
def entries_retire(here: Here) -> Answer:
    here.init()
    here.occupy()
    here.dist.all_reduce(here.tensor())
    early = here.entries()[-1]
    came = until(lambda: bool(here.entries()[-1]["retired"]))
    last = here.entries()[-1]
    return (early["state"], early["retired"], last["state"]) == (
        "scheduled",
        False,
        "completed",
    ) and came, f"{early['state']}, then {last['state']}"


@fact(
    "TORCH_NCCL_TRACE_BUFFER_SIZE=0 switches the recorder off: no entries, and no status either.",
    environment={"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
)
def recorder_can_be_off(here: Here) -> Answer:
    here.begin()
    here.dist.all_reduce(here.tensor())
    here.synchronize()
    found = here.recorded()
    return not found["pg_status"] and "entries" not in found, str(sorted(found))


# --- messages and groups of operations


@fact(
    "A batch of messages returns one Work, takes one message number, and its entry in the status is"
    " that number.",
    **OF_NCCL,
)
def batch_takes_one_number(here: Here) -> Answer:
    here.init()
    works = []
    for _ in range(3):
        works = here.send_to_self()
    here.synchronize()
    status = here.status()
    numbers = [entry["p2p_seq_id"] for entry in here.entries()[1:]]
    return (
        len(works) == 1 and status["enqueued"] == 3 and numbers == [1, 1, 1, 2, 2, 2, 3, 3, 3],
        f"{len(works)} Work, {status}, {numbers}",
    )


@fact(
    "A batch's members are is_p2p, and stay scheduled for ever; its closing entry nccl:coalesced is"
    " not is_p2p, and has the state.",
    **OF_NCCL,
)
def batch_closes_with_an_entry(here: Here) -> Answer:
    here.init()
    for work in here.send_to_self():
        work.wait()
    here.synchronize()
    until(lambda: bool(here.entries()[-1]["retired"]))
    found = [
        (e["profiling_name"], e["is_p2p"], e["state"], e["collective_seq_id"], e["p2p_seq_id"])
        for e in here.entries()[1:]
    ]
    me = here.rank
    wanted = [
        (f"nccl:send {me}->{me}", True, "scheduled", 1, 1),
        (f"nccl:recv {me}<-{me}", True, "scheduled", 1, 1),
        ("nccl:coalesced", False, "completed", 1, 1),
    ]
    return found == wanted, str(found)


@fact("Coalesced all_reduces take one number and one entry, allreduce_coalesced.")
def coalesced_collectives_take_one_number(here: Here) -> Answer:
    here.init()
    with here.dist._coalescing_manager():
        for _ in range(3):
            here.dist.all_reduce(here.tensor())
    here.synchronize()
    found = [
        (e["profiling_name"], e["collective_seq_id"], len(e["input_sizes"]))
        for e in here.entries()[1:]
    ]
    return found == [(f"{here.engine}:allreduce_coalesced", 2, 3)], str(found)


@fact("An all_gather into a list is recorded with one output, the flattened list.", **OF_NCCL)
def all_gather_records_a_flat_output(here: Here) -> Answer:
    here.init()
    here.dist.all_gather([here.tensor(3) for _ in range(here.ranks)], here.tensor(3))
    last = here.entries()[-1]
    return (
        last["output_sizes"] == [[here.ranks, 3]],
        f"{last['profiling_name']} {last['input_sizes']} {last['output_sizes']}",
    )


@fact(
    "An all_gather of uneven sizes is a group of broadcasts, closed by nccl:ALLGATHER_coalesced,"
    " under one number.",
    ranks=2,
    **OF_NCCL,
)
def uneven_all_gather_is_a_group(here: Here) -> Answer:
    here.init()
    here.dist.all_gather([here.tensor(2), here.tensor(3)], here.tensor(2 + here.rank))
    here.synchronize()
    found = [(e["profiling_name"], e["collective_seq_id"]) for e in here.entries()[1:]]
    return found == [
        ("nccl:_broadcast_oop", 2),
        ("nccl:_broadcast_oop", 2),
        ("nccl:ALLGATHER_coalesced", 2),
    ], str(found)


@fact(
    "A scatter is recorded with its output as input, and its inputs as outputs.", ranks=2, **OF_NCCL
)
def scatter_is_recorded_in_reverse(here: Here) -> Answer:
    here.init()
    here.dist.scatter(
        here.tensor(3), [here.tensor(3), here.tensor(3)] if here.rank == 0 else None, src=0
    )
    last = here.entries()[-1]
    sizes = (last["input_sizes"], last["output_sizes"])
    return here.rank != 0 or sizes == ([[3]], [[3], [3]]), str(sizes)


@fact("Bitwise reductions and receiving from any rank are refused in the call.")
def some_things_are_refused(here: Here) -> Answer:
    here.init()
    said = []
    for call in (
        lambda: here.dist.all_reduce(here.tensor().int(), op=here.dist.ReduceOp.BAND),
        lambda: here.dist.recv(here.tensor()),
    ):
        try:
            call()
        except (ValueError, RuntimeError, NotImplementedError) as error:
            said.append(type(error).__name__)
    return len(said) == 2, str(said)


# --- communicators


@fact(
    "A group's communicator is made at its first collective, which blocks in the call until all"
    " ranks join; later calls do not.",
    ranks=2,
    **OF_NCCL,
)
def communicator_is_made_at_first_use(here: Here) -> Answer:
    made, _ = timed(here.begin)
    if here.rank == 1:
        time.sleep(1.5)
    first, _ = timed(lambda: here.dist.all_reduce(here.tensor()))
    here.synchronize()
    if here.rank == 1:
        time.sleep(1.0)
    second, _ = timed(lambda: here.dist.all_reduce(here.tensor()))
    said = f"the group {made:.2f} s, the first call {first:.2f} s, the second {second:.2f} s"
    return here.rank == 1 or (first > 1.0 and second < 0.5), said


@fact(
    "A send outside of a batch makes a communicator for the two ranks, which blocks in the call"
    " until the other rank receives.",
    ranks=2,
    **OF_NCCL,
)
def pair_communicator_blocks(here: Here) -> Answer:
    here.init()
    if here.rank == 1:
        time.sleep(1.5)
        first, _ = timed(lambda: here.dist.recv(here.tensor(), 0))
    else:
        first, _ = timed(lambda: here.dist.send(here.tensor(), 1))
    here.synchronize()
    second, _ = timed(
        lambda: (
            here.dist.send(here.tensor(), 1) if here.rank == 0 else here.dist.recv(here.tensor(), 0)
        )
    )
    numbers = [entry["p2p_seq_id"] for entry in here.entries()[1:]]
    holds = numbers == [1, 2] and (here.rank == 1 or first > 1.0) and second < 0.5
    return holds, f"the first {first:.2f} s, the second {second:.2f} s, numbers {numbers}"


# --- how a hang looks, and how it ends


@fact(
    "Sizes that differ hang the collective, or it ends with a wrong result; nobody raises an"
    " error.",
    ranks=2,
)
def sizes_that_differ_hang(here: Here) -> Answer:
    here.init(timeout_s=30)
    seen = []
    for sizes in ((4, 5), (4, 1024), (512, 1024), (1 << 19, 1 << 20)):
        tensor = here.tensor(sizes[here.rank])
        work = here.dist.all_reduce(tensor, async_op=True)
        if not until(work.is_completed, 1.5):
            seen.append(f"{sizes[0]} and {sizes[1]} elements: hangs")
            break  # what comes after it would hang, too
        values = sorted(set(tensor.tolist()))
        seen.append(f"{sizes[0]} and {sizes[1]} elements: ends with {values[:3]}")
    return True, "; ".join(seen)


@fact("Two groups that two ranks use in opposite order hang.", ranks=2)
def opposite_order_hangs(here: Here) -> Answer:
    here.init()
    groups = [here.dist.new_group([0, 1]), here.dist.new_group([0, 1])]
    for group in groups:
        here.dist.all_reduce(here.tensor(), group=group)
    here.synchronize()
    for group in groups if here.rank == 0 else groups[::-1]:
        here.dist.all_reduce(here.tensor(), group=group)
    time.sleep(1.0)
    here_done = [here.completed(group) for group in groups]
    return here_done == [1, 1], f"completed in the two groups: {here_done}"


def _hang(here: Here) -> Answer:
    """Rank 0 waits for a collective; the others stand elsewhere. With one rank, the device is
    occupied.
    """
    here.init(timeout_s=2)
    if here.ranks == 1:
        here.occupy(30)
    if here.rank == 0:
        here.dist.all_reduce(here.tensor())
        here.synchronize()
    time.sleep(25)
    return False, "nobody ended it"


_QUICK = {
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "200",
}


def _ends_in_order(ended: Ended) -> Answer:
    wanted = [
        (
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE,"
            " NumelIn=4, NumelOut=4, Timeout(ms)=2000)"
        ),
        "failure detected by watchdog at work sequence id: 2",
        "First PG on this rank to signal dumping",
        "Received a dump signal due to a collective timeout from this local rank",
        "preparing to dump debug info",
        "taking the entire process down",
        "terminate called after throwing",
    ]
    at = [ended.outputs[0].find(text) for text in wanted]
    dump = ended.dump(0)
    last = dump["entries"][-1]["state"] if dump else "no dump"
    holds = (
        -1 not in at and at == sorted(at) and ended.statuses[0] == ABORTED and last == "scheduled"
    )
    missing = [text for text, place in zip(wanted, at, strict=True) if place < 0]
    return holds, f"status {ended.statuses[0]}, the dump's last entry is {last}" + (
        f"; not said: {missing}" if missing else ""
    )


@fact(
    "At a collective's timeout the watchdog says so, signals the dump, the dump is written, and"
    " then SIGABRT ends the process.",
    environment=_QUICK,
    after=_ends_in_order,
    **OF_NCCL,
)
def timeout_ends_with_sigabrt(here: Here) -> Answer:
    return _hang(here)


def _all_dumped(ended: Ended) -> Answer:
    dumps = [ended.dump(rank) is not None for rank in range(2)]
    return (
        dumps == [True, True] and ended.statuses[0] == ABORTED,
        f"statuses {ended.statuses}, dumps {dumps}",
    )


@fact(
    "At one rank's timeout all ranks write a dump, also those that wait for nothing.",
    ranks=2,
    environment=_QUICK,
    after=_all_dumped,
    **OF_NCCL,
)
def all_ranks_dump(here: Here) -> Answer:
    return _hang(here)


@fact(
    "With TORCH_NCCL_BLOCKING_WAIT=1, wait() blocks and raises at the timeout; the status stays -1"
    " and no watchdog ends the process.",
    environment={"TORCH_NCCL_BLOCKING_WAIT": "1"},
    **OF_NCCL,
)
def blocking_wait_raises(here: Here) -> Answer:
    here.begin(timeout_s=1)
    here.dist.all_reduce(here.tensor())
    here.synchronize()
    here.occupy(2.5)
    work = here.dist.all_reduce(here.tensor(), async_op=True)
    raised = ""
    began = time.monotonic()
    try:
        work.wait()
    except here.dist.DistBackendError as error:
        raised = str(error).splitlines()[0]
    seconds = time.monotonic() - began
    status = here.status()
    holds = (
        "ran for" in raised
        and 0.8 < seconds < 2.4
        and status == {"enqueued": -1, "started": -1, "completed": -1}
    )
    return holds, f"{raised[:60]!r} after {seconds:.1f} s, {status}"


def _killed_by_monitor(ended: Ended) -> Answer:
    said = "watchdog got stuck" in ended.outputs[0]
    return ended.statuses == [ABORTED] and said, f"status {ended.statuses[0]}, said: {said}"


@fact(
    "A process whose watchdog is stuck is ended by the heartbeat monitor, after twice"
    " TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC.",
    environment={
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1",
        "NCCL_LIKE_STUCK_WATCHDOG": "1",
        **_QUICK,
    },
    after=_killed_by_monitor,
    only_emulated=True,
    **OF_NCCL,
)
def stuck_watchdog_is_noticed(here: Here) -> Answer:
    here.begin()
    here.dist.all_reduce(here.tensor())
    time.sleep(15)
    return False, "nobody ended it"


@fact(
    "Each group has a watchdog thread, pt_nccl_watchdg, and a monitor thread, pt_nccl_heartbt.",
    **OF_NCCL,
)
def threads_have_names(here: Here) -> Answer:
    here.init()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    found = {name: names.count(name) for name in ("pt_nccl_watchdg", "pt_nccl_heartbt")}
    return set(found.values()) == {1}, str(found)


# --- CUDA graphs


@fact(
    "Capturing a collective takes a number, but enqueues and records nothing; a replay does"
    " neither.",
    **OF_NCCL,
)
def capture_takes_numbers(here: Here) -> Answer:
    here.init()
    tensor = here.tensor()
    entries = len(here.entries())
    with here.capture() as graph:
        here.dist.all_reduce(tensor)
    captured = (
        here.backend._get_sequence_number_for_group(),
        here.status()["enqueued"],
        len(here.entries()) - entries,
    )
    for _ in range(3):
        graph.replay()
    here.synchronize()
    replayed = (
        here.backend._get_sequence_number_for_group(),
        here.status()["enqueued"],
        len(here.entries()) - entries,
    )
    return (
        captured == replayed == (2, 1, 0),
        f"number, enqueued, entries after the capture {captured}, after three replays {replayed}",
    )


WENT_WELL = "the capture went well"


def _capture_failed(ended: Ended) -> Answer:
    return (
        WENT_WELL not in ended.outputs[0],
        f"status {ended.statuses[0]}, {ended.outputs[0].strip().splitlines()[-1:]}",
    )


@fact(
    "A thread that queries a Work while a graph is captured ruins the capture.",
    after=_capture_failed,
)
def query_ruins_a_capture(here: Here) -> Answer:
    here.init()
    tensor = here.tensor()
    work = here.dist.all_reduce(tensor, async_op=True)
    work.wait()
    here.synchronize()

    def query() -> None:
        with contextlib.suppress(RuntimeError):
            work.is_completed()

    with here.capture():
        here.dist.all_reduce(tensor)
        thread = threading.Thread(target=query)
        thread.start()
        thread.join()
    os.write(1, f"{WENT_WELL}\n".encode())
    return False, WENT_WELL


# --- what differs in nccl2, the engine that torch 2.15 calls "nccl"


@fact(
    "A synchronous collective returns a Work, whose wait() returns before it has run.", **OF_NCCL2
)
def sync_returns_work(here: Here) -> Answer:
    here.init()
    here.occupy()
    options = here.torch._C._distributed_c10d.AllreduceOptions()
    options.asyncOp = False
    work = here.backend.allreduce([here.tensor()], options)
    seconds, _ = timed(work.wait)
    return seconds < OCCUPIED_S / 2, f"returned {type(work).__name__}, wait() took {seconds:.2f} s"


@fact(
    "The backend object calls itself nccl2, has no uid, and has completion and abort hooks.",
    **OF_NCCL2,
)
def backend_has_hooks(here: Here) -> Answer:
    here.init()
    backend = here.backend
    found = (
        backend.name(),
        hasattr(backend, "uid"),
        backend.supports_coalescing,
        backend.supports_completion_hooks,
        backend.supports_abort_hooks,
    )
    return found == ("nccl2", False, True, True, True), str(found)


@fact(
    "The status of torch's recorder counts all calls from 0, messages too; its entries count"
    " collectives from 1.",
    **OF_NCCL2,
)
def status_counts_all_calls(here: Here) -> Answer:
    here.init()
    for work in here.send_to_self():
        work.wait()
    here.dist.all_reduce(here.tensor())
    status, number = here.status(), here.entries()[-1]["collective_seq_id"]
    return (status["enqueued"], number) == (3, 2), f"enqueued {status['enqueued']}, entry {number}"


@fact(
    "With TORCH_NCCL_ENABLE_TIMING=1 entries have durations; what has started is never known.",
    environment={"TORCH_NCCL_ENABLE_TIMING": "1"},
    **OF_NCCL2,
)
def timing_gives_durations(here: Here) -> Answer:
    here.init()
    here.settle(here.group)
    last, status = here.entries()[-1], here.status()
    return "duration_ms" in last and status["started"] == -1, f"{status}; {sorted(last)}"


@fact(
    "The messages of a batch are completed when they are issued, each with a number; no entry"
    " closes the batch, whose Work tells.",
    **OF_NCCL2,
)
def batch_is_completed_at_issue(here: Here) -> Answer:
    here.init()
    here.occupy()
    here.dist.all_reduce(here.tensor())
    (work,) = here.send_to_self()
    done = work.is_completed()
    found = [(e["profiling_name"], e["state"], e["p2p_seq_id"]) for e in here.entries()[2:]]
    me = here.rank
    wanted = [
        (f"nccl2:send {me}->{me}", "completed", 1),
        (f"nccl2:recv {me}<-{me}", "completed", 2),
    ]
    return found == wanted and not done, f"{found}, is_completed() of the Work: {done}"


@fact(
    "A call that the backend rejects leaves an entry that stays scheduled, and its number is taken.",
    **OF_NCCL2,
)
def rejected_call_stays(here: Here) -> Answer:
    here.init()
    with contextlib.suppress(ValueError, RuntimeError):
        here.dist.all_reduce(here.tensor().int(), op=here.dist.ReduceOp.BAND)
    here.dist.all_reduce(here.tensor())
    until(lambda: here.entries()[-1]["state"] == "completed")
    found = [(e["state"], e["collective_seq_id"]) for e in here.entries()]
    wanted = [("completed", 1), ("scheduled", 2), ("completed", 3)]
    return found == wanted, str(found)


@fact(
    "The communicator is made with the group: init_process_group blocks until all ranks join.",
    ranks=2,
    **OF_NCCL2,
)
def communicator_is_made_with_the_group(here: Here) -> Answer:
    if here.rank == 1:
        time.sleep(1.5)
    made, _ = timed(here.begin)
    return here.rank == 1 or made > 1.0, f"init_process_group took {made:.2f} s"


@fact(
    "All ranks of the default group meet in new_group, also those that are not its members.",
    ranks=2,
    **OF_NCCL2,
)
def all_ranks_meet_in_new_group(here: Here) -> Answer:
    here.init()
    if here.rank == 1:
        time.sleep(1.5)
    made, _ = timed(lambda: here.dist.new_group([0], use_local_synchronization=False))
    return here.rank == 1 or made > 1.0, f"new_group([0]) took {made:.2f} s"


@fact(
    "A send outside of a batch uses the communicator of the group, and does not block.",
    ranks=2,
    **OF_NCCL2,
)
def send_does_not_block(here: Here) -> Answer:
    here.init()
    if here.rank == 1:
        time.sleep(1.5)
        took, _ = timed(lambda: here.dist.recv(here.tensor(), 0))
    else:
        took, _ = timed(lambda: here.dist.send(here.tensor(), 1))
    here.synchronize()
    return took < 0.5, f"the call took {took:.2f} s"


def _aborted_by_nccl2(ended: Ended) -> Answer:
    wanted = [
        "Operation timed out after ",
        "Aborting process on rank 0 due to timeout - timeout watchdog detected operation timeout",
    ]
    lines = [line for line in ended.outputs[0].splitlines() if "[TC][rank=0][name=0] " in line]
    said = [any(text in line for line in lines) for text in wanted]
    dumps = [ended.dump(rank) for rank in range(len(ended.statuses))]
    last = dumps[0]["entries"][-1]["state"] if dumps[0] else "no dump"
    holds = ended.statuses[0] == ABORTED and all(said) and last == "scheduled"
    return holds and dumps[1:] == [None] * (len(dumps) - 1), (
        f"statuses {ended.statuses}, said {said}, the dump's last entry is {last}, dumps of other"
        f" ranks: {[bool(dump) for dump in dumps[1:]]}"
    )


@fact(
    "At a collective's timeout the watchdog says so, abort hooks write the dump, and SIGABRT ends"
    " the process; a rank that waits for nothing writes no dump.",
    ranks=2,
    environment=_QUICK,
    after=_aborted_by_nccl2,
    **OF_NCCL2,
)
def timeout_aborts(here: Here) -> Answer:
    return _hang(here)


@fact(
    "With TORCH_NCCL_ASYNC_ERROR_HANDLING=2 the watchdog aborts the communicator and the process"
    " lives; the next collective raises.",
    environment={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"},
    **OF_NCCL2,
)
def clean_up_raises_at_the_next_call(here: Here) -> Answer:
    here.init(timeout_s=1)
    here.occupy(3)
    here.dist.all_reduce(here.tensor())
    time.sleep(4)
    raised = ""
    try:
        here.dist.all_reduce(here.tensor())
    except RuntimeError as error:
        raised = str(error).splitlines()[0]
    return "NCCL operation timed out" in raised, repr(raised)


@fact(
    "With TORCH_NCCL_BLOCKING_WAIT=1, wait() blocks and raises at the timeout.",
    environment={"TORCH_NCCL_BLOCKING_WAIT": "1"},
    **OF_NCCL2,
)
def blocking_wait_raises_in_nccl2(here: Here) -> Answer:
    here.begin(timeout_s=1)
    here.dist.all_reduce(here.tensor())
    here.synchronize()
    here.occupy(2.5)
    work = here.dist.all_reduce(here.tensor(), async_op=True)
    raised = ""
    began = time.monotonic()
    try:
        work.wait()
    except here.dist.DistBackendError as error:
        raised = str(error).splitlines()[0]
    seconds = time.monotonic() - began
    return "NCCL operation timed out" in raised and 0.8 < seconds < 2.4, (
        f"{raised[:60]!r} after {seconds:.1f} s"
    )


@fact("The watchdog's thread has no name of its own, and there is no monitor thread.", **OF_NCCL2)
def threads_have_no_names(here: Here) -> Answer:
    here.init()
    names = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    return not any(name.startswith("pt_nccl") for name in names), str(sorted(names))


@fact(
    "Capturing a collective takes a number, but records nothing; a replay does neither.", **OF_NCCL2
)
def capture_takes_a_number(here: Here) -> Answer:
    here.init()
    tensor = here.tensor()

    def counted() -> tuple[int, int]:
        return here.backend._get_sequence_number_for_group(), len(here.entries())

    with here.capture() as graph:
        here.dist.all_reduce(tensor)
    captured = counted()
    for _ in range(3):
        graph.replay()
    here.synchronize()
    replayed = counted()
    return (
        captured == replayed == (2, 1),
        f"number, entries after the capture {captured}, after three replays {replayed}",
    )


def table(emulated: list[dict[str, Any]], real: Mapping[str, Mapping[str, Any]]) -> str:
    """Args: real: what runs on a GPU said, by engine."""
    said_on_nccl = {
        (engine, row["name"]): row for engine, run in real.items() for row in run["facts"]
    }
    said_emulated = {(row["engine"], row["name"]): row for row in emulated}

    def said(row: Mapping[str, Any] | None) -> str:
        return (
            "not run yet"
            if row is None
            else "yes"
            if row["holds"]
            else "**no**: " + str(row["observed"]).splitlines()[0]
        )

    columns = [f"{engine}, {where}" for where in ("emulated", "real") for engine in ENGINES]
    rows = [f"| claim | ranks | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for fact in FACTS:
        cells = [
            "-"
            if engine not in fact.engines
            else "cannot be provoked"
            if where is said_on_nccl and fact.only_emulated
            else said(where.get((engine, fact.name)))
            for where in (said_emulated, said_on_nccl)
            for engine in ENGINES
        ]
        rows.append(f"| {fact.claim} | {fact.ranks} | {' | '.join(cells)} |")
    for engine, ended in real.items():
        rows += ["", f"Real {engine}: torch {ended['torch']}, {ended['device']}."]
    return "\n".join(rows)


BEGIN, END = "<!-- facts: written by tests/nccl_like/facts.py --write -->", "<!-- end of facts -->"


def write_page(text: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["nccl_like", "nccl"], default="nccl_like")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        nargs="+",
        help="nccl: ProcessGroupNCCL (nccl-legacy from torch 2.15 on); nccl2: what torch 2.15 calls"
        " nccl (it needs torch 2.15; default with --backend nccl there)",
    )
    parser.add_argument(
        "--only", metavar="NAME", action="append", help="a part of the names to run (several times)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[1, 2],
        help="run only checks with so many ranks",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the answers here")
    parser.add_argument("--write", action="store_true", help="write the table in docs/nccl.md")
    arguments = parser.parse_args()
    prepare(arguments.backend)
    import torch

    new = torch.__version__.split("+")[0] >= "2.15" and arguments.backend == "nccl"
    arguments.engine = arguments.engine or ["nccl2" if new else "nccl"]
    rows = []
    for chosen, engine in itertools.product(FACTS, arguments.engine):
        left_out = (
            engine not in chosen.engines
            or chosen.ranks not in arguments.ranks
            or (chosen.only_emulated and arguments.backend == "nccl")
        )
        unwanted = arguments.only and not any(part in chosen.name for part in arguments.only)
        if left_out or unwanted:
            continue
        rows.append(run(chosen, arguments.backend, engine))
        print(
            f"{'yes' if rows[-1]['holds'] else 'NO '}  {engine} {chosen.name}:"
            f" {rows[-1]['observed']} ({rows[-1]['seconds']} s)",
            flush=True,
        )
    device = torch.cuda.get_device_name() if arguments.backend == "nccl" else "emulation"
    answers = {"torch": str(torch.__version__), "device": device, "facts": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(answers, indent=1) + "\n")
    if arguments.write:
        real = {name: json.loads(path.read_text()) for name, path in REAL.items() if path.exists()}
        write_page(table(rows, real))
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
