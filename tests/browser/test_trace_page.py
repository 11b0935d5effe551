"""The page of a trace: every view of it is opened and acted on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chosen import long

import commlens
from commlens.model.trace import Phase
from commlens.traces.network import preset
from commlens.traces.ranks import RankTraces

from .traces_to_look_at import HOSTILE, hostile, training

Look = Callable[..., Any]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pages, each made once."""
    folder = tmp_path_factory.mktemp("trace-pages")
    (folder / "usual.html").write_bytes(
        RankTraces([commlens.Trace(training())]).to_html(name="x.json")
    )
    return folder


@pytest.fixture
def usual(pages: Path, open_page: Look) -> Look:
    """The page of the usual trace: ``usual(anchor="...", width=390)``."""
    return lambda **how: open_page(pages / "usual.html", ready="h1", **how)


def row(page: Any, text: str, grid: str = "Modules") -> Any:
    """The first row of a grid that has this text."""
    return page.locator(
        f'.grid[aria-label="{grid}"] .grid-row:not(.grid-head)', has_text=text
    ).first


def unfold(page: Any, text: str) -> None:
    row(page, text).locator("button.twisty").click()


def test_the_modules_open_down_to_ops_and_the_level_of_detail_says_which(usual):
    page = usual()
    assert (
        page.inner_text("h1")
        == "32 collectives, 340 kB on the wire, over 2 optimizer steps, rank 0 of 8."
    )
    layers = row(page, "layers.0-3")
    assert "× 4 Block" in layers.inner_text() and layers.get_attribute("aria-expanded") == "true"
    unfold(page, "net1")
    weight = row(page, "weight")
    assert "(Shard(0), Shard(1)) [64, 64] float32" in weight.inner_text()
    backward = row(page, "backward 6 all_reduce on tp, 6 tensor ops")
    backward.locator("button.twisty").click()
    assert (
        "[16, 64] Partial(sum), [64, 64] Replicate()" in row(page, "aten.mm.default").inner_text()
    )
    assert row(page, "aten.relu").count() == 0
    slider = page.get_by_role("slider")
    slider.fill("2")
    row(page, "aten.relu").wait_for()
    assert row(page, "aten.detach").count() == 0
    slider.fill("3")
    row(page, "aten.detach").wait_for()
    slider.fill("0")
    assert row(page, "weight").count() == row(page, "aten.mm").count() == 0
    row(page, "all_reduce on tp").wait_for()
    page.get_by_role("button", name="Fold similar modules").click()
    row(page, "layers.3").wait_for()
    assert row(page, "layers.0-3").count() == 0 and "fold=no" in page.url


CUT = """nodes => nodes.filter(node => node.scrollWidth > node.clientWidth + 1 || node.scrollHeight > node.clientHeight + 2)
                       .map(node => node.textContent)"""
CLIPPED = (
    "nodes => nodes.filter(node => node.offsetWidth && node.scrollWidth >"
    " node.clientWidth).map(node => node.textContent)"
)


@pytest.mark.parametrize("width", [1280, 390])
def test_names_of_columns_are_not_cut(open_page, tmp_path, width):
    data = training()
    inside = next(event for event in data.events if event.site is not None)
    inside.phase = Phase.RECOMPUTATION  # the longest name
    (tmp_path / "x.html").write_bytes(RankTraces([commlens.Trace(data)]).to_html(name="x.json"))
    page = open_page(tmp_path / "x.html", ready="h1", width=width)
    heads = page.locator("[role=columnheader]")
    assert heads.count() > 10
    assert ("recomputation" in heads.all_inner_texts()) == (width > 1000)
    assert heads.evaluate_all(CLIPPED) == []
    modules = page.locator('.grid[aria-label="Modules"]')
    assert modules.evaluate("grid => grid.scrollWidth - grid.clientWidth") <= 0, (
        "all columns of figures are visible"
    )


@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_nothing_is_cut(usual, cut, width):
    page = usual(width=width)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert [each for each in cut(page) if "(implicit)" not in each] == []


