"""Where dumps are read from: files, folders, archives, compressed files and object stores.

:func:`open_sources` turns the paths that a user gives into :class:`Source` objects, one per file.
:mod:`commlens.dumps.detect` classifies a source by :meth:`Source.head`;
:mod:`commlens.dumps.sources.rank_from_name` infers rank and host from names. Standard library only;
``zstandard`` and ``fsspec`` are imported when a file needs them.
"""

from __future__ import annotations

from commlens.dumps.sources.rank_from_name import FileName, parse_name, parse_names
from commlens.dumps.sources.source import READ_MAX, Source
from commlens.dumps.sources.walk import Paths, name_paths, open_sources

__all__ = [
    "READ_MAX",
    "FileName",
    "Paths",
    "Source",
    "name_paths",
    "open_sources",
    "parse_name",
    "parse_names",
]
