"""``import torch`` works, whatever state commlens is in.

torch calls every entry point of the group ``torch.backends`` at its end and lets nothing pass: an
entry point that cannot be imported, or that raises, makes ``import torch`` fail.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from chosen import long

from conftest import REPOSITORY, SOURCE

pytestmark = pytest.mark.launches

pytest.importorskip("torch")

DEPENDENCIES = ["msgspec", "rich", "yaml", "py_spy"]


def half_installed(folder: Path, *, package: bool, autoload: bool) -> Path:
    """A folder for PYTHONPATH with commlens's metadata in it, and what else is asked for."""
    info = folder / "commlens-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: commlens\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ncommlens = commlens_autoload:start\n")
    if package:
        shutil.copytree(
            SOURCE / "commlens", folder / "commlens", ignore=shutil.ignore_patterns("*.pyc.*")
        )
    if autoload:
        shutil.copy(SOURCE / "commlens_autoload.py", folder)
    return folder


def run(
    folder: Path, what: str, *, blocked: list[str] | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run ``what`` in a process that sees this commlens and no other, and say what it has loaded."""
    # An editable install of the working tree is on the path too: it is taken off again.
    program = (
        f"import sys; sys.path[:] = [p for p in sys.path if p != {str(SOURCE)!r}]\n"
        + "".join(f"sys.modules[{name!r}] = None\n" for name in blocked or [])
        + f"{what}\nprint('imported', 'commlens_autoload' in sys.modules, 'commlens' in"
        " sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder), **environ}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )


def import_torch(folder: Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """The real thing."""
    return run(folder, "import torch; torch.ones(1)", **kwargs)


def call_start(folder: Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """What torch does at the end of its import; much quicker."""
    return run(folder, "import commlens_autoload; commlens_autoload.start()", **kwargs)


def test_the_entry_point_is_the_module_outside_the_package():
    points = [
        point
        for point in importlib.metadata.entry_points(group="torch.backends")
        if point.name == "commlens"
    ]
    if not points:
        pytest.skip("commlens is not installed here")
    assert {point.value for point in points} == {"commlens_autoload:start"}


@pytest.mark.parametrize("switch", ["", "0", "false", "No", " off "])
def test_unless_asked_for_it_loads_nothing_of_commlens(tmp_path, switch):
    done = call_start(
        half_installed(tmp_path / "site", package=True, autoload=True), COMMLENS=switch
    )
    assert done.stdout == "imported True False\n" and done.stderr == ""


def test_torch_calls_it(tmp_path):
    done = import_torch(half_installed(tmp_path / "site", package=True, autoload=True))
    assert done.stdout == "imported True False\n" and done.stderr == ""


def test_asked_for_it_is_switched_on(tmp_path):
    done = import_torch(
        half_installed(tmp_path / "site", package=True, autoload=True), COMMLENS="1"
    )
    assert done.stdout == "imported True True\n" and done.stderr == ""


def test_with_every_dependency_missing_it_records_all_the_same(tmp_path):
    program = f"""
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
from commlens.capture import session
assert session.recording().is_recording
dist.destroy_process_group()
"""
    site = half_installed(tmp_path / "site", package=True, autoload=True)
    done = run(
        site,
        program,
        blocked=DEPENDENCIES,
        COMMLENS="1",
        COMMLENS_WATCHED="1",
        COMMLENS_BOX_DIR=str(tmp_path),
    )
    assert done.stdout == "imported True True\n" and "commlens" not in done.stderr, done.stderr


def test_a_settings_file_without_pyyaml_is_a_warning(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("stall_timeout: 5\n")
    site = half_installed(tmp_path / "site", package=True, autoload=True)
    done = import_torch(site, blocked=DEPENDENCIES, COMMLENS="1", COMMLENS_CONFIG_FILE=str(path))
    assert done.stdout == "imported True True\n" and "pip install PyYAML" in done.stderr


def test_bad_settings_are_warnings(tmp_path):
    site = half_installed(tmp_path / "site", package=True, autoload=True)
    done = import_torch(site, COMMLENS="1", COMMLENS_STALL_TIMEOUT="soon", COMMLENS_NONSENSE="1")
    assert done.stdout == "imported True True\n"
    assert (
        "COMMLENS_STALL_TIMEOUT" in done.stderr
        and "COMMLENS_NONSENSE" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize("switch", [long("0"), "1"])
def test_with_the_package_gone_torch_can_be_imported(tmp_path, switch):
    done = import_torch(
        half_installed(tmp_path / "site", package=False, autoload=True), COMMLENS=switch
    )
    assert done.stdout == "imported True False\n"
    wanted = (
        "commlens: not recording: ModuleNotFoundError: No module named 'commlens'\n"
        if switch == "1"
        else ""
    )
    assert done.stderr == wanted


DAMAGE = ["raise SystemExit(3)", "raise BaseException('odd')", "1 +", "import no_such_module"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_with_a_damaged_package_nothing_leaves_start(tmp_path, damage):
    site = half_installed(tmp_path / "site", package=True, autoload=True)
    (site / "commlens" / "capture" / "session.py").write_text(damage)
    done = call_start(site, COMMLENS="1")
    assert done.stdout == "imported True True\n"
    assert done.stderr.startswith("commlens: not recording: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "stderr", ["None", "open('/dev/full', 'w', buffering=1)", "open('/dev/null')"]
)
def test_without_a_standard_error_that_works_it_is_silent(tmp_path, stderr):
    site = half_installed(tmp_path / "site", package=False, autoload=True)
    done = run(
        site,
        f"sys.stderr = {stderr}; import commlens_autoload; commlens_autoload.start(); sys.stderr ="
        " None",
        COMMLENS="1",
    )
    assert done.stdout == "imported True False\n" and done.stderr == ""


def test_torchs_own_switch_leaves_it_out(tmp_path):
    """Also the way out in the one case that nothing of ours can mend: metadata without the module
    that it names.
    """
    site = half_installed(tmp_path / "site", package=False, autoload=False)
    done = import_torch(site, COMMLENS="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout == "imported False False\n" and done.stderr == ""
    done = import_torch(site)
    assert done.returncode != 0 and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr, (
        "torch has changed: docs/development.md says otherwise"
    )


@pytest.mark.long
def test_an_interrupted_install_or_removal_never_leaves_the_metadata_without_the_module(tmp_path):
    """pip unpacks a wheel in the archive's order, and removes files in the order of their names."""
    wheels = tmp_path / "wheels"
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
        "--wheel-dir",
        str(wheels),
    ]
    source = tmp_path / "source"
    shutil.copytree(
        REPOSITORY / "src",
        source / "src",
        ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, source)
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=110)
    if done.returncode != 0 and (
        "Could not find a version" in done.stderr or "connection" in done.stderr.lower()
    ):
        pytest.skip("offline: the build backend cannot be had")
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(next(wheels.iterdir())).namelist()
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert names.index("commlens_autoload.py") < names.index(entry_points)
    assert sorted(names).index(entry_points) < sorted(names).index("commlens_autoload.py")
    assert "commlens/py.typed" in names and all(
        name.startswith(("commlens/", "commlens_autoload.py", "commlens-")) for name in names
    )
