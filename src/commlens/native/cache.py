"""The cache of builds: where they are, what each is for, and loading one.

    <cache>/<torch, Python and a digest of the rest of the identity>/<compiler>/build.json
    <package>/native/built/<the same>/build.json   for builds that came with the package

Beside each build.json is the library that it names.

Uses only the standard library and torch, and calls no compiler.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from commlens.blackbox import layout as L
from commlens.errors import NativeEngineError

MODULE: Final = "commlens_native"
LIBRARY_PREFIX: Final = f"{MODULE}-"
ABOUT: Final = "build.json"
SOURCES: Final = Path(__file__).parent
BUILT: Final = SOURCES / "built"
DIRECTORY_VARIABLE: Final = "COMMLENS_NATIVE_DIR"
_FLAVOUR: Final = re.compile(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$")
NOT_BUILT: Final = (
    "the native engine was not built for this torch and Python; commlens build-native builds it"
)


@dataclass(frozen=True)
class Build:
    """A build in the cache or in the package."""

    folder: Path
    about: dict[str, Any]

    @property
    def library(self) -> Path:
        """The library to load."""
        return self.folder / os.path.basename(str(self.about.get("library", "")))  # noqa: PTH119

    def is_whole(self) -> bool:
        """Return whether the library has the checksum that was recorded when it was built."""
        try:
            return hashlib.sha256(self.library.read_bytes()).hexdigest() == self.about.get("sha256")
        except OSError:
            return False


def sources() -> list[Path]:
    """Return the C++ files; the first is the one to compile."""
    return sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.hpp"))


def sources_digest() -> str:
    """Return a digest of the C++ files: a build is for one version of them."""
    checksum = hashlib.sha256()
    for path in sources():
        checksum.update(path.name.encode() + b"\0" + path.read_bytes())
    return checksum.hexdigest()[:16]


def identity() -> dict[str, str]:
    """Return what a build must have been made for, to run here.

    PyTorch's own builds of one release for CPU, CUDA, ROCm and XPU share it: of the 9,443 headers
    of torch 2.13.0 for CPU and for CUDA, only caffe2/core/macros.h differs, which names the options
    of the build.
    """
    import torch

    pybind11 = [
        str(getattr(torch._C, f"_PYBIND11_{name}", None) or "")
        for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    ]
    return {
        "torch": _FLAVOUR.sub("", str(torch.__version__)),
        "torch_git": str(getattr(torch.version, "git_version", ""))[:12],
        "cxx11_abi": str(int(torch._C._GLIBCXX_USE_CXX11_ABI)),
        # which modules share types; torch 2.13 names none, there its headers decide
        "pybind11_abi": "".join(pybind11),
        "python": str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag),
        "machine": platform.machine(),
        "sources": sources_digest(),
    }


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of builds: ``$COMMLENS_NATIVE_DIR``, else
    ``$XDG_CACHE_HOME/commlens/native``.
    """
    environ = os.environ if environ is None else environ
    if environ.get(DIRECTORY_VARIABLE):
        return Path(environ[DIRECTORY_VARIABLE]).expanduser()
    home = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118 - never raises
    return Path(home) / "commlens" / "native"


def folder_of(wanted: Mapping[str, str]) -> str:
    """Return the name of the folder for builds with this identity."""
    digest = hashlib.sha256(json.dumps(dict(wanted), sort_keys=True).encode()).hexdigest()[:12]
    return re.sub(r"[^\w.+-]", "_", f"torch-{wanted['torch']}-{wanted['python']}-{digest}")


def fits(build: Build, wanted: Mapping[str, str]) -> bool:
    """Return whether a build is for this identity, and was not made beside a newer glibc than this
    one: its symbols may be missing.
    """
    return build.about.get("for") == wanted and _numbers(
        str(build.about.get("glibc", ""))
    ) <= _numbers(glibc())


def glibc() -> str:
    """Return the version of the C library that this process runs with, such as ``2.36``; empty if
    it is another library.
    """
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        return ""
    return version if name == "glibc" else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def find() -> Build | None:
    """Return the newest build for this process, in the package or in the cache."""
    wanted = identity()
    candidates = [BUILT / folder_of(wanted), *builds_in(cache_directory() / folder_of(wanted))]
    found = [
        build
        for folder in candidates
        if (build := read_build(folder)) is not None and fits(build, wanted)
    ]
    return max(found, key=lambda build: str(build.about.get("built", "")), default=None)


def builds_in(folder: Path) -> Iterator[Path]:
    """Yield the folders of the builds with one identity: one for each compiler."""
    try:
        yield from sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return


def read_build(folder: Path) -> Build | None:
    """Return the build in a folder; None if there is none."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Build(folder, about) if isinstance(about, dict) else None


def check(path: Path, checksum: str) -> None:
    """Load a new build and compare the layout that it was compiled with."""
    compiled = load_file(path, checksum).layout()
    wrong = [name for name, value in compiled.items() if getattr(L, name, value) != value]
    if wrong:
        raise NativeEngineError(
            f"{path} writes another layout: {', '.join(wrong)} differ from"
            " commlens.blackbox.layout."
        )


_loaded: Any = None


def load() -> Any:
    """Load the build for this process and return its module; None if there is no build.

    Raises:
        NativeEngineError: the build is damaged or does not load.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    build = find()
    if build is not None:
        _loaded = load_file(build.library, str(build.about.get("sha256", "")))
    return _loaded


def load_file(path: Path, checksum: str) -> Any:
    """Load a library and return its module, after checking its SHA-256."""
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() != checksum:
            raise NativeEngineError(
                f"{path} is damaged: its checksum differs. Rebuild it with commlens build-native"
                " --force."
            )
        import torch  # noqa: F401 - its libraries must be loaded first

        loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
        spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (OSError, ImportError) as error:
        raise NativeEngineError(
            f"{path} does not load: {getattr(error, 'strerror', None) or error}"
        ) from error
    return module
