"""The plugin for NCCL is played to by a driver that stands for NCCL, and its file is read back."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nccl_player
import pytest
from boxes import Box
from nccl_player import GPU_WAIT, RECEIVE_WAIT, SEND_WAIT, Player

from commlens.blackbox.job_dirs import events_file
from commlens.blackbox.nccl_events import (
    decode_record,
    encode_record,
    read_beside,
    read_events,
)
from commlens.blackbox.reader import OpenBox, read_copy
from commlens.errors import FormatError
from commlens.model.nccl import NcclCommunicator, NcclOp, NcclRecord, version_text

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(nccl_player.compiler() is None, reason="there is no C compiler"),
]
VERSIONS = (4, 5, 6)


class Stage:
    """Plugins in this process, each loaded from a file of its own, so that it has its own state."""

    def __init__(self, folder: Path, builds: tuple[Path, Path]) -> None:
        self.folder = folder
        self._builds = builds
        self._numbers = itertools.count()

    def player(self, version: int = 6, nccl: int = 23007) -> Player:
        """NCCL with a fresh plugin."""
        number = next(self._numbers)
        copies = [
            shutil.copy(build, self.folder / f"{number}-{build.name}") for build in self._builds
        ]
        return Player(Path(copies[0]), Path(copies[1]), version, nccl)

    @property
    def file(self) -> Path:
        return events_file(self.folder, os.getpid())

    def read(self) -> NcclRecord:
        return read_events(self.file.read_bytes())


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("nccl")
    return nccl_player.build_plugin(folder), nccl_player.build(folder, nccl_player.PLAYER)


@pytest.fixture
def stage(
    tmp_path: Path, builds: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stage]:
    monkeypatch.setenv("COMMLENS_NCCL_FOLDER", str(tmp_path))
    monkeypatch.setenv("COMMLENS_NCCL_EVENTS", "transfers")
    yield Stage(tmp_path, builds)


def last(comm: NcclCommunicator) -> NcclOp:
    return comm.ops[-1]


@pytest.mark.parametrize("version", VERSIONS)
def test_two_communicators_and_a_hang(stage: Stage, version: int):
    play = stage.player(version)
    world = play.communicator(0xAB12, "0", 4, 3, nodes=2)
    pair = play.communicator(0xFFFF_0000_1111_2222, None, 2, 1)
    world.run(3)
    pair.run(2, "AllGather")
    kernels = world.start(world.launch(world.call("AllReduce", 4096), count=4096), 1)
    record = stage.read()
    assert (record.pid, record.level, record.nccl_version) == (os.getpid(), "transfers", 23007)
    assert record.lost == record.torn == 0
    first, second = record.communicators
    assert (first.hash, first.name, first.size, first.rank, first.nodes) == ("ab12", "0", 4, 3, 2)
    assert (second.hash, second.name) == ("ffff000011112222", "")
    assert (first.collectives, first.finished) == (4, 3)
    assert (second.collectives, second.finished) == (2, 2)
    assert [op.number for op in first.ops] == [1, 2, 3, 4]
    assert [op.nccl_number for op in first.ops] == [0, 1, 2, 3]
    assert all(op.has_stopped and op.device_ns == 4001 for op in first.ops[:3])
    hung = last(first)
    assert (hung.func, hung.datatype, hung.count) == ("AllReduce", "ncclFloat32", 4096)
    assert (hung.channels, hung.started_on, hung.stopped_on) == (2, 1, 0)
    assert hung.called_ns <= hung.launched_ns <= hung.started_ns and not hung.stopped_ns
    assert hung.thread == threading.get_native_id()
    assert abs(hung.called_ns - time.time_ns()) < 10e9
    world.end(kernels)
    assert (last(stage.read().communicators[0]).stopped_on) == 1


def test_messages_and_the_copy_engine(stage: Stage):
    play = stage.player()
    comm = play.communicator(1, "pp", 2, 0)
    api = play.p2p_api(comm.context, b"Send", 8, b"ncclInt8", 0)
    play.stop(api)
    play.stop(play.p2p(comm.context, api, b"Send", 8, b"ncclInt8", 1, 1))
    call = comm.call("AllGather", 64)
    play.stop(play.ce_coll(comm.context, call, 0, b"AllGather", 64, b"ncclInt8"))
    (found,) = stage.read().communicators
    assert (found.collectives, found.messages) == (1, 1)
    gather, send = sorted(found.ops, key=lambda op: op.is_message)
    assert (send.func, send.peer, send.count, send.is_message) == ("Send", 1, 8, True)
    assert gather.launched_ns and not gather.with_kernels and not gather.has_stopped


def test_each_launch_of_a_graph_is_an_operation_of_its_own(stage: Stage):
    play = stage.player()
    comm = play.communicator(1, None, 2, 0)
    captured = [comm.call(captured=True), comm.call("AllGather", captured=True)]
    assert last(stage.read().communicators[0]).launched_ns == 0
    late = comm.start(comm.launch(captured[0]))
    comm.run(200)  # the ring of calls has gone round
    comm.end(comm.start(comm.launch(captured[1], "AllGather", 9)))
    running = comm.start(comm.launch(captured[0]))
    comm.end(late)  # the proxy's thread saw the first launch's end late
    (found,) = stage.read().communicators
    assert (found.collectives, found.replayed) == (200, 3)
    replays = [op for op in found.ops if op.is_replay]
    assert [(op.number, op.func, op.count, op.captured) for op in replays] == [
        (1, "AllReduce", 1024, True),
        (2, "AllGather", 9, True),
        (3, "AllReduce", 1024, True),
    ]
    assert [op.has_stopped for op in replays] == [True, True, False]
    comm.end(running)
    assert last(stage.read().communicators[0]).has_stopped


def test_a_graph_is_no_operation_without_kernels(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """NCCL tells its launch once, as it is captured."""
    monkeypatch.setenv("COMMLENS_NCCL_EVENTS", "calls")
    play = stage.player()
    comm = play.communicator(1, None, 2, 0)
    comm.launch(comm.call(captured=True))
    comm.call()
    (found,) = stage.read().communicators
    assert (found.collectives, found.replayed) == (1, 0)


def test_replays_are_noted_of_more_captured_calls_than_there_is_room_for(stage: Stage):
    play = stage.player()
    comm = play.communicator(1, None, 2, 0)
    captured = [comm.call(captured=True) for _ in range(300)]
    comm.run()
    for each in captured:
        comm.end(comm.start(comm.launch(each)))
    record = stage.read()
    (found,) = record.communicators
    assert (record.lost, found.collectives, found.replayed) == (0, 1, 300)
    assert last(found).number == 300 and last(found).has_stopped


def test_transfers_stand_at_different_steps(stage: Stage):
    play = stage.player()
    comm = play.communicator(1, None, 4, 3, nodes=2)
    comm.run(2)
    task = comm.launch(comm.call())
    comm.transfer(task, 0, channel=1, is_send=True, done=41, state=SEND_WAIT)
    comm.transfer(task, 2, channel=1, is_send=False, done=43, state=RECEIVE_WAIT)
    ended = comm.transfer(task, 0, channel=2, is_send=True, done=64)
    play.stop(ended)
    foreign = play.proxy_op(comm.context, task, os.getpid() + 1, 3, 0, 64, 1)
    assert foreign == 0
    assert play.proxy_step(comm.context, foreign, 0) == 0
    record = stage.read()
    assert record.for_others == 1
    send, receive = sorted(last(record.communicators[0]).transfers, key=lambda one: one.done)
    assert (send.peer, send.channel, send.is_send, send.done, send.steps) == (0, 1, True, 41, 64)
    assert (send.state, receive.state) == ("in-network", "waits-for-data")
    assert (receive.peer, receive.done) == (2, 43)
    assert send.moved_ns > 0


def test_the_oldest_step_under_way_tells_the_state(stage: Stage):
    play = stage.player()
    comm = play.communicator(1, None, 2, 0, nodes=2)
    task = comm.launch(comm.call())
    handle = comm.transfer(task, 1, is_send=True, done=5, state=SEND_WAIT)
    play.record(play.proxy_step(comm.context, handle, 6), GPU_WAIT, 0)  # posted ahead
    (transfer,) = last(stage.read().communicators[0]).transfers
    assert (transfer.done, transfer.state) == (5, "in-network")


def test_late_and_foreign_handles_do_nothing(stage: Stage):
    play = stage.player()
    comm = play.communicator(1, None, 2, 0)
    old = comm.launch(comm.call())
    comm.end(comm.start(old))
    comm.run(80)
    before = stage.read()
    for handle in (
        old,
        0,
        1,
        0xDEADBEEF,
        2**64 - 1,
        *(random.Random(1).getrandbits(64) for _ in range(20_000)),
    ):
        play.stop(handle)
        play.record(handle, 9, 1)
        play.kernel(comm.context, handle, 0, 1)
        play.proxy_step(comm.context, handle, 1)
        play.kernel(handle, handle, 0, 1)
    assert stage.read() == before


def test_a_kernel_that_runs_keeps_its_slot(stage: Stage):
    """Behind it, what finds no slot is dropped and counted."""
    play = stage.player()
    comm = play.communicator(1, None, 2, 0)
    comm.start(comm.launch(comm.call("AllReduce", 77), count=77))
    for _ in range(100):
        comm.launch(comm.call())
    record = stage.read()
    (found,) = record.communicators
    assert (found.ops[0].number, found.ops[0].count, len(found.ops)) == (1, 77, 64)
    assert found.collectives == 101 and record.lost == 37


def test_messages_of_a_group_stop_in_any_order(stage: Stage):
    """One that runs keeps its slot until a whole ring of later ones has stopped."""
    play = stage.player()
    comm = play.communicator(1, None, 4, 0)

    def message() -> list[int]:
        api = play.p2p_api(comm.context, b"Send", 8, b"ncclInt8", 0)
        play.stop(api)
        task = play.p2p(comm.context, api, b"Send", 8, b"ncclInt8", 1, 2)
        play.stop(task)
        return comm.start(task)

    message()
    for _ in range(64):
        comm.end(message())
    (found,) = stage.read().communicators
    assert [op.number for op in found.ops if not op.has_stopped] == [1]
    for _ in range(64):
        comm.end(message())
    assert all(op.has_stopped for op in stage.read().communicators[0].ops), "its end was not told"
    assert stage.read().lost == 0


def test_uncounted_channels_finish_nothing(stage: Stage):
    play = stage.player()
    comm = play.communicator(1, None, 4, 0)
    call = comm.call()
    first, _ = (comm.launch(call, channels=200) for _ in range(2))
    for _ in range(3):
        comm.end(comm.start(first, 100))
    (found,) = stage.read().communicators
    assert (last(found).channels, last(found).stopped_on) == (255, 255)
    assert found.finished == 0 and not last(found).has_stopped


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # threads of other tests
def test_a_forked_process_closes_nothing(stage: Stage):
    play = stage.player()
    comm = play.communicator(1, None, 2, 0)
    task = comm.launch(comm.call())
    before = stage.read()
    child, failed = os.fork(), 1
    if not child:
        try:
            comm.end(comm.start(task))
            play.finalize(comm.context)
            play.communicator(2, None, 2, 0)
            failed = 0
        finally:
            os._exit(failed)
    assert os.waitpid(child, 0)[1] == 0
    assert stage.read() == before
    childs = read_events(events_file(stage.folder, child).read_bytes())
    assert [each.hash for each in childs.communicators] == ["2"]


def test_unload_and_load_again(stage: Stage):
    play = stage.player()
    comm = play.communicator(7, "a", 2, 0)
    task = comm.launch(comm.call())
    play.finalize(comm.context)
    play.unload()
    other = Player(stage.folder / "0-_nccl_profiler.so", stage.folder / "0-nccl_player.so")
    again = other.communicator(8, "b", 2, 0)
    other.stop(task)
    again.run()
    found = stage.read().communicators
    assert [comm.hash for comm in found] == ["8"], "the slot of an ended communicator is used again"


def test_more_communicators_than_there_is_room_for(stage: Stage):
    play = stage.player()
    many = [play.communicator(at, None, 2, 0) for at in range(70)]
    many[-1].run()
    record = stage.read()
    assert (len(record.communicators), record.lost) == (64, 6)


@pytest.mark.parametrize("nccl", [22605, 23102, 23203])
def test_it_steps_aside_for_another_nccl(stage: Stage, nccl: int):
    play = stage.player(6, nccl)
    assert play.init(1, None, 1, 2, 0) == 0
    assert play.mask() == 0
    record = stage.read()
    assert record.is_other_nccl and version_text(record.nccl_version) == (
        f"2.{nccl // 100 % 100}.{nccl % 100}"
    )


def test_without_its_variables_it_does_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COMMLENS_NCCL_EVENTS")
    play = stage.player()
    assert play.init(1, None, 1, 2, 0) == 0
    monkeypatch.setenv("COMMLENS_NCCL_EVENTS", "calls")
    monkeypatch.setenv("COMMLENS_NCCL_FOLDER", str(stage.folder / "missing"))
    assert play.init(1, None, 1, 2, 0) == 0
    assert play.mask() == 0 and not stage.file.exists()


@pytest.mark.parametrize("level", ["calls", "kernels"])
def test_the_level_decides_what_nccl_tells(
    stage: Stage, level: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COMMLENS_NCCL_EVENTS", level)
    play = stage.player()
    comm = play.communicator(1, None, 2, 0)
    comm.run()
    assert play.proxy_op(comm.context, 1, 0, 0, 1, 4, 1) == 0
    record = stage.read()
    op = last(record.communicators[0])
    assert record.level == level
    assert (op.with_kernels, op.has_stopped) == ((level == "kernels",) * 2)


def test_threads_write_and_a_reader_reads(stage: Stage):
    play = stage.player()
    comms = [play.communicator(at, None, 2, 0) for at in (1, 2)]
    contexts = (ctypes.c_uint64 * 2)(*(comm.context for comm in comms))
    calls: list[int] = []
    writer = threading.Thread(target=lambda: calls.append(play.crowd(contexts, 2, 4, 400)))
    writer.start()
    reads = 0
    while writer.is_alive():
        check_whole(stage.read())
        reads += 1
    writer.join()
    record = stage.read()
    assert reads and calls[0] > 1000 and record.torn == 0 and record.lost == 0
    check_whole(record)
    assert all(comm.collectives == comm.finished for comm in record.communicators)


def check_whole(record: NcclRecord) -> None:
    """Nothing in a record is of two operations, or of none."""
    for comm in record.communicators:
        numbers = [op.number for op in comm.ops]
        assert len(numbers) == len(set(numbers)) and max(numbers, default=0) <= comm.collectives
        for op in comm.ops:
            assert (op.func, op.datatype, op.count) == ("AllReduce", "ncclBfloat16", 1 << 20)
            assert op.stopped_on <= op.started_on <= max(op.channels, 2)
            assert op.called_ns > 0


KILLED = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
from nccl_player import Player
play = Player(*sys.argv[2:4])
comms = [play.communicator(at, "c", 2, 0).context for at in (1, 2, 3)]
print("go", flush=True)
play.crowd((ctypes.c_uint64 * 3)(*comms), 3, 4, 0)
"""


