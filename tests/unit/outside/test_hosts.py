"""The hosts that a user names."""

from __future__ import annotations

from commlens.outside.hosts import named_hosts


def test_hosts_come_from_the_option_and_a_file(tmp_path):
    (tmp_path / "hosts").write_text("# nodes\nn1 slots=8\nn2:4\n\nn1\n")
    assert named_hosts("n0, n1", str(tmp_path / "hosts")) == ["n0", "n1", "n2"]
