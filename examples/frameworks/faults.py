"""The faults of these examples: what rank 1 does in its seventh step."""

import os
import signal

NAMES = ("none", "skip", "stop", "error", "lost", "kill")


def leaves_out_the_collective(fault: str, rank: int, step: int) -> bool:
    """Return whether this rank skips the collective of this step, as code under ``if rank == 0`` does."""
    return fault == "skip" and rank == 1 and step == 6


def misbehave(fault: str, rank: int, step: int) -> None:
    """Stop, fail or die, if this is the rank and the step for it."""
    if rank != 1 or step != 6:
        return
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "error":
        raise ValueError("a bad batch")
    elif fault == "lost":
        raise ConnectionResetError(104, "the data server went away")
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
