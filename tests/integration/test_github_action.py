"""The GitHub action (action.yml): its shell steps run as the runner would run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from conftest import REPOSITORY

pytest.importorskip("torch")
pytestmark = [pytest.mark.launches, pytest.mark.long]

ACTION: dict[str, Any] = yaml.safe_load((REPOSITORY / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}

FINE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
"""
WRONG = FINE + "if dist.get_rank() == 1:\n    dist.broadcast(torch.ones(4), 0)\n"
ENDLESS = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
assert sys.argv[1] == "two words"
while True:
    pass
"""


class Ran(NamedTuple):
    """A step that has ended."""

    status: int
    said: str
    outputs: dict[str, str]
    summary: str


def run_step(name: str, folder: Path, **inputs: str) -> Ran:
    """Run a shell step in the repository's folder, with the environment of the runner."""
    values = {key: each.get("default") for key, each in ACTION["inputs"].items()}
    values |= {key.replace("_", "-"): value for key, value in inputs.items()}
    step = STEPS[name]
    environ = {
        key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: values[found[1]], text)
        for key, text in step.get("env", {}).items()
    }
    temp = folder.parent / "temp"
    temp.mkdir(exist_ok=True)
    output, summary, script = temp / "output", temp / "summary", temp / "step.sh"
    for file in (output, summary):
        file.write_text("")
    assert "${{" not in step["run"]
    script.write_text(step["run"])
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(script)],  # shell: bash
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTION_PATH": str(REPOSITORY),
            "GITHUB_WORKSPACE": str(folder),
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(summary),
            "RUNNER_TEMP": str(temp),
            **environ,
            **{key: value for key, value in inputs.items() if key.isupper()},
        },
        capture_output=True,
        text=True,
        check=False,
    )
    outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
    return Ran(done.returncode, done.stdout + done.stderr, outputs, summary.read_text())


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    for name, program in (("fine", FINE), ("wrong", WRONG), ("endless", ENDLESS)):
        (folder / f"{name}.py").write_text(program)
    return folder


def test_no_step_puts_inputs_into_its_script_and_all_that_is_named_exists():
    text = (REPOSITORY / "action.yml").read_text()
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == {*ACTION["inputs"]}
    assert set(re.findall(r"steps\.(\w+)\.", text)) == {"check"}
    assert ACTION["runs"]["using"] == "composite"
    for step in STEPS.values():
        assert ("run" in step) == (step.get("shell") == "bash")
    outputs = set(re.findall(r"steps\.check\.outputs\.(\w+)", text))
    assert outputs == set(re.findall(r"echo \"(\w+)=", STEPS["Check the script"]["run"]))


def test_a_script_without_a_fault(repository: Path):
    ran = run_step("Check the script", repository, script="fine.py", world_size="3")
    assert ran.status == 0, ran.said
    assert ran.outputs == {"status": "0", "sarif": "commlens.sarif"}
    assert "3 ranks" in ran.summary
    assert json.loads((repository / "commlens.sarif").read_text())["runs"][0]["results"] == []


def test_a_fault_fails_the_step_and_is_in_the_file_that_is_uploaded(repository: Path):
    ran = run_step("Check the script", repository, script="wrong.py", sarif="out.sarif")
    assert ran.status == 1, ran.said
    assert ran.outputs == {"status": "1", "sarif": "out.sarif"}
    assert "VERDICT" in ran.summary
    [result, *_] = json.loads((repository / "out.sarif").read_text())["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("wrong.py", 6)


@pytest.mark.parametrize(("not_proven", "status"), [("fail", 3), ("pass", 0)])
def test_what_is_not_proven_fails_the_step_or_not(repository: Path, not_proven: str, status: int):
    ran = run_step(
        "Check the script", repository, script='endless.py "two words"', not_proven=not_proven,
        options="--backend gloo --timeout 3", world_size="2",
    )  # fmt: skip
    assert ran.status == status, ran.said
    assert ran.outputs["status"] == "3"


def test_a_script_that_is_not_there(repository: Path):
    ran = run_step("Check the script", repository, script="absent.py; touch pwned")
    assert ran.status == 2 and ran.outputs == {"status": "2"}
    assert not (repository / "pwned").exists()


def test_the_first_step_installs_this_version(repository: Path, tmp_path: Path):
    venv.create(tmp_path / "venv", with_pip=True)
    path = f"{tmp_path}/venv/bin:{os.environ['PATH']}"
    source = tmp_path / "source"  # a copy: to build leaves files
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src"):
        subprocess.run(["cp", "-r", str(REPOSITORY / name), str(source)], check=True)
    subprocess.run(["rm", "-rf", *map(str, source.rglob("*.egg-info"))], check=True)
    ran = run_step("Install commlens", repository, PATH=path, GITHUB_ACTION_PATH=str(source))
    if "No matching distribution" in ran.said:
        pytest.skip(f"offline: {ran.said.splitlines()[-1]}")
    assert ran.status == 0, ran.said
    done = subprocess.run(
        [f"{tmp_path}/venv/bin/commlens", "check", "--world-size", "2", "fine.py"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pip install torch" in done.stderr + done.stdout
