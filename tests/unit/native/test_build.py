"""Building the native engine, and finding what was built: what goes wrong is said, and nothing is
taken for what it is not.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from native_builds import put

from commlens.blackbox import layout as L
from commlens.errors import NativeEngineError
from commlens.native import build, cache

pytestmark = pytest.mark.launches


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(cache, "_loaded", None)
    monkeypatch.setenv("COMMLENS_NATIVE_DIR", str(tmp_path))
    return tmp_path


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


def test_the_layout_in_cpp_is_the_layouts(native_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "_loaded", None)
    monkeypatch.setenv("COMMLENS_NATIVE_DIR", str(native_cache))
    module = cache.load()
    compiled = module.layout()
    assert len(compiled) > 30
    for name, value in compiled.items():
        assert value == getattr(L, name), name
