"""Marks of tests that torch 2.6 cannot run: it lacks what they need."""

from __future__ import annotations

import pytest

from commlens.tap.torch_patches import torch_version

_IS_OLD = torch_version() < (2, 9)

fsdp2_on_a_cpu = pytest.mark.skipif(_IS_OLD, reason="2.6 cannot run FSDP2 on a CPU")
reduce_scatter_over_gloo = pytest.mark.skipif(_IS_OLD, reason="2.6 has none over gloo")
checkpoint_of_one_process = pytest.mark.skipif(_IS_OLD, reason="2.6 has no no_dist=True")
