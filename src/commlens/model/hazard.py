"""Latent faults: what a program does wrong without being stopped by it, as data. An example is an
asynchronous all_reduce whose Work nobody waits for.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from commlens.model.collective import Frame, FrameKind, Stack, user_frame

HazardKind = Literal[
    "never-waited", "not-a-member", "many-groups", "touched-in-flight", "shared-in-flight"
]
Access = Literal["read", "written"]
Operand = Literal["input", "output"]

# The last one calls the former where a mode of torch.overrides is entered.
_C10D = ("distributed_c10d.py", "c10d_logger.py", "torch/overrides.py")
_FUNCTIONAL = "_functional_collectives.py"
_MODES = "/torch/_ops.py"  # runs the op of a c10d call for a dispatch mode
_TORCH = "/torch/"


class Touch(msgspec.Struct, frozen=True, omit_defaults=True):
    """An op on a tensor of an asynchronous collective, between its issue and the wait for it."""

    op: str  # "aten.add_.Tensor"; of a collective "all_reduce"
    access: Access
    operand: Operand  # the tensor's part in the collective in flight
    tensor: str  # as the collective in flight has it: "float32[4,8]"
    stack: Stack = ()  # of the op, innermost first

    @property
    def source(self) -> Frame | None:
        """The line of the program that ran the op."""
        return user_frame(self.stack)


class Hazard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A latent fault, of all calls from one stack."""

    what: HazardKind
    times: int = 1
    stack: Stack = ()  # of the call, innermost first
    group: str = ""  # of "many-groups": its ranks
    # of "touched-in-flight" by a tensor op, and of "shared-in-flight" by another collective
    touch: Touch | None = None

    @property
    def lines(self) -> tuple[HazardKind, Frame | None, Frame | None]:
        """The key of a fault that is reported once: a kind at a line, and the line of the touch."""
        return self.what, self.source, self.touch.source if self.touch is not None else None

    @property
    def op(self) -> str:
        """The function of torch.distributed that the line called: ``"all_reduce"``."""
        ours = (frame for frame in self.stack if frame.file.endswith((*_C10D, _FUNCTIONAL)))
        names = [frame.function for frame in ours if frame.function != "wrapper"]
        return names[-1] if names else "a call"

    @property
    def source(self) -> Frame | None:
        """The line that called torch.distributed; None if that was torch itself.

        torch's own callers wait in C++, through streams, or for a tensor: DDP's reducer, FSDP,
        functional collectives.
        """
        if self.touch is not None:  # then torch's own calls are left out from the first
            return user_frame(self.stack)
        frames = [
            frame
            for frame in self.stack
            if frame.kind is not FrameKind.COMMLENS and not frame.file.endswith(_MODES)
        ]
        if not frames or not frames[0].file.endswith(_C10D):
            return None
        caller = next((frame for frame in frames if not frame.file.endswith(_C10D)), None)
        return None if caller is None or _TORCH in caller.file else caller
