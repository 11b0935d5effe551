"""When the tensors of ranks are compared, as the setting ``check_numbers`` says: ``"every 100
steps"``, ``"nan"``, ``"every-op"``, ``"tolerance=1e-6"``, or several of them with commas. Standard
library only.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Final

EVERY: Final = 100
EARLY_STEPS: Final = (1, 10)  # compared whatever the plan says, counted from 1
_EVERY: Final = re.compile(r"(?:every\s+)?(\d{1,9})(?:\s+steps?)?")
_ON: Final = ("1", "true", "yes", "on")


@dataclass(frozen=True)
class NumberChecks:
    """When and how to compare."""

    every: int = EVERY  # optimizer steps
    nan: bool = False  # also look for NaN before each collective
    every_op: bool = False  # compare every op of the steps that are compared
    tolerance: float = 0.0  # of norms and means, relative; 0: bit for bit

    def __str__(self) -> str:
        """Return the setting in its shortest form."""
        parts = [f"every {self.every} steps"]
        parts += ["nan"] * self.nan + ["every-op"] * self.every_op
        parts += [f"tolerance={self.tolerance:g}"] * bool(self.tolerance)
        return ",".join(parts)


def parse_number_checks(text: str) -> NumberChecks:
    """Return when to compare.

    Raises:
        ValueError: the text is not understood.
    """
    found = NumberChecks()
    all_steps = True
    for part in text.strip().lower().split(","):
        part = part.strip()
        every = _EVERY.fullmatch(part)
        if part in _ON:
            continue
        if part == "nan":
            found = replace(found, nan=True)
        elif part == "every-op":
            found = replace(found, every_op=True)
        elif part.startswith("tolerance="):
            tolerance = float(part.removeprefix("tolerance="))
            if not (math.isfinite(tolerance) and 0 <= tolerance < 1):
                raise ValueError(part)
            found = replace(found, tolerance=tolerance)
        elif every is not None and int(every[1]) > 0:
            found, all_steps = replace(found, every=int(every[1])), False
        else:
            raise ValueError(part)
    return replace(found, every=1) if found.every_op and all_steps else found
