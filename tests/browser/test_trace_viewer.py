"""The page that takes a file, the page of a comparison, and a trace inside a notebook's cell."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from comm_debug_json import ADDMM, AG, AR, module

import commlens
from commlens.formats.trace_json import encode, read_trace
from commlens.reports.trace_page import viewer_page
from commlens.traces.diff_ranks import compare_page, compare_ranks
from commlens.traces.ranks import RankTraces

from .traces_to_look_at import HOSTILE, hostile, training

RS = "c10d._reduce_scatter_base_"


def comm_debug_json(name: str = "MLP") -> str:
    op = ADDMM | {"is_activation_checkpointing": False}
    leaf = module(f"{name}.net2", forward=[[AR, 2]], ops=[op], recomputed=[op])
    names = [
        ["c10d.allgather_into_tensor_coalesced_", 1],
        ["c10d.alltoall_base_", 2],
        ["_dtensor.shard_dim_alltoall", 1],
        ["c10d.recv_any_source_", 1],
    ]
    tree = module(
        name,
        module(f"{name}.net1"),
        leaf,
        leaf,
        forward=[[AR, 3], *names],
        backward=[[AG, 1], [RS, 4]],
    )
    return json.dumps(
        module(
            "Global",
            tree,
            forward=[[AR, 3], *names, ["c10d.allreduce_", 4]],
            backward=[[AG, 1], [RS, 4]],
        ),
        indent=4,
    )


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("viewer") / "commlens-viewer.html"
    path.write_bytes(viewer_page())
    return path


def choose(page, name: str, content: bytes) -> None:
    page.get_by_label("A trace file").set_input_files(
        {"name": name, "mimeType": "application/json", "buffer": content}
    )


def everything(page) -> str:
    """What a page says of its trace, with all modules open."""
    page.get_by_role("button", name="Open all").click()
    return "\n".join(
        page.locator(place).inner_text() for place in (".facets", "#modules", "#why", "#parameters")
    )


def test_traces_are_taken_as_commlens_writes_them_compressed_or_written_anew(viewer, open_page):
    page = open_page(viewer)
    data = training()
    plain = encode(data)
    for name, content in (
        ("a.json", plain),
        ("b.json.gz", gzip.compress(plain)),
        ("c.json", json.dumps(json.loads(plain), indent=1).encode()),
    ):
        choose(page, name, content)
        page.get_by_role("heading", name="32 collectives, 340 kB on the wire").wait_for()
        assert name in page.inner_text("main")
        page.get_by_role("button", name="Another file").click()
    assert page.get_by_role("heading", name="Open a trace").count() == 1


def test_what_is_dropped_is_read_like_what_commlens_view_reads(viewer, open_page, tmp_path):
    source = tmp_path / "comm_mode_log.json"
    source.write_text(comm_debug_json())
    page = open_page(viewer)
    page.evaluate(
        """([name, content]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([content], name));
            document.body.dispatchEvent(new DragEvent("dragover", {dataTransfer: transfer, bubbles: true, cancelable: true}));
            document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
        }""",
        [source.name, source.read_text()],
    )
    page.get_by_role("heading", name="by CommDebugMode's count").wait_for()
    dropped = everything(page)
    assert "aten.addmm.default" not in dropped  # passes are closed
    written = tmp_path / "page.html"
    written.write_bytes(RankTraces([commlens.Trace(read_trace(source))]).to_html(name=source.name))
    other = open_page(written, ready="h1")
    assert everything(other) == dropped
    # Everything that PyTorch's viewer shows is there: modules, types, parameters' shardings, counts
    # by pass, ops with shapes and shardings.
    for text in (
        "net1",
        "Linear",
        "Shard(0)",
        "all_to_all",
        "recv",
        "reduce_scatter",
        "2 all_reduce, 1 tensor op",
    ):
        assert text in dropped, text
    other.locator('.grid-row:has-text("2 all_reduce, 1 tensor op") button.twisty').first.click()
    assert (
        "[16] Shard(0), [8, 10] Replicate()"
        in other.locator('.grid-row:has-text("aten.addmm.default")').first.inner_text()
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.json", b"hello", "x.json is not a trace: it holds no JSON."),
        ("x.json", b'{"fqn": ', "x.json is not a whole trace: its JSON is cut off or damaged."),
        ("x.json", b'{"schema": "commlens.verdict/1"}', "its schema is commlens.verdict/1"),
        ("box", b"COMMLENS\x00\x01", "box is a black box, not a trace: use commlens diagnose."),
        (
            "x.json.gz",
            gzip.compress(b"{}" * 1000, mtime=0)[:20],
            "x.json.gz cannot be read: its compressed content is cut off or damaged.",
        ),
        ("x.json", encode(training())[:5000], "x.json is not a whole trace"),
        (
            "x.json",
            encode(training()).replace(b'"group":1', b'"group":9', 1),
            "refers to group 9 of 2",
        ),
    ],
)
def test_what_is_no_trace_gets_a_sentence(viewer, open_page, name, content, said):
    page = open_page(viewer)
    choose(page, name, content)
    alert = page.get_by_role("alert")
    alert.filter(has_text=name).wait_for()
    assert said in alert.inner_text()


def test_dropped_strings_stay_text(viewer, open_page, serious_faults):
    page = open_page(viewer, width=390)
    assert serious_faults(page) == []
    choose(page, f"{HOSTILE}.json", comm_debug_json(HOSTILE).encode())
    page.get_by_role("heading", name="by CommDebugMode's count").wait_for()
    assert HOSTILE in everything(page)
    assert page.evaluate("() => document.images.length") == 0


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    before, after = (
        RankTraces([commlens.Trace(training(layers=layers, dtype=dtype))])
        for layers, dtype in ((4, "float32"), (5, "bfloat16"))
    )
    path = tmp_path / "compare.html"
    path.write_bytes(
        compare_page(
            before,
            after,
            compare_ranks(before, after),
            names=("before.json", f"after{HOSTILE}.json"),
        )
    )
    return path


def test_two_traces_stand_side_by_side_with_what_differs_marked(comparison, open_page):
    page = open_page(comparison, ready="h1")
    assert "changes: 40 collectives instead of 32" in page.inner_text(
        "h1"
    ) and HOSTILE in page.inner_text(".two")
    grid = page.locator('.grid[aria-label="Modules in both traces"]')
    added = (
        grid.locator(".grid-row", has_text="4")
        .filter(has=page.get_by_role("img", name="new"))
        .first
    )
    assert added.count() == 1
    changed = grid.locator(".grid-row", has_text="forward: all_gather on dp").first
    assert (
        "−50%" in changed.inner_text() and changed.get_by_role("img", name="changed").count() == 1
    )
    assert (
        grid.locator(".grid-row", has_text="forward: all_reduce on tp")
        .filter(has_not=page.get_by_role("img"))
        .count()
        == 0
    )
    page.get_by_role("button", name="Only differences").click()
    page.get_by_role("button", name="Open all").click()
    page.get_by_role("searchbox").fill("layers.3.net2")
    assert grid.locator(".grid-row", has_text="forward: all_reduce on tp").count() == 1
    page.locator(".changes button", has_text="bfloat16").first.click()
    assert grid.locator(".grid-row.chosen").count() == 1


@pytest.mark.parametrize(("dark", "width"), [(True, 1280), (False, 390)])
def test_the_comparison_can_be_used_by_everybody(
    comparison, open_page, serious_faults, dark, width
):
    page = open_page(comparison, dark=dark, width=width, ready="h1")
    assert serious_faults(page) == []
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert page.evaluate("() => document.images.length") == 0


def test_a_notebook_s_cell_shows_the_page(open_page, tmp_path):
    trace = commlens.Trace(training())
    path = tmp_path / "notebook.html"
    path.write_text(
        f"<!doctype html><title>t</title>{trace._repr_html_()}{trace.show()._repr_html_()}<link"
        " rel=icon href='data:,'>"
    )
    page = open_page(path, ready="iframe")
    frame = page.frame_locator("iframe")
    frame.locator("h1", has_text="32 collectives").wait_for()
    frame.locator(".facet-row", has_text="tp").click()
    assert frame.locator(".search-found").inner_text() == "16 of 32 collectives"
    frame.get_by_role("link", name="Why").click()
    assert frame.locator("h1", has_text="32 collectives").count() == 1
    assert hostile().script == HOSTILE and HOSTILE not in commlens.Trace(hostile())._repr_html_()
