"""The exception that ends a rank, as the black box holds it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from torch._utils import ExceptionWrapper

from commlens.capture.uncaught import record_exception


def recorded(error: BaseException) -> dict[str, Any]:
    blobs: list[dict[str, Any]] = []
    writer = SimpleNamespace(
        word=lambda at, value: None, add_blob=lambda blob: blobs.append(blob) or 1
    )
    record_exception(writer, type(error), error, error.__traceback__)
    return blobs[0]


def load_row(row: str) -> object:
    return json.loads(row)


def test_the_exception_of_a_data_loaders_worker_is_named_with_its_own_line() -> None:
    try:
        load_row('{"x": [1.0')
    except ValueError:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 3")  # what the worker sends
    with pytest.raises((RuntimeError, ValueError), match="Original Traceback") as caught:
        wrapper.reraise()
    blob = recorded(caught.value)
    assert (
        blob["text"]
        == "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 1 column 11 (char 10) (in"
        " DataLoader worker process 3)"
    )
    functions = [function for _, _, function in blob["f"]]
    assert functions.index("load_row") < functions.index("reraise"), (
        "innermost first; then where torch raised it again"
    )
    assert blob["f"][functions.index("load_row")][0] == __file__


def test_other_exceptions_keep_their_first_line() -> None:
    with pytest.raises(ValueError, match="bad") as caught:
        raise ValueError("bad batch\nin shard 7")
    assert recorded(caught.value)["text"] == "ValueError: bad batch"


def test_the_error_of_the_rank_on_which_a_distributed_checkpoint_failed_is_kept() -> None:
    text = (
        "CheckpointException ranks:dict_keys([1])\nTraceback (most recent call last): (RANK 1)\n"
        '  File "x.py", line 3, in read\n    raise EOFError\nEOFError: Ran out of input\n'
    )
    with pytest.raises(ValueError, match="ranks") as caught:
        raise ValueError(text)
    assert (
        recorded(caught.value)["text"]
        == "ValueError: CheckpointException ranks:dict_keys([1]) (RANK 1) EOFError: Ran out of"
        " input"
    )
