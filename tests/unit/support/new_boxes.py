"""Black boxes that a test writes as a rank does."""

from __future__ import annotations

from pathlib import Path

from commlens.blackbox.writer import BoxWriter


def new_box(folder: Path, *, capacity: int = 8) -> BoxWriter:
    """Return the empty box of rank 1 of 4."""
    return BoxWriter(
        folder / "rank1.7.box",
        capacity=capacity,
        rank=1,
        world_size=4,
        local_rank=1,
        start_ticks=1,
        about={"job": "j"},
    )
