"""The two engines write the same bytes: one program, recorded by each, on the fake backend, where
nothing depends on time.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from zygote_client import Zygote

pytest.importorskip("torch")

from commlens.blackbox import job_dirs
from commlens.blackbox import layout as L
from commlens.blackbox.reader import read_box
from commlens.tap import torch_patches

PROGRAM = """
import os, threading
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from commlens import config
from commlens.capture import session, thread_id
from commlens.launch import recording
from commlens.tap import libraries

# The watchdog's thread tells of them at a moment of its own.
libraries.install = lambda adapters, late: None
# Notes on groups hold the thread's id as text: both programs write the same number of digits.
of_a_thread = thread_id._CurrentThread.__init__
thread_id._CurrentThread.__init__ = lambda self: of_a_thread(self) or setattr(self, "id", 1_000_000)
thread_id.current.id = 1_000_000
engine = os.environ["COMMLENS_ENGINE"]
recording.start(config.Settings(box_dir=os.environ["BOX_AT"], job="job", watched=True, engine=engine, box_entries=200))

def begin():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)

def plain(t):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        dist.all_reduce(t, op=op)
    dist.all_reduce(t, async_op=True).wait()
    dist.broadcast(t.view(2, 4).t(), 2)
    dist.reduce(t, 3)
    dist.all_gather([torch.zeros(8) for _ in range(4)], t)
    dist.all_gather_into_tensor(torch.zeros(32), t)
    dist.reduce_scatter_tensor(torch.zeros(2), t)
    dist.all_to_all_single(torch.zeros(8), t, [1, 3, 2, 2], [2, 2, 3, 1])
    dist.scatter(torch.zeros(2), None, src=0)
    dist.barrier()
    for n in range(5):
        dist.all_reduce(torch.zeros(n, 3, dtype=torch.float64))
    with dist._coalescing_manager():
        dist.all_reduce(t)
        dist.all_reduce(torch.zeros(2))

def point_to_point(t):
    dist.send(t, 0, tag=3)
    dist.send(t, 2)
    dist.irecv(t, 0, tag=3).wait()
    dist.irecv(t).wait()

def functional(t, group):
    fc.all_reduce(t, "sum", group) + 1
    fc.all_gather_tensor(t, 0, group) + 1
    fc.reduce_scatter_tensor(t, "sum", 0, group) + 1

def never_waited(t):
    return [dist.all_reduce(t, async_op=True) for _ in range(3)]

