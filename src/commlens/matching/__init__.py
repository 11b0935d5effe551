"""What must agree between ranks' collectives, written once: used by diagnose, by the watcher and by the verifier.

Pure functions of partial evidence. A rank whose evidence lacks an aspect (no reduce op, no tensors) is left out of that
aspect's comparison; it never makes a disagreement.
"""

from commlens.matching.answer import Agree, Answer, Aspect, Disagree, Party, Severity, Unknown
from commlens.matching.collectives import compare_coalesced, compare_collectives
from commlens.matching.point_to_point import compare_pair

__all__ = [
    "Agree",
    "Answer",
    "Aspect",
    "Disagree",
    "Party",
    "Severity",
    "Unknown",
    "compare_coalesced",
    "compare_collectives",
    "compare_pair",
]
