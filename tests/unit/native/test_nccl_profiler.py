"""NCCL is given the plugin only where no other one is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlens.native import nccl_profiler


@pytest.fixture(autouse=True)
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with the plugin, and without any other."""
    plugin = tmp_path / "_nccl_profiler.abi3.so"
    plugin.touch()
    monkeypatch.setattr(nccl_profiler, "library", lambda: plugin)
    monkeypatch.setattr(nccl_profiler, "_LINKER_CACHE", tmp_path / "ld.so.cache")
    monkeypatch.setattr(nccl_profiler, "_LINKER_FOLDERS", (str(tmp_path / "lib"),))
    return plugin


def test_the_variables_are_set(tmp_path: Path, built: Path):
    environ = {"HOME": str(tmp_path)}
    assert nccl_profiler.switch_on("calls", tmp_path, environ)
    expected = {
        "HOME": str(tmp_path),
        "NCCL_PROFILER_PLUGIN": str(built),
        "COMMLENS_NCCL_FOLDER": str(tmp_path),
        "COMMLENS_NCCL_EVENTS": "calls",
    }
    assert environ == expected
    assert nccl_profiler.switch_on("kernels", tmp_path, environ), "its own variable is no obstacle"
    assert environ == expected | {"COMMLENS_NCCL_EVENTS": "kernels"}


def set_in(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_another_plugin_is_left_alone(tmp_path: Path):
    def reason(**environ: str) -> str:
        given = {"HOME": str(tmp_path / "nobody"), **environ}
        before = dict(given)
        said = nccl_profiler.why_not(given)
        assert nccl_profiler.switch_on("calls", tmp_path, given) is (not said)
        assert said == "" or given == before
        return said

    assert reason() == ""
    assert "NCCL_PROFILER_PLUGIN is inspector" in reason(NCCL_PROFILER_PLUGIN="inspector")
    assert "NCCL_PROFILER_PLUGIN is none" in reason(NCCL_PROFILER_PLUGIN="none")
    conf = set_in(tmp_path, "my.conf", "NCCL_DEBUG=INFO\nNCCL_PROFILER_PLUGIN=x\n")
    assert f"{conf} sets NCCL_PROFILER_PLUGIN" in reason(NCCL_CONF_FILE=str(conf))
    set_in(tmp_path, ".nccl.conf", "NCCL_PROFILER_PLUGIN=x\n")
    assert ".nccl.conf sets" in reason(HOME=str(tmp_path))
    (tmp_path / "cuda").mkdir()
    set_in(tmp_path / "cuda", "libnccl-profiler.so", "")
    assert "libnccl-profiler.so is in" in reason(LD_LIBRARY_PATH=f":{tmp_path / 'cuda'}")
    set_in(tmp_path, "ld.so.cache", "x\0libnccl-profiler.so\0y")
    assert "among the libraries of the system" in reason()


def test_without_a_build_it_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nccl_profiler, "library", lambda: None)
    assert "was not built" in nccl_profiler.why_not({})
    assert not nccl_profiler.switch_on("calls", Path("/x"), {})
