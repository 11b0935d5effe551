"""The verdict's page: every view opened and acted on, in a real Chromium. What it complains of, and
every request, fails the test.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import Job, Stay, Step, all_reduce, collective
from chosen import long
from flight_recorder_dumps import dump, entry
from hand_made import as_recorded
from number_reports import Job as NumbersJob

from commlens.diagnosis.api import examine_paths
from commlens.diagnosis.examine import examine_logs
from commlens.diagnosis.select.worlds import join_worlds
from commlens.diagnosis.words.diverged import verdict_of
from commlens.model.collective import Frame, FrameKind, ProcessGroup, State
from commlens.model.hazard import Hazard
from commlens.model.ranklog import End, Observation, RankLog
from commlens.reports.page import render_page
from commlens.reports.verdict_page import verdict_html

OpenPage = Callable[..., Any]
expect = pytest.importorskip("playwright.sync_api").expect
REFUSAL = "DistributedOperationException: Cannot apply desired operation due to shape mismatches."


def mesh(job: Job, rank: int) -> Iterator[object]:
    """Data parallel over tensor parallel, 4 x 2: rank 5 stays in its data loader in the fifth step."""
    tp = job.group(f"tp{rank // 2}", (rank // 2 * 2, rank // 2 * 2 + 1), "tp")
    dp = job.group(f"dp{rank % 2}", range(rank % 2, job.size, 2), "dp")
    for step in range(8):
        if (rank, step) == (5, 5):
            yield Stay(
                57,
                "load_batch",
                frames=(
                    Frame(
                        "/site/torch/utils/data/dataloader.py", 700, "_next_data", FrameKind.TORCH
                    ),
                ),
            )
        for _ in range(3):
            yield all_reduce(tp, (8, 16), line=31, function="forward")
        yield collective(
            "reduce_scatter", dp, 4096, line=79, function="train_step", reduce_op="AVG"
        )
        yield Step()


def disagree(job: Job, rank: int) -> Iterator[object]:
    for step in range(6):
        yield all_reduce(job.world, 24 if (rank, step) == (2, 4) else 32, line=20)
        yield Step()


def swapped(job: Job, rank: int) -> Iterator[object]:
    one, two = (
        job.group("1", range(job.size), "gradients"),
        job.group("2", range(job.size), "statistics"),
    )
    for step in range(6):
        groups = [(two, 24), (one, 19)] if (rank, step) == (2, 4) else [(one, 19), (two, 24)]
        for group, line in groups:
            yield all_reduce(group, line=line)
        yield Step()


def write(folder: Path, logs: list[RankLog]) -> Path:
    path = folder / "index.html"
    path.write_bytes(verdict_html(examine_logs(logs)))
    return path


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stuck"), Job(8).run(mesh).logs())


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(1280, False, id="1280-light"),
        pytest.param(390, True, id="390-dark"),
        long(1280, True, id="1280-dark"),
        long(390, False, id="390-light"),
    ],
)
def test_it_opens_in_both_themes_and_widths_without_a_serious_fault(
    open_page: OpenPage, serious_faults, stuck: Path, dark: bool, width: int
):
    page = open_page(stuck, dark=dark, width=width)
    assert "Rank 5 never reached reduce_scatter #6 of group dp [1-7:2]" in page.inner_text("h1")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert serious_faults(page) == []


def check_that_nothing_is_cut(page: Any, width: int, cut: Callable[[Any], list[str]]) -> None:
    page.wait_for_selector("path.edge", state="attached")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert cut(page) == []
    labels = page.locator(".axis span")
    assert labels.count() >= 2
    axis = page.locator(".axis").bounding_box()
    for label in labels.all():
        box = label.bounding_box()
        assert axis["x"] <= box["x"] and box["x"] + box["width"] <= axis["x"] + axis["width"]


@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_nothing_is_cut_also_beside_a_rank(open_page: OpenPage, cut, stuck: Path, width: int):
    page = open_page(stuck, width=width)
    check_that_nothing_is_cut(page, width, cut)
    page.locator(".rank-row button").first.click()
    page.get_by_role("complementary", name="Rank 0").wait_for()
    if width > 390:  # there, it covers the page
        check_that_nothing_is_cut(page, width, cut)


@pytest.mark.parametrize("width", [390, 1024])
def test_columns_off_the_screen_are_told_of(open_page: OpenPage, cut, tmp_path: Path, width: int):
    def each_another(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        yield all_reduce(job.world, 8 + rank, line=21)

    page = open_page(write(tmp_path, Job(8).run(each_another).logs()), width=width)
    page.wait_for_selector("#issued .sideways")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert cut(page) == []


def test_what_has_no_content_has_no_section(open_page: OpenPage, tmp_path: Path):
    def trains(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, line=20)
            yield Step()

    examined = examine_logs(Job(3).run(trains).logs())
    (tmp_path / "page.html").write_bytes(verdict_html(examined, has_times=False))
    page = open_page(tmp_path / "page.html")
    assert page.locator("nav a").all_inner_texts() == [
        "Verdict",
        "Groups",
        "Collectives",
        "Stacks",
        "Evidence",
        "Ranks",
    ]
    assert page.locator("main h2").all_inner_texts() == [
        "Process groups",
        "Collectives side by side",
        "Stacks",
        "Evidence",
        "All ranks",
    ]
    assert page.inner_text(".kind-chip") == "No fault found"


def meet(job: Job, rank: int) -> Iterator[object]:
    """Trainers 0 and 1, rollouts 2 and 3; the group of 0, 2 and 3 is made by hand, and 3 is late."""
    world = ProcessGroup("0", (0, 1) if rank < 2 else (2, 3))
    weights = ProcessGroup("weights", (0, 2, 3))
    yield all_reduce(world, line=10)
    if rank != 1:
        yield all_reduce(weights, line=12)
    if rank == 3:
        yield Stay(25, "wait_for_batch")
    if rank != 1:
        yield all_reduce(weights, line=26)
    yield all_reduce(world, line=30)


def test_processes_of_two_worlds_have_their_names(open_page: OpenPage, cut, tmp_path: Path):
    worlds = {"/home/me/rl.py trainer": range(2), "/home/me/rl.py rollout": range(2, 4)}
    logs = as_recorded(Job(4).run(meet).logs(), worlds, {"weights": "localhost:29600/w"})
    page = open_page(write(tmp_path, join_worlds([logs[:2], logs[2:]])), width=1024)
    page.wait_for_selector(".node.root")
    assert page.inner_text("h1").startswith("rollout 1 never reached all_reduce #2 of group")
    assert page.inner_text(".node.root strong") == "rollout 1"
    names = ["rollout 0", "rollout 1", "trainer 0", "trainer 1"]
    assert page.locator(".lane-name").all_inner_texts() == names
    assert page.locator(".rank-row-name").all_inner_texts() == names
    assert page.locator(".strip-name").all_text_contents() == ["rollout 0-1", "trainer 0-1"]
    assert "rollout 1 never arrived" in page.inner_text("#timeline")
    # Only what numbers no process may speak of ranks.
    assert re.search(r"\branks? \d", page.inner_text("main")) is None
    assert cut(page) == []
    page.locator(".rank-row button").nth(2).click()
    page.get_by_role("complementary", name="Trainer 0").wait_for()
    assert page.url.endswith("#rank-2")
    page.evaluate("location.hash = '#rank-9'")
    page.get_by_text("There is no rank 9 in this job.").wait_for()


def test_a_process_has_the_name_that_the_text_gives_it(open_page: OpenPage, tmp_path: Path):
    worlds = {"replica 1": range(2), "replica 2": range(2, 3), "trainer": range(3, 4)}
    logs = as_recorded(Job(4).run(meet).logs(), worlds, {"weights": "localhost:29600/w"})
    for log in logs:
        log.world = log.script
    page = open_page(write(tmp_path, join_worlds([logs[:2], logs[2:3], logs[3:]])), width=1024)
    names = ["replica 1 rank 0", "replica 1 rank 1", "replica 2", "trainer"]
    assert page.locator(".lane-name").all_inner_texts() == names
    assert page.locator(".rank-row-name").all_inner_texts() == names
    page.locator(".rank-set").get_by_role("link", name="replica 2", exact=True).first.click()
    page.get_by_role("complementary", name="Replica 2").wait_for()


def test_every_view_shows_what_it_should(open_page: OpenPage, stuck: Path):
    page = open_page(stuck)
    assert page.locator("nav a").all_inner_texts() == [
        "Verdict",
        "Waiting",
        "Groups",
        "Timeline",
        "Collectives",
        "Step",
        "Stacks",
        "Evidence",
        "Ranks",
    ]
    # The graph, shown once it is laid out: the root cause is marked, and arrows lead there.
    page.wait_for_selector(".node.root")
    assert page.locator(".node.root").count() == 1
    assert "rank 5" in page.inner_text(
        ".node.root"
    ) and "train.py:57 load_batch" in page.inner_text(".node.root")
    assert page.locator("path.edge").count() == page.locator(".edge-label").count() >= 2
    # The groups: culprits and victims are coloured, the faulty group is outlined.
    assert page.locator("#groups path.cell-culprit").count() == 1
    assert page.locator("#groups .strip-fault").count() == 1
    page.get_by_role("tab", name="tp", exact=True).click()
    assert "4 groups of 2 ranks each" in page.inner_text("#groups")
    # The table: what was not issued is marked.
    assert page.locator("#issued td.differs").count() >= 1
    assert "not issued" in page.inner_text("#issued tr.fault")
    page.get_by_role("tab", name="In the order of issue").click()
    assert "all_reduce #15 of tp" in page.inner_text("#issued")
    # The stacks: the culprit's first, the user's line before the library's.
    first = page.locator("#stacks article").first
    assert first.locator(".frame.top").inner_text().startswith("load_batch")
    first.locator("summary").click()
    assert "_next_data" in first.inner_text()
    assert "its stack does not move" in page.inner_text("#evidence")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_mismatchs_graph_fills_its_box(open_page: OpenPage, tmp_path: Path, width: int):
    page = open_page(write(tmp_path, Job(4).run(disagree).logs()), width=width)
    page.wait_for_selector("path.edge", state="attached")
    box = page.locator(".graph-scroll").bounding_box()
    nodes = [
        page.locator(".node").nth(at).bounding_box() for at in range(page.locator(".node").count())
    ]
    assert len(nodes) == 2
    parts = [*nodes, *(label.bounding_box() for label in page.locator(".edge-label").all())]
    reach = max(each["x"] + each["width"] for each in parts) - min(each["x"] for each in parts)
    assert reach > 0.8 * box["width"]
    assert len({round(node["x"]) for node in nodes}) == (2 if width == 1280 else 1)
    assert "3 victims" in page.inner_text(".legend")


@pytest.mark.parametrize(("ranks", "program"), [(8, mesh), (4, swapped)])
def test_a_graph_with_several_arrows_fits_a_phone(
    open_page: OpenPage, tmp_path: Path, ranks: int, program: Callable[..., Iterator[object]]
):
    page = open_page(write(tmp_path, Job(ranks).run(program).logs()), width=390)
    page.wait_for_selector("path.edge", state="attached")
    cut = (
        "elements => elements.filter(each => each.scrollWidth > each.clientWidth).map(each =>"
        " each.textContent)"
    )
    assert page.locator(".graph-scroll, .edge-label, .node").evaluate_all(cut) == []
    frame = page.locator(".graph-scroll").bounding_box()
    for part in page.locator(".edge-label, .node").all():
        box = part.bounding_box()
        assert frame["x"] <= box["x"] and box["x"] + box["width"] <= frame["x"] + frame["width"]
    # Long names break where one of their words ends.
    assert page.locator(".node wbr").count() > 0


def test_a_rank_can_be_looked_up_and_linked_to(open_page: OpenPage, stuck: Path):
    page = open_page(stuck, anchor="rank-5")
    panel = page.get_by_role("complementary", name="Rank 5")
    panel.wait_for()
    assert "It is in load_batch at train.py:57." in panel.inner_text()
    assert "culprit" in panel.inner_text()
    page.keyboard.press("Escape")
    panel.wait_for(state="detached")
    page.get_by_role("searchbox", name="Search ranks").fill("reduce_scatter")
    rows = page.locator(".rank-row button")
    assert 0 < rows.count() < 8
    page.get_by_role("searchbox", name="Search ranks").fill("3")
    assert rows.count() == 1
    rows.first.click()
    page.get_by_role("complementary", name="Rank 3").wait_for()
    assert page.url.endswith("#rank-3")
    page.go_back()
    page.get_by_role("complementary", name="Rank 3").wait_for(state="detached")


def test_the_timeline_is_moved_and_asked(open_page: OpenPage, stuck: Path):
    page = open_page(stuck)
    chart = page.get_by_role("application", name="Timeline")
    ticks = page.locator(".axis span")
    canvas = page.locator(".lanes canvas")
    expect(ticks).not_to_have_count(0)
    before = ticks.all_inner_texts()
    page.get_by_role("button", name="Everything").click()
    expect(ticks).not_to_have_text(before)
    everything = ticks.all_inner_texts()
    width = canvas.bounding_box()["width"]
    page.set_viewport_size({"width": 1190, "height": 800})
    expect(canvas).not_to_have_css("width", f"{width:g}px")
    expect(ticks).to_have_text(everything)
    page.get_by_role("button", name="Around 0").click()
    expect(ticks).to_have_text(before)
    page.get_by_role("button", name="Zoom in").click()
    expect(ticks).not_to_have_text(before)
    chart.focus()
    page.keyboard.press("0")
    expect(ticks).to_have_text(before)
    page.keyboard.press("ArrowLeft")
    expect(ticks).not_to_have_text(before)
    page.keyboard.press("0")
    # What is in flight reaches to the right edge; rank 4 waits for rank 5.
    area = canvas.bounding_box()
    height = area["height"] / 8
    canvas.hover(position={"x": area["width"] - 20, "y": 4.5 * height - 4})
    assert "rank 4" in page.inner_text(
        "#timeline .readout"
    ) and "in flight for 30" in page.inner_text("#timeline .readout")
    assert "rank 5 never arrived" in page.inner_text("#timeline")


def test_the_grid_answers_to_the_keyboard(open_page: OpenPage, stuck: Path):
    page = open_page(stuck)
    page.get_by_role("application", name="ranks as a grid").focus()
    page.keyboard.press("End")
    assert "rank 7" in page.inner_text("#groups .readout")
    page.keyboard.press("Enter")
    page.get_by_role("complementary", name="Rank 7").wait_for()


def test_it_is_copied_for_a_ticket_and_printed(open_page: OpenPage, stuck: Path):
    page = open_page(stuck)
    page.get_by_role("button", name="Copy for a ticket").click()
    page.get_by_role("status").get_by_text("Copied").wait_for()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert (
        copied.startswith("VERDICT  rank 5 never reached")
        and "\nScript: /home/me/train.py\n" in copied
    )
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert page.locator("#waiting .node.root").is_visible()


def test_the_graph_of_a_collective_that_completed_on_some_ranks_reads_as_text(
    open_page: OpenPage, tmp_path: Path
):
    open_ = {"state": "started", "retired": False, "time_discovered_completed_ns": None}
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    for rank in range(4):
        entries = (
            [entry(0), entry(1, **open_)] if rank == 2 else [entry(0), entry(1), entry(2, **open_)]
        )
        (dumps / f"rank_{rank}").write_bytes(pickle.dumps(dump(entries, pg_status={}), 2))
    (tmp_path / "verdict.html").write_bytes(verdict_html(examine_paths(dumps)))
    page = open_page(tmp_path / "verdict.html")
    assert (
        "Rank 2 waits in all_reduce #2 of the default group: Completed on ranks 0-1,3, but not on"
        " rank 2." in page.inner_text("#waiting")
    )


def test_a_disagreement_and_a_cycle(open_page: OpenPage, tmp_path: Path):
    page = open_page(write(tmp_path, Job(4).run(disagree).logs()))
    odd = page.locator("#issued tr.fault td.differs")
    assert odd.count() == 1 and "float32[24]" in odd.inner_text()
    assert "shape differs" in page.inner_text("#issued tr.fault th")
    page = open_page(write(tmp_path, Job(4).run(swapped).logs()))
    page.wait_for_selector("path.edge", state="attached")
    assert page.locator("path.edge").count() == 2, "each waits for the other"


def other_op(job: Job, rank: int) -> Iterator[object]:
    for step in range(6):
        if (rank, step) == (0, 4):
            yield collective("all_gather", job.world, 32, line=21, function="average")
        else:
            yield all_reduce(job.world, 32, line=26, function="average")
        yield Step()


def test_a_mismatch_names_no_rank_s_op_for_all_and_shows_both_lines(
    open_page: OpenPage, tmp_path: Path
):
    page = open_page(write(tmp_path, Job(4).run(other_op).logs()))
    assert "Rank 0 issued all_gather where the others issued all_reduce" in page.inner_text("h1")
    caption = page.inner_text("#timeline .arrivals")
    assert caption.startswith("collective #5 of the default group [0-3]: ")
    answer = page.inner_text(".answer")
    assert "/home/me/train.py:21 average" in answer
    assert "Ranks 1-3\n/home/me/train.py:26 average" in answer
    assert "Restart\nDo not start it again unchanged: each attempt will meet this fault" in answer


def test_a_refused_collective_is_not_called_a_wait(open_page: OpenPage, tmp_path: Path):
    logs = Job(4).run(disagree).logs()
    for log in logs:
        op = log.collectives[-1]
        op.state, op.error, op.done_ns = State.FAILED, REFUSAL, op.announced_ns + 5_000_000
        log.exception = f"commlens.errors.{REFUSAL}"
        log.observation = Observation(End.FAILED, 1, ended_ns=op.done_ns)
    page = open_page(write(tmp_path, logs))
    assert "gave up" not in page.inner_text("main")
    assert "were refused all_reduce #5 of the default group" in page.inner_text("#waiting")
    assert "was refused all_reduce #5 of the default group" in page.inner_text("#ranks")


def test_the_step_table_fits_a_phone(open_page: OpenPage, stuck: Path):
    page = open_page(stuck, width=390)
    table = page.locator("#step .table-scroll")
    assert table.evaluate("table => table.scrollWidth - table.clientWidth") <= 0
    headings = table.locator("th").all_inner_texts()
    figures = table.locator("tbody tr").first.locator("td:not(.empty)").nth(1)
    assert figures.get_attribute("data-heading") in headings


HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\u2028\u202e'\"&{{7*7}}"


def test_hostile_names_stay_text(open_page: OpenPage, tmp_path: Path):
    logs = Job(8, host=HOSTILE, job=HOSTILE).run(mesh).logs()
    names = {
        b'"load_batch"': 0,
        b'"/home/me/train.py"': 0,
        b'"tp"': 0,
        b'"dp"': 0,
        b'"reduce_scatter"': 0,
        b'"float32"': 0,
    }
    encoded = msgspec.json.encode(logs)
    for name in names:
        assert name in encoded
        encoded = encoded.replace(name, msgspec.json.encode(f"{name.decode()[1:-1]} {HOSTILE}"))
    logs = msgspec.json.decode(encoded, type=list[RankLog])
    for log in logs:
        log.problems = [f"{HOSTILE} could not be read"]
        log.versions = {HOSTILE: HOSTILE}
    page = open_page(write(tmp_path, logs), anchor="rank-5")
    for tab in page.get_by_role("tab").all():
        tab.click()
    for details in page.locator("summary").all():
        details.click()
    assert page.locator("img").count() == 0
    assert page.locator("#app script").count() == 0
    for place in ("h1", "#groups", "#stacks", "#evidence", ".panel"):
        assert "<img src=x onerror=alert(1)></script>" in page.inner_text(place), place


def test_thousands_of_ranks_are_folded(open_page: OpenPage, tmp_path: Path):
    ranks = 4096
    few = Job(8).run(mesh).logs()
    logs = [
        msgspec.structs.replace(
            few[rank % 8 if rank != 5 else 5], rank=rank, world_size=ranks, pid=1000 + rank
        )
        for rank in range(ranks)
    ]
    path = write(tmp_path, logs)
    assert path.stat().st_size < 2_000_000
    page = open_page(path)
    assert page.evaluate("() => document.querySelectorAll('*').length") < 4000
    page.get_by_role("searchbox", name="Search ranks").fill("4095")
    assert page.locator(".rank-row").count() == 1


def test_nothing_is_wrong_and_nothing_is_known(open_page: OpenPage, serious_faults, tmp_path: Path):
    page = open_page(
        write(tmp_path, Job(4).run(lambda job, rank: iter([all_reduce(job.world, line=3)])).logs())
    )
    assert "othing is wrong" in page.inner_text("h1")
    assert serious_faults(page) == []
    page = open_page(write(tmp_path, []))
    assert "nothing to diagnose" in page.inner_text("h1").lower()


@pytest.mark.parametrize("is_stuck", [False, True])
def test_all_latent_faults_are_listed(open_page: OpenPage, tmp_path: Path, is_stuck: bool):
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=3)
        if is_stuck:
            yield Stay(57, "load_batch") if rank else all_reduce(job.world, line=3)

    torchs = Frame("/t/distributed_c10d.py", 3000, "all_reduce", FrameKind.LIBRARY)
    logs = Job(2).run(program).logs()
    for log in logs:
        log.hazards = [
            Hazard("never-waited", 1, (torchs, Frame("/home/me/train.py", line, "step")))
            for line in (7, 9)
        ]
    answer = open_page(write(tmp_path, logs)).inner_text("#verdict")
    assert "Also" not in answer
    assert ("Latent faults only" in answer) is not is_stuck
    latent = answer.partition("Latent faults")[2]
    assert "train.py:7 step" in latent and "train.py:9 step" in latent
    assert ("confidence" in answer) == is_stuck


def test_what_cannot_be_unpacked_leaves_the_plain_text(open_page: OpenPage, tmp_path: Path):
    path = tmp_path / "page.html"
    made = render_page("verdict", title="t", data={"x": 1}, text="VERDICT rank 2")
    start = made.index(b'id="commlens-data">') + len(b'id="commlens-data">')
    path.write_bytes(made[:start] + b"AAAA" + made[made.index(b"</script>", start) :])
    page = open_page(path, ready=".note")
    assert "VERDICT rank 2" in page.inner_text("body")


def test_the_reader_s_theme_is_kept(open_page: OpenPage, stuck: Path):
    page = open_page(stuck, dark=True)
    background = "() => getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(background) == "rgb(20, 23, 27)"
    page.get_by_label("Switch to the light theme").click()
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    page.reload()
    page.wait_for_selector("main")
    assert page.evaluate(background) == "rgb(255, 255, 255)"


def test_the_tensors_that_differ_are_shown_by_rank(
    open_page: OpenPage, serious_faults, tmp_path: Path
):
    numbers = NumbersJob(size=4)
    names = ["parameter a", "parameter b"]
    assert not numbers.check(1, dict.fromkeys(names, 1.0))
    odd = {3: dict.fromkeys(names, 7.0), 0: {"parameter b": 8.0}}
    [cause] = numbers.check(2, dict.fromkeys(names, 2.0), odd)
    examined = examine_logs(
        Job(4).run(lambda job, rank: iter([all_reduce(job.world, line=3)])).logs()
    )
    path = tmp_path / "page.html"
    path.write_bytes(verdict_html(examined._replace(verdict=verdict_of(cause))))
    page = open_page(path)
    rows = page.locator("#numbers tbody tr")
    assert [rows.nth(index).inner_text().split()[-4:] for index in range(2)] == [
        ["A", "A", "A", "B"],
        ["B", "A", "A", "C"],
    ]
    assert "step 1: all equal" in page.inner_text("#numbers")
    assert "step 2: 2 tensors differ" in page.inner_text("#numbers")
    assert serious_faults(page) == []
