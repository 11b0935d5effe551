"""The exception that ends a rank, as the black box holds it."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from old_torch import checkpoint_of_one_process
from torch._utils import ExceptionWrapper

from commlens.blackbox import layout as L
from commlens.capture import uncaught
from commlens.capture.uncaught import record_exception
from commlens.errors import DistributedOperationException


def recorded(error: BaseException, box: Path = Path("rank0.1.box")) -> dict[str, Any]:
    blobs: list[dict[str, Any]] = []
    writer = SimpleNamespace(
        path=box, word=lambda at, value: None, add_blob=lambda blob: blobs.append(blob) or 1
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


@checkpoint_of_one_process
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_file_of_a_distributed_checkpoint_that_a_rank_cannot_read_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.ones(4)}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (file,) = (tmp_path / "ckpt").glob("*.distcp")
    file.write_bytes(b"cut")
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    assert f"(file {file}) " in recorded(caught.value)["text"]
    assert "(file" not in recorded(caught.value, Path("rank1.1.box"))["text"]


def test_the_last_error_of_nccl_is_kept() -> None:
    said = "NCCL error in: NCCLUtils.hpp:268, invalid usage\nncclInvalidUsage: ...\nLast error:\n"
    with pytest.raises(ValueError, match="NCCL") as caught:
        raise ValueError(f"{said}Duplicate GPU detected : rank 1 and rank 0\nmore")
    assert recorded(caught.value)["text"].splitlines()[1:] == [
        "Last error:",
        "Duplicate GPU detected : rank 1 and rank 0",
    ]


def test_the_signal_that_killed_a_data_loaders_worker_is_kept() -> None:
    with pytest.raises(RuntimeError, match="unexpectedly") as caught:
        try:
            raise RuntimeError("DataLoader worker (pid 4502) is killed by signal: Bus error. It is")
        except RuntimeError as error:
            raise RuntimeError("DataLoader worker (pid(s) 4502) exited unexpectedly") from error
    assert "killed by signal: Bus error" in recorded(caught.value)["text"]
    with pytest.raises(ValueError, match="bad") as caught:
        raise ValueError("bad batch") from OSError("timed out")
    assert recorded(caught.value)["text"] == "ValueError: bad batch"


def refused(what: str) -> DistributedOperationException:
    error = DistributedOperationException(
        f"{what} mismatches.\n\nInput shapes:\n  - Process 0: [1]"
    )
    error.kind, error.refusal = "mismatch/shape", {"kind": "mismatch/shape"}
    return error


def test_one_rank_of_a_job_prints_a_refusal(tmp_path: Path) -> None:
    first, second, another = refused("shape"), refused("shape"), refused("dtype")
    whole = str(first)
    for rank, error in enumerate((first, second, another)):
        blob = recorded(error, tmp_path / f"rank{rank}.{100 + rank}.box")
        assert blob["text"].endswith("Input shapes: - Process 0: [1]"), "every box holds all of it"
    assert str(first) == whole
    assert str(second) == "shape mismatches. (The whole message is in the output of rank 0.)"
    assert "Process 0" in str(another), "another refusal is printed, too"
    assert len(list(tmp_path.iterdir())) == 2


def asserted(text: str) -> str:
    return f"/src/Loss.cu:245: loss: block: [0,0,0], thread: [31,0,0] Assertion `{text}` failed.\n"


@pytest.mark.parametrize(
    ("printed", "assertion"),
    [
        (asserted("t < n"), "Loss.cu:245, loss: t < n"),
        ("noise\n" * 100_000 + 40 * asserted("t < n"), "Loss.cu:245, loss: t < n"),
        (asserted("t < n") + asserted("t >= 0"), None),  # of two ranks
        ("", None),
    ],
)
def test_the_assertion_that_failed_in_a_kernel_is_kept(
    printed: str, assertion: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "rank0.err").open("w") as file:
        file.write(printed)
        file.flush()
        monkeypatch.setattr(uncaught, "_STDERR", file.fileno())
        blob = recorded(RuntimeError("CUDA error: device-side assert triggered\nmore"))
        assert blob.get("assertion") == assertion
        assert "assertion" not in recorded(RuntimeError("CUDA error: out of memory"))


def test_what_a_pipe_or_a_closed_stderr_was_told_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    os.write(write, asserted("t < n").encode())
    for descriptor in (write, -1):
        monkeypatch.setattr(uncaught, "_STDERR", descriptor)
        blob = recorded(RuntimeError("CUDA error: device-side assert triggered"))
        assert "assertion" not in blob
    os.close(read)
    os.close(write)


def test_the_exception_that_ends_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    blobs: list[dict[str, Any]] = []
    words: list[tuple[int, int]] = []
    writer = SimpleNamespace(
        word=lambda at, value: words.append((at, value)),
        add_blob=lambda blob: blobs.append(blob) or 7,
    )
    places: set[Any] = set()
    uncaught.hook_threads(lambda ended: uncaught.record_thread(writer, ended, places))
    for target in (sys.exit, lambda: load_row("{"), lambda: load_row("{")):
        thread = threading.Thread(target=target, name="loader")
        thread.start()
        thread.join()
    assert words == [(L.THREAD_EXCEPTION, 7)], (
        "the end by sys.exit is none, and each place is told once"
    )
    assert len(told) == 3, "the program's own hook is called, too"
    assert blobs[0]["text"].startswith("JSONDecodeError: Expecting property name")
    assert blobs[0]["text"].endswith(" (in thread loader)")
    assert "load_row" in [function for _, _, function in blobs[0]["f"]]


def test_another_recording_gets_the_exceptions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks that a forked child inherits write into no box: theirs is its parent's."""
    seen: list[str] = []

    class Recording:
        def __init__(self, name: str) -> None:
            self.name = name

        def record(self, *_: object) -> None:
            seen.append(self.name)

    monkeypatch.setattr(sys, "excepthook", lambda *_: seen.append("program"))
    monkeypatch.setattr(threading, "excepthook", lambda _: seen.append("program"))
    parent, child = Recording("parent"), Recording("child")
    for each in (parent, parent, child, child):
        uncaught.hook(each.record)
        uncaught.hook_threads(each.record)
    sys.excepthook(ValueError, ValueError(), None)
    threading.excepthook(threading.ExceptHookArgs((ValueError, None, None, None)))
    assert seen == ["child", "parent", "program"] * 2
