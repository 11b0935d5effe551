"""Self-contained HTML pages: script, style and data are in one file, nothing is loaded, and data is
never interpreted as markup.

``make page`` builds each page's script and stylesheet from ``web/`` into ``assets/``.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from importlib import resources
from typing import Any, Final, Literal

import msgspec

from commlens.version import __version__

Page = Literal["verdict", "trace"]

DATA_ELEMENT: Final = "commlens-data"
_ICON: Final = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16' fill='none'"
    " stroke='%23667' stroke-width='2'%3E%3Cpath d='M2 4h12M2 8h12M2 12h6'/%3E%3Ccircle cx='12.5'"
    " cy='12' r='2.5' fill='%23b3261e' stroke='none'/%3E%3C/svg%3E"
)


def render_page(page: Page, *, title: str, data: Any = None, text: str = "") -> bytes:
    """Return the HTML file, UTF-8.

    The data is anything that msgspec can encode as JSON; None for an empty viewer. The text is
    shown where no script runs (a mail's preview, a text browser), and until the script has run.
    """
    script, style = asset(f"{page}.js"), asset(f"{page}.css")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    packed = (
        base64.b64encode(gzip.compress(msgspec.json.encode(data), 9, mtime=0)).decode()
        if data is not None
        else ""
    )
    head = f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="commlens {__version__}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<link rel="icon" href="{_ICON}">
<style>{style}</style>
</head>
<body>
<div id="app"><pre class="plain">{html.escape(text)}</pre></div>
<script type="text/plain" id="{DATA_ELEMENT}">{packed}</script>
<script>{script}</script>
</body>
</html>
"""
    # Lone surrogates, from undecodable bytes in a file's name, cannot be encoded.
    return head.encode("utf-8", "replace")


def asset(name: str) -> str:
    """Return a built script or stylesheet."""
    return (
        resources.files("commlens.reports.page")
        .joinpath("assets")
        .joinpath(name)
        .read_text(encoding="utf-8")
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
