"""commlens as a library: a verdict from paths, in a process that never imports torch, and what a
notebook shows of it.
"""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from boxes import busy_box
from builders import Job, Stay, at, training
from hypothesis import given, settings
from hypothesis import strategies as st

from commlens.diagnosis.api import diagnose
from commlens.diagnosis.examine import diagnose_logs
from commlens.model.verdict import Finding, Verdict


@pytest.mark.launches
def test_a_verdict_without_torch(tmp_path: Path) -> None:
    for rank in range(4):
        busy_box(rank).write(tmp_path)
    code = (
        "import sys, commlens\n"
        "assert not {'numpy', 'rich', 'torch', 'msgspec'} & set(sys.modules)\n"
        f"verdict = commlens.diagnose({str(tmp_path)!r})\n"
        "assert isinstance(verdict, commlens.Verdict) and verdict.kind == 'healthy', verdict\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(verdict: Verdict) -> Tags:
    tags = Tags()
    tags.feed(verdict._repr_html_())
    tags.close()
    assert tags.open == []
    assert tags.tags <= {
        "div",
        "table",
        "tr",
        "th",
        "td",
        "details",
        "summary",
        "ul",
        "li",
        "small",
    }
    return tags


def test_the_numbers_of_a_dump_are_those_of_its_watcher(tmp_path: Path) -> None:
    for job in ("one", "two"):
        (tmp_path / job).mkdir()
        for rank in range(4):
            busy_box(rank).write(tmp_path / job)
    assert diagnose(tmp_path / "two").kind == "healthy"
    told = Verdict(kind="diverged", summary="rank 3's weight differs", looked_at="4 ranks")
    (tmp_path / "one" / "verdict.json").write_bytes(told.to_json())
    assert diagnose(tmp_path / "one") == told
    assert diagnose(tmp_path / "two").kind == "healthy", "another job's"
    for content in (
        b'{"schema": "commlens.verdict/2"',
        b'{"schema": "commlens.verdict/2", "kind": 3}',
    ):
        (tmp_path / "one" / "verdict.json").write_bytes(content)
        assert diagnose(tmp_path / "one").kind == "healthy"


def test_a_fault_in_the_records_is_the_verdict(tmp_path: Path) -> None:
    for rank in range(2):
        busy_box(rank, 2, records=8 + rank).write(tmp_path)
    told = Verdict(kind="diverged", summary="rank 3's weight differs")
    (tmp_path / "verdict.json").write_bytes(told.to_json())
    verdict = diagnose(tmp_path, stalled_after_s=0.0)
    assert verdict.is_fault and verdict.kind != "diverged", verdict


def test_what_a_notebook_shows() -> None:
    text = shown(diagnose_logs(Job(4).run(training(at(2, 5, Stay(57, "load_batch")))).logs())).text
    assert "Verdictrank 2 never reached all_reduce #11" in text
    assert "Nextlook at load_batch" in text


def test_a_notebook_shows_why_a_verdict_is_not_sure() -> None:
    verdict = diagnose_logs(Job(2).run(training(at(1, 5, Stay(57, "load_batch")))).logs())
    doubtful = msgspec.structs.replace(verdict.findings[0], would_raise_confidence="Who knows?")
    unsure = Verdict.from_findings(
        [msgspec.structs.replace(doubtful, confidence="low")], looked_at="2 ranks"
    )
    assert "Confidence: low. Who knows?" in shown(unsure).text
    assert "Who knows?" not in shown(Verdict.from_findings([doubtful], looked_at="2 ranks")).text


@settings(deadline=None)
@given(st.text(), st.lists(st.text(), max_size=12))
def test_nothing_in_a_dump_becomes_markup(text: str, several: list[str]) -> None:
    hostile = f"<script>alert(1)</script>{text}"
    finding = Finding(
        kind="missing",
        why="unknown",
        root_cause=True,
        culprits=[1],
        victims=[],
        confidence="low",
        summary=hostile,
        explanation=hostile,
        evidence=[hostile, *several],
        source=hostile,
    )
    shown(
        Verdict.from_findings(
            [finding, finding], missing_evidence=[hostile, *several], looked_at=hostile
        )
    )
