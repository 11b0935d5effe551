"""Torch's recorder is switched on where it is off, and a user's size is respected."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from commlens.config import RECORDER_MARK, RECORDER_VARIABLES, load_settings
from commlens.launch import torch_recorder
from conftest import RunCommlens


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.6.0", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        ("2.8.0+cu126", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        ("2.11.0+cu130", "TORCH_FR_BUFFER_SIZE"),
    ],
)
def test_it_is_switched_on(monkeypatch: pytest.MonkeyPatch, version: str, name: str) -> None:
    monkeypatch.setattr("torch.__version__", version)
    environ: dict[str, str] = {}
    torch_recorder.switch_on(environ)
    assert environ == {name: "2000", RECORDER_MARK: "1"}


@pytest.mark.parametrize("name", RECORDER_VARIABLES)
@pytest.mark.parametrize("size", ["0", "500", ""])
def test_a_size_of_the_users_stays(name: str, size: str) -> None:
    environ = {name: size}
    torch_recorder.switch_on(environ)
    assert environ == {name: size}


def test_our_size_is_not_taken_for_the_users(tmp_path) -> None:
    """A program that a rank starts reads its settings in the rank's environment."""
    path = tmp_path / "settings.yaml"
    path.write_text("box_entries: 500\n")
    environ: dict[str, str] = {}
    torch_recorder.switch_on(environ)
    assert load_settings(environ=environ, config_file=path).settings.box_entries == 500
    for name in RECORDER_VARIABLES:
        environ.pop(name, None)
    environ["TORCH_FR_BUFFER_SIZE"] = "700"  # by the program itself
    assert load_settings(environ=environ, config_file=path).settings.box_entries == 700


PROGRAM = """
import json, os
import torch, torch.distributed as dist
names = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
entries = len(json.loads(dump()).get("entries", [])) if dump else None
print(json.dumps([sorted(os.environ[name] for name in names if name in os.environ), entries]))
dist.destroy_process_group()
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    ("given", "sizes"),
    [({}, ["2000"]), ({"TORCH_FR_BUFFER_SIZE": "0"}, ["0"]), ({"COMMLENS_BOX_ENTRIES": "0"}, [])],
)
def test_a_recorded_program(
    run_commlens: RunCommlens, tmp_path, given: dict[str, str], sizes: list[str]
) -> None:
    import json

    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_commlens("run", "program.py", environ={"COMMLENS_BOX_DIR": str(tmp_path), **given})
    assert done.returncode == 0, done.stderr
    found, entries = json.loads(done.stdout.splitlines()[-1])
    assert found == sizes
    if entries is not None and sizes:
        assert (entries > 0) is (sizes == ["2000"])
