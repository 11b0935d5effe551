"""Options and output that verbs which show a verdict have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from builders import Job, Stay, at, training

from commlens.commands.verdict_output import add_html, add_json, write_page
from commlens.diagnosis.examine import examine_logs


def test_the_options() -> None:
    parser = argparse.ArgumentParser()
    add_json(parser)
    add_html(parser, "which needs no network")
    assert parser.parse_args(["--json", "-o", "a.html"]) == argparse.Namespace(
        json=True, html=Path("a.html")
    )
    assert "as an HTML page, which needs no network" in " ".join(parser.format_help().split())


def test_the_page_is_written_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "verdict.html"
    write_page(file, examine_logs(Job(2).run(training(at(1, 2, Stay(57, "load_batch")))).logs()))
    assert "load_batch" in file.read_text()
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"commlens: Wrote {file}: open it in a browser.\n")
