"""What gpu_check.py needs on a machine without a network: packages in a folder, and processes that
never outlive their limit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY / "tests"))

from nccl_like.one_gpu import one_gpu_for_all  # noqa: E402

__all__ = ["REPOSITORY", "Ended", "Processes", "ended", "install", "one_gpu_for_all", "prepare"]
PACKAGES = {
    "msgspec": "msgspec",
    "numpy": "numpy",
    "rich": "rich",
    "pygments": "pygments",
    "markdown-it-py": "markdown_it",
    "mdurl": "mdurl",
    "PyYAML": "yaml",
    "jinja2": "jinja2",
    "markupsafe": "markupsafe",
    "fsspec": "fsspec",
    "py-spy": "py_spy",
}
"""Distribution -> what is imported: those of commlens, and those that torch's own imports need."""

FOLDER_LIMIT = 64_000_000
"""Bytes in all: what can be carried to the machine with the GPU."""


def prepare(folder: Path, python: str) -> None:
    """Put a wheel of this commlens, and wheels of what it needs, into a folder for another machine.

    Args:
        folder: an ignored one, which is carried there.
        python: the version of Python there, such as ``3.12``.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    platforms = [
        f"--platform={name}_x86_64"
        for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
    ]
    chosen = ["--only-binary=:all:", f"--python-version={python}", *platforms, "--no-deps"]
    subprocess.run(
        [*pip, "download", *chosen, "-d", str(folder), *PACKAGES], check=True, timeout=600
    )
    # Without C code of this machine's: its C library may be newer than the other's.
    with tempfile.TemporaryDirectory(prefix="commlens-wheel-") as scratch:
        source = Path(scratch) / "source"
        names = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=REPOSITORY,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in names.splitlines():
            if (
                name.startswith(("src/", "pyproject.toml", "setup.py", "README.md", "LICENSE"))
                and (REPOSITORY / name).exists()
            ):
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, source / name)
        environment = {**os.environ, "CC": "/bin/false", "COMMLENS_BUILD_NATIVE": ""}
        command = [
            *pip,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(folder),
            str(source),
        ]
        subprocess.run(command, check=True, timeout=600, env=environment)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(
        f"{folder}: {len(list(folder.iterdir()))} wheels for Python {python}, {size / 1e6:.1f} MB"
    )
    if size > FOLDER_LIMIT:
        raise SystemExit(
            f"{folder} holds {size / 1e6:.1f} MB, more than the {FOLDER_LIMIT / 1e6:.0f} MB that"
            " can be carried."
        )


def install(wheels: Path, target: Path) -> list[str]:
    """Unpack the wheels whose packages this Python lacks, and commlens, into a folder for
    PYTHONPATH. Return their names.
    """
    installed = []
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.partition("-")[0]
        imported = {
            distribution.replace("-", "_").lower(): module
            for distribution, module in PACKAGES.items()
        }.get(name.lower())
        if (
            imported is not None
            and imported != "py_spy"
            and importlib.util.find_spec(imported) is not None
        ):
            continue
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(target)
        installed.append(name)
    for data in target.glob("*.data"):
        for part in ("purelib", "platlib"):
            if (data / part).is_dir():
                shutil.copytree(data / part, target, dirs_exist_ok=True)
        for script in (data / "scripts").glob("*"):
            (target / "bin").mkdir(exist_ok=True)
            shutil.copy2(script, target / "bin" / script.name)
            (target / "bin" / script.name).chmod(0o755)
    return installed


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Wait five seconds for a process that has done its work; kill it in any case."""
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


@dataclass
class Ended:
    """A process that has ended, or was ended at its limit."""

    status: int | None  # None: it was ended at its limit
    out: str
    err: str
    seconds: float

    @property
    def result(self) -> dict[str, Any] | None:
        """The JSON object in the last line of its output."""
        with contextlib.suppress(ValueError, IndexError):
            found = json.loads(self.out.strip().splitlines()[-1])
            return found if isinstance(found, dict) else None
        return None

    @property
    def reason(self) -> str:
        """Why there is no result: its exit, and the last words of its standard error."""
        how = (
            f"was ended after {self.seconds:.0f} s"
            if self.status is None
            else f"ended with status {self.status}"
        )
        lines = [line.strip() for line in self.err.strip().splitlines() if line.strip()]
        # torchrun's summary comes last, and the reason before it.
        telling = [
            line
            for line in lines
            if re.search(r"NCCL|Duplicate GPU|Error: ", line) and "ChildFailedError" not in line
        ]
        words = " / ".join([*telling[:3], *lines[-2:]])
        return f"{how}: {words[-600:]}" if words else how


@dataclass
class Processes:
    """Starts processes in one environment, each with a limit. All of them, and their children,
    carry a mark by which they are ended.
    """

    environ: dict[str, str]
    scratch: Path
    mark: str = field(default_factory=lambda: f"GPU_CHECK_RUN={uuid.uuid4().hex}")

    def __post_init__(self) -> None:
        name, _, value = self.mark.partition("=")
        self.environ = {**self.environ, name: value}

    def run(self, command: list[str], limit_s: float, **environ: str) -> Ended:
        """Run a command and return its output. Files take the output, so that a process stuck in a
        driver cannot hold us.
        """
        folder = Path(tempfile.mkdtemp(dir=self.scratch, prefix="process-"))
        began = time.monotonic()
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**self.environ, **environ},
                cwd=folder,
                start_new_session=True,
            )
            status: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(max(1.0, limit_s))
            seconds = time.monotonic() - began
            if status is None:
                self.end_all()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
        read = [
            (folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err")
        ]
        return Ended(status, read[0], read[1], seconds)

    def end_all(self, patience_s: float = 5.0) -> int:
        """End every process with our mark, and wait until they are gone. Return how many there
        were.
        """
        first = left = self._kill_all()
        until = time.monotonic() + patience_s
        while left and time.monotonic() < until:
            time.sleep(0.05)
            left = self._kill_all()
        return first

    def _kill_all(self) -> int:
        killed = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        return killed

    def pids(self) -> list[int]:
        """Return the processes with our mark."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found
