"""The tap, the recorder and completion, on real gloo processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from chosen import NATIVE_FIRST
from processes import Ended, Ranks
from zygote_client import Zygote

from commlens.blackbox import job_dirs
from commlens.blackbox import layout as L
from commlens.blackbox.reader import read_box
from commlens.model.collective import Collective, FrameKind, LearnedHow, State
from commlens.model.ranklog import RankLog


def torch_version() -> tuple[int, int]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def logs(box_dir: Path) -> list[RankLog]:
    found = [read_box(path) for path in job_dirs.boxes(job_dirs.user_folder(box_dir) / "job")]
    return sorted(found, key=lambda log: log.rank)


EVERY_KIND = """
import torch.distributed._functional_collectives as fc
from torch.distributed.device_mesh import init_device_mesh
import threading
import commlens

def plain(t):
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    dist.all_reduce(t, async_op=True).wait()
    dist.broadcast(t.view(2, 2).t(), 1)
    dist.reduce(t, 1)
    out = torch.zeros(2)
    dist.reduce_scatter_tensor(out, t)
    dist.reduce_scatter_tensor(out, t, async_op=True).wait()
    dist.all_gather([torch.zeros(4), torch.zeros(4)], t)
    dist.all_gather_into_tensor(torch.zeros(8), t)
    dist.all_to_all_single(torch.zeros(4), t, [1, 3] if rank == 0 else [3, 1], [1, 3] if rank == 0 else [3, 1])
    dist.gather(t, [torch.zeros(4), torch.zeros(4)] if rank == 0 else None, dst=0)
    dist.scatter(t, [torch.zeros(4), torch.zeros(4)] if rank == 1 else None, src=1)
    dist.barrier()
    dist.monitored_barrier()
    dist.all_gather_object([None, None], {"rank": rank})

