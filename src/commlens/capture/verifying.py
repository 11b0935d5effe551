"""Switches verification on for a recording: at its beginning, or in the middle of a job."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commlens import config
from commlens.capture import rank_environment
from commlens.text import ranks_phrase

log = logging.getLogger("commlens")
_ACCELERATE_ALONE = " (on CPUs, Accelerate needs ACCELERATE_USE_CPU=true or Accelerator(cpu=True))"


def make_verifier(
    make: Callable[..., Any],
    recorder: Any,
    settings: config.Settings,
    job_dir: Path | None,
    rank: int,
    *,
    depth: int,
    began_late: bool,
) -> Any:
    """Return a verifier for a recorder. With depth 0, it verifies only after it is entered.

    Args:
        make: makes a :class:`commlens.verification.verifier.Verifier`.
        recorder: of this process.
        settings: the settings.
        job_dir: the folder of the job's boxes.
        rank: of this process.
        depth: how many regions that verify surround what comes next.
        began_late: whether the job was running before it was recorded.
    """
    verifier = make(
        job_dir,
        rank,
        timeout_s=functools.lru_cache(maxsize=1)(
            lambda: settings.verify_timeout or rank_environment.default_timeout_ms() / 1000
        ),
        active=depth > 0,
        late=rank_environment.ranks_of_this_node(rank) if began_late else (),
        sample=settings.debug == config.SAMPLE,
        make_exchange=recorder.make_exchange,
    )
    for _ in range(depth - 1):
        verifier.enter()
    return verifier


def meet(verifier: Any, wait: Callable[[], list[int]], *, began_late: bool) -> None:
    """Begin to verify in the middle of a job, and name the ranks that did not: nothing can be
    compared with theirs.

    Args:
        verifier: of this process.
        wait: waits for the other ranks, and returns those that did not come.
        began_late: whether the job was running before it was recorded.
    """
    missing = wait()
    if missing and began_late:
        # Collectives are numbered from when recording began, which matches only the ranks that
        # began at the same point.
        verifier.stop()
    if missing:
        log.warning("commlens: %s", unverified(missing, began_late=began_late))


def unverified(missing: list[int], *, began_late: bool) -> str:
    """Return the warning about ranks that did not begin to verify where this one did."""
    ranks = ranks_phrase(missing)
    if began_late:
        return (
            f"collectives are not verified here: {ranks} did not switch verification on at the same"
            " point of the program"
        )
    them = "it" if len(missing) == 1 else "them"
    return (
        f"{ranks} did not reach the point where verification begins: no rank is compared with"
        f" {them} until then"
    )


def warn_if_nothing_was_verified(*, initialised: bool) -> None:
    """Warn, once on a node, that the ranks of a job which was to be verified never met.

    Args:
        initialised: whether this process made a process group; it issued no collective.
    """
    place, local = rank_environment.place_of(), rank_environment.local_rank()
    if place.world_size < 2 or local > 0 or (local < 0 and place.rank > 0):
        return
    log.warning(
        "commlens: nothing was verified: this run %s, so each of its %d processes worked alone%s.",
        "issued no collective" if initialised else "made no process group",
        place.world_size,
        _ACCELERATE_ALONE if "accelerate" in sys.modules else "",
    )
