"""Findings as SARIF 2.1.0, the format in which code hosts take the results of analyses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from commlens.model.verdict import Finding, Verdict
from commlens.text import sentence
from commlens.version import __version__

SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_ROOT: Final = "WORKING_DIRECTORY"


def sarif(verdict: Verdict, program: Path | None = None) -> bytes:
    """Return the findings of a verdict as a SARIF log. Files inside the working directory are named
    relative to it.

    Args:
        verdict: of a check.
        program: the script. A finding without a line is placed at its first line, because GitHub
            refuses a log that has a result without a location.
    """
    findings = [finding for finding in verdict.findings if finding.summary]
    kinds = sorted({finding.kind for finding in findings})
    run: dict[str, Any] = {
        "tool": {
            "driver": {
                "name": "commlens",
                "version": __version__,
                "rules": [{"id": kind} for kind in kinds],
            }
        },
        "originalUriBaseIds": {_ROOT: {"uri": f"{Path.cwd().as_uri()}/"}},
        "results": [_result(each, kinds.index(each.kind), program) for each in findings],
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return msgspec.json.format(msgspec.json.encode(log), indent=2)


def _result(finding: Finding, rule: int, program: Path | None) -> dict[str, Any]:
    text = " ".join(
        sentence(part) for part in (finding.summary, finding.explanation, finding.next_step) if part
    )
    result: dict[str, Any] = {
        "ruleId": finding.kind,
        "ruleIndex": rule,
        "level": _level(finding),
        "message": {"text": text},
    }
    if finding.source_file is not None:
        result["locations"] = [_location(finding.source_file, finding.function)]
    elif program is not None:
        result["locations"] = [_location(f"{program}:1", None)]
    return result


def _level(finding: Finding) -> str:
    if finding.kind == "hazard":
        return "warning"
    return "error" if finding.root_cause else "note"


def _location(source_file: str, function: str | None) -> dict[str, Any]:
    file, _, line = source_file.rpartition(":")
    path = Path(file).absolute()
    artifact = {"uri": path.as_uri()}
    if path.is_relative_to(Path.cwd()):
        # bytes, because a file name need not be valid text
        artifact = {"uri": quote(bytes(path.relative_to(Path.cwd()))), "uriBaseId": _ROOT}
    location: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": artifact,
            "region": {"startLine": max(int(line), 1)},
        }
    }
    if function:
        location["logicalLocations"] = [{"name": function, "kind": "function"}]
    return location
