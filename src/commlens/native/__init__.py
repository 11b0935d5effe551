"""The native engine: its C++ sources, how they are built, and how what was built is found and loaded.

A build is for one torch, one Python and one version of the sources, and is never made at the start of a job: ``commlens build-native``
makes it. docs/native.md explains.
"""

from __future__ import annotations

from commlens.errors import NativeEngineError
from commlens.native.cache import NOT_BUILT, cache_directory, find, load

__all__ = ["NOT_BUILT", "NativeEngineError", "cache_directory", "find", "load"]