def test_one_place_has_one_name(usual):
    page = usual()
    text = page.inner_text("main")
    assert "outside all modules" in text and "no module" not in text
    assert re.search(r"\boutside\b(?! all modules)", text) is None
    assert "recorded and classified." in text


@pytest.mark.parametrize("width", [1400, 1024, 390])
def test_the_tables_cut_no_text(usual, width):
    page = usual(width=width)
    texts = page.locator(".grid .clip, .grid .cut-line")
    assert texts.count() > 30
    assert [text for text in texts.evaluate_all(CUT) if "(implicit)" not in text] == [], (
        "only the longest reasons may be cut"
    )
    assert (
        page.locator(".grid").evaluate_all(
            "grids => grids.filter(grid => grid.scrollWidth > grid.clientWidth).length"
        )
        == 0
    )


OVERLAPPING = """rows => rows.flatMap(row => {
    const box = row.getBoundingClientRect()
    return [...row.children].filter(cell => {
        const { top, bottom } = cell.getBoundingClientRect()
        return top < box.top - 1 || bottom > box.bottom + 1
    }).map(cell => cell.textContent)
})"""


@pytest.mark.parametrize(
    ("width", "details"), [(800, False), (1024, False), (1440, False), (1440, True)]
)
def test_no_text_reaches_into_the_next_row(open_page, tmp_path, width, details):
    data = training()
    for event in data.events:
        if event.site is not None:
            event.site = event.site.replace("layers", "transformer_blocks.feed_forward_layers")
    for module in data.modules:
        module.path = module.path.replace("layers", "transformer_blocks.feed_forward_layers")
    (tmp_path / "x.html").write_bytes(RankTraces([commlens.Trace(data)]).to_html(name="x.json"))
    page = open_page(tmp_path / "x.html", ready="h1", width=width)
    if details:
        row(page, "all_reduce", "Collectives in order").click()
        page.get_by_label("Details", exact=True).wait_for()
    rows = page.locator(".grid .grid-row")
    assert rows.count() > 30
    assert rows.evaluate_all(OVERLAPPING) == []


@pytest.mark.parametrize("width", [1024, 1440, 1920])
@pytest.mark.parametrize("details", [False, True])
def test_the_header_and_the_content_have_one_left_edge(usual, width, details):
    page = usual(width=width)
    if details:
        row(page, "all_reduce", "Collectives in order").click()
        page.get_by_label("Details", exact=True).wait_for()
    header, content = page.locator(".brand").bounding_box(), page.locator("h1").bounding_box()
    assert abs(header["x"] - content["x"]) < 1


@pytest.mark.parametrize("width", [390, 1024])
def test_the_placeholder_of_the_search_is_not_cut(usual, width):
    page = usual(width=width)
    page.locator(".facet-row").first.click()
    assert re.search(r"\d+ of 32 collectives", page.inner_text(".filter-bar"))
    search = page.locator(".filter-bar input")
    assert search.evaluate(
        "input => { input.value = input.placeholder; return input.scrollWidth <= input.clientWidth; }"
    )


def test_a_mesh_is_named_by_its_dimensions(usual):
    parameters = usual(width=1024).locator('.grid[aria-label="Parameters"]')
    assert "dp=2, tp=4" in parameters.inner_text()
    assert "DeviceMesh" not in parameters.inner_text()


