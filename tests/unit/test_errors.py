"""Errors of commlens."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from commlens.errors import MissingDependency, did_you_mean, needs_torch, require_torch


def test_similar_words_are_suggested() -> None:
    assert did_you_mean("abrt", ["warn", "abort"]) == " Did you mean abort?"
    assert did_you_mean("xyz", ["warn", "abort"]) == ""


def test_torch_that_is_not_there_and_torch_that_is_broken() -> None:
    assert "is not installed: pip install torch" in str(MissingDependency.torch("Tracing"))
    broken = MissingDependency.torch("Tracing", ImportError("libcudart.so.12"))
    assert "cannot be imported (libcudart.so.12)" in str(broken)


def test_a_feature_is_refused_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="Tracing needs torch, which is not installed"):
        require_torch("Tracing")


def test_only_a_failed_import_of_others_is_a_missing_torch() -> None:
    with pytest.raises(MissingDependency, match="Tracing needs torch"), needs_torch("Tracing"):
        raise ImportError("libcudart.so.12")
    with pytest.raises(ModuleNotFoundError), needs_torch("Tracing"):
        importlib.import_module("commlens.no_such_module")
