"""Recording is harmless where the host runs ahead of the device, and both engines write the same:
on the backend that behaves as NCCL.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from chosen import NATIVE_FIRST

pytest.importorskip("torch")

from launching import fsdp2_runs_on_cpu
from processes import Ended, Ranks
from zygote_client import Zygote

from commlens.blackbox import job_dirs
from commlens.blackbox.reader import read_box
from commlens.model.collective import Collective, LearnedHow, State
from commlens.model.ops import GRAPH_REPLAY

sys.path.append(str(Path(__file__).parents[1]))

import nccl_like

pytestmark = pytest.mark.timeout(240)  # the first test compiles the backend

BEGIN = """
import json
from datetime import timedelta
from pathlib import Path
import nccl_like

def say(**found):
    os.write(1, (json.dumps(found) + "\\n").encode())

def ring(t, group=None):
    got = torch.zeros_like(t)
    ops = [dist.P2POp(dist.isend, t, 1 - rank, group=group), dist.P2POp(dist.irecv, got, 1 - rank, group=group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got

dist.init_process_group("nccl", timeout=timedelta(seconds=30))
is_nccl = os.environ["NCCL_LIKE_ENGINE"] == "nccl"
"""

TRAINING = (
    BEGIN
    + """
import hashlib
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

def train(model, key):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(key)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(8, 16, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]

def ddp():
    return train(nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.001), rank)

def fsdp2():
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh)
    return train(model, rank)

def tensor_parallel():
    return train(parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), 0)

def messages():
    t = torch.arange(5.0) + rank
    for _ in range(20):
        t = ring(t / 3, pair) + 1
    return [t]

mesh, pair = init_device_mesh("cpu", (2,)), dist.new_group([0, 1])
kept = dist.all_reduce(torch.ones(3), async_op=True)  # the program holds this Work
for program in (ddp, *([fsdp2] if "fsdp2" in os.environ["PROGRAMS"] else []), tensor_parallel, messages):
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in program()]
    torch.cpu.synchronize()
    bits = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
    del tensors
    time.sleep(0.6)  # the watchdog thread has looked
    say(**{program.__name__: [bits, nccl_like.works_alive(), nccl_like.queries()]})
if os.environ["RECORD"] == "1":
    recorder = session.recording().recorder
    say(recorded=[type(recorder).__name__, recorder.writer.last_index > 50, recorder.lost])
dist.destroy_process_group()
"""
)

CAPTURE = (
    BEGIN
    + """
# The group carries collectives and messages: only then does recording ever query events, when something is in flight and
# nothing was issued for two seconds. It never queries those of nccl2.
tensor = torch.ones(4)
dist.all_reduce(tensor)
ring(tensor)
nccl_like.launch_kernel()
dist.all_reduce(tensor)  # stays in flight
torchs = nccl_like.queries()  # by torch's own hooks
with nccl_like.capture() as graph:
    for _ in range(3):
        dist.all_reduce(tensor)
    time.sleep(3)  # a query ends the process with status 99
during = nccl_like.queries()
end = time.monotonic() + 10
while not nccl_like.queries() and time.monotonic() < end:
    time.sleep(0.1)
nccl_like.end_kernels()
graph.replay()
torch.cpu.synchronize()
say(during=during, afterwards=nccl_like.queries() > torchs, result=tensor.tolist(), works=nccl_like.works_alive())
dist.destroy_process_group()
"""
)

RECORDS = (
    BEGIN
    + """
from commlens.blackbox.reader import read_box
from commlens.model.collective import State
from commlens.model.ops import GRAPH_REPLAY

t, other = torch.ones(4), dist.new_group([0, 1], group_desc="other")
dist.all_reduce(t)
dist.broadcast(t, 1)
dist.all_gather_into_tensor(torch.zeros(8), t, group=other)
works = [dist.all_reduce(t + i, async_op=True, group=other) for i in range(3)]
for work in reversed(works):
    work.wait()
del work, works
dist.all_reduce(torch.ones(2), async_op=True)  # nobody waits
with dist._coalescing_manager():
    for _ in range(3):
        dist.all_reduce(t)
with dist._coalescing_manager(async_ops=True) as manager:
    for _ in range(2):
        dist.all_gather_into_tensor(torch.zeros(8), t)
