"""Fuzzes the readers in Python with atheris, where it is installed: ``python tests/fuzz/readers.py
-max_total_time=3600 CORPUS``.

Not part of the test run. Whatever the bytes, a reader gives rows or raises CommlensError; and where
the reader in C takes a file, both give the same.
"""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path

import atheris

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "unit" / "support")]

with atheris.instrument_imports(
    include=["commlens.formats", "commlens.dumps", "commlens.blackbox"]
):
    from commlens.dumps.detect import detect_kind
    from commlens.errors import CommlensError
    from commlens.formats.flight_recorder.reader import (
        read_flight_recorder_json,
        read_flight_recorder_pickle,
    )
    from commlens.formats.torch_log import read_torch_log

from flight_recorder_dumps import dump, entry  # noqa: E402

from unit.formats.flight_recorder.test_reader_native_entries import all_read_alike  # noqa: E402


def look(data: bytes) -> None:
    """One input, for every reader."""
    detect_kind(data[:4096])
    for read in (read_flight_recorder_pickle, read_flight_recorder_json):
        try:
            rows = read(data, "fuzz")
        except CommlensError:
            continue
        rows.log(range(len(rows)))
    for rows in read_torch_log(io.BytesIO(data), "fuzz"):
        rows.log(range(len(rows)))
    all_read_alike(data)


def main() -> None:
    """Seeds go to the corpus named last, if it is a folder."""
    corpus = Path(sys.argv[-1])
    if len(sys.argv) > 1 and corpus.is_dir():
        for protocol in (2, 4):
            value = dump([entry(0), entry(1, "nccl:send 0->1", duration_ms=0.5)])
            (corpus / f"seed-{protocol}").write_bytes(pickle.dumps(value, protocol))
    atheris.Setup(sys.argv, look)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