@pytest.mark.parametrize(
    "times", [12, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_a_process_killed_at_any_moment_leaves_a_file_that_is_read(
    stage: Stage, builds: tuple[Path, Path], times: int
):
    draw = random.Random(5)
    for _ in range(times):
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", KILLED, Path(nccl_player.__file__).parent, *builds],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        time.sleep(draw.random() ** 3 * 0.05)
        process.kill()
        process.wait(10)
        process.stdout.close()
        record = read_events(events_file(stage.folder, process.pid).read_bytes())
        assert record.torn <= 4 and len(record.communicators) == 3
        check_whole(record)


def test_a_damaged_file_gives_one_sentence(stage: Stage):
    play = stage.player()
    play.communicator(1, "dp", 4, 2).run(5)
    whole = stage.file.read_bytes()
    for content, words in [
        (b"", "is not a file of NCCL's events"),
        (b"x" * 5000, "is not a file of NCCL's events"),
        (whole[:100], "is cut off within its header"),
        (whole[:50_000], "is cut off: 50000 of"),
        (whole[:8] + struct.pack("<I", 9) + whole[12:], "in version 9, but this commlens reads"),
        (whole[:16] + struct.pack("<I", 2**32 - 1) + whole[20:], "has a damaged header"),
    ]:
        with pytest.raises(FormatError, match=words):
            read_events(content)
    draw = random.Random(3)
    for _ in range(60):
        damaged = bytearray(whole[: len(whole) // 1])
        for _ in range(40):
            damaged[draw.choice((draw.randrange(4096), draw.randrange(40_000)))] = draw.randrange(
                256
            )
        try:
            record = read_events(bytes(damaged))
        except FormatError as error:
            assert str(error).endswith(".")
        else:
            assert decode_record(encode_record(record)) == record


def test_it_is_read_with_the_box_and_travels_with_it(stage: Stage):
    play = stage.player()
    play.communicator(5, "dp", 4, 2).run(5)
    ticks = stage.read().start_ticks
    assert ticks == int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    path = stage.folder / f"rank2.{os.getpid()}.box"
    path.write_bytes(Box(pid=os.getpid(), start_ticks=ticks).bytes())
    with OpenBox(path) as box:
        log, packed = box.log(), box.packed()
        assert box.log(newest=1).nccl is None
        assert box.log(newest=1, with_nccl=True).nccl == log.nccl
    assert log.nccl is not None and log.nccl.communicators[0].hash == "5"
    assert read_copy(packed, name="copy")[1].nccl == log.nccl
    assert read_beside(path, os.getpid(), ticks + 1, 0) is None, (
        "of an earlier process with the pid"
    )
    stage.file.write_bytes(b"COMM" * 2000)
    with OpenBox(path) as box:
        assert "is not a file of NCCL's events" in box.log().problems[0]
        read_copy(box.packed(), name="copy")
