"""Warnings about settings: one process of a job prints them."""

from __future__ import annotations

import pytest

from commlens.config import WARNED_VARIABLE, load_settings
from commlens.launch import environment
from commlens.launch.new_warnings import new_warnings


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (WARNED_VARIABLE, "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_what_a_launcher_printed_its_ranks_do_not_repeat(monkeypatch):
    monkeypatch.setenv("COMMLENS_STAL_TIMEOUT", "3")
    warnings = load_settings(strict=False).warnings
    assert len(warnings) == 1 and new_warnings(warnings) == warnings
    monkeypatch.setenv("RANK", "0")  # started by the launcher, with its environment
    assert new_warnings(load_settings(strict=False).warnings) == []
    assert new_warnings([*warnings, "Something else is ignored."]) == ["Something else is ignored."]


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_rank_0_prints_if_no_launcher_did(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert new_warnings(["It is ignored."]) == []
    monkeypatch.delenv(WARNED_VARIABLE)
    monkeypatch.setenv(variable, "0")
    assert new_warnings(["It is ignored."]) == ["It is ignored."]


def test_doctor_says_once_that_a_setting_is_ignored(monkeypatch):
    monkeypatch.setenv("COMMLENS_STAL_TIMEOUT", "3")
    (problem,) = [
        problem for problem in environment.examine().problems if "STAL_TIMEOUT" in problem
    ]
    assert problem.count("ignored") == 1
