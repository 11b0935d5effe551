"""Limits of what is read."""

from __future__ import annotations

from typing import Final

WORLD_MAX: Final = 1 << 18
"""Most ranks of a job, more than any job has had. A larger number in a file means damage; reading
it would cost gigabytes.
"""

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})
"""Addresses by which a process reaches its own machine."""
