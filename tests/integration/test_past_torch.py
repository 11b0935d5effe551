"""Programs that communicate past torch's dispatcher, over stand-ins for the libraries: the rank at
fault is named, no other is, and healthy ones get no word.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from chosen import long

from commlens.native import nccl_profiler

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(240)


def load() -> ModuleType:
    file = Path(__file__).parents[1] / "past_torch" / "run.py"
    spec = importlib.util.spec_from_file_location("past_torch_run", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


programs = load()
OFTEN = ("asleep_before_combine", "stands_before_replay", "device_stands_before_torch")
"""The queues have tests in ``tests/unit/diagnosis/select/test_worlds.py``.
"""


def skip_if_impossible(name: str) -> None:
    if name in (*programs.NCCL_REPORTS, *programs.NCCL_HEALTHY):
        if reason := programs.nccl_like().why_not():
            pytest.skip(reason)
        if nccl_profiler.library() is None:
            pytest.skip("the plugin was not built here")


@pytest.mark.parametrize("name", [*OFTEN, *(long(n) for n in programs.REPORTS if n not in OFTEN)])
def test_a_report(name: str, tmp_path: Path) -> None:
    skip_if_impossible(name)
    found = programs.run(name, tmp_path, 3)
    undecided = name in programs.UNDECIDED
    assert found.said == ("undecided" if undecided else "right"), found.output
    if name == "asleep_before_combine":
        assert "Ranks 0-2 called deep_ep: 9 to 10 calls of each are recorded." in found.output
    if name == "device_stands_before_torch":
        said = " ".join(found.output.split())
        assert "its device has not started it; ranks 0,2 have started it and wait" in said
        assert "called NCCL past torch" not in said, "a call that both tell of is one record"


@pytest.mark.parametrize("name", [long(name) for name in programs.HEALTHY])
def test_a_healthy_program(name: str, tmp_path: Path) -> None:
    skip_if_impossible(name)
    found = programs.run(name, tmp_path, 3)
    assert found.said == "right", found.output