manager.wait()
ring(t)
ring(t, other)
dist.send(t, 1) if rank == 0 else dist.recv(t, 0)
with nccl_like.capture() as graph:
    dist.all_reduce(t)
    dist.all_reduce(t, group=other)
for _ in range(2):
    graph.replay()
dist.all_reduce(t)
dist.all_reduce(t, group=other)
dist.barrier()
torch.cpu.synchronize()
(box,) = Path(os.environ["BOX_DIR"]).rglob(f"rank{rank}.*box")

def is_open(op):
    is_of_batch = op.coalescing_id and not op.coalesced_members  # the record that closes the batch has the state
    return op.state is not State.COMPLETED and not (is_of_batch or op.captured or op.op == GRAPH_REPLAY)

end = time.monotonic() + 12  # torch's recorder is asked two seconds after the last collective
while any(map(is_open, read_box(box).collectives)) and time.monotonic() < end:
    time.sleep(0.2)
dist.destroy_process_group()
"""
)

HOOKED = (
    BEGIN
    + """
from commlens.blackbox.reader import read_box

(box,) = Path(os.environ["BOX_DIR"]).rglob(f"rank{rank}.*box")
wanted = json.loads(os.environ["WANTED"])

def states():
    # not those of a batch's messages: the record that closes the batch has the state
    ops = [op for op in read_box(box).collectives if op.coalesced_members or not op.coalescing_id]
    return [f"{op.op} {op.state.value} {op.learned_how.value}" for op in ops]

def come(name):
    end = time.monotonic() + 15
    while states() != wanted[name] and time.monotonic() < end:
        time.sleep(0.1)
    say(**{name: states()})

t = torch.ones(4)
dist.all_reduce(t)
ring(t)
try:
    dist.all_reduce(t, op=dist.ReduceOp.BAND)
except ValueError:
    pass
nccl_like.launch_kernel()
dist.all_reduce(t)
dist.broadcast(t, 0)
come("before")
nccl_like.end_kernels()
come("after")
took = [op.duration_ns for op in read_box(box).collectives if op.op == "broadcast"]
from commlens.tracing import trace_events

durations = [one.get("duration_ms") for one in trace_events.entries() if one["profiling_name"] == "nccl2:broadcast"]
say(timed=took[0] is not None, traced=[type(one).__name__ for one in durations])
dist.destroy_process_group()
"""
)


@pytest.fixture(scope="module")
def ranks(zygote: Zygote) -> Ranks:
    return Ranks(zygote)


@pytest.fixture(scope="module", params=["nccl", "nccl2"])
def nccl(request: pytest.FixtureRequest) -> str:
    """The emulated engine: ProcessGroupNCCL, or that of torch 2.15."""
    if why_not := nccl_like.why_not(request.param):
        pytest.skip(why_not)
    return str(request.param)


@pytest.fixture(scope="module")
def emulation(nccl: str) -> dict[str, str]:
    """What puts a rank on the backend."""
    return {**nccl_like.variables(nccl), "PROGRAMS": "fsdp2" if fsdp2_runs_on_cpu() else ""}


def said(ended: list[Ended]) -> list[dict[str, Any]]:
    """Each rank's JSON, merged."""
    found: list[dict[str, Any]] = []
    for end in ended:
        found.append({})
        for line in end.output.splitlines():
            if line.startswith("{"):
                found[-1].update(json.loads(line))
    return found


