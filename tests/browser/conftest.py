"""One Chromium for all tests of pages: Debian's, or the one that Playwright downloads. A page that
complains or calls the network fails.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

playwright_api = pytest.importorskip(
    "playwright.sync_api", reason="the pages are not tested: playwright is not installed"
)

SYSTEM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
AXE = Path(__file__).parent / "axe.min.js"
PATIENCE_MS = 30_000
WIDTHS = {"desktop": 1280, "phone": 390}


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    found = next(filter(None, map(shutil.which, SYSTEM_NAMES)), None)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright_api.sync_playwright() as playwright:
        if found is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip(
                "the pages are not tested: there is no Chromium (apt install chromium, or"
                " playwright install chromium)"
            )
        try:
            chromium = playwright.chromium.launch(
                executable_path=found, args=[*arguments, "--disable-dev-shm-usage"]
            )
        except playwright_api.Error as error:
            pytest.skip(
                "the pages are not tested: Chromium does not start here:"
                f" {error.message.splitlines()[0]}"
            )
        yield chromium
        chromium.close()


class Opened:
    """A page of the browser, and what it complained of."""

    def __init__(self, context: Any) -> None:
        self.complaints: list[str] = []
        context.set_default_timeout(PATIENCE_MS)
        context.on("request", self._on_request)
        self.page = context.new_page()
        self.page.on(
            "console",
            lambda message: (
                self.complaints.append(message.text)
                if message.type in ("error", "warning")
                else None
            ),
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._on_dialog)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.complaints.append(f"asked the network for {request.url}")

    def _on_dialog(self, dialog: Any) -> None:
        self.complaints.append(f"a dialog opened: {dialog.message}")
        dialog.dismiss()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a file: ``open_page(path, anchor="rank-2", dark=True, width=390)`` gives Playwright's
    page, with the content shown.
    """
    contexts: list[tuple[Any, Opened]] = []

    def open_(
        path: Path, *, anchor: str = "", dark: bool = False, width: int = 1280, ready: str = "main"
    ) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 800 if width > 700 else 844},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            permissions=["clipboard-read", "clipboard-write"],
        )
        opened = Opened(context)
        contexts.append((context, opened))
        opened.page.goto(path.as_uri() + (f"#{anchor}" if anchor else ""))
        opened.page.wait_for_selector(ready)
        return opened.page

    yield open_
    complaints = [text for _, opened in contexts for text in opened.complaints]
    for context, _ in contexts:
        context.close()
    assert complaints == []


CUT = """() => [...document.querySelectorAll('header *, main *, aside *')].filter(each => {
    const style = getComputedStyle(each)
    const [box, told] = [each.getBoundingClientRect(), each.previousElementSibling?.matches('.sideways')]
    const cut = each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0 && style.display !== 'inline'
    const outside = each.childElementCount === 0 && each.textContent && box.width > 0
        && (box.right > innerWidth + 1 || box.left < 0) && !each.closest('.sideways + *')
    return !each.closest('.off-screen, .skip, select, .block, .step thead') && ((cut && style.overflowX !== 'visible' && !told) || outside)
}).map(each => `${each.className.baseVal ?? each.className}: ${each.textContent.slice(0, 80)}`)"""


@pytest.fixture
def cut() -> Callable[[Any], list[str]]:
    """What a page cuts or shows beside the window, unless a line says that it scrolls."""
    return lambda page: page.evaluate(CUT)


@pytest.fixture
def serious_faults() -> Callable[[Any], list[str]]:
    """What axe finds in a page, of impact serious or critical, in words."""

    def find(page: Any) -> list[str]:
        # The page's policy keeps scripts out that are added to the document; this one is run as the
        # inspector runs its own.
        page.evaluate(AXE.read_text(encoding="utf-8"))
        found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{fault['id']} ({fault['impact']}): {fault['help']}:"
            f" {[node['html'][:160] for node in fault['nodes'][:3]]}"
            for fault in found["violations"]
            if fault["impact"] in ("serious", "critical")
        ]

    return find
