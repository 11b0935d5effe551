"""Tests of src/commlens/verification/operation.py, without a process group."""

from __future__ import annotations

import pytest

from commlens.verification.operation import verify_operation


def test_a_group_that_is_no_parameter_is_refused_when_the_function_is_decorated() -> None:
    def gather(inputs: int, mesh_group: object = None) -> int:
        return inputs

    with pytest.raises(ValueError, match=r"gather has no parameter 'group'; .* inputs, mesh_group"):
        verify_operation(group="group")(gather)
    assert verify_operation(group="mesh_group")(gather)(3) == 3
