"""The GPUs of the machine while a preview runs."""

from __future__ import annotations

import os

import pytest

from commlens.commands.preview import hidden_gpus


@pytest.mark.parametrize("visible", [None, "0,1"])
def test_gpus_are_hidden_and_come_back(
    visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with hidden_gpus():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
