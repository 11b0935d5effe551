"""The scripts and stylesheets in the package were built from the sources beside them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from commlens.reports.page import asset, render_page
from conftest import REPOSITORY

WEB = REPOSITORY / "web"
PAGES = sorted(
    folder.name for folder in (WEB / "src").iterdir() if folder.is_dir() and folder.name != "shared"
)


def _hash_of_sources(page: str) -> str:
    """As web/build.mjs computes it."""
    folders = (WEB / "src" / "shared", WEB / "src" / page)
    files: list[Path] = [WEB / "build.mjs", WEB / "package-lock.json", WEB / "tsconfig.json"]
    files += [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    whole = hashlib.sha256()
    for name, file in sorted((file.relative_to(WEB).as_posix(), file) for file in files):
        whole.update(f"{name}\n{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


@pytest.mark.parametrize("page", PAGES)
def test_the_asset_belongs_to_the_sources(page: str):
    built_from = re.search(r"from sources ([0-9a-f]{64})", asset(f"{page}.js"))
    assert built_from and built_from.group(1) == _hash_of_sources(page), (
        f"web/src/{page} or web/src/shared changed: run make page"
    )


@pytest.mark.parametrize("page", PAGES)
def test_it_lies_in_html_as_it_is(page: str):
    script, style = asset(f"{page}.js"), asset(f"{page}.css")
    assert "</script" not in script.lower() and "<!--" not in script and "\r" not in script
    assert "</style" not in style.lower() and "\r" not in style
    assert "http://" not in style and "https://" not in style and "@import" not in style


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_small_and_refuses_everything_that_it_does_not_hold(page: str):
    made = render_page(
        page, title="a </title> & b", data={"text": "</script>"}, text="<b>plain</b>"
    ).decode()  # type: ignore[arg-type]
    assert len(made) < 500_000
    assert "default-src 'none'; script-src 'sha256-" in made
    assert "a &lt;/title&gt; &amp; b" in made and "&lt;b&gt;plain" in made
    assert made.count("</script>") == 2
