"""The handler for torch's debug server."""

from __future__ import annotations

import pickle

import pytest

import commlens
from commlens.launch import debug_handler


@pytest.fixture
def handler(tmp_path, monkeypatch: pytest.MonkeyPatch) -> commlens.DebugHandler:
    monkeypatch.setenv("COMMLENS_BOX_DIR", str(tmp_path / "none"))
    return pickle.loads(pickle.dumps(commlens.DebugHandler()))  # as for a server that is spawned


@pytest.mark.launches
def test_what_a_job_without_records_shows(handler: commlens.DebugHandler) -> None:
    """What the verbs say, and no page."""
    said = debug_handler._run("dump", str(handler._pid))
    assert "commlens" in said
    page = handler._overview(None).decode()
    assert "<h2>Verdict</h2>" in page and said.split("'")[0].strip() in page
    assert handler.dump() == said and handler._page(None).decode() == said


def test_a_verb_that_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_handler, "_LIMIT_S", 0.01)
    assert debug_handler._run("status").startswith("commlens status gave no answer")


def test_what_torchs_server_asks_a_handler_for(handler: commlens.DebugHandler) -> None:
    frontend = pytest.importorskip("torch.distributed.debug._frontend")
    if not hasattr(frontend, "Route"):
        pytest.skip("this torch's debug server takes no handlers")
    assert [route.path for route in handler.routes()] == ["/commlens", "/commlens/page"]
    assert [link.path for link in handler.nav_links()] == ["/commlens"]
    server = frontend.FrontendServer(0, handlers=[handler])
    try:
        assert {"/commlens", "/commlens/page"} <= set(server._routes)
    finally:
        server._server.shutdown()
        server._server.server_close()
        server._thread.join()
