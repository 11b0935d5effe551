"""The patches of torch are installed once, however often listeners come and go."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from torch.optim import optimizer

from commlens.tap import torch_patches


def test_optimizers_get_one_hook() -> None:
    """A listener may begin inside of an optimizer's hooks, which must not change meanwhile."""
    torch_patches._tap_optimizers()
    hooks = len(optimizer._global_optimizer_post_hooks)
    torch_patches._install(torch_patches._tap_optimizers)
    assert len(optimizer._global_optimizer_post_hooks) == hooks


def test_a_torch_without_the_functions_of_a_patch_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    patch = torch_patches._Patch(
        {"torch.distributed": ("missing", "absent")}, lambda original: None
    )
    for _ in range(2):
        torch_patches._install(patch)
    (message,) = caplog.messages
    assert message == (
        "commlens: the patch of missing, absent does not work with this torch: AttributeError:"
        " torch.distributed has no missing or absent"
    )


def test_a_patch_replaces_the_functions_that_this_torch_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(optimizer, "present", lambda: 1, raising=False)
    names = {"torch.missing": ("absent",), "torch.optim.optimizer": ("present", "missing")}
    torch_patches._install(torch_patches._Patch(names, lambda original: lambda: 2))
    assert optimizer.present() == 2 and len(caplog.messages) == 1
