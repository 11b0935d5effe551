"""commlens build-native."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlens.errors import NativeEngineError
from commlens.native import build
from conftest import RunCommlens

pytestmark = pytest.mark.launches


def test_no_compiler_is_one_sentence(call_commlens: RunCommlens, tmp_path: Path):
    done = call_commlens(
        "build-native",
        environ={"PATH": str(tmp_path), "CXX": "", "COMMLENS_NATIVE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("commlens: Building the native engine needs a C++ compiler")
        and done.stderr.count("\n") == 1
    )
    assert not (tmp_path / "cache").exists()


def test_a_compiler_that_is_not_there_is_named(call_commlens: RunCommlens):
    done = call_commlens("build-native", environ={"CXX": "no-such-compiler"})
    assert done.returncode == 2
    assert (
        done.stderr
        == "commlens: CXX names the compiler 'no-such-compiler', which is not a command here.\n"
    )


def test_a_compiler_that_fails_leaves_nothing(call_commlens: RunCommlens, tmp_path: Path):
    compiler = tmp_path / "bad++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo bad++ 1.0; exit 0; }\necho "x.cpp:1: error: it'
        ' is broken" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    done = call_commlens(
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
    how: str, call_commlens: RunCommlens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The compiler runs in another folder."""
    compiler = tmp_path / "cannot-link"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo it 1.0; exit 0; }\necho "ld: cannot open output'
        ' file $3: is it there?\ncollect2: error: ld returned 1 exit status" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    if how == "command":
        said = call_commlens("build-native", "-o", "cache", environ={"CXX": str(compiler)}).stderr
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("CXX", str(compiler))
        with pytest.raises(NativeEngineError) as error:
            build.build_into(Path("cache"))
        said = str(error.value)
    if "headers" in said:
        pytest.skip("there are no headers to compile with")
    assert f"(exit status 1): ld: cannot open output file {tmp_path}/cache/" in said


def test_a_cache_that_cannot_be_written_is_named(call_commlens: RunCommlens, tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = call_commlens("build-native", "-o", str(tmp_path / "file"), environ={"CXX": "/bin/echo"})
    assert done.returncode == 2
    assert f"cannot be saved in {tmp_path / 'file'}" in done.stderr


def test_what_was_built_is_not_built_again(native_cache: Path, call_commlens: RunCommlens):
    done = call_commlens("build-native", environ={"COMMLENS_NATIVE_DIR": str(native_cache)})
    assert done.returncode == 0, done.stderr
    assert "exists already, built on" in done.stdout
