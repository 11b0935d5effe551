"""The docs name everything that there is: errors, settings, commands; and their links lead
somewhere.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import _readme
import pytest
import run_all

from commlens import errors
from commlens.commands import COMMANDS
from commlens.config import Settings
from conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
PAGES = [REPOSITORY / "README.md", CONTRIBUTING, *sorted(DOCS.rglob("*.md"))]


def test_every_error_has_its_heading_and_every_heading_its_error():
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.CommlensError)
    ]
    headings = re.findall(r"^## (.+)$", (DOCS / "errors.md").read_text(), flags=re.MULTILINE)
    assert sorted(headings) == sorted(kind.slug for kind in classes)
    for kind in classes:
        section = (DOCS / "errors.md").read_text().split(f"## {kind.slug}\n")[1].split("\n## ")[0]
        assert f"`{kind.__name__}`" in section
        assert kind.__name__ in (errors.__doc__ or ""), "the tree at the top of errors.py"


@pytest.mark.parametrize("field", fields(Settings), ids=lambda field: field.name)
def test_every_setting_has_its_row_with_its_default(field):
    default = "-" if field.default is None else f"`{str(field.default).lower()}`"
    default = f"`{field.default:g}`" if isinstance(field.default, float) else default
    assert f"\n| `{field.name}` | {default} | " in (DOCS / "settings.md").read_text()


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_every_command_is_in_a_pages_heading_and_in_the_readme(entry):
    headings = [page.read_text().splitlines()[0].replace("`", "") for page in DOCS.glob("*.md")]
    assert any(re.search(rf"\bcommlens {entry.name}\b", heading) for heading in headings)
    assert f"commlens {entry.name}" in (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
    "page", [CONTRIBUTING, DOCS / "development.md"], ids=lambda page: page.name
)
def test_files_that_developers_are_sent_to_exist(page: Path):
    named = re.findall(r"`((?:src|tests|docs|benchmarks|web)/[\w./-]*)`", page.read_text())
    assert named
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_every_changelog_fragment_has_a_type_that_towncrier_knows():
    names = [path.name for path in (REPOSITORY / "changelog.d").iterdir() if path.suffix == ".md"]
    assert [
        name for name in names if not re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed)\.md", name)
    ] == []


def test_the_readme_and_the_page_show_the_figures_that_make_bench_wrote():
    figures = json.loads(run_all.FIGURES.read_text())
    reports = [figures[each.name] for each in run_all.BENCHMARKS if each.name in figures]
    assert run_all.page(reports) == run_all.PAGE.read_text()
    assert _readme.answers(figures)
    readme = (REPOSITORY / "README.md").read_text()
    assert _readme.with_table(readme, figures) == readme, (
        "benchmarks/run_all.py --write puts them there"
    )
    assert _readme.table(figures) in readme


def test_every_page_can_be_reached_from_the_index():
    linked = set(re.findall(r"\]\(([\w-]+\.md)", (DOCS / "index.md").read_text()))
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} == linked


def test_the_first_code_that_a_visitor_sees_fits_a_phone():
    block = (DOCS / "index.md").read_text().split("```")[1]
    assert max(map(len, block.splitlines())) <= 48
