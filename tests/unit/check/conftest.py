"""What the tests of check share."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def no_caches_of_dtensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake world looks for them among all objects, of which a process with all tests has a
    million: 0.2 s each time, for programs that use no DTensor.
    """
    if "torch" in sys.modules:
        monkeypatch.setattr("commlens.tracing.preview.world.clear_caches", lambda: None)