@pytest.fixture(scope="module")
def bare(
    ranks: Ranks, emulation: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What the training programs say without commlens."""
    return said(ranks.run(TRAINING, tmp_path_factory.mktemp("bare"), RECORD="0", **emulation))


@NATIVE_FIRST
def test_recording_changes_no_bit_holds_no_work_and_queries_nothing(
    ranks, nccl, emulation, bare, engine_environment, tmp_path
):
    """In nccl2, only torch's own hooks query."""
    recorded = said(ranks.run(TRAINING, tmp_path, RECORD="1", **emulation, **engine_environment))
    name = "NativeRecorder" if engine_environment["COMMLENS_ENGINE"] == "native" else "Recorder"
    for rank, found in enumerate(recorded):
        assert found.pop("recorded") == [name, True, 0]
        assert found == bare[rank]  # the results, the Works that are held, and the queries
        assert nccl == "nccl2" or {queries for _, _, queries in found.values()} == {0}
        assert all(works for _, works, _ in found.values())


@NATIVE_FIRST
def test_nothing_is_queried_while_a_graph_is_captured(
    ranks, nccl, emulation, engine_environment, tmp_path, tmp_path_factory
):
    """torch's hooks on nccl2 query, with recording as often as without it."""
    queried = 0
    if nccl == "nccl2":
        folder = tmp_path_factory.mktemp("bare")
        bare = said(ranks.run(CAPTURE, folder, RECORD="0", **emulation))
        queried = bare[0]["during"]
    for found in said(ranks.run(CAPTURE, tmp_path, RECORD="1", **emulation, **engine_environment)):
        assert found == {
            "during": queried,
            "afterwards": nccl == "nccl",
            "result": [32.0] * 4,
            "works": 0,
        }


AT_ONCE = (
    BEGIN
    + """
t = torch.ones(4)
peer = 1 - rank
works = []
for _ in range(20):
    for work in dist.batch_isend_irecv([dist.P2POp((dist.isend, dist.irecv)[rank], t, peer)]):
        work.wait()
for _ in range(20):
    works += dist.batch_isend_irecv([dist.P2POp((dist.isend, dist.irecv)[rank], t, peer)])
for work in works:
    work.wait()
dist.destroy_process_group()
"""
)


@NATIVE_FIRST
def test_a_message_that_its_rank_waits_for_at_once(
    ranks: Ranks, nccl: str, emulation: dict[str, str], engine_environment: Any, tmp_path: Path
) -> None:
    """Its device waits, too. A look of the watchdog thread in between may hide that."""
    ranks.run(AT_ONCE, tmp_path, RECORD="1", TIMING="1", **emulation, **engine_environment)
    for path in job_dirs.boxes(job_dirs.user_folder(tmp_path) / "job"):
        batches = [op for op in read_box(path).collectives if op.coalesced_members]
        waited = [op for op in batches if op.wait_began_ns]
        assert len(batches) == 40 and len(waited) >= 15
        assert {op.index for op in waited} <= {op.index for op in batches[:20]}
        assert all(op.wait_ended_ns == op.wait_began_ns >= op.returned_ns for op in waited)


@pytest.fixture(scope="module")
def records(
    ranks: Ranks,
    emulation: dict[str, str],
    native_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[list[Collective]]]:
    """The records of one program, by engine and rank."""
    found = {}
    for engine in ("python", "native"):
        folder = tmp_path_factory.mktemp(engine)
        ranks.run(
            RECORDS,
            folder,
            RECORD="1",
            COMMLENS_ENGINE=engine,
            COMMLENS_NATIVE_DIR=str(native_cache),
            **emulation,
        )
        logs = sorted(
            (read_box(path) for path in job_dirs.boxes(job_dirs.user_folder(folder) / "job")),
            key=lambda log: log.rank,
        )
        assert [log.problems for log in logs] == [[], []]
        found[engine] = [log.collectives for log in logs]
    return found


def shown(op: Collective) -> tuple[object, ...]:
    return (
        op.index,
        op.op,
        op.channel.group.label,
        op.channel.device,
        op.channel.runs_ahead,
        op.sequence_number,
        op.state.value,
        op.learned_how.value,
        op.peer,
        op.captured,
        bool(op.coalescing_id),
        op.coalesced_members,
    )


def test_both_engines_write_the_same_records(records, nccl):
    """Of nccl2, the Python engine does not learn what completes in a group with coalesced calls."""
    states = slice(6, 8) if nccl == "nccl2" else slice(0)
    for python, native in zip(records["python"], records["native"], strict=True):
        both = [list(map(list, map(shown, ops))) for ops in (python, native)]
        for op in (*both[0], *both[1]):
            del op[states]
        assert both[0] == both[1]


def test_all_that_ran_is_known_to_be_complete(records, nccl):
    for ops in records["native" if nccl == "nccl2" else "python"]:
        batches = [op for op in ops if op.coalescing_id and not op.coalesced_members]
        # whose states are those of the records that close them
        assert [op.op for op in batches] == ["send", "recv"] * 2
        replays = [op for op in ops if op.op == GRAPH_REPLAY]
        assert [(op.channel.group.label, op.sequence_number) for op in replays] == [
            ("default_pg", 1),
            ("other", 1),
            ("default_pg", 2),
            ("other", 2),
        ]
        captured = [op for op in ops if op.captured]
        assert [op.op for op in captured] == ["all_reduce"] * 2
        ran = [op for op in ops if op not in (*batches, *replays, *captured)]
        assert {(op.state, op.learned_how) for op in ran} == {
            (State.COMPLETED, LearnedHow.NATIVE_RECORDER)
        }, list(map(shown, ran))


@pytest.fixture(scope="module")
def hooked() -> dict[str, str]:
    """What puts a rank on the backend with completion and abort hooks."""
    if why_not := nccl_like.why_not("nccl2"):
        pytest.skip(why_not)
    return {**nccl_like.variables("nccl2"), "TORCH_NCCL_ENABLE_TIMING": "1"}


@NATIVE_FIRST
def test_what_completion_hooks_tell(
    ranks: Ranks, hooked: dict[str, str], engine_environment: dict[str, str], tmp_path: Path
) -> None:
    """torch's own hooks fill the recorder that the Python engine reads; the native engine has a hook
    of its own. What the backend rejects is neither in flight nor counted.
    """
    native = engine_environment["COMMLENS_ENGINE"] == "native"
    batch = "coalesced completed native-recorder" if native else "coalesced unknown unknown"
    first = ["all_reduce completed native-recorder", batch, "all_reduce failed return"]
    last = ("all_reduce", "broadcast")
    wanted = {
        "before": first + [f"{op} issued native-recorder" for op in last],
        "after": first + [f"{op} completed native-recorder" for op in last],
    }
    ended = ranks.run(
        HOOKED,
        tmp_path,
        RECORD="1",
        WANTED=json.dumps(wanted),
        **hooked,
        **engine_environment,
    )
    for found in said(ended):
        # a trace takes the durations from the recorder that torch's hooks fill
        assert found == {**wanted, "timed": native, "traced": ["float"]}


def test_an_abort_hook_tells_that_the_watchdog_ends_the_process(
    ranks: Ranks, hooked: dict[str, str], native_cache: Path, tmp_path: Path
) -> None:
    """It writes to the black box without the GIL, which the program holds here."""
    program = (
        BEGIN.replace("seconds=30", "seconds=2")
        + """
import ctypes
nccl_like.launch_kernel()
dist.all_reduce(torch.ones(4))
ctypes.PyDLL(None).sleep(20)
"""
    )
    ended = ranks.run(
        program,
        tmp_path,
        RECORD="1",
        expect=-signal.SIGABRT,
        COMMLENS_ENGINE="native",
        COMMLENS_NATIVE_DIR=str(native_cache),
        TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "fr_"),
        TORCH_INCLUDE_STACK_TRACE="0",
        **hooked,
    )
    assert [end.returncode for end in ended] == [-signal.SIGABRT] * 2
    for path in job_dirs.boxes(job_dirs.user_folder(tmp_path) / "job"):
        log = read_box(path)
        [last] = log.collectives[-1:]
        assert 1e9 < log.gave_up_ns - last.announced_ns < 19e9


def test_a_work_without_a_key_of_its_own_is_not_in_flight(
    ranks: Ranks, hooked: dict[str, str], native_cache: Path, tmp_path: Path
) -> None:
    """No completion hook tells of it, as of nccl2's Works that are complete from the start."""
    program = (
        BEGIN
        + """
nccl_like.native().set_works_have_keys(False)
dist.all_reduce(torch.ones(4))
time.sleep(5)
dist.destroy_process_group()
"""
    )
    ranks.run(
        program,
        tmp_path,
        RECORD="1",
        COMMLENS_ENGINE="native",
        COMMLENS_NATIVE_DIR=str(native_cache),
        TORCH_FR_BUFFER_SIZE="0",
        **hooked,
    )
    for path in job_dirs.boxes(job_dirs.user_folder(tmp_path) / "job"):
        [op] = read_box(path).collectives
        assert (op.state, op.learned_how) == (State.UNKNOWN, LearnedHow.UNKNOWN)
