"""Compile the native engine once, into the cache, for ``commlens build-native`` and for ``commlens
launch``'s build in the background.

The sources are one translation unit, so the compiler is called directly, with the include paths,
the language standard and the macros with which torch itself was built (those that
torch.utils.cpp_extension passes to ninja).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from commlens import helper_process
from commlens.errors import NativeEngineError
from commlens.native import attempts
from commlens.native.cache import (
    ABOUT,
    LIBRARY_PREFIX,
    SOURCES,
    Build,
    builds_in,
    cache_directory,
    fits,
    folder_of,
    glibc,
    identity,
    read_build,
    sources,
    sources_digest,
)

TIMEOUT_S = 900.0
_COMPILERS = ("c++", "g++", "clang++")
_LOAD_S = 120.0
_SCRATCH = ".building-"
Progress = Callable[[str], None]


def build(
    directory: Path | None = None, *, force: bool = False, progress: Progress = lambda text: None
) -> tuple[Build, bool]:
    """Build for this torch and Python, unless there is a build already. Return the build, and
    whether it is new.

    ``progress`` is called with a few words at each step.

    Raises:
        NativeEngineError: there is no compiler, it fails, or the folder cannot be written.
    """
    wanted = identity()
    compiler = find_compiler(os.environ)
    version = compiler_version(compiler)
    folder = (directory or cache_directory()).absolute() / folder_of(wanted) / _name(version)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress):
            # builds that were killed: a running one is at most as old as a compilation may take
            for scratch in folder.glob(f"{_SCRATCH}*"):
                with contextlib.suppress(OSError):
                    if time.time() - scratch.stat().st_mtime > TIMEOUT_S + _LOAD_S:
                        shutil.rmtree(scratch, ignore_errors=True)
            found, is_new = read_build(folder), False
            if force or found is None or not fits(found, wanted) or not found.is_whole():
                found, is_new = _build(folder, compiler, version, wanted, progress), True
            attempts.forget_failure(folder.parent)
            return found, is_new
    except OSError as error:
        raise NativeEngineError(
            f"The native engine cannot be saved in {folder}: {error.strerror or error}."
        ) from None


def build_into(package: Path) -> Build:
    """Build into the package's folder of builds while it is installed or packed."""
    compiler = find_compiler(os.environ)
    # absolute: the compiler runs in another folder
    folder = package.absolute() / folder_of(identity())
    folder.mkdir(parents=True, exist_ok=True)
    return _build(folder, compiler, compiler_version(compiler), identity(), print)


def copy_builds(directory: Path, package: Path) -> list[Build]:
    """Copy all builds of these sources from a cache into the package's folder of builds, for a
    wheel that serves several torch versions.

    Args:
        directory: a cache that ``commlens build-native -o`` has filled with each torch and Python.
        package: the folder of builds.

    Raises:
        NativeEngineError: there is no such build in the cache, or one is damaged.
    """
    copied = []
    for folder in sorted(
        path for identified in directory.glob("torch-*") for path in builds_in(identified)
    ):
        found = read_build(folder)
        if found is None or found.about.get("for", {}).get("sources") != sources_digest():
            continue
        if not found.is_whole():
            raise NativeEngineError(
                f"{found.library} is damaged: its checksum differs. Rebuild it with commlens"
                " build-native --force."
            )
        target = package / folder_of(found.about["for"])
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(found.library, target)
        shutil.copy2(folder / ABOUT, target)
        copied.append(Build(target, found.about))
    if not copied:
        raise NativeEngineError(
            f"There is no build of these sources in {directory}: commlens build-native -o"
            f" {directory} makes one."
        )
    return copied


def find_compiler(environ: Mapping[str, str]) -> list[str]:
    """Return the command of the C++ compiler: ``$CXX``, else the first one installed."""
    named = shlex.split(environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]) is None:
            raise NativeEngineError(
                f"CXX names the compiler {named[0]!r}, which is not a command here."
            )
        return named
    for name in _COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise NativeEngineError(
        f"Building the native engine needs a C++ compiler, and none of {', '.join(_COMPILERS)} is"
        " installed: install g++ (on Debian: apt install g++), or name one with CXX. Without it"
        " commlens records in Python."
    )


def compiler_version(compiler: list[str]) -> str:
    """Return the first line that the compiler prints with ``--version``."""
    try:
        ended = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=60, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeEngineError(
            f"The compiler {shlex.join(compiler)} cannot be run: {error}."
        ) from None
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        raise NativeEngineError(
            f"The compiler {shlex.join(compiler)} does not print its version: exit status"
            f" {ended.returncode}."
        )
    return lines[0].strip()


def obstacle() -> str:
    """Return why the engine cannot be built here, as far as that can be seen without calling the
    compiler; empty if it can.
    """
    try:
        find_compiler(os.environ)
        flags()
    except NativeEngineError as error:
        return str(error)
    return ""


