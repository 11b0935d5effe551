"""Files are told by their beginning, never by their name."""

from __future__ import annotations

import pickle

import pytest
from flight_recorder_dumps import dump, entry

from commlens.blackbox.layout import MAGIC
from commlens.dumps import detect
from commlens.dumps.detect import detect_kind, is_trace


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (MAGIC + bytes(8), detect.BLACK_BOX),
        (pickle.dumps(dump([entry(0)]), 2), detect.FLIGHT_RECORDER_PICKLE),
        (b'{"version": "2.10", "pg_config": {}}', detect.FLIGHT_RECORDER_JSON),
        (b'\xef\xbb\xbf  {"entries": [', detect.FLIGHT_RECORDER_JSON),
        (b'{"schema": "commlens.observed/1"}', detect.OBSERVED),
        (b'{"schema": "commlens.dump/1"}', detect.DUMP_MARKER),
        (b'{"schema": "commlens.verdict/2"}', detect.REPORT),
        (b'{"schema": "commlens.trace/1", "events": []}', None),
        (b"<!doctype html><html>", None),
        (b"[rank0]: loss 2.5\n", detect.TEXT),
        (b'{"loss": 2.5}', detect.TEXT),
        (b"\x7fELF\x02\x01\x01\x00", None),
        (b"  \n", None),
        (b"", None),
    ],
)
def test_kinds(head: bytes, kind: detect.Kind | None) -> None:
    assert detect_kind(head) is kind


def test_traces_are_shown_by_another_verb() -> None:
    assert is_trace(b'{"schema": "commlens.trace/1"') and is_trace(b'{ "traceEvents": [')
    assert not is_trace(b'{"pg_config": {}}')


@pytest.mark.parametrize(
    ("name", "is_box"),
    [
        ("rank3.1234.box", True),
        ("rank-1.1234.box", True),
        ("rank3.1234.newest.box", True),
        ("rank3.1234.new", True),
        ("rank3.box", False),
        ("xrank3.1234.box", False),
    ],
)
def test_names_of_boxes(name: str, is_box: bool) -> None:
    assert (detect.BOX_NAME.fullmatch(name) is not None) is is_box
