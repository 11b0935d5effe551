"""Where dumps come from: files and folders, compressed or in archives, object stores, a list on standard input.

:func:`open_sources` turns what a user names into :class:`Source` objects, one for each file that could hold something of one
rank. What they hold is found out by others, from :meth:`Source.head`. :mod:`commlens.dumps.sources.rank_from_name` tells rank and
host from names. Standard library only; ``zstandard`` and ``fsspec`` are imported where something needs them.
"""

from __future__ import annotations

from commlens.dumps.sources.rank_from_name import Named, named, settle
from commlens.dumps.sources.source import READ_MAX, Source
from commlens.dumps.sources.walk import Paths, name_paths, open_sources

__all__ = ["READ_MAX", "Named", "Paths", "Source", "name_paths", "named", "open_sources", "settle"]
