"""Read and write trace files: a JSON object, schema ``commlens.trace/1``, gzipped if the name ends
with ``.gz``. See docs/traces.md.

Lists have one item per line, so that line-based tools such as diff can compare files.
"""

from __future__ import annotations

import gzip
import io
import stat
import zlib
from pathlib import Path
from typing import Any, Final

import msgspec

from commlens.atomic_write import write_whole
from commlens.errors import FormatError
from commlens.model.trace import SCHEMA, TraceData
from commlens.text import TEXT_MAX, clean_all, clean_json

UNPACKED_MAX: Final = 1 << 30  # most bytes that a compressed trace is unpacked to
_PIECE: Final = 1 << 20
_TEXT_BYTES: Final = 32 << 10
_GZIP: Final = b"\x1f\x8b"
_LISTS: Final = ("groups", "modules", "events", "ops")


class _Head(msgspec.Struct):
    schema: Any = None
    fqn: Any = None
    children: Any = None


def encode(data: TraceData) -> bytes:
    """Return a trace as the bytes of an uncompressed file. The size is linear in the number of
    events.
    """
    lines = []
    for name in data.__struct_fields__:
        value = getattr(data, name)
        if name in _LISTS and value:
            items = ",\n  ".join(_encoded(item) for item in value)
            lines.append(f' "{name}": [\n  {items}\n ]')
        else:
            lines.append(f' "{name}": {_encoded(value)}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _encoded(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        # a file name that is not valid text
        return msgspec.json.encode(clean_all(msgspec.to_builtins(value))).decode()


def write_trace(data: TraceData, path: Path) -> None:
    """Save a trace atomically, compressed if the name ends with ``.gz``. The folder is created if
    missing.

    Raises:
        OutputError: the file could not be written.
    """
    content = encode(data)
    if path.name.endswith(".gz"):
        content = gzip.compress(content, compresslevel=6, mtime=0)
    write_whole(path, content)


def read_trace(path: Path) -> TraceData:
    """Read a trace file, or CommDebugMode's JSON as far as possible.

    Raises:
        FormatError: the file is neither, or is damaged. The message says what the file is.
    """
    content, cut = _clean_texts(read_content(path))
    try:
        head = msgspec.json.decode(content, type=_Head)
    except msgspec.ValidationError:
        raise FormatError(
            f"{path} is not a trace: it is JSON, but not one object with a schema."
        ) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FormatError(f"{path} is not a trace: {_describe(content, error)}") from None
    if head.schema is None and isinstance(head.fqn, str) and isinstance(head.children, list):
        from commlens.formats.comm_debug_json import convert

        data = convert(content, path)
        data.coverage.blind += cut
        return data
    if head.schema != SCHEMA:
        raise FormatError(f"{path} is not a trace that can be read: {_other_schema(head.schema)}")
    try:
        data = msgspec.json.decode(content, type=TraceData)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(
            f"{path} claims to be a trace ({SCHEMA}) but is damaged: {str(error).rstrip('.')}."
        ) from None
    contradiction = _contradiction(data)
    if contradiction:
        raise FormatError(
            f"{path} claims to be a trace ({SCHEMA}) but is damaged: {contradiction}."
        )
    data.coverage.blind += cut
    return data


def _clean_texts(content: bytes) -> tuple[bytes, list[str]]:
    """Clean texts, and cut those of many kilobytes. Return the JSON and, if texts were cut, a
    sentence about them.
    """
    # A text is not long if there is a quotation mark in every piece.
    is_long = any(
        content.find(b'"', at, at + _TEXT_BYTES) < 0
        for at in range(0, len(content) - _TEXT_BYTES, _TEXT_BYTES)
    )
    cleaned = clean_json(content, always=is_long)
    was_cut = len(cleaned) < len(content) - _TEXT_BYTES // 2
    return cleaned, (
        [f"Texts of more than {TEXT_MAX} characters were cut."] if is_long and was_cut else []
    )


def read_content(path: Path) -> bytes:
    """Return the content of a trace's file, compressed with gzip or not.

    Raises:
        FormatError: the file cannot be read, is empty, or unpacks to too much.
    """
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise FormatError(f"{path} is a folder, not a trace file.")
        # opening a named pipe would block until another process writes to it
        if not stat.S_ISREG(kind):
            raise FormatError(
                f"{path} is not a trace: it is no regular file. Save its content to a file, and"
                " give that."
            )
        content = path.read_bytes()
        if not content:
            raise FormatError(f"{path} is not a trace: it is empty.")
        return _decompressed(content, path) if content.startswith(_GZIP) else content
    except FileNotFoundError:
        raise FormatError(f"There is no file {path}.") from None
    except gzip.BadGzipFile as error:
        raise FormatError(
            f"{path} is not a trace: its compressed content is damaged ({error})."
        ) from None
    except (OSError, ValueError, MemoryError) as error:
        raise FormatError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None
    except (EOFError, zlib.error):
        raise FormatError(
            f"{path} is not a whole trace: its compressed content is cut off or damaged."
        ) from None


def _decompressed(content: bytes, path: Path) -> bytes:
    whole = io.BytesIO()
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        while piece := file.read(_PIECE):
            whole.write(piece)
            if whole.tell() > UNPACKED_MAX:
                raise FormatError(
                    f"{path} unpacks to more than {UNPACKED_MAX >> 20} MiB, the most that is read"
                    " of a compressed trace. Unpack it first."
                )
    return whole.getvalue()


def _describe(content: bytes, error: Exception) -> str:
    if content.startswith(b"COMMLENS"):
        return "it is a black box; commlens diagnose reads those."
    start = content.lstrip()[:1]
    if start == b"{" and "truncated" in str(error):
        return "its JSON is cut off, as if the program was killed while writing it."
    if start in (b"{", b"["):
        return f"its JSON is damaged ({str(error).rstrip('.')})."
    return "it holds no JSON."


def _other_schema(schema: Any) -> str:
    if schema is None:
        return f"it is JSON without a schema, where {SCHEMA!r} is expected."
    family, _, version = str(schema).partition("/")
    ours, _, our_version = SCHEMA.partition("/")
    if family == ours and version.isdecimal() and int(version) > int(our_version):
        return (
            f"its schema is {schema!r}, written by a newer commlens; this one reads {SCHEMA!r}."
            " Update commlens."
        )
    if family == "commlens.verdict":
        return "it is a verdict, the output of commlens diagnose --json."
    return f"its schema is {str(schema)[:80]!r}, where {SCHEMA!r} is expected."


def _contradiction(data: TraceData) -> str | None:
    """Return what is impossible in a trace although every field has the right type; None if nothing
    is.
    """
    groups = len(data.groups)
    for number, event in enumerate(data.events):
        if not 0 <= event.group < groups:
            return f"event {number} refers to group {event.group} of {groups}"
        if event.count < 1:
            return f"event {number} has a count of {event.count}"
        if min(event.input_bytes, event.output_bytes, event.wire_bytes) < 0:
            return f"event {number} has a negative number of bytes"
        if event.last_step is not None and event.last_step < event.step:
            return (
                f"event {number} ends in step {event.last_step}, before it begins in step"
                f" {event.step}"
            )
    for number, module in enumerate(data.modules):
        if module.parent is not None and (
            module.parent == number or not 0 <= module.parent < len(data.modules)
        ):
            return (
                f"module {number} refers to parent {module.parent} of {len(data.modules)} modules"
            )
    return None