def test_idle_time_does_not_fill_the_drawing(open_page, tmp_path):
    data = training(steps=1)
    middle = len(data.events) // 2
    for event in data.events[middle:]:
        event.started_ns += 60_000_000_000
        event.returned_ns += 60_000_000_000
        for field in ("wait_began_ns", "wait_ended_ns"):
            if getattr(event, field, 0):
                setattr(event, field, getattr(event, field) + 60_000_000_000)
    (tmp_path / "x.html").write_bytes(RankTraces([commlens.Trace(data)]).to_html(name="x.json"))
    page = open_page(tmp_path / "x.html", ready="h1")
    page.wait_for_function("() => document.querySelector('canvas').width > 600")
    page.wait_for_timeout(200)
    drawn = page.locator("canvas").evaluate(
        """canvas => {
            const pixels = canvas.getContext("2d").getImageData(132, 31, canvas.width - 132, 1).data
            let drawn = 0
            for (let at = 0; at < pixels.length; at += 4) {
                const [red, green, blue, alpha] = pixels.slice(at, at + 4)
                drawn += alpha > 100 && Math.max(red, green, blue) - Math.min(red, green, blue) > 40
            }
            return drawn / (pixels.length / 4)
        }"""
    )
    assert drawn > 0.2
    canvas, details = page.locator("canvas"), page.get_by_label("Details", exact=True)
    canvas.focus()
    page.keyboard.press("ArrowRight")
    assert "issued 0 us after the first collective" in details.inner_text()


def test_the_level_of_detail_says_what_it_shows(usual):
    page = usual()
    slider = page.get_by_label("Level of detail")
    assert (
        "1 of 3: shows counts, single collectives, parameters and DTensor ops"
        in page.inner_text("#modules")
    )
    slider.fill("3")
    assert "3 of 3: shows everything, even trivial ops such as views and detach" in page.inner_text(
        "#modules"
    )


def test_lines_of_code_are_not_cut(usual):
    lines = usual().locator(".cut-line")
    assert ", at train.py:14" in lines.all_inner_texts()
    assert [text for text in lines.evaluate_all(CLIPPED) if "(" not in text] == [], (
        "only the function behind the line may be cut"
    )


def test_a_narrow_page_shows_the_op_and_group_of_a_reason(usual):
    reasons = usual(width=390).locator('.grid[aria-label="Why"] .grid-row:not(.grid-head)')
    assert re.match(r"\d+ all_\w+ on (dp|tp)", reasons.first.inner_text())
    assert reasons.locator(".cut-line").count() == 0


def test_the_details_of_a_shared_module_have_its_other_names(open_page, tmp_path):
    data = training()
    data.modules[0].other_paths = ("Model.tied",)
    (tmp_path / "x.html").write_bytes(RankTraces([commlens.Trace(data)]).to_html(name="x.json"))
    page = open_page(tmp_path / "x.html", ready="h1")
    page.locator('.grid[aria-label="Modules"] .grid-row:not(.grid-head)').first.click()
    assert "Shared: also Model.tied" in page.locator(".details").inner_text()


def test_a_collective_says_why_and_a_link_brings_it_back(usual):
    page = usual()
    row(page, "all_reduce", "Collectives in order").click()
    details = page.get_by_label("Details", exact=True)
    said = details.inner_text()
    assert "#2 all_reduce on tp" in said and "MLP.layers.0.net2" in said
    assert (
        "The program or its parallel plan requested it." in said
        and "Partial(sum) → Replicate()" in said
    )
    assert "/home/me/train.py:14" in said and "tp [0-3], mesh_tp, gloo, 4 ranks" in said
    assert "4.0 kB in, 4.0 kB out, 6.0 kB on the wire, float32, SUM" in said
    assert "in the call" in said and "waited for" in said and "Overlaps" in said
    details.get_by_role("button", name="Next").click()
    assert "#3 all_gather" in details.inner_text() and "FSDP2 MLP.layers.1" in details.inner_text()
    assert page.url.endswith("#collective=3")
    page.reload()
    assert "#3 all_gather" in page.get_by_label("Details", exact=True).inner_text()
    page.keyboard.press("Escape")
    page.get_by_label("Details", exact=True).wait_for(state="detached")


def test_an_op_leads_to_the_collective_that_it_caused_and_back(usual):
    page = usual(anchor="module=layers.2.net1&phase=backward")
    details = page.get_by_label("Details", exact=True)
    row(page, "backward").locator("button.twisty").click()
    row(page, "aten.mm.default").click()
    assert "→ Replicate()" in details.inner_text() and "Caused" in details.inner_text()
    details.get_by_role("button", name=re.compile("#.* all_reduce on tp")).first.click()
    assert "DTensor chose it to run aten.mm.default" in details.inner_text()
    details.get_by_role("button", name="aten.mm.default").click()
    assert details.locator("h2").inner_text() == "aten.mm.default"


