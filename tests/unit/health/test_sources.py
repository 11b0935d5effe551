"""Small files, and PCI addresses of every form."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlens.health.sources import folders, normal_address, number, word


@pytest.mark.parametrize(
    "text", ["PCI:0000:4F:00", "00000000:4F:00.0", "0000:4f:00.0", "4f:00.0", "PCI:0000:4f:00.0"]
)
def test_every_form_of_a_pci_address(text: str) -> None:
    assert normal_address(text) == "0000:4f:00.0"


def test_a_file_that_is_missing_or_no_number(tmp_path: Path) -> None:
    (tmp_path / "speed").write_text("unknown\n")
    (tmp_path / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert number(tmp_path / "speed") is None and number(tmp_path / "none") is None
    assert number(tmp_path / "rate") == 400.0
    assert word(tmp_path / "none") == "" and folders(tmp_path / "none") == []
