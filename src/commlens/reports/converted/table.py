"""Write one row for each operation of each rank, as CSV or Parquet, for notebooks and databases."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from commlens.errors import MissingDependency
from commlens.formats.columns import DTYPES, STATES, RankColumns
from commlens.model.collective import Channel, CollectiveArgs, Stack, TensorSpec, user_frame
from commlens.text import csv_cell, format_ranks

_EMPTY: Final = {
    "peer": -1,
    "created_ns": 0,
    "started_ns": 0,
    "completed_ns": 0,
    "duration_ns": -1,
    "timeout_ms": 0,
    "coalesced": 0,
}
"""What stands for "unknown" in columns of RankColumns, and is written as an empty cell."""
_PLAIN: Final = ("sequence", *_EMPTY)
"""Columns taken from RankColumns."""

_CHANNEL: Final[dict[str, Callable[[Channel], Any]]] = {
    "group": lambda one: one.group.name,
    "group_description": lambda one: one.group.description,
    "group_ranks": lambda one: format_ranks(one.group.ranks),
    "backend": lambda one: one.group.backend,
    "device": lambda one: one.device,
}
_ASKED: Final[dict[str, Callable[[CollectiveArgs], Any]]] = {
    "op": lambda one: one.op,
    "recorded_as": lambda one: one.dispatcher_op,
    "input_shapes": lambda one: _shapes(one.inputs),
    "input_dtypes": lambda one: _dtypes(one.inputs),
    "output_shapes": lambda one: _shapes(one.outputs),
    "output_dtypes": lambda one: _dtypes(one.outputs),
    "reduce_op": lambda one: one.reduce_op or "",
    "root": lambda one: "" if one.root is None else str(one.root),
}
_STACK: Final[dict[str, Callable[[Stack], Any]]] = {
    "line": lambda one: frame.where if (frame := user_frame(one)) else "",
    "stack": lambda one: "; ".join(f"{frame.file}:{frame.line} {frame.function}" for frame in one),
}
COLUMNS: Final = (
    "rank",
    "host",
    "index",
    *_CHANNEL,
    *_ASKED,
    "p2p",
    "state",
    *_PLAIN,
    *_STACK,
    "source",
    "job",
)
"""The columns in order; docs/convert.md explains each."""


def to_csv(several: Iterable[RankColumns]) -> Iterator[bytes]:
    """Yield the table, one piece per rank."""
    for number, rows in enumerate(several):
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        if not number:
            writer.writerow(COLUMNS)
        columns = [_texts(rows, name) for name in COLUMNS]
        writer.writerows(zip(*columns, strict=True))
        yield out.getvalue().encode("utf-8", "backslashreplace")


def write_parquet(several: Iterable[RankColumns], path: Path) -> None:
    """Write the table with one row group per rank and dictionary-encoded texts.

    Raises:
        MissingDependency: pyarrow is not installed.
        OSError: the file cannot be written.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency(
            f"Writing Parquet needs the package pyarrow ({error}): pip install pyarrow"
        ) from None
    texts = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    types = {name: pyarrow.type_for_alias(DTYPES[name]) for name in _PLAIN}
    types |= {"rank": pyarrow.int32(), "index": pyarrow.int64(), "p2p": pyarrow.bool_()}
    schema = pyarrow.schema([(name, types.get(name, texts)) for name in COLUMNS])
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for rows in several:
            arrays = []
            for name in COLUMNS:
                if name in types:
                    values, empty = _numbers(rows, name)
                    arrays.append(pyarrow.array(values, types[name], mask=empty))
                else:
                    codes, table = _coded(rows, name)
                    made = pyarrow.DictionaryArray.from_arrays(
                        pyarrow.array(codes, pyarrow.int32(), mask=codes < 0), table
                    )
                    arrays.append(made.cast(texts))
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _numbers(rows: RankColumns, name: str) -> tuple[Any, Any]:
    """Return the values, and a mask of the unknown ones."""
    if name == "rank":
        return np.full(len(rows), rows.rank, "int32"), np.zeros(len(rows), "bool")
    values = rows.record_id if name == "index" else getattr(rows, name)
    return values, values == _EMPTY[name] if name in _EMPTY else np.zeros(len(rows), "bool")


def _coded(rows: RankColumns, name: str) -> tuple[Any, list[str]]:
    """Return the code of each row, -1 for none, and the distinct texts."""
    made: list[str]
    if name in _CHANNEL:
        codes, made = rows.channel, [_CHANNEL[name](one) for one in rows.channels]
    elif name in _ASKED:
        codes, made = rows.args_index, [_ASKED[name](one) for one in rows.args]
    elif name in _STACK:
        codes, made = rows.stack, [_STACK[name](one) for one in rows.call_stacks]
    elif name == "state":
        codes, made = rows.state.astype("int32"), list(STATES)
    else:
        codes, made = np.zeros(len(rows), "int32"), [getattr(rows, name)]
    # neither format can hold lone surrogates, which texts of foreign files may have
    return codes, [text.encode("utf-8", "backslashreplace").decode() for text in made]


def _texts(rows: RankColumns, name: str) -> list[str]:
    if name == "p2p":
        return ["true" if one else "false" for one in rows.p2p.tolist()]
    if name in _PLAIN or name in ("rank", "index"):
        values, empty = _numbers(rows, name)
        return [
            "" if nothing else str(value)
            for value, nothing in zip(values.tolist(), empty.tolist(), strict=True)
        ]
    codes, table = _coded(rows, name)
    table = [csv_cell(text) for text in table]
    return [table[code] if code >= 0 else "" for code in codes.tolist()]


def _shapes(tensors: Sequence[TensorSpec]) -> str:
    return " ".join("x".join(map(str, one.shape)) or "scalar" for one in tensors)


def _dtypes(tensors: Sequence[TensorSpec]) -> str:
    return " ".join(dict.fromkeys(one.dtype for one in tensors))
