"""A black box's log as columns."""

from __future__ import annotations

from boxes import MONO, Box

from commlens.blackbox.reader import read_box
from commlens.formats.rank_log_columns import columns_from_log


def test_numbers_too_large_for_their_columns_cost_no_operation() -> None:
    box = Box()
    group, asked = box.group(), box.asked()
    for coalescing in (0, 1 << 40, (1 << 63) - 1):
        box.record(group=group, asked=asked, at=MONO, coalescing_id=coalescing)
    columns = columns_from_log(read_box(box.bytes(), captured_ns=1))
    assert len(columns) == 3 and columns.coalesced[0] == 0