def test_filters_narrow_every_view_and_the_address_keeps_them(usual):
    page = usual(anchor="module=layers.2")
    found = page.locator(".search-found")
    assert found.inner_text() == "8 of 32 collectives"
    page.locator(".facet-row", has_text="tp").click()
    assert found.inner_text() == "4 of 32 collectives" and "group=tp" in page.url
    page.locator(".facet-row", has_text="backward").click()
    assert found.inner_text() == "2 of 32 collectives"
    page.reload()
    assert found.inner_text() == "2 of 32 collectives"
    page.get_by_role("button", name="Show all").click()
    assert found.inner_text() == ""
    search = page.get_by_role("searchbox", name="Search modules, ops, lines")
    search.fill("implicit train.py:28")
    assert found.inner_text() == "6 of 32 collectives"
    assert row(page, "net2").count() == 0
    search.fill("#5")
    assert found.inner_text() == "1 of 32 collectives"
    search.fill("")
    page.get_by_label("at least").select_option(label="10.0 kB")
    assert found.inner_text() == "16 of 32 collectives"
    search.fill("nothing has this")
    assert page.get_by_text("No module matches the filters.").count() == 1


def test_the_tree_is_walked_with_the_keyboard(usual):
    page = usual()
    grid = page.locator('.grid[aria-label="Modules"]')
    grid.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert (
        row(page, "MLP").get_attribute("aria-expanded") == "false"
        and row(page, "layers.0-3").count() == 0
    )
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    active = page.evaluate(
        "() =>"
        " document.getElementById(document.activeElement.getAttribute('aria-activedescendant')).innerText"
    )
    assert "layers.0-3" in active
    assert "layers.0-3" in page.get_by_label("Details", exact=True).inner_text()


def test_the_sequence_is_drawn_over_time_and_in_order(usual):
    page = usual()
    canvas = page.locator("canvas")
    canvas.scroll_into_view_if_needed()
    label = canvas.get_attribute("aria-label")
    assert label.startswith("32 collectives over time, 3 lanes: main thread, ")
    page.wait_for_function("""() => {
        const canvas = document.querySelector("canvas");
        return new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size > 10;
    }""")
    details = page.get_by_label("Details", exact=True)
    canvas.focus()
    page.keyboard.press("ArrowRight")
    assert "#1 all_gather" in details.inner_text()
    page.keyboard.press("ArrowRight")
    assert "#2 all_reduce" in details.inner_text()
    page.get_by_role("button", name="Order").click()
    assert "in order of issue" in canvas.get_attribute("aria-label")
    page.get_by_label("Close the details").click()
    box = canvas.bounding_box()
    # the last collective of the lowest lane
    canvas.click(position={"x": box["width"] - 3, "y": box["height"] - 10})
    assert re.search(r"#\d+ \w+ on (tp|dp)", details.inner_text())
    page.get_by_role("button", name="Zoom in").click()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 80, box["y"] + 30, steps=3)
    page.mouse.up()
    page.get_by_role("button", name="All", exact=True).click()


def test_bytes_why_and_parameters(usual):
    page = usual()
    block = page.get_by_role("button", name=re.compile(r"^MLP\.layers\.0-3: "))
    assert "4 modules" in block.get_attribute("aria-label")
    block.click()
    page.get_by_role("button", name="Back to MLP").click()
    row(page, "reduce_scatter on dp", "Why").click()
    assert "FSDP2" in page.get_by_label("Details", exact=True).inner_text()
    page.locator("#why select").select_option(label="line of code")
    assert "train.py:19: 8 all_gather on dp" in row(page, "train.py:19", "Why").inner_text()
    page.locator("#why select").select_option(label="redistribution")
    assert row(page, "(implicit)", "Why").count() == 1
    assert "MLP.layers.0-3.net1.weight × 4" in row(page, "net1", "Parameters").inner_text()
    assert "Rank 0 holds 16.4 kB" in page.locator("#parameters .about").inner_text()


