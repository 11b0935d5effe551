"""The native engine: its C++ sources, building them, and finding and loading a build.

A build is for one torch, one Python and one version of the sources. ``commlens build-native`` makes
one, and ``commlens launch`` in the background; never a rank. docs/native.md explains.
"""

from __future__ import annotations

from commlens.errors import NativeEngineError
from commlens.native.cache import NOT_BUILT, cache_directory, find, load

__all__ = ["NOT_BUILT", "NativeEngineError", "cache_directory", "find", "load"]
