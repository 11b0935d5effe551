"""Watching without a launcher, and commands from another terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chosen import long
from launching import Bench
from ports import free_port
from zygote_client import Zygote

from commlens.processes import pyspy

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def bench(tmp_path: Path, zygote: Zygote) -> Iterator[Bench]:
    made = Bench(tmp_path, zygote)
    yield made
    made.close()


def watchers(bench: Bench) -> list[int]:
    return [
        pid
        for pid in bench.processes()
        if b"commlens.watch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def gone(bench: Bench, timeout_s: float = 5.0) -> bool:
    end = time.monotonic() + timeout_s
    while watchers(bench):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.long
def test_switched_on_by_the_environment(bench: Bench) -> None:
    """Its working directory is removed before it initialises."""
    leave = (
        "def main():\n    name = f'gone{os.environ[\"RANK\"]}'; os.mkdir(name); os.chdir(name);"
        " os.rmdir(os.getcwd())"
    )
    bench.script.write_text(bench.script.read_text().replace("def main():", leave))
    program = bench.torchrun("train.py", "well", COMMLENS="1")
    program.until("training")
    assert len(watchers(bench)) == 1, "one for the node"
    assert program.end() == 0
    assert "commlens" not in program.error
    assert gone(bench)
    assert bench.boxes_left == []


@pytest.mark.parametrize(
    "how", [long("the environment"), "commlens run", long("commlens run without the entry point")]
)
def test_a_stall_is_reported_by_a_detached_watcher(bench: Bench, how: str) -> None:
    environ = {"COMMLENS_STALL_TIMEOUT": "2"}
    if how == "the environment":
        program = bench.torchrun(
            "train.py", "sleep", COMMLENS="1", COMMLENS_ABORT_ON="stall", **environ
        )
    else:
        if how.endswith("point"):
            environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        program = bench.torchrun("-m", "commlens", "run", "train.py", "sleep", **environ)
    stalled = program.until("training")
    told = program.until("VERDICT", stream="err")
    assert 1.5 < told - stalled < 4.5, program.report()
    assert "rank 1" in next(line for line in program.err if "VERDICT" in line)
    if how == "the environment":
        assert program.end() != 0
        summary = " ".join(program.error.rpartition("Root Cause")[2].split())
        assert "rank : 1" in summary and "VERDICT rank 1 never reached" in summary, program.report()
    else:
        os.kill(program.process.pid, signal.SIGTERM)
        program.end()
    assert gone(bench)
    assert bench.boxes_left == []
    assert bench.dumped == ["rank0", "rank1"]


@pytest.mark.long
def test_it_outlives_the_rank_that_started_it(bench: Bench) -> None:
    """Rank 0 starts the watcher and is killed. The other rank sleeps and notices nothing."""
    program = bench.torchrun("train.py", "sleep", COMMLENS="1")
    program.until("training")
    time.sleep(0.5)
    box = next(path for path in bench.boxes_left if path.name.startswith("rank0."))
    os.kill(int(box.name.split(".")[1]), signal.SIGKILL)
    program.until("VERDICT", stream="err")
    verdict = next(line for line in program.err if "VERDICT" in line)
    # torchrun is quick to end the other
    assert "rank 0" in verdict or "ranks 0-1 are gone" in verdict, program.report()
    ended = program.process.wait(60)
    at = time.monotonic()
    assert ended == 1
    program.end()
    assert program.closed_at - at < 1.5, "the job's pipes were held too long"
    assert bench.boxes_left == []


@pytest.mark.long
def test_another_rank_starts_the_watcher_if_the_one_that_should_is_killed_before(
    bench: Bench,
) -> None:
    end = (
        "import torch, torch.distributed as dist\nif os.environ['RANK'] == '0':"
        " os.kill(os.getpid(), signal.SIGKILL)"
    )
    bench.script.write_text(
        bench.script.read_text().replace("import torch, torch.distributed as dist", end)
    )
    environ = {
        "COMMLENS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "COMMLENS_STALL_TIMEOUT": "2",
    }
    first, second = (
        bench.start("train.py", "well", **environ, RANK=rank, LOCAL_RANK=rank)
        for rank in ("0", "1")
    )
    second.until("VERDICT", stream="err", timeout_s=90)
    assert "rank 0" in next(line for line in second.err if "VERDICT" in line), second.report()
    assert len(watchers(bench)) == 1
    second.process.terminate()
    second.end()
    first.end()
    assert gone(bench)


@pytest.mark.long
def test_a_rank_0_that_exits_at_once_starts_the_watcher_for_the_others(bench: Bench) -> None:
    bench.script.write_text(
        "import os, sys, torch, torch.distributed as dist\nif os.environ['RANK'] == '0':"
        " sys.exit(2)\ndist.init_process_group('gloo')\n"
    )
    program = bench.torchrun("train.py", COMMLENS="1")
    assert program.end() == 1
    assert gone(bench) and not list(bench.boxes.rglob("*.box")), program.report()
    # On a busy machine, torchrun has reaped the rank before the watcher sees how it ended.
    assert (
        "VERDICT" not in program.error
        or "rank 0 exited with status 2" in program.error
        or "not observed" in program.error
    )


@pytest.mark.long  # the scenario holds-gil does so, too
@pytest.mark.skipif(pyspy.find() is None, reason="py-spy is not installed")
def test_the_line_that_holds_the_gil(bench: Bench) -> None:
    program = bench.launch("--stall-timeout", "2", "--abort-on", "stall", "train.py", "gil")
    program.end()
    assert "rank 1" in next(line for line in program.err if "VERDICT" in line), program.report()
    assert "train.py:8 load_batch" in program.error, program.report()


def top(bench: Bench, keys: bytes) -> str:
    """Return what ``commlens top`` writes to a terminal of 80 x 24, while these keys are pressed,
    one for each frame.
    """
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "commlens", "top", "--interval", "0.3"]
    environ = {**bench.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    shown, pressed = b"", 0
    with subprocess.Popen(
        command, cwd=bench.folder, env=environ, stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and process.poll() is None:
            if select.select([controller], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # the program has closed the terminal
                    shown += os.read(controller, 1 << 16)
            if pressed < len(keys) and shown.count(b"up/down") > 2 * pressed + 1:
                os.write(controller, keys[pressed : pressed + 1])
                pressed += 1
        process.kill()
    os.close(controller)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode("utf-8", "replace"))
    assert process.returncode == 0, text
    return text


def test_status_and_dump_from_another_terminal(bench: Bench) -> None:
    nothing = bench.start("-m", "commlens", "status")
    assert nothing.end() == 3
    assert re.search("No job is recorded|nothing is recorded", nothing.error)
    program = bench.launch("train.py", "stop")
    program.until("training")
    time.sleep(1.5)
    status = bench.start("-m", "commlens", "status")
    assert status.end() == 0, status.report()
    assert "2 ranks" in status.out[0]
    assert "train.py stop" in status.out[0]
    assert "in all_reduce #4 of the default group [0-1]" in status.out[2]
    assert "train.py:17 step" in status.out[2]
    assert "stopped" in status.out[3]
    assert "after all_reduce #3" in status.out[3]
    pid = status.out[3].split()[1]
    stacks = bench.start("-m", "commlens", "stacks", pid)
    assert stacks.end() == 0, stacks.report()
    assert stacks.out[0] == "2 ranks of train.py stop stand at 2 places:"
    assert "Rank 1, stopped" in stacks.out
    shown = top(bench, keys=b"j\rq")
    assert "rank 1 never reached all_reduce #4" in shown
    assert "stopped" in shown
    assert "load_batch" in shown
    dump = bench.start("-m", "commlens", "dump", "-o", "here", pid)
    assert dump.end() == 0, dump.report()
    folder = bench.folder / dump.out[0]
    assert sorted(path.name.split(".")[0] for path in folder.glob("*.box")) == ["rank0", "rank1"]
    assert "commlens diagnose" in dump.out[1]
    wrong = bench.start("-m", "commlens", "dump", "no-such-job")
    assert wrong.end() == 2
    os.kill(int(pid), signal.SIGCONT)


@pytest.mark.long
def test_a_rank_that_rank_0_starts_is_one_of_the_job(bench: Bench) -> None:
    """As Lightning starts its ranks: without RANK, and before rank 0 has a box. A worker of a rank
    is none.
    """
    (bench.folder / "lightning.py").write_text("""
import os, subprocess, sys, time
os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
import torch, torch.distributed as dist
rank = int(os.environ.get("LOCAL_RANK", 0))
if "LOCAL_RANK" not in os.environ:
    child = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1"})
dist.init_process_group("gloo", rank=rank, world_size=2)
dist.all_reduce(torch.ones(2))
worker = subprocess.run([sys.executable, "-c", "import torch"], env={**os.environ, "RANK": str(rank)}, check=True)
print("training", flush=True)
if rank == 1:
    time.sleep(60)
dist.all_reduce(torch.ones(2))
""")
    program = bench.start(
        "lightning.py",
        COMMLENS="1",
        MASTER_PORT=str(free_port()),
        COMMLENS_STALL_TIMEOUT="2",
        COMMLENS_ABORT_ON="stall",
    )
    program.until("training")
    program.until("ending the job", stream="err")
    assert program.end() != 0
    assert "rank 1 never reached all_reduce #2" in program.error.replace("\n         ", " "), (
        program.report()
    )
    assert program.error.count("VERDICT") == 1 and "ranks are recorded" not in program.error, (
        program.report()
    )
    assert gone(bench)
    assert not bench.processes(), "no orphan"
    assert bench.dumped == ["rank0", "rank1"]
