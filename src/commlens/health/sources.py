"""The helpers that all readers of a node's files share: the root that they read below, and small
files.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from commlens.processes.process import read_text

ROOT: Final = Path("/")


class UnreadableError(Exception):
    """A source cannot be read. The message is a clause: the reason, and the remedy."""


def output_of(command: Sequence[str], timeout_s: float, *, check: bool = True) -> bytes:
    """Return what a command prints; empty if it takes longer or, with ``check``, if it fails."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            timeout=timeout_s,
            check=check,
            stdin=subprocess.DEVNULL,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def number(path: Path) -> float | None:
    """Return the number in a small file; None if there is none."""
    text = (read_text(path) or "").split()
    try:
        return float(text[0])
    except (IndexError, ValueError):
        return None


def word(path: Path) -> str:
    """Return a small file's text; empty if it cannot be read."""
    return (read_text(path) or "").strip()


def folders(path: Path) -> list[Path]:
    """Return what a folder contains, sorted; nothing if it does not exist or cannot be read."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def pci_address(device: Path) -> str:
    """Return the PCI address of a device's folder in /sys; empty if it has none."""
    for line in word(device / "uevent").splitlines():
        if line.startswith("PCI_SLOT_NAME="):
            return normal_address(line.partition("=")[2])
    return ""


def normal_address(text: str) -> str:
    """Return a PCI address as the kernel writes it in /sys.

    ``PCI:0000:4F:00`` of an Xid and ``00000000:4F:00.0`` of NVML become ``0000:4f:00.0``.
    """
    address = text.strip().lower().removeprefix("pci:")
    function = address if "." in address else f"{address}.0"
    domain, _, rest = function.partition(":")
    if rest.count(":") == 0:  # without a domain
        domain, rest = "0", function
    return f"{domain[-4:].rjust(4, '0')}:{rest}"
