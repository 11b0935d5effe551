from __future__ import annotations

from commlens.model.device_assertion import parse_device_assertion

LINE = (
    "/pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward: block: [0,0,0], thread:"
    " [31,0,0] Assertion `t >= 0 && t < n_classes` failed."
)


def test_the_place_the_kernel_and_what_failed() -> None:
    assert parse_device_assertion(LINE) == "Loss.cu:245, nll_loss_forward: t >= 0 && t < n_classes"
    assert parse_device_assertion("AssertionError: t >= 0") == ""
