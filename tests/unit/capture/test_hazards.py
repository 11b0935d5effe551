"""Works that nobody waits for."""

from __future__ import annotations

from commlens.capture.hazards import Unwaited


class Work:
    pass


def test_a_work_that_is_freed_is_known_by_the_next_one_in_its_place() -> None:
    unwaited, first = Unwaited(), Work()
    unwaited.issued(first, 7)
    unwaited.issued(first, 8)  # the same address, after the first is gone
    assert unwaited.found() == {7: 1, 8: 1}
    unwaited.open.pop(id(first))  # waited for
    assert unwaited.found() == {7: 1}
