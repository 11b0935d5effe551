"""A page of torch's own debug server (``torch.distributed.debug``) that shows what commlens says
about the job.
"""

from __future__ import annotations

import html
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_LIMIT_S = 60.0
_PAGE = """<!doctype html><meta charset="utf-8"><title>commlens</title>
<h1>commlens</h1>
<p><a href="/">torch's debug server</a>, <a href="/commlens/page">page of the verdict</a></p>
<h2>Verdict</h2><pre>{verdict}</pre><h2>Ranks</h2><pre>{status}</pre>
"""


class DebugHandler:
    """The pages ``/commlens`` and ``/commlens/page`` of torch's debug server: the verdict and the
    state of each rank, and the page of a dump. They tell of the ranks on the node of rank 0, which
    serves them, at the moment of the request::

        start_debug_server(handlers=[*default_handlers(), commlens.DebugHandler()])
    """

    fetch_timeout = _LIMIT_S

    def __init__(self) -> None:
        self._pid = os.getpid()  # the server is a child of this process, and may be spawned

    def routes(self) -> list[Any]:
        """Return the addresses, and what answers there."""
        from torch.distributed.debug._frontend import Route

        return [Route("/commlens", self._overview), Route("/commlens/page", self._page)]

    def nav_links(self) -> list[Any]:
        """Return the links for the server's menu."""
        from torch.distributed.debug._frontend import NavLink

        return [NavLink("/commlens", "commlens")]

    def templates(self) -> dict[str, str]:
        """Return no templates: the pages use none."""
        return {}

    def dump(self) -> str:
        """Return the verdict for the server's periodic dumps."""
        return self._look()[0]

    def dump_filename(self) -> str:
        """Return the name of the file of a periodic dump."""
        return "commlens"

    def _overview(self, _: Any) -> bytes:
        said = {"verdict": self._look()[0], "status": _run("status", str(self._pid))}
        return _PAGE.format(**{name: html.escape(text) for name, text in said.items()}).encode()

    def _page(self, _: Any) -> bytes:
        return self._look()[1]

    def _look(self) -> tuple[str, bytes]:
        """Take a dump, and return the verdict and the page."""
        with tempfile.TemporaryDirectory(prefix="commlens-") as folder:
            page = Path(folder) / "page.html"
            said = _run("dump", "--output", folder, str(self._pid))
            if any(dumps := sorted(Path(folder).glob("*/"))):
                said = _run("diagnose", str(dumps[0]), "--html", str(page))
            return said, page.read_bytes() if page.exists() else said.encode()


def _run(*arguments: str) -> str:
    """Return what a verb of commlens prints."""
    command = [sys.executable, "-m", "commlens", *arguments]
    usual = {**os.environ, "COLUMNS": "120", "COMMLENS": "0"}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, env=usual, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"commlens {arguments[0]} gave no answer: {error}"
    return ended.stdout or ended.stderr
