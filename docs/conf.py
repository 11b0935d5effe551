"""Build the documentation as a site: `make docs`.

The Markdown files are the source, readable as they are. ``index.md`` lists every page once, in
sections; the site's navigation is made from these lists.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
REPOSITORY = DOCS.parent
sys.path[:0] = [str(REPOSITORY / "src"), str(DOCS / "make")]

from commands_page import commands_page  # noqa: E402

from commlens.version import __version__  # noqa: E402

project = "commlens"
author = "the commlens contributors"
copyright = "the commlens contributors, Apache-2.0"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["make"]
templates_path: list[str] = []
suppress_warnings = ["autodoc.import_cycle"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

highlight_language = "text"
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # output is not for copying
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = f"commlens {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["../src/commlens/reports/schemas"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fbf", "color-brand-content": "#1f5fbf"},
    "dark_css_variables": {"color-brand-primary": "#7fb0ff", "color-brand-content": "#7fb0ff"},
}
html_show_sourcelink = True
html_copy_source = True


def navigation(text: str) -> str:
    """Return hidden tables of contents, one for each section of the index."""
    parts = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        links = re.findall(r"\[([^\]]+)\]\(([\w./-]+)\.md\)", section)
        pages = [f"{text[0].upper()}{text[1:]} <{page}>" for text, page in links]
        parts.append(
            "\n".join(
                [
                    "",
                    "```{toctree}",
                    ":hidden:",
                    f":caption: {section.splitlines()[0]}",
                    "",
                    *pages,
                    "```",
                    "",
                ]
            )
        )
    return "".join(parts)


def schemas_page() -> str:
    """Return a table of the properties of each published JSON schema."""
    parts = []
    for path in sorted((REPOSITORY / "src/commlens/reports/schemas").glob("*.schema.json")):
        schema = json.loads(path.read_text())
        name = schema["$id"].removeprefix("urn:commlens:").replace(":", "/")
        parts += [
            f"## {name}\n",
            schema["description"] + "\n",
            f'The whole schema: <a href="{path.name}">{path.name}</a>\n',
        ]
        parts += ["| key | type | meaning |", "|---|---|---|"]
        for key, about in schema["properties"].items():
            meaning = about.get("description", "").replace("|", "\\|")
            parts.append(f"| `{key}` | {_type(about)} | {meaning} |")
        parts.append("")
    return "\n".join(parts)


def _type(about: dict[str, Any]) -> str:
    if "const" in about:
        return f'`"{about["const"]}"`'
    if "enum" in about:
        return "one of " + ", ".join(f"`{value}`" for value in about["enum"])
    if "$ref" in about:
        return about["$ref"].rpartition("/")[2]
    if "anyOf" in about:
        return " or ".join(_type(each) for each in about["anyOf"])
    if about.get("type") == "array":
        return f"list of {_type(about.get('items', {}))}" if about.get("items") else "list"
    kind = about.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else kind


def outside(text: str) -> str:
    """Name files outside this folder instead of linking to them: they are not part of the site,
    except CONTRIBUTING.md.
    """
    text = text.replace("](../CONTRIBUTING.md", "](contributing.md")
    return re.sub(r"\[`?[^\]]*?`?\]\((?:\.\./)+([\w./-]+)\)", r"`\1`", text)


def contributing_page() -> str:
    """Return CONTRIBUTING.md, which is not in this folder, with its links as they are seen from
    here.
    """
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    return re.sub(r"\]\(docs/", "](", re.sub(r"\[[^\]]*\]\((\.[\w.-]+)\)", r"`\1`", text))


def read_page(app: Any, page: str, source: list[str]) -> None:
    """Add the parts of a page that are generated."""
    if page == "contributing":
        source[0] = contributing_page()
    source[0] = outside(source[0])
    if page == "index":
        source[0] += navigation(source[0])
    elif page == "schemas":
        source[0] += schemas_page()
    elif page == "commands":
        source[0] += commands_page()


def setup(app: Any) -> None:
    """Connect the generated parts."""
    app.connect("source-read", read_page)
