"""What all pages have in common: the frame, the themes, the plain text where no script runs."""

from __future__ import annotations

from commlens.reports.page import render_page


def test_a_page_shows_its_data_and_follows_the_reader_s_theme(open_page, tmp_path, serious_faults):
    path = tmp_path / "page.html"
    path.write_bytes(render_page("verdict", title="t", data={"text": "rank 2 never reached all_reduce #41"}, text="plain"))
    page = open_page(path, dark=True)
    assert "rank 2 never reached" in page.inner_text("main")
    background = "() => getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(background) == "rgb(20, 23, 27)"
    page.get_by_label("Switch to the light theme").click()
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    page.reload()
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    assert serious_faults(page) == []


def test_the_text_can_be_copied(open_page, tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(render_page("verdict", title="t", data={"text": "line 1\nline 2 <b>"}, text="plain"))
    page = open_page(path)
    page.get_by_role("button", name="Copy for a ticket").click()
    page.get_by_role("status").get_by_text("Copied").wait_for()
    assert page.evaluate("() => navigator.clipboard.readText()") == "line 1\nline 2 <b>"


def test_what_cannot_be_read_leaves_the_plain_text(open_page, tmp_path):
    path = tmp_path / "page.html"
    made = render_page("verdict", title="t", data={"text": "x"}, text="VERDICT rank 2")
    start = made.index(b'id="commlens-data">') + len(b'id="commlens-data">')
    path.write_bytes(made[:start] + b"AAAA" + made[made.index(b"</script>", start) :])
    page = open_page(path, ready=".note")
    assert "VERDICT rank 2" in page.inner_text("body")
