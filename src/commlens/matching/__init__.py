"""The rules that ranks' collectives must agree by, in one place for diagnosis, the watcher and verification.

Pure functions of partial evidence. A rank whose evidence lacks an aspect (no reduce op, no tensors) is left out of the comparison
of that aspect; missing evidence never makes a disagreement.
"""

from commlens.matching.answer import Agree, Answer, Aspect, Disagree, Party, Severity, Unknown
from commlens.matching.collectives import compare_coalesced, compare_collectives
from commlens.matching.point_to_point import compare_pair, matches_by_tag, pair_messages

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
    "matches_by_tag",
    "pair_messages",
]
