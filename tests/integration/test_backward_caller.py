"""Collectives that autograd issues in a thread of its own have the line that called ``backward()``.

On an accelerator, all of a backward pass runs in such a thread. On the CPU, autograd does the same
where passes are nested more than 60 deep.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chosen import NATIVE_FIRST
from zygote_client import Zygote

pytest.importorskip("torch")

from commlens.blackbox import job_dirs
from commlens.blackbox.reader import read_box
from commlens.model.collective import Collective, user_lines

PROGRAM = """
import json, os, threading
import torch, torch.distributed as dist
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from commlens import config
from commlens.capture import session
from commlens.launch import recording

recording.start(config.Settings(
    box_dir=os.environ["BOX_AT"], job="job", watched=True, engine=os.environ["COMMLENS_ENGINE"],
    cpp_stack="CPP_STACK" in os.environ, debug="VERIFIED" in os.environ,
))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
recorder = session.recording().recorder
issued, threads = {}, []

def note(what, since):
    issued[what] = [since + 1, recorder.writer.last_index]

class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, levels, innermost):
        ctx.levels, ctx.innermost = levels, innermost
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            nested(ctx.levels, ctx.innermost)
        return grad, None, None

def nested(levels, innermost):
    if levels == 0:
        return innermost()
    Nested.apply(torch.ones(2, requires_grad=True), levels - 1, innermost).sum().backward()

def elsewhere(what, call, loss):
    loss.register_hook(lambda grad: threads.append(threading.get_native_id()))
    since = recorder.writer.last_index
    nested(61, lambda: call(loss))
    note(what, since)

def reduced():
    return all_reduce(torch.ones(2, requires_grad=True)).sum()

def here(loss):
    loss.backward()  # HERE

def first(loss):
    loss.backward()  # FIRST

def second(loss):
    loss.backward()  # SECOND

model = DistributedDataParallel(torch.nn.Linear(2, 2))
parallel = lambda: model(torch.ones(2)).sum()

for name, make in ("python", reduced), ("ddp", parallel):
    loss = make()
    since = recorder.writer.last_index
    here(loss)
    note(name + " here", since)
    elsewhere(name + " first", first, make())
    elsewhere(name + " second", second, make())
    elsewhere(name + " second again", second, make())

# A second thread is in a backward pass.
inside, over = threading.Event(), threading.Event()
x = torch.ones(2, requires_grad=True)
y = x * 2
y.register_hook(lambda grad: (inside.set(), over.wait(30))[0] and None)
thread = threading.Thread(target=lambda: y.sum().backward())
thread.start()
inside.wait(30)
for name, make in ("python", reduced), ("ddp", parallel):
    elsewhere(name + " of one of two", first, make())

# The main thread and others run Python while it is.
def outside():
    dist.all_reduce(torch.ones(2))  # OUTSIDE

def outside_of_any(start):
    since, done = recorder.writer.last_index, threading.Event()
    start(lambda: (outside(), done.set()))
    done.wait(30)
    return since

import _thread
note("main", outside_of_any(lambda run: run()))
note("threading", outside_of_any(lambda run: threading.Thread(target=run).start()))
note("_thread", outside_of_any(lambda run: _thread.start_new_thread(run, ())))
over.set()
thread.join()
elsewhere("python afterwards", first, reduced())
assert recorder.lost == 0
assert os.getpid() not in threads and len(set(threads)) < len(threads), threads
print(json.dumps({"issued": issued, "engine": type(recorder).__name__}))
"""
LINES = {
    line.split("# ")[1]: number
    for number, line in enumerate(PROGRAM.splitlines(), 1)
    if "  # " in line
}
Issued = dict[str, list[Collective]]


@pytest.fixture(scope="module")
def issued(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory, engine_environment: dict[str, str]
) -> Issued:
    """The collectives of each part of the program."""
    return run(zygote, tmp_path_factory.mktemp("program"), engine_environment)


def run(zygote: Zygote, folder: Path, engine_environment: dict[str, str], *options: str) -> Issued:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    environment = {**engine_environment, "BOX_AT": str(folder), **dict.fromkeys(options, "1")}
    printed = zygote.run(str(script), folder=folder, environ=environment, timeout_s=110)
    said = json.loads(printed.splitlines()[-1])
    native = engine_environment["COMMLENS_ENGINE"] == "native"
    assert said["engine"] == ("NativeRecorder" if native else "Recorder"), printed
    (path,) = job_dirs.boxes(job_dirs.user_folder(folder) / "job")
    log = read_box(path)
    return {
        part: [op for op in log.collectives if first <= op.index <= last]
        for part, (first, last) in said["issued"].items()
    }


def only(issued: Issued, part: str) -> Collective:
    (op,) = issued[part]
    return op


def lines(op: Collective) -> list[int]:
    return [frame.line for frame in user_lines(op.stack)]


@pytest.mark.parametrize("issuer", ["python", "ddp"])
def test_the_stack_is_that_of_a_pass_in_the_calling_thread(issued: Issued, issuer: str) -> None:
    here, first = only(issued, f"{issuer} here"), only(issued, f"{issuer} first")
    assert lines(here)[0] == LINES["HERE"]
    assert lines(first)[0] == LINES["FIRST"]
    depth = [frame.line for frame in here.stack].index(LINES["HERE"])
    assert [frame.function for frame in first.stack[:depth]] == [
        frame.function for frame in here.stack[:depth]
    ]


@pytest.mark.parametrize("issuer", ["python", "ddp"])
def test_each_pass_has_its_own_line(issued: Issued, issuer: str) -> None:
    assert lines(only(issued, f"{issuer} second"))[0] == LINES["SECOND"]
    assert lines(only(issued, f"{issuer} second again"))[0] == LINES["SECOND"]


@pytest.mark.parametrize("issuer", ["python", "ddp"])
def test_of_two_passes_at_once_no_line_is_known(issued: Issued, issuer: str) -> None:
    assert not lines(only(issued, f"{issuer} of one of two"))


@pytest.mark.parametrize("thread", ["main", "threading", "_thread"])
def test_other_threads_keep_their_own_stacks(issued: Issued, thread: str) -> None:
    op = only(issued, thread)
    assert lines(op)[0] == LINES["OUTSIDE"]
    assert "_engine_run_backward" not in [frame.function for frame in op.stack]


def test_a_line_is_known_again_when_only_one_pass_runs(issued: Issued) -> None:
    assert lines(only(issued, "python afterwards"))[0] == LINES["FIRST"]


@NATIVE_FIRST
def test_the_line_is_known_also_with_stacks_of_cpp_and_under_verification(
    zygote: Zygote, tmp_path: Path, engine_environment: dict[str, str]
) -> None:
    issued = run(zygote, tmp_path, engine_environment, "CPP_STACK", "VERIFIED")
    for issuer in ("python", "ddp"):
        assert lines(only(issued, f"{issuer} first"))[0] == LINES["FIRST"]
