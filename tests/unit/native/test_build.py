"""Building the native engine, and finding what was built: what goes wrong is said, and nothing is
taken for what it is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from commlens.blackbox import layout as L
from commlens.errors import NativeEngineError
from commlens.native import build, cache
from conftest import RunCommlens

pytestmark = pytest.mark.launches


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(cache, "_loaded", None)
    monkeypatch.setenv("COMMLENS_NATIVE_DIR", str(tmp_path))
    return tmp_path


def put(folder: Path, content: bytes = b"no library", **about: object) -> Path:
    """A build that claims to be for this process."""
    wanted = cache.identity()
    place = folder / cache.folder_of(wanted) / "a-compiler"
    place.mkdir(parents=True)
    (place / "commlens_native-1.so").write_bytes(content)
    described = {
        "for": wanted,
        "library": "commlens_native-1.so",
        "sha256": hashlib.sha256(content).hexdigest(),
        "built": "now",
        **about,
    }
    (place / "build.json").write_text(json.dumps(described))
    return place


def test_nothing_is_loaded_where_nothing_was_built(nothing_loaded: Path):
    assert cache.load() is None


@pytest.mark.parametrize(
    "what", ["torch", "torch_git", "cxx11_abi", "pybind11_abi", "python", "machine", "sources"]
)
def test_a_build_for_something_else_is_not_taken(nothing_loaded: Path, what: str):
    put(nothing_loaded, **{"for": {**cache.identity(), what: "another"}})
    assert cache.load() is None


def test_a_build_beside_a_newer_c_library_is_not_taken(
    nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch
):
    """A home folder may be shared by machines with different systems."""
    put(nothing_loaded, glibc="2.36")
    for here, fits in (("2.36", True), ("2.41", True), ("2.9", False), ("2.31", False)):
        monkeypatch.setattr(cache, "glibc", lambda here=here: here)
        assert (cache.find() is not None) is fits, here


def test_the_build_needs_neither_cudas_headers_nor_its_libraries():
    """A torch for CUDA is often installed where no CUDA toolkit is."""
    if why_not := build.obstacle():
        pytest.skip(why_not)
    options = build.flags()
    assert [option for option in options if option.startswith("-l")] == [
        "-lc10",
        "-ltorch_cpu",
        "-ltorch",
        "-ltorch_python",
    ]
    compiler = build.find_compiler(os.environ)
    unit = next(path for path in cache.sources() if path.suffix == ".cpp")
    found = subprocess.run(
        [*compiler, "-M", str(unit), *options], capture_output=True, text=True, timeout=100
    )
    assert found.returncode == 0, found.stderr
    headers = [Path(word).as_posix() for word in found.stdout.replace("\\\n", " ").split()[1:]]
    assert len(headers) > 500
    own = ("/ATen/ops/", "/ATen/detail/")  # declarations in every build of torch
    foreign = [
        path
        for path in headers
        if re.search("cuda|nccl|hip|cudnn", path, re.IGNORECASE)
        and not any(part in path for part in own)
    ]
    assert foreign == []


def test_a_changed_file_is_not_loaded(nothing_loaded: Path):
    put(nothing_loaded, sha256="0" * 64)
    with pytest.raises(NativeEngineError, match="checksum differs"):
        cache.load()


def test_a_file_that_is_no_library_is_not_loaded(nothing_loaded: Path):
    put(nothing_loaded)
    with pytest.raises(NativeEngineError, match="does not load"):
        cache.load()


def test_an_unreadable_description_is_no_build(nothing_loaded: Path):
    (put(nothing_loaded) / "build.json").write_text("{")
    assert cache.load() is None


def test_the_library_named_cannot_be_elsewhere(nothing_loaded: Path):
    place = put(nothing_loaded, library="../../elsewhere.so")
    found = cache.find()
    assert found is not None and found.library == place / "elsewhere.so"


def test_the_packages_builds_are_found_and_the_others_are_not_in_the_way(
    nothing_loaded: Path, monkeypatch: pytest.MonkeyPatch
):
    (nothing_loaded / "many").mkdir()
    mine = put(nothing_loaded / "many")
    other = {**cache.identity(), "torch": "9.9.9"}
    folder = nothing_loaded / "many" / cache.folder_of(other) / "a-compiler"
    folder.mkdir(parents=True)
    for name in ("commlens_native-1.so", "build.json"):
        (folder / name).write_bytes((mine / name).read_bytes())
    (folder / "build.json").write_text(
        json.dumps({**json.loads((mine / "build.json").read_text()), "for": other})
    )
    copied = build.copy_builds(nothing_loaded / "many", nothing_loaded / "built")
    assert {made.about["for"]["torch"] for made in copied} == {cache.identity()["torch"], "9.9.9"}
    monkeypatch.setattr(cache, "BUILT", nothing_loaded / "built")
    found = cache.find()
    assert found is not None and found.about["for"] == cache.identity() and found.is_whole()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"for": {"sources": "older"}}, "There is no build of these sources in "),
        ({"sha256": "0" * 64}, "is damaged: its checksum differs"),
    ],
)
def test_a_wheel_takes_no_build_that_cannot_be_used(
    nothing_loaded: Path, change: dict[str, object], words: str
):
    put(nothing_loaded, **change)
    with pytest.raises(NativeEngineError, match=words):
        build.copy_builds(nothing_loaded, nothing_loaded / "built")


@pytest.mark.parametrize(
    "version", ["2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.13.0+rocm6.4", "2.13.0+xpu"]
)
def test_one_build_serves_all_of_pytorchs_builds_of_a_release(
    monkeypatch: pytest.MonkeyPatch, version: str
):
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    assert cache.identity()["torch"] == "2.13.0"
    monkeypatch.setattr(torch, "__version__", f"{version}.mine")
    assert cache.identity()["torch"] == f"{version}.mine"


def test_the_cache_is_where_it_was_put():
    assert cache.cache_directory({"COMMLENS_NATIVE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path(
        "/a"
    )
    assert cache.cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/commlens/native")
    assert cache.cache_directory({}).parts[-3:] == (".cache", "commlens", "native")


def test_no_compiler_is_one_sentence(run_commlens: RunCommlens, tmp_path: Path):
    done = run_commlens(
        "build-native",
        environ={"PATH": str(tmp_path), "CXX": "", "COMMLENS_NATIVE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("commlens: Building the native engine needs a C++ compiler")
        and done.stderr.count("\n") == 1
    )
    assert not (tmp_path / "cache").exists()


def test_a_compiler_that_is_not_there_is_named(run_commlens: RunCommlens):
    done = run_commlens("build-native", environ={"CXX": "no-such-compiler"})
    assert done.returncode == 2
    assert (
        done.stderr
        == "commlens: CXX names the compiler 'no-such-compiler', which is not a command here.\n"
    )


def test_a_compiler_that_fails_leaves_nothing(run_commlens: RunCommlens, tmp_path: Path):
    compiler = tmp_path / "bad++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo bad++ 1.0; exit 0; }\necho "x.cpp:1: error: it'
        ' is broken" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    done = run_commlens(
        "build-native",
        environ={"CXX": str(compiler), "COMMLENS_NATIVE_DIR": str(tmp_path / "cache")},
    )
    if "headers" in done.stderr:
        pytest.skip("there are no headers to compile with")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "x.cpp:1: error: it is broken" in done.stderr
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [".lock"]


@pytest.mark.parametrize("how", ["command", "installation"])
def test_a_relative_folder_is_the_callers(
    how: str, run_commlens: RunCommlens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The compiler runs in another folder."""
    compiler = tmp_path / "cannot-link"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo it 1.0; exit 0; }\necho "ld: cannot open output'
        ' file $3: is it there?\ncollect2: error: ld returned 1 exit status" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    if how == "command":
        said = run_commlens("build-native", "-o", "cache", environ={"CXX": str(compiler)}).stderr
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("CXX", str(compiler))
        with pytest.raises(NativeEngineError) as error:
            build.build_into(Path("cache"))
        said = str(error.value)
    if "headers" in said:
        pytest.skip("there are no headers to compile with")
    assert f"(exit status 1): ld: cannot open output file {tmp_path}/cache/" in said


