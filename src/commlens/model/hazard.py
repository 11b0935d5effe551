"""Latent faults: what a program does wrong without being stopped by it, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from commlens.model.collective import Frame, FrameKind, Stack

HazardKind = Literal["never-waited", "not-a-member", "many-groups"]

# The last one calls the former where a mode of torch.overrides is entered.
_C10D = ("distributed_c10d.py", "c10d_logger.py", "torch/overrides.py")
_TORCH = "/torch/"


class Hazard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A latent fault, of all calls from one stack."""

    what: HazardKind
    times: int = 1
    stack: Stack = ()  # of the call, innermost first
    group: str = ""  # of "many-groups": its ranks

    @property
    def op(self) -> str:
        """The function of torch.distributed that the line called: ``"all_reduce"``."""
        ours = (frame for frame in self.stack if frame.file.endswith(_C10D))
        names = [frame.function for frame in ours if frame.function != "wrapper"]
        return names[-1] if names else "a call"

    @property
    def source(self) -> Frame | None:
        """The line that called torch.distributed; None if that was torch itself.

        torch's own callers wait in C++, through streams, or for a tensor: DDP's reducer, FSDP,
        functional collectives.
        """
        frames = [frame for frame in self.stack if frame.kind is not FrameKind.COMMLENS]
        if not frames or not frames[0].file.endswith(_C10D):
            return None
        caller = next((frame for frame in frames if not frame.file.endswith(_C10D)), None)
        return None if caller is None or _TORCH in caller.file else caller
