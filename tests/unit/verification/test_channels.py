"""The names of groups in refusals."""

from __future__ import annotations

import pytest

from commlens import text
from commlens.model.collective import ProcessGroup
from commlens.verification.channels import group_label
from commlens.verification.messages import group_name


@pytest.mark.parametrize(
    ("name", "description", "mesh_dim"),
    [("0", "default_pg", None), ("3", "", None), ("4", "dp", None), ("5", "mesh_tp", "tp")],
)
def test_a_group_has_one_name_in_refusals_and_in_verdicts(
    name: str, description: str, mesh_dim: str | None
) -> None:
    group = ProcessGroup(name, (0, 1), description, "gloo", mesh_dim)
    assert text.group_phrase(group) == f"{group_name(group_label(group))} [0-1]"