def test_a_cache_that_cannot_be_written_is_named(run_commlens: RunCommlens, tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = run_commlens("build-native", "-o", str(tmp_path / "file"), environ={"CXX": "/bin/echo"})
    assert done.returncode == 2
    assert f"cannot be saved in {tmp_path / 'file'}" in done.stderr


def test_the_layout_in_cpp_is_the_layouts(native_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "_loaded", None)
    monkeypatch.setenv("COMMLENS_NATIVE_DIR", str(native_cache))
    module = cache.load()
    compiled = module.layout()
    assert len(compiled) > 30
    for name, value in compiled.items():
        assert value == getattr(L, name), name


def test_what_was_built_is_not_built_again(native_cache: Path, run_commlens: RunCommlens):
    done = run_commlens("build-native", environ={"COMMLENS_NATIVE_DIR": str(native_cache)})
    assert done.returncode == 0, done.stderr
    assert "exists already, built on" in done.stdout


def test_doctor_says_which_engine_and_why(native_cache: Path, run_commlens: RunCommlens):
    without = run_commlens("doctor")
    assert without.returncode == 0, without.stderr
    assert "\nengine           python, because the native engine was not built" in without.stdout
    built = run_commlens("doctor", environ={"COMMLENS_NATIVE_DIR": str(native_cache)})
    assert (
        "\nengine           native, because it was built for this torch and Python" in built.stdout
    )
    chosen = run_commlens(
        "doctor", environ={"COMMLENS_NATIVE_DIR": str(native_cache), "COMMLENS_ENGINE": "python"}
    )
    assert (
        "\nengine           python, because the setting engine is python (COMMLENS_ENGINE)"
        in chosen.stdout
    )


def test_doctor_says_what_would_not_work(run_commlens: RunCommlens, tmp_path: Path):
    (tmp_path / "damaged").mkdir()
    put(tmp_path / "damaged", sha256="0" * 64)
    done = run_commlens(
        "doctor",
        environ={
            "COMMLENS_NATIVE_DIR": str(tmp_path / "damaged"),
            "COMMLENS_BOX_DIR": str(tmp_path / "nowhere"),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "COMMLENS_STALL_TIMEOUT": "soon",
        },
    )
    assert done.returncode == 0, done.stderr
    problems = done.stdout.split("What would not work here:")[1]
    for words in (
        "checksum differs",
        "no folder in memory has room",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        "COMMLENS_STALL_TIMEOUT is 'soon'",
    ):
        assert words in problems, words
    assert os.pathsep not in done.stderr


def test_doctor_says_how_torchs_recorder_is_read(run_commlens: RunCommlens):
    said = run_commlens("doctor").stdout
    [line] = [line for line in said.splitlines() if line.startswith("recorder ")]
    assert "by default" in line and "; read through _dump_" in line
    off = run_commlens("doctor", environ={"TORCH_FR_BUFFER_SIZE": "0"}).stdout
    assert "\nrecorder         torch's own: off by TORCH_FR_BUFFER_SIZE" in off
    assert "nothing tells which are complete" in off.split("What would not work here:")[1]