def point_to_point(t):
    if rank == 0:
        dist.isend(t, 1, tag=7).wait()
        dist.recv(t)
    else:
        dist.irecv(t, 0, tag=7).wait()
        dist.send(t, 0)
    ops = [dist.P2POp(dist.isend, t, 1 - rank), dist.P2POp(dist.irecv, torch.zeros(4), 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()

def functional(t, mesh):
    (fc.reduce_scatter_tensor(t, "sum", 0, mesh.get_group("tp")) + 1)
    (fc.all_reduce(t, "sum", (mesh, 1)) + 1)
    (fc.all_gather_tensor(t, 0, (mesh, 1)) + 1)

def ddp():
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.ones(2, 4)).sum()
        time.sleep(0.2 * rank)
        loss.backward()
        time.sleep(0.2 * (1 - rank))
        optimizer.step()

def in_a_thread(t, group):
    thread = threading.Thread(target=lambda: dist.all_reduce(t, group=group), name="second")
    thread.start()
    thread.join()

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
extra = dist.new_group([0, 1], group_desc="mine")
commlens.world("trainer")
plain(torch.ones(4))
point_to_point(torch.ones(4))
functional(torch.ones(4), mesh)
ddp()
in_a_thread(torch.ones(4), extra)
time.sleep(0.6)
recorder = session.recording().recorder
assert recorder.lost == 0
print("recorded by", type(recorder).__name__)
engine = getattr(recorder, "engine", None)  # in C++
assert not (engine.held() if engine else recorder.in_flight or recorder.by_pointer)
dist.destroy_process_group()
"""


pytestmark = NATIVE_FIRST


@pytest.fixture(scope="module")
def ranks(zygote: Zygote) -> Ranks:
    return Ranks(zygote)


@pytest.fixture(autouse=True)
def both_engines(
    engine_environment: dict[str, str], clean_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in engine_environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def every_kind(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, engine_environment: dict[str, str]
) -> list[RankLog]:
    box_dir = tmp_path_factory.mktemp("every")
    ended = ranks.run(EVERY_KIND, box_dir, fresh=True, TIMING="1", **engine_environment)
    recorder = "NativeRecorder" if engine_environment["COMMLENS_ENGINE"] == "native" else "Recorder"
    assert all(f"recorded by {recorder}\n" in end.output for end in ended)
    return logs(box_dir)


def test_a_program_names_its_world(every_kind: list[RankLog]) -> None:
    assert [log.world for log in every_kind] == ["trainer", "trainer"]


def of(log: RankLog, op: str) -> list[Collective]:
    return [c for c in log.collectives if c.op == op]


def test_every_op_is_recorded_once_and_completed(every_kind: list[RankLog]) -> None:
    for log in every_kind:
        assert not log.problems
        seen = {c.op for c in log.collectives}
        assert seen == {
            "all_reduce",
            "broadcast",
            "reduce",
            "reduce_scatter",
            "all_gather",
            "all_to_all",
            "gather",
            "scatter",
            "barrier",
            "monitored_barrier",
            "send",
            "recv",
        }
        assert [c.index for c in log.collectives] == list(range(1, log.issued + 1))
        assert {c.state for c in log.collectives} == {State.COMPLETED}, [
            (c.op, c.state) for c in log.collectives if c.state != State.COMPLETED
        ]


def test_ranks_agree_on_channels_and_sequence_numbers(every_kind: list[RankLog]) -> None:
    first, second = (
        [
            (c.channel.key, c.sequence_number, c.op)
            for c in log.collectives
            if not c.is_point_to_point
        ]
        for log in every_kind
    )
    assert sorted(first) == sorted(second)


def test_what_was_asked(every_kind: list[RankLog]) -> None:
    log = every_kind[0]
    first, second = of(log, "all_reduce")[:2]
    assert (first.args.reduce_op, second.args.reduce_op) == ("MAX", "SUM")
    if first.args.asynchronous is not None:  # torch 2.6 does not say
        assert (first.args.asynchronous, second.args.asynchronous) == (False, True)
    broadcast = of(log, "broadcast")[0]
    assert broadcast.args.root == 1
    assert broadcast.args.inputs[0].memory_order == (1, 0)
    assert of(log, "all_to_all")[0].args.input_splits == (1, 3)
    assert of(log, "reduce")[0].args.root == 1
    gathered = of(log, "all_gather")[0].args
    assert [spec.shape for spec in gathered.inputs] == [(4,)]
    assert [spec.shape for spec in gathered.outputs] == [(4,), (4,)]


def test_point_to_point_has_peer_tag_and_numbers_of_its_own(every_kind: list[RankLog]) -> None:
    sends = of(every_kind[0], "send")
    receives = of(every_kind[0], "recv")
    assert [(c.peer, c.tag, c.sequence_number) for c in sends] == [(1, 7, 1), (1, 0, 2)]
    assert receives[0].peer is None  # from any rank
    assert (receives[1].peer, receives[1].sequence_number) == (1, 1)


def test_groups_are_known_by_name_description_ranks_and_mesh_dimension(
    every_kind: list[RankLog],
) -> None:
    groups = {c.channel.group.label: c.channel.group for log in every_kind for c in log.collectives}
    assert groups["mine"].ranks == (0, 1)
    assert groups["tp"].mesh_dim == "tp"
    assert all(group.backend == "gloo" for group in groups.values())


def test_lines_are_the_users(every_kind: list[RankLog]) -> None:
    functions = {c.source.function for log in every_kind for c in log.collectives if c.source}
    assert {"plain", "point_to_point", "functional", "ddp", "<lambda>"} == functions
    assert all(
        c.source is not None and c.source.file.endswith("program.py")
        for log in every_kind
        for c in log.collectives
    )
    kinds = {frame.kind for c in every_kind[0].collectives for frame in c.stack}
    assert {FrameKind.USER, FrameKind.TORCH} <= kinds


def test_how_completion_was_learned(every_kind: list[RankLog]) -> None:
    by_function: dict[str, set[LearnedHow]] = {}
    for c in every_kind[0].collectives:
        assert c.source is not None
        by_function.setdefault(c.source.function, set()).add(c.learned_how)
    assert by_function["functional"] == {LearnedHow.WAIT}
    assert by_function["ddp"] == {LearnedHow.POLL}  # the reducer waits in C++
    (barrier,) = of(every_kind[0], "monitored_barrier")
    assert barrier.learned_how is LearnedHow.RETURN
    waited = [c for c in every_kind[0].collectives if c.learned_how is LearnedHow.WAIT]
    assert all(
        c.announced_ns <= c.returned_ns <= c.wait_began_ns <= c.wait_ended_ns for c in waited
    )
    assert all(c.wait_thread == c.issue_thread for c in waited)


def test_how_long_ddp_waits_in_cpp(every_kind: list[RankLog]) -> None:
    """Rank 1 is late in the backward pass, and rank 0 after it, before it broadcasts the
    buffers.
    """
    for rank, expected in ((0, {"all_reduce"}), (1, {"broadcast"})):
        ops = [
            c
            for c in every_kind[rank].collectives
            if c.source is not None and c.source.function == "ddp" and c.step == 2
        ]
        assert all(c.announced_ns <= c.wait_began_ns <= c.wait_ended_ns for c in ops)
        assert all(c.state is State.COMPLETED for c in ops)
        long = {c.op for c in ops if c.wait_ended_ns - c.wait_began_ns > 100_000_000}
        assert long == expected


def test_durations_where_timing_is_on_and_the_end_was_seen(every_kind: list[RankLog]) -> None:
    for c in every_kind[0].collectives:
        if c.learned_how is LearnedHow.POLL:
            assert c.duration_ns is None
        else:
            assert (
                c.duration_ns is not None and 0 < c.duration_ns <= c.done_ns - c.announced_ns + 1000
            )


def test_optimizer_steps_are_counted(every_kind: list[RankLog]) -> None:
    assert every_kind[0].steps == 3
    assert {c.step for c in every_kind[0].collectives} == {0, 1, 2, 3}


def test_the_goodbye(every_kind: list[RankLog]) -> None:
    assert all(log.closed and log.initialised and log.world_size == 2 for log in every_kind)
    assert all(log.timeout_s == 1800 for log in every_kind)


def test_threads(every_kind: list[RankLog]) -> None:
    (threaded,) = [c for c in every_kind[0].collectives if c.channel.group.label == "mine"]
    assert threaded.issue_thread not in {
        c.issue_thread for c in every_kind[0].collectives if c is not threaded
    }


def test_killed_in_mid_collective_loses_nothing(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(
        """
        dist.init_process_group("gloo")
        for _ in range(5):
            dist.all_reduce(torch.ones(3))
        if rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        import threading
        threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        dist.broadcast(torch.ones(3), 1)
        """,
        tmp_path,
        expect=-signal.SIGKILL,
    )
    killed, other = logs(tmp_path)
    assert killed.issued == 6
    last = killed.collectives[-1]
    assert (last.op, last.state, last.waited_for) == ("broadcast", State.ISSUED, True)
    assert last.source is not None and last.source.function == "<module>"
    assert not killed.closed
    assert other.issued == 5 and {c.state for c in other.collectives} == {State.COMPLETED}


def test_an_exception_of_the_backend_is_recorded_and_reaches_the_user_unchanged(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(
        """
        dist.init_process_group("gloo")
        try:
            dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 1], [1, 1])
        except RuntimeError as error:
            print("caught", error)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        raise ValueError("a fault of the user")
        """,
        tmp_path,
        expect=1,
    )
    log = logs(tmp_path)[0]
    failed, fine = log.collectives
    assert failed.state is State.FAILED and failed.error
    assert fine.state is State.COMPLETED
    assert log.closed and log.exception == "ValueError: a fault of the user"
    assert log.exception_stack[0].function == "<module>"


def test_an_op_that_the_backend_refuses_has_no_number(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(
        """
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        for attempt in range(2):
            try:
                dist.broadcast(torch.ones(1), 99)
            except (RuntimeError, ValueError):
                pass
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        """,
        tmp_path,
    )
    log = logs(tmp_path)[0]
    assert [(c.op, c.sequence_number, c.state) for c in log.collectives] == [
        ("all_reduce", 1, State.COMPLETED),
        ("broadcast", 0, State.FAILED),
        ("broadcast", 0, State.FAILED),
        ("all_reduce", 2, State.COMPLETED),
    ]
    assert log.problems == []


def test_a_failed_op_that_nobody_waits_for_is_not_called_completed(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(
        """
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            os._exit(0)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        while not work.is_completed():
            time.sleep(0.05)
        time.sleep(0.6)
        os._exit(0)
        """,
        tmp_path,
    )
    assert [c.state for c in logs(tmp_path)[0].collectives] == [State.COMPLETED, State.FAILED]


def test_results_are_bit_identical_and_tensors_are_not_kept(ranks: Ranks, tmp_path: Path) -> None:
    program = """
        import gc, time, weakref
        dist.init_process_group("gloo")
        torch.manual_seed(rank)
        layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        model = torch.nn.parallel.DistributedDataParallel(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            dist.all_reduce(loss.detach())
            print("LOSS", step, loss.item().hex())
        kept = []
        for kind in ("sync", "async", "p2p", "scattered"):
            tensor = torch.ones(1000)
            kept.append(weakref.ref(tensor))
            if kind == "sync": dist.all_reduce(tensor)
            elif kind == "async": dist.all_reduce(tensor, async_op=True).wait()
            elif kind == "p2p": (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
            else: dist.reduce_scatter_tensor(torch.zeros(500), tensor)
        del tensor
        dist.barrier()
        deadline = time.monotonic() + 5  # gloo's own threads let go of a finished op a little later than its waiter
        while any(ref() is not None for ref in kept) and time.monotonic() < deadline:
            time.sleep(0.01)
        print("KEPT", [ref() is not None for ref in kept])
        del model, optimizer  # DDP's reducer goes before its group
        dist.destroy_process_group()
        """
    recorded = ranks.run(program, tmp_path)
    bare = ranks.run(program, tmp_path, RECORD="0")

    def results(ended: list[Ended]) -> list[list[str]]:
        return [
            [line for line in end.output.splitlines() if line.startswith(("LOSS", "KEPT"))]
            for end in ended
        ]

    assert results(recorded) == results(bare)
    assert results(recorded)[0][-1] == "KEPT [False, False, False, False]"


def test_a_store_that_is_written_in_python(ranks: Ranks, tmp_path: Path) -> None:
    """C++ looks into the class for overrides of its methods, and must not find ours."""
    ranks.run(
        """
        class Store(dist.Store):
            def __init__(self):
                super().__init__()
                self.values = {}
            def set(self, key, value):
                self.values[key] = value
            def get(self, key):
                return self.values[key]

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        mine = Store()
        store = dist.PrefixStore("mine", mine)
        store.set("a", b"1")
        assert (store.get("a"), store.multi_get(["a"])) == (b"1", [b"1"])
        try:
            store.append("a", b"2")
        except RuntimeError as error:
            assert "INTERNAL ASSERT" in str(error), error
        dist.destroy_process_group()
        """,
        tmp_path,
    )


def test_children_of_a_rank_never_write_into_a_box(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(
        """
        import multiprocessing, subprocess

        def child():
            from torch.testing._internal.distributed.fake_pg import FakeStore
            recording.start(config.Settings(box_dir=os.environ["BOX_DIR"], job="job", watched=True))
            if dist.is_initialized():  # forked: the parent's group is there, and must not be used
                os._exit(0)
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
            dist.all_reduce(torch.ones(1))
            os._exit(0)

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(1))
            pid = os.fork()
            if pid == 0:
                assert session.recording().recorder is None
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            if rank == 0:
                worker = multiprocessing.get_context("spawn").Process(target=child)
                worker.start(); worker.join(40)
                assert worker.exitcode == 0
            loader = torch.utils.data.DataLoader(torch.arange(8), num_workers=1)
            assert len(list(loader)) == 8
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
        """,
        tmp_path,
    )
    assert [(log.rank, log.issued) for log in logs(tmp_path)] == [(0, 2), (1, 2)]
    assert len(job_dirs.boxes(job_dirs.user_folder(tmp_path) / "job")) == 2


def test_a_wait_in_the_store_before_init_process_group(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(
        """
        import threading
        threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        store = dist.FileStore(os.path.join(os.environ["BOX_DIR"], "meeting"), 2)
        if rank == 1:
            store.get("config")
        time.sleep(5)
        """,
        tmp_path,
        expect=-signal.SIGKILL,
    )
    busy, waiting = (log.store_wait for log in logs(tmp_path))
    assert busy is None and waiting is not None
    assert (waiting.op, waiting.channel.group.name, waiting.channel.group.ranks) == (
        "store.get",
        "config",
        (0, 1),
    )
    assert waiting.source is not None and waiting.source.function == "<module>"


def test_a_wait_for_a_store_to_be_made(ranks: Ranks, tmp_path: Path) -> None:
    """Of a client for its server, and of a server for its clients."""
    ranks.run(
        """
        import threading
        threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        dist.TCPStore("127.0.0.1", 1 if rank else 0, 3, is_master=rank == 0)
        """,
        tmp_path,
        expect=-signal.SIGKILL,
    )
    server, client = (log.store_wait for log in logs(tmp_path))
    assert server is not None and client is not None
    assert (server.op, server.module) == ("TCPStore(is_master=True)", "2 clients")
    assert (client.op, client.channel.group.name) == ("TCPStore", "localhost:1")
    assert server.is_store_wait and client.is_store_wait
    assert client.source is not None and client.source.function == "<module>"


def test_a_store_that_is_made_is_torchs(ranks: Ranks, tmp_path: Path) -> None:
    """Its class, arguments, errors and subclasses are as without commlens."""
    ended = ranks.run(
        """
        import contextlib
        from datetime import timedelta
        WAIT = timedelta(seconds=1)

        class Mine(dist.TCPStore):
            def __init__(self, *args):
                super().__init__(*args)

        class Without(dist.TCPStore):
            def __init__(self):
                pass

        store = dist.TCPStore("127.0.0.1", 0, None, True, WAIT, False)
        assert type(store) is dist.TCPStore and isinstance(store, dist.Store)
        mine = Mine("127.0.0.1", store.port, 2, False, WAIT)
        assert type(mine) is Mine and mine.port == store.port
        mine.set("a", "1")
        assert store.get("a") == b"1"
        for wrong in (dict(), dict(host_name="127.0.0.1"), dict(host_name=1, port="x"), dict(no=1)):
            try:
                dist.TCPStore(**wrong)
            except TypeError as error:
                assert "incompatible constructor arguments" in str(error), error
        try:
            dist.TCPStore("127.0.0.1", 1, timeout=WAIT, wait_for_workers=False)
        except dist.DistError as error:
            assert "Traceback" not in str(error)
        else:
            raise AssertionError("no error")
        with contextlib.suppress(TypeError):
            Without()
            raise AssertionError("no error")
        """,
        tmp_path,
    )
    assert not any("commlens" in end.output for end in ended)
    assert all(log.store_wait is None for log in logs(tmp_path))


def test_a_rank_is_found_however_it_came_to_be(ranks: Ranks, tmp_path: Path) -> None:
    """Forked from a launcher's rank that never joined and has the pid of one that has ended; with a
    name imported before the switch.
    """
    ranks.run(
        """
        import multiprocessing

        from pathlib import Path
        from commlens.blackbox import job_dirs, writer

        old = job_dirs.user_folder(Path(os.environ["BOX_DIR"])) / "old"
        old.mkdir(parents=True, exist_ok=True)
        writer.BoxWriter(old / job_dirs.box_name(0, os.getpid()), capacity=8, rank=0, world_size=1, local_rank=0, start_ticks=1, about={})
        init = dist.distributed_c10d.init_process_group.__wrapped__  # what a name imported earlier is bound to

        def work():
            init("gloo")
            dist.all_reduce(torch.ones(1))
            if rank == 1:
                raise ValueError("bad")
            if rank == 2:
                dist.destroy_process_group()
                os._exit(0)

        worker = multiprocessing.get_context("fork").Process(target=work)
        worker.start()
        worker.join(40)
        assert worker.exitcode == (1 if rank == 1 else 0)
        """,
        tmp_path,
        world_size=3,
    )
    found = [log for log in logs(tmp_path) if log.initialised]  # without their parents'
    assert [(log.rank, log.issued, log.initialised) for log in found] == [
        (0, 1, True),
        (1, 1, True),
        (2, 1, True),
    ]
    # multiprocessing leaves by os._exit, without exit handlers.
    assert [(log.closed, log.left, log.exception) for log in found] == [
        (True, False, None),
        (True, False, "ValueError: bad"),
        (False, True, None),
    ]


def test_every_default_group_is_an_incarnation_and_a_refused_call_is_none(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(
        """
        import contextlib
        from torch.distributed.device_mesh import init_device_mesh
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        with contextlib.suppress(ValueError):
            dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        init_device_mesh("cpu", (1,))
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        """,
        tmp_path,
        world_size=1,
    )
    seen = [(c.channel.group.incarnation, c.sequence_number) for c in logs(tmp_path)[0].collectives]
    assert seen == [(0, 1), (0, 2), (1, 1)]


def test_the_hooks_read_a_call_however_its_arguments_are_passed(
    ranks: Ranks, tmp_path: Path
) -> None:
    """By position, by keyword, in any order; torch refuses a call that does not fit, and commlens
    says nothing.
    """
    ended = ranks.run(
        """
        import contextlib
        from datetime import timedelta
        from torch.distributed import distributed_c10d as c10d
        from torch.distributed.device_mesh import init_device_mesh
        WAIT = timedelta(seconds=30)

        with contextlib.suppress(TypeError):
            dist.init_process_group("gloo", nothing_of_torch=1)
        dist.init_process_group("gloo", None, WAIT, 2, rank)
        store = dist.distributed_c10d._get_default_store()
        store.set("key", "1")
        store.wait([b"key"], WAIT)
        store.get(b"key")
        if hasattr(store, "queue_push"):  # not in torch 2.6
            store.queue_push("q", "1")
            store.queue_pop(key="q", block=True)
        helper, gloo = c10d._new_process_group_helper, c10d.Backend("gloo")
        helper(2, rank, [0, 1], gloo, dist.PrefixStore("five", store), group_name="five", timeout=WAIT)
        helper(2, rank, [0, 1], gloo, dist.PrefixStore("six", store), "six", None, WAIT)
        helper(
            group_name="named", store=dist.PrefixStore("named", store), backend=gloo, timeout=WAIT,
            global_ranks_in_group=[0, 1], group_rank=rank, group_size=2, group_desc="all by name",
        )
        with contextlib.suppress(TypeError):
            helper(2, rank)
        dist.new_group([0, 1], WAIT, "gloo", None, False, "by position")
        dist.new_group(ranks=[0, 1], group_desc="by keyword")
        init_device_mesh(mesh_shape=(2,), device_type="cpu", mesh_dim_names=("dp",))
        with contextlib.suppress(TypeError):
            init_device_mesh()
        dist.barrier()
        dist.destroy_process_group(group=None)
        """,
        tmp_path,
    )
    assert [end.output for end in ended] == ["", ""]
    for log in logs(tmp_path):
        made = [each.channel.group for each in log.setups if each.op == "new_group"]
        assert {"five", "six", "named"} <= {group.name for group in made}
        assert {"all by name", "by position", "by keyword"} <= {g.description for g in made}
        assert [each.op for each in log.setups].count("init_device_mesh") == 1


def test_the_ring_wraps(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(
        """
        dist.init_process_group("gloo")
        for size in range(1, 60):
            dist.all_reduce(torch.ones(size))
        dist.destroy_process_group()
        """,
        tmp_path,
        ENTRIES="16",
    )
    log = logs(tmp_path)[0]
    assert log.issued == 59
    assert [c.index for c in log.collectives] == list(range(44, 60))
    assert [c.args.inputs[0].shape for c in log.collectives] == [(size,) for size in range(44, 60)]


def test_an_op_that_outlives_its_record_leaves_the_next_one_alone(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(
        """
        dist.init_process_group("gloo")
        late = torch.ones(1)
        work = dist.irecv(late, 1) if rank == 0 else None
        for _ in range(20):
            dist.all_reduce(torch.ones(1))
        dist.send(late, 0) if rank == 1 else work.wait()
        dist.barrier()
        dist.destroy_process_group()
        """,
        tmp_path,
        ENTRIES="16",
    )
    assert {c.state for c in logs(tmp_path)[0].collectives} == {State.COMPLETED}


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/full/nowhere"])
def test_without_a_place_for_the_box_the_job_runs_on_with_one_line(
    ranks: Ranks, tmp_path: Path, place: str
) -> None:
    program = """
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        print("DONE")
        """
    for end in ranks.run(program, tmp_path, BOX_AT=place):
        assert "DONE" in end.output
        assert end.output.count("is not recorded") == 1


def test_cpp_frames_on_request(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(
        """
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        """,
        tmp_path,
        CPP_STACK="1",
    )
    stack = logs(tmp_path)[0].collectives[0].stack
    native = [frame.function for frame in stack if frame.kind is FrameKind.NATIVE]
    if torch_version() >= (2, 14) and not any("c10d::" in function for function in native):
        pytest.skip("this torch's own unwinder does not get past the interpreter")
    assert any("c10d::" in function and "allreduce" in function for function in native), native
    assert any(frame.kind is FrameKind.USER for frame in stack)


def test_a_thread_without_python_frames_is_recorded(ranks: Ranks, tmp_path: Path) -> None:
    """As autograd's threads on an accelerator are, from which DDP issues its collectives."""
    if os.environ["COMMLENS_ENGINE"] == "native":
        pytest.skip("such a thread is made here by calling the kernel in Python")
    ranks.run(
        """
        import _thread
        from torch._C import DispatchKey
        from commlens.tap import tap
        dist.init_process_group("gloo")
        recorder = session.recording().recorder
        caught = []
        original, recorder.begin = recorder.begin, lambda *arguments: caught.append(arguments)
        dist.barrier()
        recorder.begin = original
        kernel = tap._kernel(torch.ops.c10d.barrier.default, caught[0][0])
        _thread.start_new_thread(kernel, (torch._C.DispatchKeySet(DispatchKey.CPU), *caught[0][1]))
        while recorder.writer.last_index + recorder.lost == 0:
            time.sleep(0.01)
        time.sleep(0.2)
        assert recorder.lost == 0
        dist.destroy_process_group()
        """,
        tmp_path,
    )
    assert [c.op for c in logs(tmp_path)[0].collectives] == ["barrier"]


def test_layout_constants_match_torch() -> None:
    import torch.distributed as dist

    values = {name: int(value) for name, value in dist.ReduceOp.RedOpType.__members__.items()}
    assert tuple(sorted(values, key=values.__getitem__)) == L.REDUCE_OPS[: len(values)]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_tmpfs_that_is_too_small_or_fills_up_later_does_no_harm(
    ranks: Ranks, tmp_path: Path
) -> None:
    import subprocess

    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    try:
        ended = ranks.run(
            """
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(1))
            if rank == 0:
                try:
                    with open(os.environ["BOX_DIR"] + "/filler", "wb") as filler:
                        while True: filler.write(bytes(65536))
                except OSError:
                    pass
            for size in range(300):
                dist.all_reduce(torch.ones(size + 1))
            dist.destroy_process_group()
            print("DONE")
            """,
            tmp_path,
            world_size=3,
        )
        assert all("DONE" in end.output for end in ended)
        unrecorded = [end for end in ended if "is not recorded" in end.output]
        assert len(unrecorded) == 1, (
            "5 MB hold two boxes of 2.2 MB: the third rank must say that it has none"
        )
        assert [log.issued for log in logs(tmp_path)] == [301, 301]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=False)


