"""The meaning of NVIDIA's Xid numbers."""

from __future__ import annotations

import pytest

from commlens.model.xids import UNKNOWN, XIDS, xid


@pytest.mark.parametrize(
    ("number", "fault", "effect"),
    [
        (79, "gpu-fault", "stops"),
        (48, "gpu-memory", "stops"),
        (74, "gpu-fault", "stops"),
        (94, "gpu-memory", "stops"),
        (95, "gpu-memory", "stops"),
        (119, "gpu-fault", "stops"),
        (31, "gpu-fault", "program"),
        (13, "gpu-fault", "program"),
        (45, "gpu-fault", "sign"),
        (63, "gpu-memory", "sign"),
    ],
)
def test_what_an_xid_means(number: int, fault: str, effect: str) -> None:
    assert (xid(number).fault, xid(number).effect) == (fault, effect)


def test_a_number_that_is_not_in_the_table_is_only_a_sign() -> None:
    assert 9999 not in XIDS and xid(9999) is UNKNOWN and UNKNOWN.effect == "sign"
