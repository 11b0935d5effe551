"""Writes durations.md, beside this file, from the report of a test run: ``python tests/durations.py
TESTS.XML``.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).with_name("durations.md")
FILES, TESTS = 40, 40


def table(path: Path) -> str:
    """Return the page: the files and the tests that take longest."""
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None, f"{path} is no report of pytest"
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for case in suite.iter("testcase"):
        name, seconds = case.get("classname", ""), float(case.get("time", 0))
        file = ".".join(part for part in name.split(".") if not part.startswith("Test"))
        files[file] += seconds
        counts[file] += 1
        tests[f"{file} {case.get('name')}"] += seconds
    rows = [
        "# Where the time of `make test` goes",
        "",
        f"{suite.get('tests')} tests in {float(suite.get('time', 0)) / 60:.1f} minutes, on"
        f" {os.cpu_count()} cores; {sum(files.values()):.0f} s in all workers. The first test of a"
        " file pays for what the file's tests share. `make durations` writes this page.",
        "",
        "| file | tests | s |",
        "|---|---|---|",
        *(
            f"| {file} | {counts[file]} | {seconds:.0f} |"
            for file, seconds in files.most_common(FILES)
        ),
        "",
        "| test | s |",
        "|---|---|",
        *(f"| {test} | {seconds:.0f} |" for test, seconds in tests.most_common(TESTS)),
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(table(Path(sys.argv[1])))