OF_PYTHON = """
import commlens

if os.environ["VERIFIED"] == "1":
    commlens.enable(verify=True)

class Plain(dist._Work):
    pass

class Done(dist._Work):
    def __init__(self, result):
        super().__init__()
        self.future = torch.futures.Future()
        self.future.set_result(result)

    def wait(self, timeout=None):
        return True

    def get_future(self):
        return self.future

class Group(dist.ProcessGroup):
    def allreduce(self, tensors, opts=None):
        return Done(tensors)

    def broadcast(self, tensors, opts=None):
        return Done(tensors)

    def allgather(self, outputs, tensors, opts=None):
        for output in outputs[0]:
            output.copy_(tensors[0])
        return Done(outputs)

    def getBackendName(self):
        return "of python"

def error_of(call):
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]

Plain.__module__ = Done.__module__ = "torchft.work"
dist.init_process_group("gloo")
group = Group(rank, 2)
print(error_of(lambda: group.reduce_scatter([torch.ones(1)], [[torch.ones(1)] * 2])))
print(error_of(lambda: group._start_coalescing(torch.device("cpu"))))
print(error_of(Plain().get_future))
print(error_of(Plain().is_completed))
if not torch.__version__.startswith("2.6."):  # where it hangs without commlens, too
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(2, 2), process_group=group, find_unused_parameters=True
    )
    model(torch.ones(1, 2)).sum().backward()
print("DDP has finished")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("verified", ["0", "1"])
def test_groups_and_works_that_are_written_in_python_do_what_they_did(
    ranks: Ranks, tmp_path: Path, verified: str, engine_environment: dict[str, str]
) -> None:
    """As torchft's: C++ must not take a patch of a base class for a method of theirs."""
    ended = ranks.run(OF_PYTHON, tmp_path, VERIFIED=verified, **engine_environment)
    for end in ended:
        assert "RecursionError" not in end.output
        assert end.output.count("RuntimeError: No backend type associated with device") == 2
        assert "RuntimeError: Work::getFuture not implemented." in end.output
        assert "DDP has finished" in end.output
        assert "the job goes on without it" not in end.output
