"""What the verdict on a scenario should be."""

from __future__ import annotations

import pytest

from commlens.scenarios import find
from commlens.scenarios.truth import culprit_rank, marked_lines


def test_the_culprit_is_neither_the_first_nor_the_last_rank() -> None:
    assert culprit_rank(2) == 1
    for size in (3, 4, 8, 16):
        assert 0 < culprit_rank(size) < size - 1


def test_the_faults_line_is_found_by_its_comment() -> None:
    path = find("data-loader").path
    (line,) = marked_lines(path, "data-loader")
    name, number = line.split(":")
    assert name == path.name
    text = path.read_text().splitlines()[int(number) - 1]
    assert "data-loader" in text.partition("# fault: ")[2]
    with pytest.raises(LookupError, match="is marked"):
        marked_lines(path, "no-such-scenario")
