"""Programs under `commlens launch`, `commlens run` and torchrun, as a user starts them; every
process started here is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from zygote_client import Zygote

SOURCE = Path(__file__).parents[2] / "src"

TRAIN = """
import ctypes, os, signal, sys, time
import torch, torch.distributed as dist

def load_batch(how):
    if how == "sleep": time.sleep(60)
    if how == "late": time.sleep(3.5)
    if how == "gil": ctypes.PyDLL(None).sleep(60)
    if how == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "end": os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)
    if how == "raise": raise ValueError("bad batch")
    if how == "exit": sys.exit(3)
    if how == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": os._exit(5)

def step():
    dist.all_reduce(torch.ones(4))

def main():
    how = sys.argv[1]
    dist.init_process_group("gloo")
    for _ in range(3):
        step()
    os.write(1, b"training\\n")  # one write: two ranks share the line
    if dist.get_rank() == 1:
        load_batch(how)
    step()
    dist.destroy_process_group()
    os.write(1, b"finished\\n")

if __name__ == "__main__":
    main()
"""


def installed(folder: Path) -> Path:
    """What an installation adds to the importable source: the metadata with the entry point."""
    about = folder / "site" / "commlens-0.1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: commlens\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text(
        "[torch.backends]\ncommlens = commlens_autoload:start\n"
    )
    return about.parent


def says_whether_a_call_waits() -> bool:
    """Not torch 2.6: there a fault is found once operations are with gloo already, which may end
    the process for it.
    """
    import torch

    return any(
        "async" in argument.name for argument in torch.ops.c10d.allreduce_.default._schema.arguments
    )


def fsdp2_runs_on_cpu() -> bool:
    """Not with torch 2.6, whose CPU streams record no events."""
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)


@dataclass
class Program:
    """A program under way: its lines of both streams as they come, with the time of each."""

    process: subprocess.Popen[str]
    folder: str = ""
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    err_at: list[float] = field(default_factory=list)
    out_at: list[float] = field(default_factory=list)
    closed_at: float = 0.0

    def __post_init__(self) -> None:
        self.threads = [
            threading.Thread(target=self._read, args=(name,), daemon=True)
            for name in ("out", "err")
        ]
        for thread in self.threads:
            thread.start()

    def _read(self, name: str) -> None:
        stream = self.process.stdout if name == "out" else self.process.stderr
        assert stream is not None
        with stream:
            for line in stream:
                getattr(self, name).append(line.rstrip("\n"))
                getattr(self, f"{name}_at").append(time.monotonic())
        self.closed_at = time.monotonic()

    def until(self, text: str, *, timeout_s: float = 60, stream: str = "out") -> float:
        """Wait for a line that holds this text. Returns when it came."""
        end = time.monotonic() + timeout_s
        while True:
            lines, times = getattr(self, stream), getattr(self, f"{stream}_at")
            for line, moment in zip(list(lines), list(times), strict=False):
                if text in line:
                    return float(moment)
            assert time.monotonic() < end, f"no line with {text!r}\n{self.report()}"
            assert self.process.poll() is None or any(
                thread.is_alive() for thread in self.threads
            ), f"ended\n{self.report()}"
            time.sleep(0.02)

    def end(self, *, timeout_s: float = 60) -> int:
        """Wait for its end, and for that of everybody who holds its streams."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end\n{self.report()}") from None
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive(), f"somebody still holds its streams\n{self.report()}"
        return code

    def report(self) -> str:
        """Both streams, for a failed test."""
        return "\n".join(["--- stdout", *self.out, "--- stderr", *self.err])

    @property
    def error(self) -> str:
        return "\n".join(self.err)


class Bench:
    """A folder with the program in it, and an environment in which commlens can be imported.

    With a zygote, programs and the workers that they start are its forks, which import no torch;
    without one, they are Pythons of their own.
    """

    def __init__(
        self, folder: Path, zygote: Zygote | None = None, *, is_installed: bool = True
    ) -> None:
        self.folder = folder
        self._popen = subprocess.Popen if zygote is None else zygote.popen
        self.boxes = folder / "boxes"
        self.dumps = folder / "dumps"
        self.script = folder / "train.py"
        self.script.write_text(TRAIN)
        self.programs: list[Program] = []
        path = [str(SOURCE), *([str(installed(folder))] if is_installed else [])]
        self.environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "COMMLENS_BOX_DIR": str(self.boxes),
            "COMMLENS_DUMP_DIR": str(self.dumps),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "NO_COLOR": "1",
        }
        for name in ("COMMLENS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            self.environ.pop(name, None)

    def start(self, *command: str, **environ: str) -> Program:
        """Start ``python command...`` here."""
        process = self._popen(
            [sys.executable, *command],
            cwd=self.folder,
            env={**self.environ, **environ},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.programs.append(Program(process, str(self.folder)))
        return self.programs[-1]

    def launch(self, *arguments: str, **environ: str) -> Program:
        """``commlens launch`` with two workers."""
        return self.start(
            "-m",
            "commlens",
            "launch",
            "--nproc-per-node",
            "2",
            "--standalone",
            *arguments,
            **environ,
        )

    def torchrun(self, *arguments: str, **environ: str) -> Program:
        """Torchrun itself, with two workers."""
        return self.start(
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            *arguments,
            **environ,
        )

    @property
    def boxes_left(self) -> list[Path]:
        """What is left where black boxes live."""
        return sorted(path for path in self.boxes.rglob("*") if path.is_file())

    @property
    def dumped(self) -> list[str]:
        """The boxes in dumps: ``["rank0", "rank1"]``."""
        return sorted(path.name.split(".")[0] for path in self.dumps.glob("*/rank*.box"))

    def close(self) -> None:
        """End all that was started. What a program that ended by itself has left running is an
        error.
        """
        cut_short = [program for program in self.programs if program.process.poll() is None]
        left = [] if cut_short else self.processes()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for program in self.programs:
            program.process.wait(10)
            for thread in program.threads:
                thread.join(10)
        assert not left, f"left behind: {left}"

    def processes(self) -> list[int]:
        """Processes that run in our folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if f"COMMLENS_BOX_DIR={self.boxes}".encode() in (
                        entry / "environ"
                    ).read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found
