"""Takes what the sources of dumps give."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import zstandard

from commlens.dumps.sources import open_sources


def tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return path


CONTENT = b"".join(
    b"entry %d of a dump that says %d\n" % (number, zlib.crc32(b"%d" % number))
    for number in range(6_000)
)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor().compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def taken(*paths: object, prefix: str = "") -> tuple[dict[str, bytes], list[str]]:
    """Names (without the common folder) and contents, and everything that was said."""
    problems: list[str] = []
    contents: dict[str, bytes] = {}
    for source in open_sources([str(path) for path in paths], problems, prefix=prefix):
        source = pickle.loads(pickle.dumps(source))  # as it goes to another process
        contents[source.name] = source.read()
        problems += source.problems
    return contents, problems
