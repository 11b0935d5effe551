"""Take the pictures in docs/pictures from real runs: the terminal as SVG, the pages by Chromium.

``python docs/make/pictures.py`` takes all, in about two minutes; ``python docs/make/pictures.py
NAME ...`` only these.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

REPOSITORY = Path(__file__).parents[2]
PICTURES = REPOSITORY / "docs" / "pictures"
WIDTH = 84
WITHOUT_FOLDER = """folder => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
    for (let text = walker.nextNode(); text; text = walker.nextNode()) text.data = text.data.replace(folder, "~/commlens")
}"""
COMMLENS = [sys.executable, "-m", "commlens"]


def on_terminal(arguments: list[str], folder: Path) -> str:
    """Run commlens on a terminal of its own, and return what it showed, with its colours."""
    size = {"COLUMNS": str(WIDTH), "LINES": "60"}
    environment = {**os.environ, **size, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    environment.pop("NO_COLOR", None)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMLENS, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the terminal's other side was closed
        pass
    finally:
        os.close(ours)
        process.wait(200)
    return shown.decode(errors="replace").replace("\r\n", "\n")


def draw(name: str, title: str, shown: str) -> None:
    """Write what a terminal showed as an SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown.strip("\n")))
    svg = console.export_svg(title=title)
    # they would be loaded from a network
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (PICTURES / name).write_text(svg)


def photograph(name: str, page: Path, *, height: int = 900) -> None:
    """Write a picture of a page as wide as a laptop's screen. The folder of this checkout is shown
    as ``~/commlens``.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_timeout(1500)
        tab.evaluate(WITHOUT_FOLDER, str(REPOSITORY))
        tab.screenshot(path=PICTURES / name)
        browser.close()


def chromium() -> str | None:
    """Return the system's Chromium; None for the one that Playwright has."""
    return next(
        filter(
            None,
            map(
                shutil.which,
                ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
            ),
        ),
        None,
    )


def demo(folder: Path) -> None:
    """The demo on a terminal, and the page of its verdict."""
    dumps = folder / "dumps"
    lines = on_terminal(["demo", "--dump-dir", str(dumps)], folder).splitlines()
    verdict = next(number for number, line in enumerate(lines) if "VERDICT" in line)
    training = [line for line in lines[:verdict] if "step" in line][-2:]
    end = next(number for number, line in enumerate(lines) if "dump saved" in line)
    draw(
        "terminal.svg",
        "commlens demo",
        "\n".join(["$ commlens demo", "...", *training, *lines[verdict:end]]),
    )
    photograph("verdict.png", next(dumps.glob("*/index.html")))


def trace(folder: Path) -> None:
    """The page of a trace: a step of a large model, previewed."""
    script = REPOSITORY / "examples" / "preview_llama.py"
    preview = [
        "preview",
        "--world-size",
        "512",
        "--fake-tensors",
        "--network",
        "h100-ib",
        "--output",
        "llama.json",
        str(script),
    ]
    subprocess.run(
        [*COMMLENS, *preview], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=200
    )
    subprocess.run(
        [*COMMLENS, "view", "llama.json", "-o", "llama.html"],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=100,
    )
    photograph("trace.png", folder / "llama.html")


def main(names: list[str]) -> None:
    """Take the pictures."""
    takers: dict[str, Callable[[Path], None]] = {"demo": demo, "trace": trace}
    PICTURES.mkdir(exist_ok=True)
    for name in names or takers:
        with tempfile.TemporaryDirectory() as folder:
            takers[name](Path(folder))
    for path in sorted(PICTURES.iterdir()):
        print(f"{path.relative_to(REPOSITORY)}  {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