def test_strings_of_a_file_stay_text(open_page, tmp_path):
    path = tmp_path / "hostile.html"
    path.write_bytes(RankTraces([commlens.Trace(hostile())]).to_html(name=HOSTILE, notes=[HOSTILE]))
    page = open_page(path, ready="h1")
    page.get_by_role("button", name="Open all").click()
    row(page, "all_", "Collectives in order").click()
    row(page, "all_", "Why").click()
    row(page, HOSTILE, "Modules").click()
    page.get_by_role("slider").fill("3")
    assert (
        HOSTILE in page.inner_text("main")
        and HOSTILE in page.get_by_label("Details", exact=True).inner_text()
    )
    assert (
        page.evaluate(
            "() => document.images.length + document.querySelectorAll('main script, aside"
            " script').length"
        )
        == 0
    )


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(1280, False, id="1280-light"),
        pytest.param(390, True, id="390-dark"),
        long(1280, True, id="1280-dark"),
        long(390, False, id="390-light"),
    ],
)
def test_it_fits_and_can_be_used_by_everybody(usual, serious_faults, dark, width):
    page = usual(dark=dark, width=width, anchor="collective=2")
    page.get_by_label("Details", exact=True).wait_for()
    assert serious_faults(page) == []
    page.get_by_label("Close the details").click()
    assert serious_faults(page) == []
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_a_long_trace_puts_few_rows_into_the_document(open_page, tmp_path):
    path = tmp_path / "long.html"
    path.write_bytes(
        RankTraces([commlens.Trace(training(layers=32, steps=100))]).to_html(name="long.json")
    )
    page = open_page(path, ready="h1")
    assert "12,800 collectives" in page.inner_text("h1")
    page.get_by_role("button", name="Open all").click()
    assert page.locator(".grid-row").count() < 250
    grid = page.locator('.grid[aria-label="Collectives in order"]')
    assert grid.get_attribute("aria-rowcount") == "12801"
    grid.focus()
    page.keyboard.press("End")
    row(page, "12,800", "Collectives in order").wait_for()
    assert page.locator(".grid-row").count() < 250
    page.get_by_role("button", name="Fold similar modules").click()
    row(page, "layers.1").wait_for()
    assert page.locator(".grid-row").count() < 250


def test_ranks_that_differ_are_chosen_from_and_times_can_be_estimated(open_page, tmp_path):
    ranks = RankTraces(
        commlens.Trace(training(rank, layers=3 if rank == 2 else 2)) for rank in range(4)
    )
    path = tmp_path / "ranks.html"
    path.write_bytes(
        ranks.to_html(
            name="traces",
            names=[f"trace-{rank}.json" for rank in range(4)],
            network=preset("h100-ib"),
        )
    )
    page = open_page(path, ready="h1")
    assert "rank 2" in page.locator(".ranks").inner_text() and "rank 0 of 8" in page.inner_text(
        "h1"
    )
    assert "Times are estimated for h100-ib" in page.inner_text(
        "main"
    ) and "if none are hidden" in page.inner_text("h1")
    page.get_by_label("Shown:").select_option(label="rank 2")
    assert "rank 2 of 8" in page.inner_text("h1") and "trace-2.json" in page.inner_text("main")
    assert row(page, "layers.0-2").count() == 1


def test_an_estimate_is_that_of_a_step_and_the_setup_is_told_apart(open_page, tmp_path):
    def estimated(**options) -> str:
        path = tmp_path / "estimated.html"
        commlens.Trace(training(**options)).write_html(path, network="h100-ib")
        return open_page(path, ready="h1").inner_text("h1")

    once, twice = estimated(steps=1), estimated(steps=2, setup=3)
    per_step = re.search(r", (\S+ us per step) if none are hidden", once)[1]
    assert "over 2 optimizer steps and the setup before them (3 collectives and 900 kB)" in twice
    assert re.search(rf", {per_step} and \S+ us in the setup if none are hidden", twice)
