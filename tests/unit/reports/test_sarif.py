"""Tests of src/commlens/reports/sarif.py against the parts of SARIF 2.1.0 that code hosts need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commlens.model.verdict import Finding, Verdict
from commlens.reports.sarif import sarif


def finding(kind: Any, source_file: str | None = None, *, root_cause: bool = True) -> Finding:
    return Finding(
        kind=kind,
        why="unknown",
        root_cause=root_cause,
        culprits=[1],
        victims=[0],
        confidence="high",
        summary="rank 1 issued broadcast",
        source_file=source_file,
        function="main",
    )


def run_of(*findings: Finding) -> dict[str, Any]:
    log = json.loads(sarif(Verdict(findings=list(findings))))
    assert log["version"] == "2.1.0" and log["$schema"]
    (run,) = log["runs"]
    assert run["tool"]["driver"]["name"] == "commlens"
    rules = run["tool"]["driver"]["rules"]
    for result in run["results"]:
        assert result["message"]["text"]
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    return run


def test_levels() -> None:
    run = run_of(finding("cycle"), finding("hazard"), finding("missing", root_cause=False))
    assert [result["level"] for result in run["results"]] == ["error", "warning", "note"]
    assert all("locations" not in result for result in run["results"])


@pytest.mark.parametrize(
    ("program", "uri"), [("train.py", "train.py"), ("caf\udce9.py", "caf%E9.py")]
)
def test_a_finding_without_a_line_is_at_the_programs_first_line(program: str, uri: str) -> None:
    log = json.loads(sarif(Verdict(findings=[finding("cycle")]), Path(program)))
    [result] = log["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == (uri, 1)


def test_files_are_named_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside, outside = tmp_path / "src" / "train me.py", tmp_path.parent / "other.py"
    run = run_of(finding("cycle", f"{inside}:12"), finding("cycle", f"{outside}:0"))
    first, second = (result["locations"][0]["physicalLocation"] for result in run["results"])
    base = run["originalUriBaseIds"]
    assert first["artifactLocation"]["uri"] == "src/train%20me.py"
    assert base[first["artifactLocation"]["uriBaseId"]]["uri"] == f"{tmp_path.as_uri()}/"
    assert first["region"] == {"startLine": 12}
    assert second["artifactLocation"] == {"uri": outside.as_uri()}
    assert second["region"] == {"startLine": 1}


def test_a_verdict_without_a_fault_has_no_result() -> None:
    assert run_of()["results"] == []
