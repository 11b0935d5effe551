"""The facts that ``commlens doctor`` reports about this environment. The checks are independent: if
one fails, the others still run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commlens import config
from commlens.blackbox import job_dirs
from commlens.blackbox.layout import box_size
from commlens.text import size
from commlens.version import __version__

_EXIT: Final = (
    "recording waits a moment before destroy_process_group, in which torch itself can hang (Reducer"
    " and ProcessGroupGloo\njoin threads while they hold the GIL). So a job may end well while it"
    " is recorded, and hang without commlens: see docs/launch.md"
)


@dataclass
class Report:
    """Facts and problems of this environment."""

    # a name, and words in one line or more
    facts: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # sentences


def examine(config_file: str | None = None) -> Report:
    """Check everything.

    Raises:
        ConfigError: the settings file that was named cannot be read.
    """
    report = Report()
    resolved = config.load_settings(config_file=config_file, strict=False)
    if config_file is not None:
        config.load_settings(config_file=config_file)  # strict: raises
    report.problems += resolved.warnings
    checks: list[tuple[str, Callable[[Report], str]]] = [
        ("commlens", lambda _: f"{__version__} in {Path(__file__).parents[1]}"),
        (
            "Python",
            lambda _: (
                f"{platform.python_version()} ({platform.python_implementation()}) at"
                f" {sys.executable}"
            ),
        ),
        (
            "system",
            lambda _: (
                f"{platform.system()} {platform.release()}, {platform.machine()},"
                f" {' '.join(platform.libc_ver())}, {os.cpu_count()} cores"
            ),
        ),
        ("torch", _torch),
        ("backends", _backends),
        ("GPUs", _if_torch(_gpus)),
        ("engine", lambda report: _engine(report, resolved)),
        ("recorder", _if_torch(_torch_recorder)),
        ("completion", _if_torch(_completion)),
        ("NCCL's plugin", lambda report: _nccl_plugin(report, resolved)),
        ("past torch", _if_torch(_past_torch)),
        ("shared memory", lambda report: _shared_memory(report, resolved.settings)),
        ("other processes", _ptrace),
        ("autoload", _autoload),
        ("exit", lambda _: _EXIT),
        ("packages", _packages),
        ("settings", lambda _: _settings(resolved)),
    ]
    for name, check in checks:
        try:
            report.facts.append((name, check(report)))
        except Exception as error:
            report.facts.append((name, f"unknown: {type(error).__name__}: {error}"))
    return report


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _if_torch(check: Callable[[Report], str]) -> Callable[[Report], str]:
    return lambda report: check(report) if _has_torch() else "unknown without torch"


def _torch(report: Report) -> str:
    if not _has_torch():
        report.problems.append(
            "Recording, tracing and verifying need torch: pip install torch. Diagnosing"
            " works without it."
        )
        return "not installed"
    import torch

    built_for = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU only"
    )
    git = str(getattr(torch.version, "git_version", "") or "")[:12]
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
        report.problems.append(
            f"torch {torch.__version__} is older than 2.6, the first version that commlens"
            " supports."
        )
    return (
        f"{torch.__version__} ({built_for}, C++11 ABI {int(torch._C._GLIBCXX_USE_CXX11_ABI)},"
        f" {git}) in {Path(torch.__file__).parent}"
    )


def _backends(report: Report) -> str:
    if not _has_torch():
        return "none without torch"
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        report.problems.append(
            "This torch was built without torch.distributed, so there are no collectives to record."
        )
        return "torch.distributed is not available"
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    found = [name for name in names if getattr(dist, f"is_{name}_available", lambda: False)()]
    if "nccl" in found:
        found[found.index("nccl")] = (
            f"nccl {'.'.join(str(part) for part in torch.cuda.nccl.version())}"
        )
    return ", ".join(found) or "none"


def _gpus(_: Report) -> str:
    import torch

    if not torch.cuda.is_available():
        return "none that torch can use"
    names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _engine(report: Report, resolved: config.Resolved) -> str:
    wanted, origin = resolved.settings.engine, resolved.origins["engine"]
    said = f"the setting engine is {wanted} ({origin})"
    if not _has_torch():
        return f"none without torch; {said}"
    from commlens import native

    if wanted == "python":
        return f"python, because {said}"
    try:
        module = native.load()
    except native.NativeEngineError as error:
        report.problems.append(f"The native engine cannot be used: {error}")
        return f"python, because the native engine is damaged; {said}"
    if module is None:
        if wanted == "native":
            report.problems.append(f"The setting engine is native, but {native.NOT_BUILT}.")
        return (
            f"python, because {_not_built(resolved.settings)}; {said}\nthe cache of builds is"
            f" {native.cache_directory()}"
        )
    build = native.find()
    assert build is not None
    about = f"built on {build.about['built']} with {build.about['compiler']}"
    return (
        f"native, because it was built for this torch and Python; {said}\n{build.library}\n{about}"
    )


def _torch_recorder(report: Report) -> str:
    from commlens.tap import recorder_dumps

    names = [dump.name for dump in recorder_dumps.dumps()]
    if not names:
        return "this torch has none"
    holds = f"{config.RECORDER_ENTRIES} entries, as commlens sets it"
    given = [
        name for name in reversed(config.RECORDER_VARIABLES) if os.environ.get(name, "").strip()
    ]
    if given:
        off = os.environ[given[0]].strip() == "0"
        holds = f"{'off' if off else f'{os.environ[given[0]].strip()} entries'} by {given[0]}"
        if off:
            report.problems.append(
                f"The recorder of torch is off ({given[0]}=0): of collectives on an accelerator,"
                " nothing tells which are complete."
            )
    return f"torch's own: {holds}; read through {' and '.join(names)}"


def _past_torch(_: Report) -> str:
    """Return the installed libraries that communicate past torch, and whether their calls are
    recorded.
    """
    from commlens.tap.libraries import installed
    from commlens.tap.library_adapters import ADAPTERS

    lines = []
    for library, fits in installed(ADAPTERS).items():
        names = [name for each in ADAPTERS if each.library == library for name in each.calls]
        calls = ", ".join(dict.fromkeys(names))
        unless = "" if fits else "not recorded, because this version has other signatures: "
        lines.append(f"{library}{_version_of(library)}: {unless}{calls}")
    return "\n".join(lines)


def _version_of(library: str) -> str:
    try:
        return f" {importlib.metadata.version(library)}"
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


_COMPLETION: Final = {
    "call": "its call or its Work tells",
    "hooks": "its completion hooks tell the native engine, torch's recorder the Python engine",
    "status": "the status of each group in torch's recorder tells",
    "unknown": "nothing tells",
}


def _completion(_: Report) -> str:
    """Return how it is learned what completed on each backend of this torch."""
    from commlens.tap import backends

    completion = backends.completion_by_class()
    return "\n".join(f"{name}: {_COMPLETION[how]}" for name, how in completion.items())


def _nccl_plugin(report: Report, resolved: config.Resolved) -> str:
    """Return whether NCCL itself would tell of its calls."""
    from commlens.model.nccl import VERSIONS
    from commlens.native import nccl_profiler

    level, origin = resolved.settings.nccl_profiler, resolved.origins["nccl_profiler"]
    said = f"the setting nccl_profiler is {level} ({origin})"
    reason = nccl_profiler.why_not(os.environ)
    if level != "off" and reason:
        report.problems.append(f"NCCL itself tells nothing, because {reason}.")
    can = reason or f"{nccl_profiler.library()}, for NCCL {VERSIONS}"
    return f"{'off' if level == 'off' or reason else 'on'}: {said}\n{can}"


def _not_built(settings: config.Settings) -> str:
    from commlens.launch import background_build

    not_built = "the native engine was not built for this torch and Python"
    if background_build.is_building():
        return f"{not_built}; it is being built in the background now"
    if not settings.auto_build:
        return f"{not_built}, and auto_build is off; commlens build-native builds it"
    if why_not := background_build.why_not():
        return f"{not_built}; commlens launch does not build it: {why_not}"
    return (
        f"{not_built}; the next commlens launch builds it in the background, commlens build-native"
        " at once"
    )


def _shared_memory(report: Report, settings: config.Settings) -> str:
    need = box_size(settings.box_entries)
    lines, room = [], False
    for root in job_dirs.box_roots(settings.box_dir):
        try:
            free = shutil.disk_usage(root).free
        except OSError as error:
            lines.append(f"{root}: {error.strerror}")
            continue
        writable = os.access(root, os.W_OK | os.X_OK)
        fits = free // need if need else 0
        room = room or (writable and fits > 0)
        what = f"room for the black boxes of about {fits} ranks" if writable else "not writable"
        lines.append(f"{root}: {size(free)} free, {what}")
    if settings.box_entries == 0:
        report.problems.append("Nothing is recorded, because box_entries is 0.")
    elif not room:
        report.problems.append(
            "Nothing is recorded, because no folder in memory has room for a rank's black box of"
            f" {size(need)}. Give the container more shared memory (docker run --shm-size=1g), or"
            " name a folder with COMMLENS_BOX_DIR."
        )
    return "\n".join(lines) or "no folder in memory was found"


def _ptrace(report: Report) -> str:
    from commlens.processes import pyspy

    scope = pyspy.ptrace_scope()
    program = pyspy.find()
    limits = {
        "": "the processes of the same user can be traced (no Yama)",
        "0": "the processes of the same user can be traced (ptrace_scope 0)",
        "1": "only child processes can be traced (ptrace_scope 1)",
        "2": "only root can trace processes (ptrace_scope 2)",
        "3": "no process can be traced (ptrace_scope 3)",
    }
    words = limits.get(scope, f"ptrace_scope is {scope}")
    if os.geteuid() == 0 and scope in ("1", "2"):
        words += ", and this is root"
    elif scope in ("1", "2", "3"):
        report.problems.append(
            f"The stack of a rank whose watchdog thread cannot run cannot be read: {words}. A"
            " container needs --cap-add=SYS_PTRACE."
        )
    if program is None:
        report.problems.append(
            "The stack of a rank that holds the GIL cannot be read without py-spy: pip install"
            " py-spy."
        )
    return f"{words}; py-spy is {'at ' + program if program else 'not installed'}"


def _autoload(report: Report) -> str:
    entries = importlib.metadata.entry_points(group="torch.backends")
    installed = any(entry.value.startswith("commlens_autoload") for entry in entries)
    off = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0"
    on = config.is_switched_on(os.environ)
    if not installed:
        report.problems.append(
            "COMMLENS=1 does nothing here, because commlens's entry point is not installed: install"
            " commlens with pip."
        )
    if off:
        report.problems.append(
            "COMMLENS=1 does nothing here, because TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from"
            " loading extensions."
        )
    words = (
        f"COMMLENS={os.environ[config.SWITCH]}"
        if config.SWITCH in os.environ
        else "COMMLENS is not set"
    )
    return (
        f"{words}: processes that import torch here are"
        f" {'recorded' if on and installed and not off else 'not recorded automatically'}"
    )


def _packages(_: Report) -> str:
    names = ("numpy", "msgspec", "rich", "PyYAML", "accelerate", "py-spy")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _settings(resolved: config.Resolved) -> str:
    changed = [name for name in config.NAMES if resolved.origins[name] != config.DEFAULT]
    return (
        "\n".join(
            f"{name} = {getattr(resolved.settings, name)} ({resolved.origins[name]})"
            for name in changed
        )
        or "all at their defaults"
    )
