"""Sentences that are wrapped."""

from __future__ import annotations

from commlens.model.wrapping import fill, rejoined, unbroken


def test_a_number_stays_with_its_unit() -> None:
    text = "it waits for 31 s with 16.8 MB, rank 3 of 4 too"
    for width in range(8, 50):
        lines = fill(text, width).splitlines()
        assert " ".join(lines) == text
        assert not any(line.endswith((" 31", " 16.8")) for line in lines), width


def test_paths_are_not_broken_and_lines_are_indented() -> None:
    path = "/home/me/a-long/name-of-a/file.py"
    lines = fill(f"look at {path} now", 20, first="- ", indent="  ").splitlines()
    assert lines[0] == "- look at" and f"  {path}" in lines


def test_nothing_is_lost() -> None:
    assert rejoined(unbroken("1 s and 2 GB")) == "1 s and 2 GB"
