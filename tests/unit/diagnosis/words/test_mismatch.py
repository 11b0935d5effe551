"""Words about ranks that disagree or are out of step."""

from __future__ import annotations

from commlens.diagnosis.words.mismatch import _and_so_on


def test_a_single_match_does_not_go_on() -> None:
    assert [_and_so_on(matches) for matches in (1, 5)] == ["", ", and so on for 5 collectives"]