def flags() -> list[str]:
    """Return the compiler's options besides the files: torch's own C++ standard, ABI and paths."""
    import torch

    root = Path(torch.__file__).parent
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise NativeEngineError(
            f"Building the native engine needs Python's headers, and {python / 'Python.h'} does not"
            " exist: install them (on Debian: apt install python3-dev)."
        )
    include, library = root / "include", root / "lib"
    if not (include / "torch" / "library.h").exists():
        raise NativeEngineError(
            f"This torch was installed without its C++ headers: {include / 'torch' / 'library.h'}"
            " does not exist."
        )
    defines = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        value = getattr(torch._C, f"_PYBIND11_{name}", None)
        if value is not None:
            defines.append(f'-DPYBIND11_{name}="{value}"')
    return [
        "-shared",
        "-fPIC",
        "-O2",
        "-g0",
        f"-std=c++{_standard(root)}",
        "-Wno-attributes",
        *defines,
        "-isystem",
        str(include),
        "-isystem",
        str(include / "torch" / "csrc" / "api" / "include"),
        "-isystem",
        str(python),
        f"-L{library}",
        "-lc10",
        "-ltorch_cpu",
        "-ltorch",
        "-ltorch_python",
    ]


def _standard(torch_root: Path) -> str:
    with contextlib.suppress(OSError):
        text = (torch_root / "utils" / "cpp_extension.py").read_text(encoding="utf-8")
        found = re.findall(r"-std=c\+\+(\d\d)", text)
        if found:
            return str(max(found))
    return "17"


def _name(version: str) -> str:
    digest = hashlib.sha256(version.encode()).hexdigest()[:8]
    return re.sub(r"[^\w.+-]+", "-", version)[:40].strip("-") + f"-{digest}"


def _build(
    folder: Path, compiler: list[str], version: str, wanted: Mapping[str, str], progress: Progress
) -> Build:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
        made = Path(scratch) / "made.so"
        unit = next(path for path in sources() if path.suffix == ".cpp")
        options = flags()
        progress("compiling")
        _compile([*compiler, str(unit), "-o", str(made), *options], scratch)
        checksum = hashlib.sha256(made.read_bytes()).hexdigest()
        progress("loading the build")
        _try_to_load(made, checksum)
        library = folder / f"{LIBRARY_PREFIX}{checksum[:16]}.so"
        made.chmod(0o755)
        made.replace(library)
        about = {
            "for": dict(wanted),
            "glibc": glibc(),
            "compiler": version,
            "library": library.name,
            "sha256": checksum,
            "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(time.monotonic() - began, 1),
        }
        # A process that looks meanwhile finds either the previous build or this one, complete.
        described = Path(scratch) / ABOUT
        described.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        described.replace(folder / ABOUT)
    for previous in folder.glob(f"{LIBRARY_PREFIX}*.so"):
        if previous != library:
            with contextlib.suppress(OSError):
                previous.unlink()
    return Build(folder, about)


def _compile(command: list[str], scratch: str) -> None:
    """Run the compiler, with ``scratch`` for its temporary files, too."""
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            cwd=SOURCES,
            env={**os.environ, "TMPDIR": scratch},
        )
    except subprocess.TimeoutExpired:
        raise NativeEngineError(
            f"The compiler {command[0]} did not finish within {TIMEOUT_S:.0f} s."
        ) from None
    if ended.returncode:
        # collect2 only says that the linker failed; the reason is in the line before.
        lines = [
            line.strip() for line in ended.stderr.splitlines() if not line.startswith("collect2:")
        ]
        first = next(
            (line for line in lines if "error" in line), lines[-1] if lines else "no message"
        )
        raise NativeEngineError(
            f"The compiler {command[0]} failed (exit status {ended.returncode}): {first[:300]}. The"
            f" command was: {shlex.join(command)}"
        )


def _try_to_load(library: Path, checksum: str) -> None:
    """Load a build in a separate process, since a bad one may crash it."""
    program = (
        "import sys; from pathlib import Path; from commlens.native import cache;"
        " cache.check(Path(sys.argv[1]), sys.argv[2])"
    )
    environ = helper_process.environment(os.environ)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program, str(library), checksum],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOAD_S,
            env={**environ, "PYTHONPATH": helper_process.python_path()},
        )
    except subprocess.TimeoutExpired:
        raise NativeEngineError(f"The build did not load within {_LOAD_S:.0f} s.") from None
    if ended.returncode:
        lines = ended.stderr.strip().splitlines()
        raise NativeEngineError(
            f"The build does not load (exit status {ended.returncode}):"
            f" {lines[-1] if lines else 'no message'}."
        )


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Allow one build at a time in a folder, where its file system has locks."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that builds the same")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
