"""The lines of the user's files on the page."""

from __future__ import annotations

import os
import time
from pathlib import Path

from commlens.reports.verdict_page.data import SourceLines
from commlens.reports.verdict_page.source_lines import source_lines


class TestSourceLines:
    def script(
        self,
        folder: Path,
        text: str = "import time\n\n\ndef load():\n\ttime.sleep(9)  # </script>\n",
    ) -> Path:
        (folder / "train.py").write_text(text)
        return folder / "train.py"

    def test_the_lines_around_the_culprits(self, tmp_path: Path) -> None:
        file = self.script(
            tmp_path,
            "".join(f"line {i}\n" for i in range(1, 60)) + "def load():\n" + "x = 1\n" * 20,
        )
        found = source_lines(f"{file}:62", "load", time.time_ns())
        assert found == SourceLines(58, 62, ["line 58", "line 59", "def load():", *["x = 1"] * 6])

    def test_bounded(self, tmp_path: Path) -> None:
        file = self.script(tmp_path, "def load():\n\t</script>" + "x" * 10_000 + "\n")
        found = source_lines(f"{file}:2", "load", 0)
        assert found is not None and found.lines[0] == "def load():"
        assert found.lines[1].startswith("    </script>xx") and len(found.lines[1]) < 200

    def test_no_file_that_is_not_the_one_that_ran(self, tmp_path: Path) -> None:
        file = self.script(tmp_path)
        now = time.time_ns()
        assert source_lines(f"{file}:5", "load", now) is not None
        assert source_lines(f"{file}:5", "load", now - 3_600_000_000_000) is None, "changed since"
        assert source_lines(f"{file}:5", "save", now) is None, "has no such function"
        assert source_lines(f"{file}:50", "load", now) is None, "is shorter"
        assert source_lines("train.py:5", "load", now) is None, "a folder that is not known"
        (tmp_path / "secret.txt").write_text("def load(): 1\n")
        assert source_lines(f"{tmp_path / 'secret.txt'}:1", "load", now) is None
        os.mkfifo(tmp_path / "pipe.py")
        assert source_lines(f"{tmp_path / 'pipe.py'}:1", "load", now) is None
        assert source_lines("", "", now) is None
