"""Write docs/gallery.md: run each scenario for real as `commlens demo` does, and keep what it printed.

python docs/make/gallery.py             every scenario (ten minutes on two idle cores)
python docs/make/gallery.py stopped     these; the other sections stay as they are
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "integration"))

from more_scenarios import SCENARIOS

from commlens.scenarios import Scenario

PAGE = Path(__file__).parents[1] / "gallery.md"
KINDS = {
    "missing": "A rank does not reach the collective",
    "dead": "A rank dies",
    "mismatch": "Ranks disagree",
    "cycle": "Ranks wait for each other",
    "healthy": "Nothing is wrong",
}
HEAD = """# The gallery

Every scenario, with what commlens said about it: real runs with 4 processes over gloo. `commlens demo --list` shows those
that you can try yourself; the others, whose programs are in `tests/`, run in the tests. See [the scenarios](scenarios.md).

`make gallery` runs them all and writes this page.
Each verdict was compared with the fault in the program; these were all correct.
"""


def main(names: list[str]) -> int:
    """Run the scenarios with these names, all without any, and write the page. Returns 1 if a
    verdict was wrong.
    """
    sections = read()
    wrong = []
    for scenario in SCENARIOS:
        if names and scenario.name not in names:
            continue
        said = run(scenario)
        if said is None:
            wrong.append(scenario.name)
            continue
        sections[scenario.name] = f"### {scenario.name}\n\n{sentence(scenario.summary)}\n\n{said}\n"
        PAGE.write_text(page(sections))
        print(f"{scenario.name}: done", flush=True)
    print(f"Wrong or not run: {', '.join(wrong)}" if wrong else f"Wrote {PAGE}.")
    return 1 if wrong else 0


def read() -> dict[str, str]:
    """Return the sections of the page by scenario."""
    text = PAGE.read_text() if PAGE.exists() else ""
    parts = re.split(r"^(?=###? )", text, flags=re.MULTILINE)
    return {part.split()[1]: part.rstrip() + "\n" for part in parts if part.startswith("### ")}


def page(sections: dict[str, str]) -> str:
    """Return the page, with the scenarios in their order."""
    parts = [HEAD]
    for kind, heading in KINDS.items():
        parts.append(f"## {heading}\n")
        parts += [
            sections[each.name]
            for each in SCENARIOS
            if kind_of(each) == kind and each.name in sections
        ]
    return "\n".join(parts)


def kind_of(scenario: Scenario) -> str:
    """Return the key of ``KINDS`` under which a scenario is shown."""
    kind = scenario.truth(4).kinds[0].partition("/")[0]
    return "mismatch" if scenario.program == "disagree" else kind


def sentence(summary: str) -> str:
    """Return a scenario's summary as a sentence."""
    summary = summary.removeprefix("healthy: ")
    return summary[0].upper() + summary[1:] + "."


def run(scenario: Scenario) -> str | None:
    """Return what the demo printed about a scenario, as Markdown; None if it was wrong or could not
    run.
    """
    if scenario.impossible():
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "more_scenarios.demo", scenario.name, folder]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "COLUMNS": "80", "PYTHONPATH": sys.path[-1]},
            cwd=folder,
        )
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        return None
    if verdict := re.search(
        r"^VERDICT .*?(?=^$|^Looked at)", done.stdout, flags=re.MULTILINE | re.DOTALL
    ):
        return f"```text\n{verdict[0].rstrip()}\n```"
    if notice := re.search(r"^commlens: (?!demo).*(\n {10}.*)*", done.stdout, flags=re.MULTILINE):
        return f"No verdict, but a notice while the ranks wait:\n\n```text\n{notice[0]}\n```"
    return "commlens said nothing."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
