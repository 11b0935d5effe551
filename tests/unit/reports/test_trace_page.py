"""Pages of traces as the command line and notebooks make them; what is in them is looked at in
tests/browser.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import msgspec
import pytest
from traces import training

import commlens
from commlens.commands import main
from commlens.formats.trace_json import encode, write_trace
from commlens.reports.trace_page import VIEWER_FILE, viewer_page
from commlens.traces import ranks as ranks_module
from commlens.traces.ranks import RankTraces

HOSTILE = "<img src=x onerror=alert(1)>"


def carried(page: bytes) -> tuple[dict, str]:
    """A page's head, and the traces after it."""
    packed = re.search(rb'id="commlens-data">([^<]*)<', page)
    assert packed is not None
    head, _, traces = gzip.decompress(base64.b64decode(packed[1])).decode().partition("\n")
    return json.loads(head), traces


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):  # no browser opens
        monkeypatch.delenv(name, raising=False)
    write_trace(training(), Path("x.json"))
    write_trace(training(layers=5), Path("y.json"))
    return tmp_path


def test_view_writes_a_page_that_carries_the_file(folder, capsys):
    assert main(["view", "x.json", "-o", "x.html"]) == 0
    assert re.fullmatch(
        r"commlens: Wrote x.html \(\d+ kB\): open it in a browser.\n", capsys.readouterr().err
    )
    page = Path("x.html").read_bytes()
    head, traces = carried(page)
    assert head == {"kind": "trace", "names": ["x.json"], "notes": []}
    assert traces == encode(training()).decode()
    assert b"32 collectives, 340 kB on the wire" in page  # where no script runs
    assert main(["view", "x.json", "-o", "x.html"]) == 2
    assert "will not overwrite without --force: x.html" in capsys.readouterr().err
    assert (
        main(
            [
                "view",
                "x.json",
                "--phase",
                "backward",
                "--network",
                "h100-ib",
                "-o",
                "x.html",
                "--force",
            ]
        )
        == 0
    )
    head, traces = carried(Path("x.html").read_bytes())
    assert (
        head["estimates"][0]["network"] == "h100-ib" and len(head["estimates"][0]["seconds"]) == 14
    )
    assert '"phase":"forward"' not in traces.split('"ops"')[0]


def test_ranks_are_in_it_by_class(tmp_path, capsys):
    for rank in range(4):
        write_trace(training(rank, layers=3 if rank == 2 else 4), tmp_path / f"{rank}.json")
    assert main(["view", str(tmp_path), "-o", str(tmp_path / "out" / "x.html")]) == 0
    head, traces = carried((tmp_path / "out" / "x.html").read_bytes())
    assert head["ranks"]["classes"] == ["rank 0, for ranks 0-1,3", "rank 2"]
    assert (
        head["ranks"]["answer"].startswith("Ranks 0-1,3 and rank 2 issued different collectives.")
        and head["ranks"]["differences"]
    )
    assert [name.rsplit(", ", 1)[1] for name in head["names"]] == ["rank 0", "rank 2"]
    assert traces.count('"schema": "commlens.trace/1"') == 2


def test_more_classes_than_a_page_holds_are_said(monkeypatch):
    monkeypatch.setattr(ranks_module, "MOST_CLASSES", 2)
    head, traces = carried(
        RankTraces(commlens.Trace(training(rank, layers=rank + 1)) for rank in range(3)).to_html(
            name="x"
        )
    )
    assert head["notes"] == [
        "There are 3 classes of ranks; this page shows one rank of each of the 2 largest."
    ]
    assert traces.count('"schema"') == 2


def test_view_without_a_file_makes_an_empty_viewer(folder, capsys):
    assert main(["view"]) == main(["view"]) == 0  # it is there, and the same
    assert Path(VIEWER_FILE).read_bytes() == viewer_page()
    assert (
        f"Wrote {VIEWER_FILE}: open it in a browser and drop a trace on it."
        in capsys.readouterr().err
    )
    assert main(["view", "-o", "v.html"]) == 0 and Path("v.html").read_bytes() == viewer_page()
    assert main(["view", "-o", "x.json"]) == 2
    assert "will not overwrite" in capsys.readouterr().err
    for filtered in (["--events"], ["--rank", "0"]):
        assert main(["view", *filtered]) == 2
        assert "Which trace?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--network", "h100", "-o", "x.html"], "There is no network preset 'h100'."),
        (["-o", "."], ". is a folder"),
    ],
)
def test_wrong_usage_is_a_sentence(folder, capsys, arguments, said):
    assert main(["view", "x.json", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_compare_writes_a_page_beside_what_it_prints(folder, capsys):
    assert main(["compare", "x.json", "y.json", "--html", "c.html"]) == 1
    printed = capsys.readouterr()
    assert "Wrote c.html" in printed.err and "changes: " in printed.out
    head, traces = carried(Path("c.html").read_bytes())
    assert (
        head["kind"] == "compare"
        and head["names"] == ["x.json", "y.json"]
        and head["comparison"]["changes"]
    )
    assert traces == encode(training()).decode() + "\n" + encode(training(layers=5)).decode()
    assert main(["compare", "x.json", "x.json", "--html", "c.html"]) == 2
    assert main(["compare", "x.json", "x.json", "--html", "c.html", "--force", "--json"]) == 0


def test_of_several_ranks_one_that_changed_stands_side_by_side(tmp_path):
    for name, layers in (("before", 4), ("after", 5)):
        for rank in range(3):
            write_trace(
                training(rank, layers=layers if rank else 4), tmp_path / name / f"{rank}.json"
            )
    assert (
        main(
            [
                "compare",
                str(tmp_path / "before"),
                str(tmp_path / "after"),
                "--html",
                str(tmp_path / "c.html"),
            ]
        )
        == 1
    )
    head, traces = carried((tmp_path / "c.html").read_bytes())
    assert head["notes"] == ["The changes cover ranks 0-2; the side-by-side view shows rank 1."]
    assert traces.count('"rank": 1,') == 2


def test_a_notebook_shows_a_trace_as_text_in_tables(tmp_path):
    data = training()
    data.groups = [msgspec.structs.replace(group, mesh_dim=HOSTILE) for group in data.groups]
    trace = commlens.Trace(data)
    shown = trace._repr_html_()
    assert "32 collectives, 340 kB on the wire" in shown and "all_gather" in shown
    assert HOSTILE not in shown and "&lt;img" in shown and "<script" not in shown
    assert commlens.Trace(commlens.Trace(training()).filter(op="none").data)._repr_html_()
    trace.write_html(tmp_path / "t.html", network="h100-ib")
    assert carried((tmp_path / "t.html").read_bytes())[0]["estimates"][0]["network"] == "h100-ib"
    cell = trace.show(height=500)
    assert (
        'sandbox="allow-scripts"' in cell._repr_html_()
        and HOSTILE not in cell._repr_html_()
        and "write_html" in repr(cell)
    )
    with pytest.raises(commlens.CommandError, match="no network preset"):
        trace.show(network="nothing")
