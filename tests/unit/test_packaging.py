"""What is beside the package: workflows, issue templates, the citation, the recipe. They name the
versions that the package has.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from commlens.version import __version__
from conftest import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted(
    path
    for path in (REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
    if path.name != "config.yml"
)


def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_targets_and_files_that_exist(path: Path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    targets = set(
        re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    )
    runs = [
        step["run"]
        for job in workflow["jobs"].values()
        for step in job.get("steps", [])
        if "run" in step
    ]
    assert set(re.findall(r"\bmake ([a-z-]+)", "\n".join(runs))) <= targets
    for job in workflow["jobs"].values():
        assert (REPOSITORY / job.get("uses", ".")).exists()
        assert set(
            [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        ) <= set(workflow["jobs"])


def test_the_tests_run_with_every_python_that_the_package_names():
    named = [
        name.split(" :: ")[-1]
        for name in project()["project"]["classifiers"]
        if re.search(r":: 3\.\d+$", name)
    ]
    tests = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "tests.yml").read_text())
    assert tests["jobs"]["all"]["strategy"]["matrix"]["python"] == named


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_an_issue_template_asks_for_doctors_output(path: Path):
    labels = [item["attributes"]["label"] for item in yaml.safe_load(path.read_text())["body"]]
    assert "The output of commlens doctor" in labels


def test_the_version_is_the_same_everywhere():
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == __version__
    assert (
        f'set version = "{__version__}"'
        in (REPOSITORY / "packaging" / "conda" / "meta.yaml").read_text()
    )


def test_the_recipe_has_the_packages_dependencies():
    recipe = (REPOSITORY / "packaging" / "conda" / "meta.yaml").read_text()
    for dependency in project()["project"]["dependencies"]:
        name, version = re.fullmatch(r"(\w+)(>=.*)", dependency).groups()  # type: ignore[union-attr]
        assert f"- {name.lower()} {version}\n" in recipe
