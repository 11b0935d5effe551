"""The keys of ``commlens top``."""

from __future__ import annotations

import os

import pytest

from commlens.commands import top


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"\x1b[B\x1b[B", ["down", "down"]),
        (b"ff", ["f", "f"]),
        (b"\x1b", ["escape"]),
        (b"\x1bOA\x1b[5~\rq", ["up", "pageup", "enter", "q"]),
        (b"\x1b[1;5Cq", ["\x1b[1;5C", "q"]),
    ],
)
def test_no_key_is_lost_though_several_are_read_at_once(
    typed: bytes, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(top.sys, "stdin", stdin)
        assert top._next_keys(0.0) == []
        os.write(writer, typed)
        assert top._next_keys(1.0) == keys
        os.close(writer)
        assert top._next_keys(1.0) == ["q"], "the terminal is gone"