def all_of_it():
    t = torch.ones(8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pair = dist.new_group([0, 1], group_desc="pair")
    plain(t)
    point_to_point(t)
    functional(t, mesh.get_group("tp"))
    dist.all_reduce(t, group=pair)
    dist.destroy_process_group(pair)
    thread = threading.Thread(target=lambda: dist.all_reduce(t, group=dist.new_group([0, 1])))
    thread.start()
    thread.join()
    return never_waited(t)

begin()
kept = all_of_it()
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
begin()
kept = all_of_it()
assert session.recording().recorder.lost == 0
print(type(session.recording().recorder).__name__)
"""

TIMELESS = (
    "index",
    "channel",
    "sequence_number",
    "state",
    "peer",
    "tag",
    "step",
    "coalescing_id",
    "coalesced_members",
    "error",
)
TIMES = (L.ENTERED, L.RETURNED, L.WAIT_BEGAN, L.WAIT_ENDED, L.DONE)


def record(
    zygote: Zygote, engine: str, script: Path, environment: dict[str, str]
) -> tuple[bytes, Path]:
    box_at = script.parent / engine
    box_at.mkdir()
    environment = {**environment, "COMMLENS_ENGINE": engine, "BOX_AT": str(box_at)}
    printed = zygote.run(str(script), folder=box_at, environ=environment, timeout_s=110)
    assert printed.splitlines()[-1] == ("NativeRecorder" if engine == "native" else "Recorder")
    (path,) = job_dirs.boxes(job_dirs.user_folder(box_at) / "job")
    return path.read_bytes(), path


def without_times(box: bytes, index: int) -> tuple[object, ...]:
    """All of a record but when, and by which threads."""
    offset = L.HEADER_SIZE + (index - 1) * L.RECORD_SIZE
    fields = list(L.RECORD.unpack_from(box, offset))
    fields[1] = fields[10] = None  # announced, thread

    def word(at: int) -> int:
        return int(struct.unpack_from("<Q", box, offset + at)[0])

    times = [(word(at) & L.TAG_MASK, word(at) > L.TAG_MASK) for at in TIMES]
    return (
        *fields,
        times,
        word(L.OUTCOME) & 0xFFFFFFFF,
        word(L.OUTCOME) >> 32 != 0,
        word(L.FAILURE),
        word(L.REDUCE_OP),
        word(L.DURATION),
    )


def blobs(side: bytes) -> list[object]:
    """The blobs of a side table that has not wrapped, without when and by which thread process
    groups were made.
    """
    found: list[object] = []
    at = 0
    while at < len(side):
        size, _, position = L.BLOB.unpack_from(side, at)
        content = json.loads(side[at + L.BLOB.size : at + L.BLOB.size + size])
        if content["k"] == "setup":
            del content["began"], content["thread"]
        found.append((position, content))
        at += (L.BLOB.size + size + L.BLOB_ALIGN - 1) // L.BLOB_ALIGN * L.BLOB_ALIGN
    return found


def test_both_engines_write_the_same_records_and_the_same_side_table(
    zygote: Zygote, tmp_path: Path, native_cache: Path
):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {"COMMLENS_NATIVE_DIR": str(native_cache)}
    (python, path), (native, native_path) = (
        record(zygote, engine, script, environment) for engine in ("python", "native")
    )
    log = read_box(path)
    assert log.issued > 50 and not log.problems
    assert struct.unpack_from("<Q", python, L.NEXT_INDEX) == struct.unpack_from(
        "<Q", native, L.NEXT_INDEX
    )
    if torch_patches.python_reads_reduce_ops():
        for index in range(1, log.issued + 1):
            assert without_times(python, index) == without_times(native, index), log.collectives[
                index - 1
            ]
        (head,) = struct.unpack_from("<Q", python, L.SIDE_HEAD)
        assert struct.unpack_from("<Q", native, L.SIDE_HEAD) == (head,)
        side = L.box_size(200) - 2 * L.EVIDENCE_SLOT - L.side_size(200)
        assert blobs(python[side : side + head]) == blobs(native[side : side + head])
    else:
        # the engine in Python has a frame of its own in stacks, and does not know the reduce ops of
        # C++ callers
        ours, native_log = torch_patches.__file__, read_box(native_path)
        for one, other in zip(log.collectives, native_log.collectives, strict=True):
            assert [frame for frame in one.stack if frame.file != ours] == list(other.stack)
            assert msgspec.structs.replace(one.args, reduce_op=None) == msgspec.structs.replace(
                other.args, reduce_op=None
            )
            assert one.args.reduce_op in (other.args.reduce_op, None)
            assert [getattr(one, name) for name in TIMELESS] == [
                getattr(other, name) for name in TIMELESS
            ]


SIGNALS = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from commlens import config
from commlens.capture import session
from commlens.launch import recording

recording.start(config.Settings(box_dir=os.environ["BOX_AT"], job="job", watched=True, engine="native"))
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
recorder = session.recording().recorder
original = recorder.describe_args
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))

def send(number):
    def describe_args(*args):
        signal.raise_signal(number)
        return original(*args)
    recorder.describe_args = describe_args

send(signal.SIGINT)
try:
    dist.all_reduce(torch.zeros(1))
except KeyboardInterrupt:
    print("interrupted")
recorder.describe_args = original
dist.all_reduce(torch.zeros(1))
print("lost", recorder.lost, flush=True)
send(signal.SIGTERM)
dist.all_reduce(torch.zeros(2))
"""


def test_what_a_signals_handler_raises_in_our_code_reaches_the_program(
    tmp_path: Path, native_cache: Path
):
    script = tmp_path / "signals.py"
    script.write_text(SIGNALS)
    environment = {
        **os.environ,
        "COMMLENS_NATIVE_DIR": str(native_cache),
        "BOX_AT": str(tmp_path / "box"),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=110
    )
    assert (done.stdout.split(), done.returncode) == (["interrupted", "lost", "0"], 7), done.stderr
    assert "could not record" not in done.stderr
