"""The documentation builds as a site without a warning, and every link within it leads somewhere."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from more_scenarios import SCENARIOS

import commlens
from commlens.commands import COMMANDS
from conftest import REPOSITORY, SOURCE

if importlib.util.find_spec("furo") is None:  # an import here would take each worker a second
    pytest.skip("furo is not installed", allow_module_level=True)
pytest.importorskip("torch")  # the reference shows docstrings, and torchrun's options

DOCS = REPOSITORY / "docs"
pytestmark = pytest.mark.launches


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        "-d",
        str(folder / "trees"),
        str(DOCS),
        str(folder),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_every_page_is_in_the_navigation(pages, site):
    linked = {urlsplit(link).path for link in pages[site / "index.html"].links}
    assert {f"{path.stem}.html" for path in DOCS.glob("*.md")} - {"index.html"} <= linked


def test_links_lead_somewhere(pages, site):
    lost = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].anchors
            ):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert lost == []


def test_nothing_is_loaded_from_a_network(pages):
    assert [
        link
        for page in pages.values()
        for link in page.links
        if link.endswith((".js", ".css")) and "//" in link
    ] == []


def test_the_reference_has_every_command_and_every_public_name(pages, site):
    commands, names = (pages[site / f"{name}.html"].anchors for name in ("commands", "api"))
    assert {f"commlens-{entry.name}" for entry in COMMANDS} <= commands
    assert {f"commlens.{name}" for name in commlens.__all__} - {"commlens.__version__"} <= names


def test_the_gallery_has_every_scenario(pages, site):
    assert {scenario.name for scenario in SCENARIOS} <= pages[site / "gallery.html"].anchors
